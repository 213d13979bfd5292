"""FlashAttention-4 behind the plan, where it is not installed: when it is chosen, what is refused,
how a batch is cut into calls that its kernels can express. Its kernels are stood in for by dense
attention that spoils what Hopper's do: rows that see no key.

Legend: T queries, S keys, H query heads, K key heads, D head_dim, E head_dim_v."""

import ast
from collections import namedtuple
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.dense_attention import dense, dense_packed, paged
from tests.attention.packed import varlen_metadata
from vitrail.attention.backends import fa4
from vitrail.attention.chunked import attend_chunks
from vitrail.attention.fa4 import RELEASE, is_before
from vitrail.attention.metadata import gather_slots, with_chunks
from vitrail.attention.plan import (
    CUTLASS_RELEASE,
    AttentionPlan,
    PlanLimits,
    make_table,
    order,
    plan,
    plan_on,
)
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import Refused, accept
from vitrail.config.hardware import CPU, GPUS, find

H200, B300 = find("H200"), find("B300")
HERE = torch.device("cpu")
INSTALLED = {"fa4": RELEASE, "cute": CUTLASS_RELEASE}


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more) -> AttentionSite:
    facts = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


VISION, EXPANDED = site(4, 4, 72, 72, causal=False), site(2, 2, 192, 128)


def shape_of(where: AttentionSite, phase: Phase, page: int = 16, **more) -> AttentionShape:
    facts = {"batch": 16, "max_q_len": 300, "max_kv_len": 4096, **more}
    return AttentionShape(
        site=where,
        phase=phase,
        dtype="float16",
        page_size=page if phase in PAGED else None,
        **facts,
    )


def planned(where: AttentionSite, phase: Phase, page: int = 16, gpu=H200, **more) -> AttentionPlan:
    return accept(plan_on("fa4", shape_of(where, phase, page, **more), gpu))


# What is chosen.


def test_an_h200_takes_what_was_measured_quickest_there():
    for where, phase in ((VISION, Phase.ENCODE), (EXPANDED, Phase.PREFILL)):
        made = plan(shape_of(where, phase, max_kv_len=8192), H200, installed=INSTALLED)
        assert isinstance(made, AttentionPlan)
        assert (made.backend, made.kernel) == ("fa4", "varlen")
    for phase, q_len, name in ((Phase.EXTEND, 300, "fa4"), (Phase.DECODE, 1, "cute")):
        shape = shape_of(site(4, 2, 64, 64), phase, max_q_len=q_len)
        made = plan(shape, H200, installed=INSTALLED)
        assert isinstance(made, AttentionPlan)
        assert made.backend == name


def test_small_images_are_ours():
    for kv_len, name in ((256, "triton"), (512, "triton"), (1024, "fa4")):
        made = plan(shape_of(VISION, Phase.ENCODE, max_kv_len=kv_len), H200, installed=INSTALLED)
        assert isinstance(made, AttentionPlan)
        assert made.backend == name


@pytest.mark.parametrize("gpu", [g for g in GPUS if g.cc != 90], ids=lambda g: g.name)
@pytest.mark.parametrize("phase", list(Phase))
def test_where_nothing_was_measured_our_kernels_are_first(gpu, phase):
    shape = shape_of(site(4, 2, 64, 64), phase)
    assert order(shape, gpu) == ("triton", "reference")
    assert order(shape, CPU) == ("reference",)


LIMITS = PlanLimits(dtype="bfloat16", page_size=64, max_batch=64, max_q_len=512, max_kv_len=20_000)
SITES = [
    (VISION, Phase.ENCODE),
    (EXPANDED, Phase.PREFILL),
    (site(16, 1, 576, 512, latent_rank=512), Phase.DECODE),
]


def test_a_table_says_once_that_it_is_not_installed_and_takes_the_next():
    table = make_table(SITES, LIMITS, H200, None)
    assert {w.severity for w in table.warnings} == {"warning"}
    assert [w.code for w in table.warnings] == ["fa4_not_installed", "cutlass_not_installed"]
    assert f"flash-attn-4=={RELEASE}" in table.warnings[0].change
    assert table.select(*SITES[0], 1, 1).backend == "triton"
    with_it = make_table(SITES, LIMITS, H200, None, INSTALLED)
    assert not with_it.warnings
    backends = [with_it.select(*where, 64, 20_000).backend for where in SITES]
    assert backends == ["fa4", "fa4", "cute"]


def test_preferred_and_not_installed_is_refused():
    with pytest.raises(Refused, match="not installed"):
        make_table(SITES[:1], LIMITS, H200, "fa4")
    found = plan(shape_of(SITES[2][0], Phase.DECODE), H200, "fa4", INSTALLED)
    assert isinstance(found, list)
    assert any("latent rank 512" in f.saw for f in found)


# Which releases.


def test_another_release_is_refused_by_name():
    (found,) = plan(shape_of(VISION, Phase.ENCODE), H200, "fa4", {"fa4": "4.0.0b30"})
    assert "4.0.0b30" in found.saw
    assert found.code == "fa4_release"
    assert RELEASE in found.change


@pytest.mark.parametrize(
    ("gpu", "where", "page", "keys", "rows"),
    [
        # Two tiles of a page each on SM100, halved where its host splits unequal heads.
        (B300, site(8, 1, 192, 128), 128, 8192, "64 keys of a tile, pages of 128, for 128"),
        (B300, site(8, 1, 192, 128), 128, 8064, None),
        (B300, site(8, 1, 128, 128), 128, 65536, None),
        (H200, site(8, 1, 192, 128), 64, 65536, None),
        (H200, site(4, 4, 256, 256), 1, 4096, "80 keys of a tile, pages of 1, for 128"),
        (H200, site(4, 4, 128, 128), 1, 4096, None),
    ],
)
def test_releases_that_divide_with_floor_name_the_rows_they_lose(gpu, where, page, keys, rows):
    shape = shape_of(where, Phase.DECODE, page, batch=1, max_q_len=1, max_kv_len=keys)
    for release in ("4.0.0b18", "4.0.0b24", "4.0.0b25"):
        found = plan(shape, gpu, "fa4", {"fa4": release})
        assert isinstance(found, list)
        lost = [f for f in found if f.code == "fa4_zero_rows"]
        assert bool(lost) == (rows is not None)
        assert all(rows in f.saw and "0 rows a thread" in f.saw for f in lost)
    for release in ("4.0.0b26", "4.0.0"):
        found = plan(shape, gpu, "fa4", {"fa4": release})
        assert [f.code for f in found] == ["fa4_release"]
    assert isinstance(plan(shape, gpu, "fa4", INSTALLED), AttentionPlan)


def test_releases_in_order():
    names = ["what", "3.9", "4.0.0b4", "4.0.0b18", "4.0.0b26", "4.0.0", "4.0.1b1"]
    for i, older in enumerate(names):
        assert all(is_before(older, newer) for newer in names[i + 1 :])
        assert not any(is_before(older, name) for name in names[: i + 1])


# How a batch is cut.

LENS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(-6, 6)), max_size=5)


def seen_by(causal: bool, n: int, m: int, start: int) -> list[set[int]]:
    return [{k for k in range(m) if not causal or k <= start + j} for j in range(n)]


@given(sequences=LENS, causal=st.booleans())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_calls_show_each_row_its_keys_once(sequences, causal):
    meta = varlen_metadata(
        [n for n, _, _ in sequences],
        HERE,
        [m for _, m, _ in sequences],
        [start for _, _, start in sequences],
    )
    want: list[set[int]] = []
    edge = 0
    for n, m, start in sequences:
        want += [{edge + k for k in keys} for keys in seen_by(causal, n, m, start)]
        edge += m
    made = fa4.cut(causal, False, meta)
    got: list[set[int] | None] = [None] * len(want)
    for rows in made.blank:
        for row in range(len(want))[rows]:
            assert got[row] is None
            got[row] = set()
    for part in made.parts:
        assert not part.causal or causal
        row, key = part.rows.start, part.keys.start
        for n, m in zip(part.q_lens, part.kv_lens, strict=True):
            for keys in seen_by(part.causal, n, m, m - n):
                assert got[row] is None
                assert keys, "a row that sees no key is no kernel's"
                got[row] = {key + k for k in keys}
                row += 1
            key += m
        assert (row, key) == (part.rows.stop, part.keys.stop)
    assert got == want


def test_what_ends_with_its_keys_is_one_call():
    meta = varlen_metadata([5, 0, 3, 1], HERE, [5, 0, 9, 1])
    (part,) = fa4.cut(True, False, meta).parts
    assert (part.q_lens, part.kv_lens, part.causal) == ((5, 3, 1), (5, 9, 1), True)
    meta = varlen_metadata([5, 3], HERE)
    (part,) = fa4.cut(False, True, meta).parts
    assert part.q_lens == (5, 3)
    with pytest.raises(AssertionError, match="under a window the last ones meet"):
        fa4.cut(True, True, varlen_metadata([5], HERE, [9], [2]))


# How it runs.


class StandIn:
    """Kernels that compute what FlashAttention-4's do from the same arguments; rows without a key
    become NaN. `launched`: what was asked for."""

    def __init__(self) -> None:
        self.launched: list[fa4.Launch] = []

    def kernels_of(self, launch: fa4.Launch) -> fa4.Kernels:
        self.launched.append(launch)
        return fa4.Kernels(lambda *a: self.forward(launch, *a), self.combine)

    def forward(self, launch, q, k, v, out, lse, scale, cu_q, cu_kv, used, kv_lens, table, *rest):
        before, after, sink, *rest = rest
        assert used is None
        assert len(rest) == (11 if launch.splits > 1 else 4)
        assert (before is not None) == launch.window
        assert after == (None if before is None else 0 if launch.causal else before)
        assert (sink is not None) == launch.sink
        where = site(
            launch.num_q_heads, launch.num_kv_heads, launch.head_dim, launch.head_dim_v,
            scale=scale, causal=launch.causal, window=before, softcap=launch.softcap,
        )  # fmt: skip
        edges = cu_q.tolist()
        for i, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            if table is None:
                keys, values = k[cu_kv[i] : cu_kv[i + 1]], v[cu_kv[i] : cu_kv[i + 1]]
            else:
                slots = torch.arange(int(kv_lens[i]))
                slots = table[i].long()[slots // k.shape[1]] * k.shape[1] + slots % k.shape[1]
                keys, values = gather_slots(k, slots), gather_slots(v, slots)
            rows = slice(start, stop)
            n, m = stop - start, len(keys)
            got, got_lse = dense(q[rows], keys, values, where, m - n, sink)
            spoilt = torch.arange(n) + m - n < 0 if launch.causal else torch.full((n,), not m)
            got[spoilt] = torch.nan
            if launch.splits == 1:
                out[rows], lse[:, rows] = got.to(out.dtype), got_lse.t().float()
            else:
                out[:, rows], lse[..., rows] = 0, -torch.inf
                out[-1, rows], lse[-1][:, rows] = got.float(), got_lse.t().float()

    def combine(self, part, part_lse, out, lse, cu_q, *none):
        assert none == (None,) * 4
        assert part.shape[:3] == part_lse.shape
        lse.copy_(part_lse.logsumexp(0))
        out.copy_((part * (part_lse - lse).exp()[..., None]).sum(0))


@pytest.fixture
def stand_in(monkeypatch) -> StandIn:
    kernels = StandIn()
    monkeypatch.setattr(fa4, "kernels_of", kernels.kernels_of)
    return kernels


def test_a_compiled_kernel_gets_a_tuple_for_its_packages_own() -> None:
    """The same array of as many items, whatever the tuple's type."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    spec = find_spec("flash_attn")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("flash-attn-4 is not installed")
    source = Path(next(iter(spec.submodule_search_locations)), "cute", "utils.py").read_text()
    (extras,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == "AuxData")
    assert [base.id for base in extras.bases] == ["NamedTuple"]
    named = namedtuple("AuxData", [each.target.id for each in extras.body])
    assert all(each.value.value is None for each in extras.body)
    assert tuple(named(*fa4.NO_EXTRAS)) == fa4.NO_EXTRAS
    look = tvm_ffi.convert(lambda *given: repr([(type(g).__name__, list(g)) for g in given]))
    got = ast.literal_eval(look(fa4.NO_EXTRAS, named(*fa4.NO_EXTRAS)))
    assert got == [("Array", [None, None])] * 2


def inputs(where: AttentionSite, q_lens, kv_lens) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = (
        (sum(q_lens), where.num_q_heads, where.head_dim),
        (sum(kv_lens), where.num_kv_heads, where.head_dim),
        (sum(kv_lens), where.num_kv_heads, where.head_dim_v),
    )
    q, k, v = (torch.randn(*size, generator=g).half() for size in sizes)
    return q, k, v


def held(got, want) -> None:
    assert torch.allclose(got.out.double(), want[0], atol=2e-3)
    assert torch.allclose(got.lse.double(), want[1], atol=1e-4)


@pytest.mark.parametrize(
    ("where", "q_lens", "kv_lens", "q_starts"),
    [
        (VISION, [5, 9, 0, 1], None, None),
        (replace(VISION, window=3, sink=True), [7, 0, 12], None, None),
        (EXPANDED, [7, 1, 30], None, None),
        (EXPANDED, [3, 4, 2], [9, 4, 7], None),
        (replace(EXPANDED, softcap=5.0), [3, 4], [9, 4], None),
        # Pieces of a context: keys before, around and after the queries; none at all.
        (EXPANDED, [4, 5, 3, 2, 6], [6, 4, 2, 0, 3], [9, 2, -2, 4, -9]),
        (site(4, 2, 64, 64, sink=True), [4, 5, 2], [6, 0, 2], [1, 7, -1]),
        (replace(VISION, sink=True), [2, 3], [0, 5], [0, 0]),
    ],
)
def test_varlen(stand_in, where, q_lens, kv_lens, q_starts):
    meta = varlen_metadata(q_lens, HERE, kv_lens, q_starts)
    q, k, v = inputs(where, q_lens, meta.kv_lens)
    sink = torch.linspace(-1, 1, where.num_q_heads) if where.sink else None
    made = planned(where, Phase.PREFILL if where.causal else Phase.ENCODE)
    parts = zip(
        q.split(q_lens), k.split(meta.kv_lens), v.split(meta.kv_lens), meta.q_starts, strict=True
    )
    each = [dense(a, b, c, where, start, sink) for a, b, c, start in parts]
    want = torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])
    for _ in "ab":  # the second call finds its cut
        held(fa4.BACKEND.varlen(made, q, k, v, meta, sink), want)
    assert set(stand_in.launched) <= set(fa4.launches(made))


@pytest.mark.parametrize("gpu", [H200, B300])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("phase", PAGED)
def test_paged(stand_in, phase, page, gpu):
    where = site(4, 2, 64, 64, window=40 if page == 16 else None, sink=page == 64)
    q_lens, kv_lens = ([1, 0, 1, 1], [1, 0, 70, 200])
    if phase is Phase.EXTEND:
        q_lens = [1, 0, 33, 200]
    q, k, v = inputs(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page)
    more = {"batch": 4, "max_q_len": max(q_lens)}
    made = planned(where, phase, page, gpu, **more)
    sink = torch.linspace(-1, 1, 4) if where.sink else None
    want = dense_packed(q, k, v, where, q_lens, kv_lens, sink)
    if made.max_splits > 1 or gpu is H200:
        held(fa4.BACKEND.paged(made, q, pages.k, pages.v, pages.meta, sink), want)
        assert set(stand_in.launched) <= set(fa4.launches(made))
    assert (made.max_splits > 1) == (gpu is B300 and phase is Phase.DECODE and page != 16)


@pytest.mark.parametrize("max_tokens", [7, 16, 1000])
def test_a_context_in_pieces_is_the_context(stand_in, max_tokens):
    q_lens, kv_lens = [9, 1, 12, 3], [9, 30, 25, 3]
    q, k, v = inputs(EXPANDED, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, 8)
    meta = with_chunks(pages.meta, max_tokens)

    def expand(slots: Tensor) -> tuple[Tensor, Tensor]:
        return gather_slots(pages.k, slots), gather_slots(pages.v, slots)

    made = planned(EXPANDED, Phase.PREFILL)
    got = attend_chunks(fa4.BACKEND, made, q, meta.chunks, expand)
    held(got, dense_packed(q, k, v, EXPANDED, q_lens, kv_lens))
    assert set(stand_in.launched) <= set(fa4.launches(made))


def test_nothing_to_attend(stand_in):
    made = planned(VISION, Phase.ENCODE)
    got = fa4.BACKEND.varlen(made, *inputs(VISION, [0], [0]), varlen_metadata([0], HERE))
    assert got.out.shape == (0, 4, 72)
    assert not stand_in.launched


def test_rows_off_their_borders_are_refused(stand_in):
    """Its host code would copy the pool."""
    where = site(2, 2, 64, 64)
    q, k, v = inputs(where, [1], [20])
    pages = paged(k, v, [1], [20], 16)
    wide = torch.zeros(*pages.k.shape[:-1], 68, dtype=torch.float16)[..., :64]
    made = planned(where, Phase.DECODE, max_q_len=1)
    with pytest.raises(AssertionError, match="rows start at borders of 16 bytes"):
        fa4.BACKEND.paged(made, q, wide, pages.v, pages.meta)
    assert not stand_in.launched


def test_buckets_share_their_kernels():
    """A launch holds what a kernel is specialised for, not the bucket's lengths."""
    made = {
        fa4.launches(planned(VISION, Phase.ENCODE, batch=batch, max_q_len=n, max_kv_len=n))
        for batch in (1, 64, 1024)
        for n in (1024, 4356, 16384)
    }
    assert len(made) == 1
