"""The steps around latent attention: definitions by hand, kernels against them.

Legend: see `ops/mla/naive`."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import interpreted
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.spec import LatentKv
from vitrail.config.model import KvDType, KvScales
from vitrail.ops.mla import fused, naive
from vitrail.ops.mla.naive import LatentNorm, MlaSizes
from vitrail.ops.rope.naive import Turns, rope_table

ODD = MlaSizes(heads=3, nope=7, rope=6, rank=21, value=5)
EVEN = MlaSizes(heads=2, nope=16, rope=8, rank=80, value=34)  # two blocks of R, two of E
SIZES = [ODD, EVEN]
PAGE = 3


@dataclass
class Step:
    """Tokens at slots of a pool that holds NaN elsewhere."""

    sizes: MlaSizes
    row_TX: Tensor
    turns: Turns
    norm: LatentNorm
    pool: KvPool
    slots: Tensor
    k_b_HNR: Tensor
    v_b_HER: Tensor

    def into(self):
        return self.pool.latent_slots(0, self.slots)

    def rows(self) -> Tensor:
        return self.pool.latent(0).flatten(0, 1)[self.slots]


def step(
    tokens: int,
    sizes: MlaSizes = ODD,
    interleaved: bool = True,
    dtype: torch.dtype = torch.float32,
    stored: KvDType = "float32",
    scale: float = 1.0,
) -> Step:
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    spec = LatentKv(latent_rank=sizes.rank, rope_dim=sizes.rope, dtype=stored)
    pages = tokens // PAGE + 3
    scales = {0: KvScales(k=scale, v=scale)}
    pool = KvPool([spec], pages, PAGE, torch.device("cpu"), scales)
    pool.latent(0).view(torch.uint8).fill_(0xFF)  # a NaN in every format
    cos, sin = rope_table(torch.randint(0, 900, (tokens,), generator=g), sizes.rope, 1e4)
    kv_b = normal(sizes.heads, sizes.nope + sizes.value, sizes.rank) / sizes.rank**0.5
    return Step(
        sizes=sizes,
        row_TX=normal(tokens, sizes.projected + 2)[:, 2:],  # rows of a wider tensor
        turns=Turns(cos, sin, interleaved),
        norm=LatentNorm(normal(sizes.rank), 0.3),
        pool=pool,
        slots=torch.randperm(pages * PAGE, generator=g)[:tokens],
        k_b_HNR=kv_b[:, : sizes.nope],
        v_b_HER=kv_b[:, sizes.nope :],
    )


def expanded(ops, s: Step) -> Tensor:
    return ops.expanded_queries(s.row_TX.clone(), s.norm, s.turns, s.sizes, s.into())


def absorbed(ops, s: Step) -> Tensor:
    return ops.absorbed_queries(s.row_TX, s.k_b_HNR, s.norm, s.turns, s.sizes, s.into())


def untouched(s: Step) -> Tensor:
    """Slots that are no token's."""
    kept = torch.ones(s.pool.num_pages * PAGE, dtype=torch.bool)
    kept[s.slots] = False
    return s.pool.latent(0).flatten(0, 1)[kept].float()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_latent_scores_the_same_in_both_forms(sizes: MlaSizes) -> None:
    s = step(9, sizes)
    q_THD, q_THC, row_TC = expanded(naive, s), absorbed(naive, s), s.rows()
    kv_b = torch.cat((s.k_b_HNR, s.v_b_HER), 1).flatten(0, 1)
    k_THD, v_THE = naive.expanded_keys(row_TC, kv_b, sizes, False)
    want = torch.einsum("thd,shd->hts", q_THD, k_THD)
    got = torch.einsum("thc,sc->hts", q_THC, row_TC)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    latents = row_TC[:, None, : sizes.rank].expand(-1, sizes.heads, -1)
    got = naive.values(latents, s.v_b_HER)
    torch.testing.assert_close(got, v_THE.flatten(1), atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_expanded_queries_are_the_definition(
    tokens: int, sizes: MlaSizes, interleaved: bool
) -> None:
    s, other = (step(tokens, sizes, interleaved) for _ in range(2))
    torch.testing.assert_close(expanded(fused, s), expanded(naive, other), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(s.rows(), other.rows(), atol=2e-6, rtol=2e-6)
    assert untouched(s).isnan().all()


@interpreted
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 5, 67])
def test_absorbed_queries_are_the_definition(
    tokens: int, sizes: MlaSizes, interleaved: bool
) -> None:
    """One token and several that take turns, tiles of a product, more tokens than a tile."""
    s, other = (step(tokens, sizes, interleaved) for _ in range(2))
    got, want = absorbed(fused, s), absorbed(naive, other)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(s.rows(), other.rows(), atol=2e-6, rtol=2e-6)
    assert untouched(s).isnan().all()


@interpreted
@pytest.mark.parametrize("tokens", [1, 5])
def test_halves_are_rounded_as_the_definition_rounds(tokens: int) -> None:
    s, other = (step(tokens, dtype=torch.float16, stored="float16") for _ in range(2))
    got, want = absorbed(fused, s), absorbed(naive, other)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    assert (s.rows() != other.rows()).float().mean() < 0.02
    torch.testing.assert_close(s.rows(), other.rows(), atol=2e-3, rtol=2e-3)


@interpreted
@pytest.mark.parametrize("form", [expanded, absorbed])
def test_rows_of_e4m3_are_those_of_the_pool(form) -> None:
    """Codes as the pool makes them: scaled and saturated. The interpreter makes a number of NaN and
    loses the carry of a rounded mantissa: tests/gpu holds every code."""
    s, other = (step(6, dtype=torch.float16, stored="float8_e4m3fn", scale=0.037) for _ in range(2))
    for one in (s, other):
        one.row_TX[2, -3] = 6e4
    form(fused, s)
    form(naive, other)
    got, want = s.rows().float(), other.rows().float()
    assert (want.abs() == 448).any()
    assert (got != want).float().mean() < 0.03
    assert untouched(s).isnan().all()


@interpreted
def test_a_pool_of_any_strides_is_written() -> None:
    s, other = step(7), step(7)
    wide = torch.full((s.pool.num_pages, PAGE + 2, s.sizes.row + 3), torch.nan)
    view = wide[:, 1 : PAGE + 1, 2 : 2 + s.sizes.row]

    class Into:
        cache_NPC, slots_T, scale = view, s.slots, 1.0

        def write(self, rows: Tensor) -> None:
            raise AssertionError("the kernel writes by itself")

    fused.expanded_queries(s.row_TX.clone(), s.norm, s.turns, s.sizes, Into())
    expanded(naive, other)
    got = view[s.slots // PAGE, s.slots % PAGE]
    torch.testing.assert_close(got, other.rows(), atol=2e-6, rtol=2e-6)
    assert int((~wide.isnan()).sum()) == 7 * s.sizes.row


@interpreted
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 35, 70])
def test_values_are_the_definition(tokens: int, sizes: MlaSizes) -> None:
    s = step(1, sizes)
    torch.manual_seed(tokens)
    out_THR = torch.randn(tokens, sizes.heads, sizes.rank + 3)[..., : sizes.rank]
    want = naive.values(out_THR, s.v_b_HER)
    torch.testing.assert_close(fused.values(out_THR, s.v_b_HER), want, atol=1e-5, rtol=1e-5)


@interpreted
def test_values_of_many_tokens_are_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    s = step(1, ODD)
    out_THR = torch.randn(7, ODD.heads, ODD.rank)
    monkeypatch.setattr(fused, "MAX_VALUE_TOKENS", 6)
    want = naive.values(out_THR, s.v_b_HER)
    torch.testing.assert_close(fused.values(out_THR, s.v_b_HER), want, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mend", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_expanded_keys_are_the_definition(tokens: int, mend: bool, sizes: MlaSizes) -> None:
    s = step(1, sizes)
    torch.manual_seed(tokens)
    row_TC = torch.randn(tokens, sizes.row + 1)[:, 1:]
    kv_b = torch.cat((s.k_b_HNR, s.v_b_HER), 1).flatten(0, 1)
    for got, want in zip(
        fused.expanded_keys(row_TC, kv_b, sizes, mend),
        naive.expanded_keys(row_TC, kv_b, sizes, mend),
        strict=True,
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def faulty_keys(ops) -> tuple[Tensor, Tensor]:
    """Row 3 has a latent that is no number, row 5 an infinite one, row 6 a rotary channel; a value
    of head 1 alone overflows in row 1."""
    s = step(1)
    row_TC = torch.ones(8, ODD.row)
    row_TC[3, 0], row_TC[5, 2], row_TC[6, -1] = torch.nan, torch.inf, torch.nan
    kv_b_HXR = torch.cat((s.k_b_HNR, s.v_b_HER), 1)
    kv_b_HXR[1, -1] = 0
    kv_b_HXR[1, -1, 4] = 3e38
    row_TC[1, 4] = 3e38
    return ops.expanded_keys(row_TC, kv_b_HXR.flatten(0, 1), ODD, True)


@pytest.mark.parametrize(
    "ops", [naive, pytest.param(fused, marks=interpreted)], ids=["naive", "fused"]
)
def test_values_that_are_not_finite_are_zeros_and_their_keys_nan(ops) -> None:
    k_THD, v_THE = faulty_keys(ops)
    assert v_THE.isfinite().all()
    blank = k_THD.isnan().all(-1)
    assert blank.tolist() == [
        [False] * 3, [False, True, False], [False] * 3, [True] * 3, [False] * 3, [True] * 3,
        [False] * 3, [False] * 3,
    ]  # fmt: skip
    assert (v_THE[blank] == 0).all()
    assert (v_THE[~blank] != 0).any(-1).all()
    assert k_THD[6, :, :-1].isfinite().all()
