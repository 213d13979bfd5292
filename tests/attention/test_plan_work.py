"""The work list of a launch: every key that a row of queries sees is in one item, and no launch
needs more items than its plan allows."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.padded import padded
from vitrail.attention.plan import AttentionPlan, plan_on
from vitrail.attention.records import DecodeRecords, Records, decode_records, make_records, room
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.config.hardware import GPUS, find

SITE = AttentionSite(
    num_q_heads=28, num_kv_heads=4, head_dim=128, head_dim_v=128, scale=0.1, causal=True
)
LATENT = AttentionSite(
    num_q_heads=48,
    num_kv_heads=1,
    head_dim=576,
    head_dim_v=512,
    scale=0.1,
    causal=True,
    latent_rank=512,
)
SHAPE = AttentionShape(
    site=SITE,
    phase=Phase.DECODE,
    dtype="bfloat16",
    page_size=16,
    batch=8,
    max_q_len=1,
    max_kv_len=100_000,
)


def planned(shape: AttentionShape, gpu: str = "H200", backend: str = "triton") -> AttentionPlan:
    made = plan_on(backend, shape, find(gpu))
    assert isinstance(made, AttentionPlan), made
    return made


def records(plan: AttentionPlan, lens: list[tuple[int, int]]) -> Records:
    """Of sequences (q_len, kv_len), queries at the end of the keys, block table rows in order."""
    return make_records(
        plan,
        [q for q, _ in lens],
        [kv for _, kv in lens],
        [kv - q for q, kv in lens],
        list(range(len(lens))),
    )


def ranges(got: Records) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(sequence, first row) -> its items' keys [lo, hi), in order."""
    by_block: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for _, row, _, _, base, lo, hi, _, _ in got.items.tolist():
        by_block[base, row].append((lo, hi))
    return {block: sorted(pieces) for block, pieces in by_block.items()}


def check(plan: AttentionPlan, lens: list[tuple[int, int]]) -> Records:
    site, got = plan.shape.site, records(plan, lens)
    group = site.num_q_heads // site.num_kv_heads
    pieces = ranges(got)
    assert len(got.items) <= plan.max_items
    assert got.slots <= plan.max_items
    blocks = [
        (seq, row)
        for seq, (q_len, _) in enumerate(lens)
        for row in range(0, q_len * group, plan.tile_m)
    ]
    assert sorted(pieces) == blocks
    for seq, row in blocks:
        q_len, kv_len = lens[seq]
        last = min(row + plan.tile_m, q_len * group) - 1
        first_pos = kv_len - q_len + row // group
        hi = kv_len - q_len + last // group + 1
        lo = 0 if site.window is None else max(0, first_pos - site.window)
        items = pieces[seq, row]
        assert len(items) <= plan.max_splits
        assert (items[0][0], items[-1][1]) == (lo, hi)
        assert all(a < b for a, b in items), f"an empty split in {items}"
        assert all(a[1] == b[0] for a, b in zip(items, items[1:], strict=False))
        assert all(a % (plan.shape.page_size or 1) == 0 for a, _ in items[1:])
    splits = [len(pieces[block]) for block in blocks]
    assert got.slots == sum(n for n in splits if n > 1)
    assert sorted(got.combines[:, 4].tolist()) == sorted(n for n in splits if n > 1)
    used = sorted(s for s in got.items[:, 7].tolist() if s >= 0)
    assert used == list(range(got.slots))
    return got


@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 17)), min_size=1, max_size=12),
    page=st.sampled_from([1, 3, 16, 48, 64, 128, 256]),
    window=st.sampled_from([None, 0, 127, 5000]),
    latent=st.booleans(),
    fixed=st.booleans(),
    gpu=st.sampled_from([*(("triton", g) for g in GPUS), ("cute", find("H200"))]),
)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_every_page_is_read_once_within_the_bound(lens, page, window, latent, fixed, gpu):
    # Lengths spread over orders of magnitude.
    lens = [(q, q + (kv**4) % 100_000 if kv else q) for q, kv in lens]
    site = replace(LATENT if latent else SITE, window=window)
    shape = replace(
        SHAPE,
        site=site,
        page_size=page,
        batch=len(lens),
        max_q_len=max(q for q, _ in lens),
        max_kv_len=max(kv for _, kv in lens),
        batch_invariant=fixed,
    )
    backend, where = gpu
    check(planned(shape, where.name, backend), lens)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("page", [1, 16, 64, 128])
def test_our_hopper_decode_reads_every_page_once(page, latent):
    for lens in ([(1, 100_000)], [(1, 1 + 977 * i) for i in range(100)], [(3, 9000), (1, 1)] * 40):
        shape = replace(
            SHAPE,
            site=LATENT if latent else SITE,
            page_size=page,
            batch=len(lens),
            max_q_len=3,
            max_kv_len=100_000,
        )
        check(planned(shape, "H200", "cute"), lens)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_bucket_s_bound_holds_for_every_batch_within_it(batch):
    """The plan is for 8 sequences of 100,000 keys; batches that fill it less cut them finer."""
    plan = planned(replace(SHAPE, page_size=64))
    for kv_len in (1, 63, 64, 65, 255, 257, 4097, 32_768, 99_999, 100_000):
        check(plan, [(1, kv_len)] * batch)
        check(plan, [(1, 1 + kv_len // (i + 1)) for i in range(batch)])
        check(plan, [(1, 100_000)] + [(1, 1)] * (batch - 1))


def test_one_long_sequence_among_short_ones_is_cut():
    """No program is left with 64k keys while the others have 1k."""
    plan = planned(replace(SHAPE, batch=256, max_kv_len=65_536, page_size=64))
    got = check(plan, [(1, 1000)] * 255 + [(1, 65_536)])
    longest = int((got.items[:, 6] - got.items[:, 5]).max())
    assert longest <= 65_536 // 4
    # Longest first, so that none starts last.
    assert (np.diff(got.items[:, 6] - got.items[:, 5]) <= 0).all()


@given(
    kv_lens=st.lists(st.integers(1, 30_000), min_size=1, max_size=7),
    window=st.sampled_from([None, 9000]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_batch_invariant_cuts_depend_on_a_sequence_s_own_length(kv_lens, window):
    site = replace(SITE, window=window)
    shape = replace(SHAPE, site=site, batch_invariant=True, max_kv_len=30_000)
    together = ranges(check(planned(shape), [(1, n) for n in kv_lens]))
    for seq, n in enumerate(kv_lens):
        small = replace(shape, batch=1, max_kv_len=n)
        alone = ranges(check(planned(small), [(1, n)]))
        assert together[seq, 0] == alone[0, 0]


def test_without_splits_each_block_of_rows_is_one_item():
    shape = replace(SHAPE, phase=Phase.EXTEND, max_q_len=4096, max_kv_len=9000)
    plan = planned(shape)
    got = check(plan, [(300, 300), (1, 9000), (4096, 8999)])
    assert got.slots == 0
    rows = (300 * 7, 7, 4096 * 7)
    assert len(got.items) == sum(-(-r // plan.tile_m) for r in rows) <= plan.max_items


def test_a_graph_s_records_are_of_one_size():
    plan = planned(SHAPE)
    got = records(plan, [(1, 50_000), (1, 70)])
    full = padded(got, plan.max_items, plan.shape.batch)
    assert full.items.shape == (plan.max_items, got.items.shape[1])
    assert (full.items[: len(got.items)] == got.items).all()
    assert not full.items[len(got.items) :].any()
    assert not full.combines[len(got.combines) :].any()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_records_of_a_decode_are_those_of_any_batch(data: st.DataObject):
    site = data.draw(
        st.sampled_from(
            [SITE, LATENT, replace(SITE, window=100, sink=True), replace(SITE, sink=True)]
        )
    )
    batch = data.draw(st.sampled_from([1, 3, 8, 200]))
    shape = replace(
        SHAPE,
        site=site,
        batch=batch,
        batch_invariant=data.draw(st.booleans()),
        page_size=data.draw(st.sampled_from([1, 16, 64])),
    )
    plan = planned(shape, backend=data.draw(st.sampled_from(["triton", "cute"])))
    longest = data.draw(st.sampled_from([1, 300, 5000, 100_000]))
    lens = [data.draw(st.integers(0, longest)) for _ in range(data.draw(st.integers(1, batch)))]
    bases = data.draw(st.permutations(range(len(lens))))
    starts = [n - 1 for n in lens]
    want = make_records(plan, [1] * len(lens), lens, starts, bases)
    got = decode_records(plan, np.array(lens), np.array(bases))
    assert got.items.tolist() == want.items.tolist()
    assert got.combines.tolist() == want.combines.tolist()
    assert got.slots == want.slots
    num_items, num_combines = room(plan, len(lens))
    padded(got, num_items, num_combines)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_records_in_place_are_those_of_the_step(data: st.DataObject):
    """Sequences grow by a key a step, and now and then there are others, or one that does not."""
    site = data.draw(st.sampled_from([SITE, LATENT, replace(SITE, window=40, sink=True)]))
    count, longest = data.draw(st.sampled_from([(5, 3000), (5, 300), (200, 300), (200, 3000)]))
    fixed = data.draw(st.booleans())
    plan = planned(replace(SHAPE, site=site, batch=count, page_size=16, batch_invariant=fixed))
    items, combines = (
        np.zeros((n, w), np.int32) for n, w in zip(room(plan, count), (9, 5), strict=True)
    )
    records, lens = DecodeRecords(plan, items, combines), np.zeros(0, np.int64)
    for _ in range(40):
        if not len(lens) or data.draw(st.integers(0, 19)) == 0:
            seed = data.draw(st.integers(0, 2**32))
            lens = np.random.default_rng(seed).integers(1, longest, count)
        elif data.draw(st.integers(0, 19)) == 0:
            lens[data.draw(st.integers(0, count - 1))] -= 1
        records.update(lens)
        want = padded(decode_records(plan, lens, np.arange(count)), *room(plan, count))
        assert np.array_equal(in_order(items), in_order(want.items))
        assert np.array_equal(combines, want.combines)
        lens = lens + 1


def in_order(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T)]
