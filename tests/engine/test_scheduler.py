"""The scheduler's behaviour, case by case, on a device made of paper (`scheduler_rig`)."""

import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from tests.engine.scheduler_rig import (
    IMAGE_ID,
    Rig,
    Setting,
    chat,
    oracle,
    oracle_states,
    request,
    run,
)
from vitrail.config.finding import Refused
from vitrail.engine.request import EngineRequest, FinishReason
from vitrail.engine.step import Decodes, WrittenPlan, draws


def many(seed: int, count: int, longest: int) -> list[EngineRequest]:
    """Random requests of text and pictures; prompts and pictures repeat."""
    rng = random.Random(seed)
    made: list[EngineRequest] = []
    for i in range(count):
        parts: list[int | tuple[int, int]] = []
        room = rng.randint(1, longest)
        while room > 0:
            n = rng.randint(1, min(9, room))
            parts.append(n if rng.random() < 0.6 else (rng.randint(0, 4), n))
            room -= n
        stop = frozenset(rng.sample(range(50), 2))
        made.append(chat(f"r{i}", *parts, max_tokens=rng.randint(1, 12), stop=stop, seed=i))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_step_ahead_equals_step_by_step_equals_alone(seed: int, page_size: int):
    rng = random.Random(seed)
    setting = Setting(
        page_size=page_size,
        num_pages=-(-rng.choice([64, 80, 100]) // page_size),
        max_step_tokens=rng.choice([5, 16, 64]),
        max_running=rng.choice([1, 3, 8]),
        encoder_tokens=rng.choice([0, 9, 20, 100]),
        prefix_cache=seed % 2 == 0,
    )
    requests = many(seed, 12, min(40, setting.context - 1))
    rigs = [run(replace(setting, depth=depth), *requests) for depth in (1, 2, 3)]
    for r in requests:
        assert rigs[0].tokens(r.id) == rigs[1].tokens(r.id) == rigs[2].tokens(r.id)


def test_a_pool_too_small_for_all_preempts_and_changes_nothing():
    setting = Setting(num_pages=12, page_size=4, max_model_len=48, max_step_tokens=32)
    requests = [chat(f"r{i}", 8 + i % 3, max_tokens=24, seed=i) for i in range(8)]
    roomy = run(replace(setting, num_pages=200), *requests)
    tight = run(setting, *requests)
    assert roomy.scheduler.preemptions == 0
    assert tight.scheduler.preemptions >= 4
    for r in requests:
        assert tight.tokens(r.id) == roomy.tokens(r.id)


def test_the_oldest_is_never_preempted_and_first_come_is_first_served():
    setting = Setting(num_pages=12, page_size=4, max_model_len=48, max_step_tokens=32)
    rig = Rig(setting)
    rig.add(*(chat(f"r{i}", 9, max_tokens=20, seed=i) for i in range(8)))
    oldest: dict[str, int] = {}
    begun: list[str] = []
    while not rig.scheduler.idle:
        for output in rig.step():
            if output.request_id not in begun:
                begun.append(output.request_id)
        alive = [name for name in rig.requests if rig.reason(name) is None]
        if alive:  # in every step that is absorbed the oldest gets a token
            oldest[alive[0]] = oldest.get(alive[0], 0) + 1
    assert begun == [f"r{i}" for i in range(8)]
    assert rig.scheduler.preemptions > 0
    # 20 tokens, of which most came while younger ones still ran: no step went by without one.
    assert all(steps <= 24 for steps in oldest.values())
    rig.check_outputs()


def test_one_that_is_alone_ends_even_where_equal_pages_were_computed_twice():
    """Two equal prompts computed side by side hold equal pages twice; the second fills the pool."""
    setting = Setting(num_pages=16, page_size=1, max_model_len=16, max_step_tokens=20)
    twins = [chat(f"r{i}", 4, max_tokens=12, seed=1) for i in range(2)]
    rig = run(setting, *twins)
    assert [rig.reason(r.id) for r in twins] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_the_next_turn_finds_the_answer_in_the_cache(chunk: int):
    """All full pages of prompt and answer but the last token, which nothing was computed from."""
    for num_prompt in (5, 7, 8, 9):
        rig = run(Setting(page_size=4, max_step_tokens=chunk), chat("a", num_prompt, max_tokens=8))
        turn = [*rig.requests["a"].prompt_token_ids, *rig.tokens("a")]
        rig.add(request("b", [*turn, 3, 4, 5]))
        rig.run()
        rig.check_outputs()
        assert rig.outputs["b"][0].cached_tokens == (len(turn) - 1) // 4 * 4


@pytest.mark.parametrize("tight", [False, True])
def test_c14_groups_of_answers_end_in_a_cache_for_two(tight: bool):
    """n = 3 answers to each of 4 prompts."""
    setting = Setting(num_pages=14 if tight else 400, page_size=4, max_model_len=28)
    requests = [
        chat(f"p{p}.{i}", 5, (p, 4), max_tokens=18, group=f"p{p}", seed=10 * p + i)
        for p in range(4)
        for i in range(3)
    ]
    rig = run(setting, *requests)
    assert (rig.scheduler.preemptions > 0) == tight
    assert all(rig.reason(r.id) is FinishReason.LENGTH for r in requests)
    assert len({tuple(rig.tokens(r.id)) for r in requests}) == 12


def test_one_that_found_no_room_comes_in_when_its_prompt_is_another_ones_by_now():
    rig = Rig(Setting(num_pages=11, page_size=3, max_model_len=33, max_step_tokens=20))
    rig.add(chat("a", 18, max_tokens=12), chat("b", 18, max_tokens=1))
    rig.launch()
    assert rig.scheduler.num_waiting == 1, "nothing of the prompt is computed, and there is no room"
    while rig.reason("b") is None:
        rig.step()
    assert rig.reason("a") is None, "it waited for the other one's end"
    assert rig.outputs["b"][0].cached_tokens == 15
    rig.run()
    rig.check_outputs()


def test_a_group_computes_its_prompt_once():
    setting = Setting(page_size=4, num_pages=100, max_step_tokens=64)
    group = [chat(f"r{i}", 9, (1, 4), 5, group="g", seed=i) for i in range(6)]
    rig = run(setting, *group)
    assert sum(r.length for p in rig.plans for r in p.prefills) == 18 + 5 * 2
    assert [rig.outputs[r.id][0].cached_tokens for r in group] == [0] + [16] * 5
    assert len({tuple(rig.tokens(r.id)) for r in group}) == 6
    cold = run(replace(setting, prefix_cache=False), *group)
    assert all(cold.tokens(r.id) == rig.tokens(r.id) for r in group)
    (first, *_) = cold.plans
    assert len(first.prefills) > 1, "without a cache nobody waits"


@pytest.mark.parametrize("how", ["abort", "fail"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_group_that_loses_its_leader_gets_another(how: str, steps: int):
    rig = Rig(Setting(max_step_tokens=4))
    rig.add(*(chat(f"r{i}", 15, group="g", seed=i) for i in range(3)))
    for _ in range(steps):
        rig.launch()
    if how == "fail" and steps:
        rig.fail()
    else:
        rig.abort("r0")
    rig.run()
    rig.check_outputs()
    assert [rig.reason(f"r{i}") for i in (1, 2)] == [FinishReason.LENGTH] * 2


def test_a_group_whose_leader_fails_computes_its_prompt_once_more():
    rig = Rig(Setting(page_size=4, max_step_tokens=64))
    rig.add(*(chat(f"r{i}", 17, group="g", seed=i) for i in range(5)))
    rig.device.nan_steps = {0}
    rig.run()
    rig.check_outputs()
    assert rig.reason("r0") is FinishReason.ERROR
    assert [rig.outputs[f"r{i}"][0].cached_tokens for i in range(1, 5)] == [0, 16, 16, 16]


def test_c17_a_prompt_over_the_limit_is_refused_with_both_numbers_and_the_queue_moves_on():
    rig = Rig(Setting(max_model_len=30, num_pages=20))
    with pytest.raises(Refused, match=r"30 tokens.*at most 30") as refused:
        rig.add(chat("exact", 20, (1, 10)))
    assert [f.code for f in refused.value.findings] == ["context_length_exceeded"]
    with pytest.raises(Refused, match=r"31 tokens.*send at most 29"):
        rig.add(chat("over", 31))
    rig.add(chat("under", 19, (1, 10), max_tokens=100), chat("behind", 3))
    rig.run()
    rig.check_outputs()
    assert len(rig.tokens("under")) == 1
    assert rig.reason("under") is rig.reason("behind") is FinishReason.LENGTH


def test_c17_the_pool_is_a_limit_too():
    rig = Rig(Setting(max_model_len=1000, num_pages=5, page_size=4))
    with pytest.raises(Refused, match="20 tokens, what the KV cache can hold"):
        rig.add(chat("r", 20))
    rig.add(chat("r", 5, max_tokens=100), chat("s", 19, max_tokens=100))
    rig.run()
    rig.check_outputs()
    assert len(rig.tokens("r")) == 15


def test_what_is_refused_leaves_no_trace():
    rig = Rig(Setting(max_running=1, max_waiting=1, encoder_patches=20))
    with pytest.raises(Refused, match=r"images\[1\].*2 x 11 = 22 patches.*at most 20"):
        rig.add(chat("r", (1, 9), (2, 11)))
    rig.add(chat("a", 3), chat("b", 3))
    with pytest.raises(Refused, match="1 requests are waiting") as refused:
        rig.add(chat("c", 3))
    assert refused.value.findings[0].code == "overloaded"
    rig.run()
    rig.add(chat("c", 3))
    rig.run()
    rig.check_outputs()


def test_as_many_may_wait_beside_those_that_could_start_now():
    """Of an idle engine, of one whose rows are taken, and of one that has a row to give."""
    rig = Rig(Setting(max_running=3, max_waiting=2))

    def fill(names: str) -> None:
        for name in names:
            rig.add(chat(name, 3, max_tokens=20))
        with pytest.raises(Refused, match="2 requests are waiting"):
            rig.add(chat("refused", 3))

    fill("abcde")
    rig.step()
    with pytest.raises(Refused, match="2 requests are waiting"):
        rig.add(chat("refused", 3))
    rig.abort("a")
    fill("f")
    rig.run()
    rig.check_outputs()


def _churn(seed: int, count: int, longest: int, page_size: int, check_every: int) -> Rig:
    rng = random.Random(seed)
    context = longest + 40
    rig = Rig(
        Setting(
            num_pages=-(-3 * context // page_size),
            page_size=page_size,
            max_model_len=context,
            max_step_tokens=longest // 3 + 1,
            max_running=12,
        )
    )
    alive: list[str] = []
    for i in range(count):
        made = chat(f"r{i}", rng.randint(1, longest), max_tokens=rng.randint(1, 39), seed=i)
        rig.scheduler.add(made)
        rig.requests[made.id], rig.outputs[made.id] = made, []
        alive.append(made.id)
        if rng.random() < 0.33:
            output = rig.scheduler.abort(alive.pop(rng.randrange(len(alive))))
            rig.outputs[output.request_id].append(output) if output else None
        planned = rig.scheduler.schedule()
        if planned is not None:
            rig.flights.append((planned[0], rig.device.launch(*planned)))
        while len(rig.flights) > 1:
            plan, result = rig.flights.popleft()
            for output in rig.scheduler.absorb(plan, result):
                rig.outputs[output.request_id].append(output)
        if i % check_every == 0:
            rig.scheduler.check()
    rig.run(20_000)
    rig.check_outputs()
    return rig


def test_c20_no_page_leaks_over_mixed_chunks_and_aborts():
    rig = _churn(1, count=120, longest=90, page_size=16, check_every=10)
    assert sum(rig.reason(r) is FinishReason.ABORT for r in rig.requests) > 20


@pytest.mark.suite("soak", minutes=1, owner="engine")
@pytest.mark.nightly
def test_c20_no_page_leaks_over_500_requests_of_700_tokens():
    _churn(2, count=500, longest=700, page_size=16, check_every=50)


@pytest.mark.parametrize("victim", ["r0", "r1", "r2"])
def test_an_abort_at_any_moment_harms_nobody_else(victim: str):
    """Waiting, in the middle of a picture, in flight, answering, done."""
    setting = Setting(num_pages=14, page_size=3, max_model_len=40, max_step_tokens=5, max_running=2)
    for moment in range(18):
        for lead in (1, 2):
            rig = Rig(setting)
            rig.add(*(chat(f"r{i}", 2, (i % 2, 8), 1, max_tokens=4, seed=i) for i in range(3)))
            for _ in range(moment):
                rig.step()
            while len(rig.flights) < lead and rig.launch():
                pass
            held = rig.manager.usage().running_pages
            running = rig.scheduler.num_running
            rig.abort(victim)
            if rig.scheduler.num_running < running:
                assert rig.manager.usage().running_pages < held, "its pages are free at once"
            assert rig.scheduler.abort(victim) is None
            rig.run()
            rig.check_outputs()
            ended = [rig.reason(r) for r in rig.requests if r != victim]
            assert ended == [FinishReason.LENGTH] * 2


def test_a_step_that_raises_fails_its_requests_alone():
    rig = Rig(Setting(max_step_tokens=8, max_running=2))
    rig.add(*(chat(f"r{i}", 3, max_tokens=4, seed=i) for i in range(5)))
    rig.launch()
    rig.launch()
    failed = {r.seq for r in (*rig.flights[0][0].prefills, *rig.flights[0][0].decodes)}
    rig.fail()
    assert [rig.reason(f"r{i}") for i in range(2)] == [FinishReason.ERROR] * 2
    assert rig.outputs["r0"][-1].error == "the device is on fire"
    assert len(failed) == 2
    rig.run()
    rig.check_outputs()
    assert [rig.reason(f"r{i}") for i in (2, 3, 4)] == [FinishReason.LENGTH] * 3


def test_logits_that_are_not_finite_fail_one_request_and_leave_nothing_behind():
    rig = Rig(Setting(page_size=3, max_step_tokens=7))
    rig.add(chat("a", 12, max_tokens=3), chat("b", (1, 3), 4, max_tokens=9))
    rig.device.nan_steps = {0}  # the first chunk of a; its last gives the token
    rig.run()
    assert rig.reason("a") is FinishReason.ERROR
    assert rig.outputs["a"][-1].error == "the model's logits were not finite"
    rig.add(chat("again", 12, max_tokens=3))
    rig.run()
    rig.check_outputs()
    assert rig.reason("b") is rig.reason("again") is FinishReason.LENGTH
    assert rig.outputs["again"][0].cached_tokens == 0


def test_an_end_id_ends_and_is_named_but_not_before_min_tokens():
    base = chat("r", 5, max_tokens=12, seed=5)
    free, _ = oracle(base, 64)
    stop = frozenset({free[3]})
    at = free.index(free[3])
    rig = run(Setting(), chat("r", 5, max_tokens=12, seed=5, stop=stop))
    assert rig.tokens("r") == free[: at + 1]
    last = rig.outputs["r"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, free[3])
    rig = run(Setting(), chat("r", 5, max_tokens=12, seed=5, stop=stop, min_tokens=6))
    assert len(rig.tokens("r")) >= 6
    assert not stop & set(rig.tokens("r")[:6])


def test_nothing_is_computed_past_the_last_token():
    setting = Setting(num_pages=100, depth=2)
    rig = run(setting, *(chat(f"r{i}", 3, max_tokens=i + 1, seed=i) for i in range(5)))
    sampled = sum(len(p.sampled) for p in rig.plans)
    assert sampled == sum(len(rig.tokens(r)) for r in rig.requests) == 15


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("num_pages", [60, 10])
def test_rows_of_the_prompt_come_once_each_in_order(logits: bool, num_pages: int):
    """Cold, after others with the same prompt, cut by chunks and by preemption."""
    setting = Setting(num_pages=num_pages, page_size=4, max_model_len=40, max_step_tokens=5)
    rig = Rig(setting)
    rig.add(chat("plain", 13, max_tokens=20, seed=1))
    options = {"want_logits": True} if logits else {"prompt_logprobs": 0}
    for i in range(3):
        rig.add(chat(f"r{i}", 13, (1, 5), 1, max_tokens=16, seed=i, **options))
        rig.step()
        rig.step()
    rig.run()
    rig.check_outputs()
    assert (rig.scheduler.preemptions > 0) == (num_pages == 10)
    for i in range(3):
        made = rig.requests[f"r{i}"]
        states = oracle_states(made, made.prompt_token_ids)
        got = rig.outputs[made.id]
        if logits:
            parts = [(o.logits_start, o.logits[:, 0].tolist()) for o in got if o.logits is not None]
            assert parts[-1][0] + len(parts[-1][1]) == 19
            assert all(a[0] + len(a[1]) == b[0] for a, b in pairwise(parts))
            assert [s for _, rows in parts for s in rows] == states[parts[0][0] :]
        else:
            rows = [r for o in got for r in o.prompt_logprobs or []]
            assert [r.token_id for r in rows] == made.prompt_token_ids[1:]
            assert [r.logprob for r in rows] == [-float(s % 1000) for s in states[:-1]]


@pytest.mark.parametrize(("num_pages", "twin", "before"), [(9, 14, 2), (11, 4, 0), (11, 4, 3)])
def test_logits_have_no_gap_where_another_cached_more_before_a_resume(
    num_pages: int, twin: int, before: int
):
    setting = Setting(num_pages=num_pages, page_size=4, max_step_tokens=5, depth=1)
    rig = Rig(setting)
    rig.add(chat("old", 7, max_tokens=100, seed=1))
    for _ in range(before):
        rig.step()
    rig.add(request("twin", [9] + [20] * 12, max_tokens=twin, seed=5))
    rows = request("rows", [9] + [20] * 12 + [8, 8], want_logits=True, max_tokens=4, seed=2)
    rig.add(rows)
    rig.run()
    rig.check_outputs()
    assert rig.scheduler.preemptions > 0
    parts = [o for o in rig.outputs["rows"] if o.logits is not None]
    got = [row for o in parts for row in o.logits[:, 0].tolist()]
    assert got == oracle_states(rows, rows.prompt_token_ids)[parts[0].logits_start :]


def test_logits_of_a_cached_prefix_are_absent_unless_logprobs_force_the_whole_prompt():
    rig = run(Setting(page_size=4), chat("a", 14))
    rig.add(chat("b", 14, want_logits=True), chat("c", 14, want_logits=True, prompt_logprobs=0))
    rig.run()
    rig.check_outputs()
    starts = {n: [o.logits_start for o in rig.outputs[n] if o.logits is not None] for n in "bc"}
    assert starts == {"b": [12], "c": [0]}
    assert rig.outputs["c"][0].cached_tokens == 0
    whole = np.concatenate([o.logits for o in rig.outputs["c"] if o.logits is not None])
    part = np.concatenate([o.logits for o in rig.outputs["b"] if o.logits is not None])
    assert np.array_equal(whole[12:], part)


def test_b43_a_draw_depends_on_seed_and_index_alone():
    seeds = [0, 1, 2, 2**63 - 1] * 64
    index = np.repeat(np.arange(64), 4)
    together = draws(seeds, index)
    alone = [draws([s], np.array([i]))[0] for s, i in zip(seeds, index, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)
    assert draws([], np.zeros(0, dtype=np.int64)).shape == (0,)


def test_draws_are_uniform_and_those_of_neighbours_unrelated():
    n = 20_000
    index = np.arange(n)
    rows = np.stack([draws([seed] * n, index) for seed in (0, 1, 2, 1 << 40)])
    assert rows.min() >= 0
    assert rows.max() < 1
    counts = np.stack([np.histogram(r, bins=64, range=(0, 1))[0] for r in rows])
    chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum(axis=1)
    assert (chi2 < 120).all()  # 63 degrees of freedom: 1 in 50,000
    related = np.corrcoef(np.concatenate([rows, rows[:, ::-1]]))[np.triu_indices(8, 1)]
    assert np.abs(related).max() < 0.035
    serial = [np.corrcoef(r[:-1], r[1:])[0, 1] for r in rows]
    by_seed = draws(list(range(n)), np.zeros(n, dtype=np.int64))
    assert max(map(abs, serial)) < 0.03
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.03


def test_a_plan_is_ints_and_says_nothing_of_the_prompt():
    secret = [IMAGE_ID] * 3 + [41, 42, 43, 44]
    rigs = []
    for text in (secret, [IMAGE_ID] * 3 + [11, 12, 13, 14]):
        picture = chat("", (text[-1], 3)).images[0]
        rig = run(Setting(), request("r", text, [picture], max_tokens=3))
        plans = [msgspec.structs.replace(p, decodes=tuple(p.decodes)) for p in rig.plans]
        rigs.append([msgspec.json.encode(p) for p in plans])
        decoded = [msgspec.json.decode(p, type=WrittenPlan) for p in rigs[-1]]
        assert decoded == plans
        assert [tuple(Decodes.of(p.decodes)) for p in plans] == [p.decodes for p in plans]
    assert rigs[0] == rigs[1], "plans of other tokens and pictures are the same"


def test_an_engine_without_work_is_idle_and_plans_nothing():
    rig = Rig(Setting())
    assert rig.scheduler.idle
    assert rig.scheduler.schedule() is None
    rig.add(chat("r", 3))
    assert not rig.scheduler.idle
    rig.launch()
    rig.abort("r")
    assert not rig.scheduler.idle, "a result is still to come"
    rig.absorb()
    rig.check_idle()
    assert rig.scheduler.idle
