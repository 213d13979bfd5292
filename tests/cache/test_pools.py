"""The device side: slots, entries, bytes."""

import pytest
import torch

from vitrail.cache.encoder_pool import EncoderPool
from vitrail.cache.kv_pool import KvPool, dequantized
from vitrail.cache.spec import LatentKv, LayerSpec, PagedKv, stored_as
from vitrail.config.model import KvScales

CPU = torch.device("cpu")
LATENT = LatentKv(latent_rank=10, rope_dim=3, dtype="float32")
PAGED = PagedKv(num_kv_heads=3, head_dim=7, head_dim_v=5, dtype="bfloat16")
SPECS: list[LayerSpec] = [LATENT, PAGED, LATENT, PAGED]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_rows_land_in_their_slots_and_nowhere_else(page_size: int) -> None:
    pool = KvPool(SPECS, 5, page_size, CPU)
    torch.manual_seed(0)
    slots = torch.randperm(5 * page_size)[:4]
    rows = torch.randn(4, 13)
    k, v = torch.randn(4, 3, 7).bfloat16(), torch.randn(4, 3, 5).bfloat16()
    pool.write_latent(2, slots, rows)
    pool.write_paged(1, slots, k, v)
    written = torch.zeros(5 * page_size, dtype=torch.bool)
    written[slots] = True

    cache = pool.latent(2)
    assert cache.shape == (5, page_size, 13)
    keys, values = pool.paged(1)
    assert keys.shape == (5, page_size, 3, 7)
    assert values.shape == (5, page_size, 3, 5)
    for i, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        torch.testing.assert_close(cache[page, offset], rows[i], rtol=0, atol=0)
        torch.testing.assert_close(keys[page, offset], k[i], rtol=0, atol=0)
        torch.testing.assert_close(values[page, offset], v[i], rtol=0, atol=0)
    for pages in (cache, keys, values):
        assert pages.flatten(0, 1)[~written].isnan().all()
    assert pool.latent(0).isnan().all()
    assert all(t.isnan().all() for t in pool.paged(3))


def test_layers_keep_what_their_spec_says() -> None:
    pool = KvPool(SPECS, 5, 3, CPU)
    assert pool.layer(0) is pool.latent(0)
    assert pool.layer(1) == pool.paged(1)
    with pytest.raises(KeyError):
        pool.latent(1)
    with pytest.raises(KeyError):
        pool.paged(0)


def test_bytes_are_what_the_plan_counted() -> None:
    pool = KvPool(SPECS, 5, 3, CPU)
    assert pool.total_bytes == 5 * 3 * sum(spec.bytes_per_token() for spec in SPECS)


def test_entries_keep_their_rows_and_only_theirs() -> None:
    pool = EncoderPool()
    packed = torch.arange(11 * 3, dtype=torch.float32).reshape(11, 3)
    pool.put(4, packed[:7])
    pool.put(9, packed[7:])
    packed_before = packed.clone()
    packed.zero_()
    torch.testing.assert_close(pool.slice(4, 2, 4), packed_before[2:6], rtol=0, atol=0)
    torch.testing.assert_close(pool.slice(9, 0, 4), packed_before[7:], rtol=0, atol=0)
    assert pool.slice(9, 0, 4).untyped_storage().nbytes() == 4 * 3 * 4
    assert pool.total_bytes == 11 * 3 * 4
    pool.drop((4, 77))
    assert 4 not in pool
    assert 9 in pool
    assert pool.total_bytes == 4 * 3 * 4
    with pytest.raises(KeyError):
        pool.slice(4, 0, 1)


@pytest.mark.parametrize(("start", "length"), [(3, 3), (-1, 2), (0, 6)])
def test_no_rows_beyond_an_entry(start: int, length: int) -> None:
    pool = EncoderPool()
    pool.put(0, torch.zeros(5, 3))
    with pytest.raises(AssertionError):
        pool.slice(0, start, length)


def e4m3_values() -> torch.Tensor:
    """Every finite value, by the format's definition: 4 bits of exponent with bias 7, 3 of
    mantissa; exponent 0 has no hidden bit, all ones are NaN."""
    found = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        found += [size, -size]
    return torch.tensor(sorted(set(found)), dtype=torch.float64)


def nearest(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale rounded to e4m3, ties to the even mantissa, and multiplied again."""
    values = e4m3_values()
    far = (x.double()[..., None] / scale - values).abs()
    best = far.min(-1, keepdim=True).values
    even = (values.abs() / 2.0 ** (torch.frexp(values)[1] - 4).clamp(min=-9)) % 2 == 0
    choice = torch.where(far == best, torch.where(even, 2, 1), 0).argmax(-1)
    return values[choice] * scale


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_e4m3_rows_are_the_nearest_values(scale: float) -> None:
    """Values of every size, ties between neighbours, zeros of both signs, subnormal ones."""
    values = e4m3_values()
    ties = (values[1:] + values[:-1]) / 2
    random = torch.randn(2000, generator=torch.Generator().manual_seed(1)).double()
    sizes = random * 2.0 ** torch.arange(-10, 10).repeat(100)
    x = torch.cat([values, ties, sizes]) * scale
    x = x[x.abs() <= 448 * scale].float()
    x = x[: len(x) // 13 * 13].view(-1, 13)
    pool = KvPool(
        [LatentKv(latent_rank=10, rope_dim=3, dtype="float8_e4m3fn")],
        len(x) // 4 + 1, 4, CPU, {0: KvScales(scale, scale)},
    )  # fmt: skip
    pool.write_latent(0, torch.arange(len(x)), x)
    stored = pool.latent(0).flatten(0, 1)[: len(x)]
    assert stored.dtype == torch.float8_e4m3fn
    got = dequantized(stored, scale, torch.float64)
    torch.testing.assert_close(got, nearest(x, scale).float().double(), rtol=1e-7, atol=0)


def test_e4m3_saturates_and_what_is_not_finite_stays_a_fault() -> None:
    spec = PagedKv(num_kv_heads=1, head_dim=6, head_dim_v=6, dtype="float8_e4m3fn")
    pool = KvPool([spec], 2, 3, CPU, {0: KvScales(2.0, 0.5)})
    inf = float("inf")
    row = torch.tensor([[[1e4, -1e4, 3e38, inf, -inf, float("nan")]]])
    pool.write_paged(0, torch.tensor([4]), row, row.bfloat16())
    k, v = (t[1, 1, 0].float() for t in pool.paged(0))
    assert k[:3].tolist() == v[:3].tolist() == [448, -448, 448]
    assert k[3:].isnan().all()
    assert v[3:].isnan().all()
    others = [t.flatten(0, 1)[[0, 1, 2, 3, 5]] for t in pool.paged(0)]
    assert all(t.float().isnan().all() for t in others), "nobody else's slot is touched"


def test_e4m3_pages_are_half_of_bfloat16_and_counted_so() -> None:
    kept = stored_as(SPECS, "float8_e4m3fn")
    pool = KvPool(kept, 5, 3, CPU)
    assert pool.total_bytes == 5 * 3 * sum(spec.bytes_per_token() for spec in kept)
    assert pool.total_bytes == 5 * 3 * 2 * (13 + 3 * 12)
    assert pool.scales(1) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("spec", "scales"),
    [
        (LATENT, KvScales(2.0, 2.0)),
        (stored_as([LATENT], "float8_e4m3fn")[0], KvScales(2.0, 1.0)),
        (stored_as([PAGED], "float8_e4m3fn")[0], KvScales(0.0, 1.0)),
    ],
)
def test_scales_that_a_layer_cannot_have(spec: LayerSpec, scales: KvScales) -> None:
    with pytest.raises(AssertionError, match="layer 0"):
        KvPool([spec], 1, 1, CPU, {0: scales})
