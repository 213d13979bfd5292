"""A step's layout (positions, cache slots, tables, sampled rows) against a loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.attention.plan import PlanLimits, make_table
from vitrail.cache.kv_pool import KvPool
from vitrail.config.hardware import CPU
from vitrail.engine.batch import Batch, BatchBuilder
from vitrail.engine.parcel import Door
from vitrail.engine.runner import _prompt_logprobs
from vitrail.engine.step import NO_DECODES, Decodes, SequenceStep, StepInputs, StepPlan

DEVICE = torch.device("cpu")
LIMITS = PlanLimits(dtype="float32", page_size=3, max_batch=8, max_q_len=64, max_kv_len=64)


def inputs(ids: np.ndarray) -> StepInputs:
    nothing = np.zeros(0)
    return StepInputs(
        token_ids=ids,
        next_ids=ids,
        seeds=nothing.astype(np.uint64),
        output_index=nothing.astype(np.int64),
        setups=[],
        pixels=[],
    )


def build(builder: BatchBuilder, plan: StepPlan, given: StepInputs, table, pool) -> Batch:
    sent = Door(DEVICE).parcel()
    packed = builder.pack(plan, given, table, sent)
    return builder.unpack(packed, sent.send(), table, pool)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layout_equals_a_loop_over_tokens(data: st.DataObject):
    page = data.draw(st.sampled_from([1, 3, 16]))
    builder = BatchBuilder(max_running=8, max_pages=70, page_size=page, device=DEVICE)
    pool = KvPool([], num_pages=1, page_size=page, device=DEVICE)
    table = make_table([], LIMITS, CPU, None)
    last = torch.arange(100, 109)
    builder.last_tokens.copy_(last)
    slots = data.draw(st.permutations(range(8)))
    chunks = data.draw(st.integers(0, 4))
    pages = iter(data.draw(st.permutations(range(8 * 70))))
    steps = []
    held: dict[int, list[int]] = {}
    for i, slot in enumerate(slots[: data.draw(st.integers(chunks, 8))]):
        start = data.draw(st.integers(0, 40))
        length = data.draw(st.integers(1, 20)) if i < chunks else 1
        held[slot] = [next(pages) for _ in range(-(-(start + length) // page))]
        sample = data.draw(st.booleans()) if i < chunks else True
        steps.append(SequenceStep(i, slot, start, length, 0, tuple(held[slot]), sample))
    plan = StepPlan(0, tuple(steps[:chunks]), Decodes.of(steps[chunks:]), (), (), ())
    ids = np.arange(sum(s.length for s in steps[:chunks]), dtype=np.int64)
    batch = build(builder, plan, inputs(ids), table, pool)
    positions, cache, sampled, at = [], [], [], 0
    for s in steps:
        for p in range(s.start, s.start + s.length):
            positions.append(p)
            cache.append(held[s.slot][p // page] * page + p % page)
        at += s.length
        if s.sample:
            sampled.append((at - 1, s.slot))
    assert batch.context.positions.tolist() == positions
    assert batch.context.cache_slots.tolist() == cache
    assert (
        list(zip(batch.sample_rows.tolist(), batch.sample_slots.tolist(), strict=True)) == sampled
    )
    decoded = [100 + s.slot for s in steps[chunks:]]
    assert batch.token_ids.tolist() == [*ids.tolist(), *decoded]
    for meta, part in (
        (batch.context.prefill, steps[:chunks]),
        (batch.context.decode, steps[chunks:]),
    ):
        if not part:
            assert meta is None
            continue
        assert meta is not None
        assert meta.q_lens == tuple(s.length for s in part)
        assert meta.kv_lens == tuple(s.start + s.length for s in part)
        assert meta.cu_q.tolist() == np.cumsum([0, *meta.q_lens]).tolist()
        for row, s in zip(meta.block_table.tolist(), part, strict=True):
            assert row[: len(held[s.slot])] == held[s.slot]


def test_pages_grow_step_by_step():
    builder = BatchBuilder(max_running=2, max_pages=9, page_size=3, device=DEVICE)
    pool = KvPool([], num_pages=1, page_size=3, device=DEVICE)
    table = make_table([], LIMITS, CPU, None)
    none = inputs(np.zeros(0, np.int64))
    first = StepPlan(0, (), Decodes.of([SequenceStep(7, 1, 2, 1, 0, (5,), True)]), (), (), ())
    second = StepPlan(1, (), Decodes.of([SequenceStep(7, 1, 3, 1, 1, (8,), True)]), (), (), ())
    third = StepPlan(2, (), Decodes.of([SequenceStep(7, 1, 4, 1, 2, (), True)]), (), (), ())
    got = [
        build(builder, p, none, table, pool).context.cache_slots.item()
        for p in (first, second, third)
    ]
    assert got == [5 * 3 + 2, 8 * 3, 8 * 3 + 1]


def test_an_empty_step_has_empty_tensors():
    builder = BatchBuilder(max_running=2, max_pages=9, page_size=3, device=DEVICE)
    pool = KvPool([], num_pages=1, page_size=3, device=DEVICE)
    batch = build(
        builder,
        StepPlan(0, (), NO_DECODES, (), (), ()),
        inputs(np.zeros(0, np.int64)),
        make_table([], LIMITS, CPU, None),
        pool,
    )
    assert batch.token_ids.shape == (0,)
    assert batch.context.prefill is batch.context.decode is None


def test_an_image_token_beyond_the_vocabulary_has_no_logprob() -> None:
    logits = torch.randn((3, 7), generator=torch.Generator().manual_seed(0))
    rows = _prompt_logprobs(logits, [4, 7, -1], 2)
    assert [row.token_id for row in rows] == [4, 7]
    assert rows[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[4]))
    assert rows[1].logprob is None
    assert rows[1].top[0][0] == int(logits[1].argmax())
