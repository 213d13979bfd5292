"""The work of a launch: every visible pair of row and key exactly once, within the plan's bounds;
splits that change nothing; records of fixed addresses that serve other batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_attention import CPU_DEVICE, close, dense_packed, packed, paged, site
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_plans import tiny

from tests.attention.packed import varlen_metadata
from tests.attention.padded import padded, padded_work
from vitrail.attention.backend import load_backend
from vitrail.attention.backends.triton import prepare
from vitrail.attention.metadata import lengths_of, paged_metadata
from vitrail.attention.records import COMBINE_SPLITS, make_records, records_of
from vitrail.attention.shape import Phase
from vitrail.config.finding import Refused

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
BACKEND = load_backend("triton")


def seen_by(where, row_pos: int, kv_len: int) -> set[int]:
    low = 0 if where.window is None else max(0, row_pos - where.window)
    high = kv_len
    if where.causal:
        high = min(high, row_pos + 1)
    elif where.window is not None:
        high = min(high, row_pos + where.window + 1)
    return set(range(low, high))


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_pair_is_in_exactly_one_item(data):
    batch = data.draw(st.integers(0, 6))
    q_lens = data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    kv_lens = data.draw(st.lists(st.integers(0, 200), min_size=batch, max_size=batch))
    phase = data.draw(st.sampled_from([Phase.DECODE, Phase.EXTEND, Phase.PREFILL, Phase.ENCODE]))
    where = site(
        6,
        data.draw(st.sampled_from([1, 2, 6])),
        causal=phase is not Phase.ENCODE,
        window=data.draw(st.none() | st.integers(0, 40)),
        sink=data.draw(st.booleans()),
    )
    page = data.draw(st.sampled_from([1, 3, 16, 64]))
    splits = data.draw(st.integers(1, 7)) if phase is Phase.DECODE else 1
    fixed = data.draw(st.sampled_from([0, 0, 16, 32])) if splits > 1 else 0
    plan = tiny(
        where, phase, page, splits, item_pages=fixed, wave_items=data.draw(st.integers(0, 9))
    )
    starts = [kv - q for q, kv in zip(q_lens, kv_lens, strict=True)]
    records = make_records(plan, q_lens, kv_lens, starts, range(batch))

    group = where.num_q_heads // where.num_kv_heads
    firsts = np.cumsum([0, *q_lens])
    seen: dict[tuple[int, int], list[int]] = {}
    sinks: dict[tuple[int, int], int] = {}
    for q_row, row, rows, q_pos, base, lo, hi, _, has_sink in records.items.tolist():
        assert q_row == firsts[base]
        assert q_pos == starts[base]
        assert 0 <= lo <= max(lo, hi) <= max(kv_lens[base], lo)
        for flat in range(row, min(row + plan.tile_m, rows)):
            keys = seen.setdefault((base, flat), [])
            keys += seen_by(where, q_pos + flat // group, kv_lens[base]) & set(range(lo, hi))
            sinks[base, flat] = sinks.get((base, flat), 0) + has_sink
    for seq, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for flat in range(q_len * group):
            want = seen_by(where, starts[seq] + flat // group, kv_len)
            assert sorted(seen[seq, flat]) == sorted(want)
            assert sinks[seq, flat] == where.sink
    slots = [s for s in records.items[:, 7].tolist() if s >= 0]
    assert sorted(slots) == list(range(records.slots))
    spans = [range(slot, slot + n) for _, _, _, slot, n in records.combines.tolist()]
    assert sorted(s for span in spans for s in span) == sorted(slots)
    if not fixed:
        assert len(records.items) <= plan.max_items
        assert all(len(span) <= plan.max_splits for span in spans)


@given(
    others=st.lists(st.integers(1, 5000), max_size=7),
    mine=st.integers(1, 5000),
    at=st.integers(0, 7),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_fixed_items_depend_on_no_other_sequence(others, mine, at):
    plan = tiny(site(), Phase.DECODE, 16, 99, item_pages=32, max_q_len=1)

    def cuts(lens, seq):
        starts = [n - 1 for n in lens]
        records = make_records(plan, [1] * len(lens), lens, starts, range(len(lens)))
        rows = records.items[records.items[:, 4] == seq]
        return sorted(rows[:, 5:7].tolist())

    lens = [*others[:at], mine, *others[at:]]
    assert cuts(lens, len(others[:at])) == cuts([mine], 0)


def test_a_short_decode_alone_is_cut_as_finely_as_its_plan_allows():
    """One sequence of 1k on a GPU of many SMs: not one program that walks all of it."""
    plan = tiny(site(), Phase.DECODE, 64, 4, min_item_pages=4, max_items=4, wave_items=132)
    records = make_records(plan, [1], [1024], [1023], [0])
    assert len(records.items) >= 3
    even = records.items[:, 6] - records.items[:, 5]
    assert even.max() - even.min() <= 256


def test_no_room_is_our_own_fault():
    plan = tiny(site(), Phase.DECODE, 16, 4, wave_items=9)
    records = make_records(plan, [1], [200], [199], [0])
    assert len(records.items) > 1
    assert padded(records, 9, 2).items[len(records.items) :].sum() == 0
    with pytest.raises(AssertionError, match="room for 1"):
        padded(records, 1, 2)


@interpreted
@pytest.mark.parametrize("kv_len", [1, 2, 3, 15, 16, 17, 47])
@pytest.mark.parametrize("splits", [2, 8])
def test_d15_splits_are_the_whole(kv_len, splits):
    where = site()
    q, k, v = packed(where, [1], [kv_len])
    pages = paged(k, v, [1], [kv_len], 4)
    plan = tiny(where, Phase.DECODE, 4, splits, tile_n=16, wave_items=64, max_q_len=1)
    got = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    close(got, dense_packed(q, k, v, where, [1], [kv_len]), 2e-5)


@interpreted
def test_more_splits_and_channels_than_a_combine_reads_at_once():
    """The first splits hold the smaller scores, so that what came before is scaled anew."""
    where = site(heads=3, kv_heads=1, dim=8, dim_v=200)
    kv_len = 16 * (COMBINE_SPLITS + 5)
    q, k, v = packed(where, [1], [kv_len])
    k *= torch.linspace(0.1, 6, kv_len)[:, None, None]
    pages = paged(k, v, [1], [kv_len], 16)
    plan = tiny(where, Phase.DECODE, 16, 99, item_pages=1, max_q_len=1)
    got = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    close(got, dense_packed(q, k, v, where, [1], [kv_len]), 2e-5)


@interpreted
@pytest.mark.parametrize("batch", [1, 3])
def test_d14_any_length_any_splits_no_nan(batch):
    """Partial results are written over memory that holds NaN."""
    where = site(heads=2, kv_heads=1, dim=4, dim_v=4)
    for first in range(1, 601, 61 * batch):
        lens = [(first + 83 * i) % 600 + 1 for i in range(batch)]
        q, k, v = packed(where, [1] * batch, lens)
        pages = paged(k, v, [1] * batch, lens, 16)
        for splits in (1, 2, 8):
            plan = tiny(where, Phase.DECODE, 16, splits, tile_n=64, wave_items=64, max_q_len=1)
            meta = paged_metadata(16, [1] * batch, lens, pages.meta.block_table)
            got = BACKEND.paged(plan, q, pages.k, pages.v, meta)
            assert got.out.isfinite().all()
            close(got, dense_packed(q, k, v, where, [1] * batch, lens), 2e-5)


@interpreted
def test_records_of_fixed_addresses_serve_other_batches(monkeypatch):
    """What a captured graph does: the grid and the tensors stay, their contents change. Rows are
    joined by fewer programs than there are."""
    monkeypatch.setattr("vitrail.attention.backends.triton.JOIN_PROGRAMS", 5)
    where = site(heads=4, kv_heads=2, dim=8, dim_v=8)
    plan = tiny(where, Phase.DECODE, 8, 4, wave_items=16, max_q_len=1)
    pool = torch.randn(60, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    q = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))

    def prepared(lens):
        meta = paged_metadata(8, [1] * 3, lens, table)
        return meta, padded_work(plan, meta, CPU_DEVICE, (plan.max_items, 3))

    meta, work = prepared([160, 160, 160])
    meta.work.put(plan, work)
    for lens in ([160, 160, 160], [1, 159, 8], [30, 0, 31]):
        _, new = prepared(lens)
        work.items.copy_(new.items)
        work.combines.copy_(new.combines)
        got = BACKEND.paged(plan, q, pool, pool, meta)
        fresh = paged_metadata(8, [int(n > 0) for n in lens], lens, table)
        live = [i for i, n in enumerate(lens) if n]
        want = BACKEND.paged(plan, q[live], pool, pool, fresh)
        rows = [i for i, n in enumerate(lens) if n]
        assert torch.equal(got.out[rows], want.out)
        assert torch.equal(got.lse[rows], want.lse)


@interpreted
def test_the_layers_of_a_step_share_one_work():
    where = site()
    q, k, v = packed(where, [1], [20])
    pages = paged(k, v, [1], [20], 16)
    plan = tiny(where, Phase.DECODE)
    BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)

    def make():
        raise AssertionError("made twice")

    assert len(pages.meta.work.get(plan, make).items) == 1
    with pytest.raises(AssertionError, match="made twice"):
        pages.meta.work.get(tiny(where, Phase.DECODE), make)


@interpreted
def test_d10_addresses_past_2_to_the_31_elements():
    """A pool of 4 GiB of which two pages are ever touched; k and v are the same memory."""
    where = site(heads=1, kv_heads=1, dim=64, dim_v=64)
    page, far = 64, 2**31 // (64 * 64)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        pool = torch.empty(far + 2, page, 1, 64, dtype=torch.float16)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    g = torch.Generator().manual_seed(0)
    pool[1] = torch.randn(page, 1, 64, generator=g)
    pool[far + 1] = pool[1]
    q = torch.randn(1, 1, 64, generator=g).half().repeat(2, 1, 1)
    table = torch.tensor([[1], [far + 1]], dtype=torch.int32)
    for tile_n in (16, 64):
        plan = tiny(where, Phase.DECODE, page, dtype="float16", tile_n=tile_n)
        meta = paged_metadata(page, [1, 1], [60, 60], table)
        out, _ = BACKEND.paged(plan, q, pool, pool, meta)
        assert torch.equal(out[0], out[1])


def test_d12_a_table_too_short_is_refused_before_the_kernel():
    with pytest.raises(Refused, match="65 keys in 4 pages of 16"):
        paged_metadata(16, [1, 1], [65, 1], torch.zeros((2, 4), dtype=torch.int32))


@given(st.lists(st.integers(0, 80), min_size=1, max_size=7), st.sampled_from([(1, 1), (4, 2)]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_work_made_on_the_device_is_that_of_the_host(lens, heads):
    """The same items, in any order, and empty ones behind: never more than there is room for."""
    where = site(*heads, 24, 24, causal=False, sink=True)
    plan = tiny(where, Phase.ENCODE, max_q_len=80)
    meta = replace(varlen_metadata(lens, CPU_DEVICE), longest=80)
    made = prepare(plan, meta, CPU_DEVICE)
    want = records_of(plan, lengths_of(meta)).items.tolist()
    assert made.items.dtype == torch.int32
    assert sorted(made.items[: len(want)].tolist()) == sorted(want)
    assert not made.items[len(want) :].any()
    assert (made.slots, len(made.combines)) == (0, 0)
