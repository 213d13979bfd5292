"""The device side: slots, entries, bytes."""

import pytest
import torch

from vitrail.cache.encoder_pool import EncoderPool
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.spec import LatentKv, LayerSpec, PagedKv

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
