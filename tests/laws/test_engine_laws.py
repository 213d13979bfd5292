"""The engine's laws on the golden Kimi-VL: whatever path a prompt takes, its logits are the golden
ones within 1e-4 and its greedy tokens are the golden tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.driver import Golden, golden_llm, pictures_beside_decodes
from vitrail import LLM, Refused, SamplingParams
from vitrail.engine.request import FinishReason

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


def run(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    out = [g.outputs[0].token_ids for g in llm.generate(prompts, params)]
    settled(llm)
    return out


def settled(llm: LLM) -> None:
    """Idle: nothing is held, every page is free or only cached."""
    assert llm.engine.idle
    llm.engine.scheduler.check()
    usage = llm.engine.scheduler.cache_usage()
    assert usage.running_pages == 0


def strangers(golden: Golden, count: int) -> list[dict[str, Any]]:
    """Prompts of other lengths, with and without pictures, in other orders."""
    rng = np.random.default_rng(5)
    made: list[dict[str, Any]] = []
    for i in range(count):
        ids = rng.integers(0, 500, 5 + 13 * i).tolist()
        image = golden.images[i % 3]
        if i % 2:
            made.append({"prompt_token_ids": [*ids[:3], 505, *ids[3:]], "images": [image]})
        else:
            made.append({"prompt_token_ids": ids})
    return made


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("step_ahead", [True, False])
def test_golden_at_every_page_size(golden: Golden, page_size: int, step_ahead: bool):
    llm = golden_llm(page_size=page_size, step_ahead=step_ahead)
    assert np.abs(llm.score(golden.ids, golden.images) - golden.logits).max() <= TOLERANCE
    assert np.abs(llm.score(golden.text_ids) - golden.text_logits).max() <= TOLERANCE
    assert run(llm, [golden.prompt]) == [golden.greedy]


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 50, 120])
def test_chunked_equals_whole(golden: Golden, chunk: int):
    """A step of `chunk` tokens cuts the prompt, and its images' spans, at every multiple of it; 1
    cuts everywhere."""
    llm = golden_llm(max_step_tokens=chunk)
    assert np.abs(llm.score(golden.ids, golden.images) - golden.logits).max() <= TOLERANCE
    assert run(llm, [golden.prompt]) == [golden.greedy]


def test_batched_with_strangers_equals_alone(golden: Golden):
    others = strangers(golden, 7)
    alone = [run(golden_llm(), [p])[0] for p in others]
    llm = golden_llm(max_step_tokens=90)
    got = run(llm, [*others[:4], golden.prompt, *others[4:]])
    assert got == [*alone[:4], golden.greedy, *alone[4:]]


def test_c01_a_cached_prefix_equals_a_cold_one_and_pictures_never_share(golden: Golden):
    """The second run finds the prompt's pages and no image is encoded again; the same ids with
    another picture find nothing beyond the ids before it."""
    llm = golden_llm()
    assert run(llm, [golden.prompt]) == [golden.greedy]
    encoded = llm.engine.stats().images_encoded_total
    again = llm.generate([golden.prompt], GREEDY)[0]
    assert again.outputs[0].token_ids == golden.greedy
    assert again.cached_tokens == len(golden.ids) - 1 - (len(golden.ids) - 1) % 16
    assert llm.engine.stats().images_encoded_total == encoded
    first = golden.ids.index(505)
    other = dict(golden.images[0], patches=golden.images[0]["patches"][::-1].copy())
    swapped = {"prompt_token_ids": golden.ids, "images": [other, *golden.images[1:]]}
    cold = run(golden_llm(prefix_cache=False), [swapped])
    warm = llm.generate([swapped], GREEDY)[0]
    assert warm.cached_tokens <= first
    assert [warm.outputs[0].token_ids] == cold
    settled(llm)


def test_a_cached_image_equals_a_fresh_one(golden: Golden):
    """Other text before the same pictures: no prefix to share, embeddings from the cache."""
    moved = {"prompt_token_ids": [7, *golden.ids], "images": golden.images}
    fresh = run(golden_llm(), [moved])
    llm = golden_llm()
    run(llm, [golden.prompt])
    encoded = llm.engine.stats().images_encoded_total
    assert run(llm, [moved]) == fresh
    assert llm.engine.stats().images_encoded_total == encoded == 3


@pytest.mark.parametrize("step_ahead", [True, False])
def test_preempted_and_resumed_equals_undisturbed(golden: Golden, step_ahead: bool):
    """A pool that holds one and a half of three requests: someone is preempted, nobody notices."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": golden.text_ids}, *strangers(golden, 4)[2:], golden.prompt]
    alone = [run(golden_llm(), [p], params)[0] for p in prompts]
    token_bytes = 3 * 40 * 4
    llm = golden_llm(kv_cache_bytes=16 * 14 * token_bytes, max_model_len=200, step_ahead=step_ahead)
    assert run(llm, prompts, params) == alone
    assert llm.engine.scheduler.preemptions > 0


def test_step_ahead_equals_step_by_step_with_every_kind_of_sampling(golden: Golden):
    params = [
        SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(max_tokens=12, temperature=1.2, top_k=20, repetition_penalty=1.2, seed=2),
        SamplingParams(max_tokens=5, temperature=0.0, presence_penalty=1.0),
        SamplingParams(max_tokens=14, min_p=0.05, logit_bias={3: 4.0}, seed=9),
        SamplingParams(max_tokens=10, temperature=0.5, stop_token_ids=tuple(range(0, 500, 9))),
    ]
    prompts = [*strangers(golden, 4), golden.prompt]
    ahead = run(golden_llm(step_ahead=True), prompts, params)
    by_step = run(golden_llm(step_ahead=False, max_step_tokens=33), prompts, params)
    alone = [run(golden_llm(), [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert ahead == by_step
    assert [a for a, s in zip(ahead, params, strict=True) if s.seed is not None] == [
        a for a, s in zip(alone, params, strict=True) if s.seed is not None
    ]


def test_n_choices_share_a_prompt_and_differ(golden: Golden):
    llm = golden_llm()
    params = SamplingParams(n=4, max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    got = llm.generate([golden.prompt], params)[0]
    assert [o.index for o in got.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in got.outputs}) == 4
    one = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    assert llm.generate([golden.prompt], one)[0].outputs[0].token_ids == got.outputs[0].token_ids
    assert llm.engine.stats().images_encoded_total == 3
    settled(llm)


def ends(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    """Each prompt's completion, whether it failed or not."""
    out = [g.outputs[0] for g in llm.generate(prompts, params)]
    settled(llm)
    return out


def test_a_request_whose_logits_are_not_finite_fails_alone(golden: Golden):
    """Patches that make the tower give NaN: that request ends with an error, its neighbour in every
    step does not."""
    huge = np.full_like(golden.images[0]["patches"], 3e38)
    bad = {"patches": huge, "grid": golden.images[0]["grid"]}
    llm = golden_llm()
    poisoned = {"prompt_token_ids": [1, 505, 2], "images": [bad]}
    failed, fine = ends(llm, [poisoned, golden.prompt])
    assert failed.finish_reason is FinishReason.ERROR
    assert "not finite" in failed.error
    assert fine.token_ids == golden.greedy


@pytest.mark.parametrize("step_ahead", [True, False])
@pytest.mark.parametrize("fault", [AssertionError("grid"), IndexError("row"), RuntimeError("oom")])
def test_an_image_whose_encoding_raises_fails_its_requests_alone(
    golden: Golden, fault: Exception, step_ahead: bool
):
    """The tower raises for one picture, in whatever company. The chunk is small, so that the step
    launched ahead already reads the failed entry."""
    llm = golden_llm(step_ahead=step_ahead, max_step_tokens=20)
    model = llm.engine._runner._p.encoder._model
    encode, marked = model.encode_patches, golden.images[1]["grid"]

    def faulty(patches: Any, grids: Any, plans: Any) -> Any:
        if tuple(marked) in [tuple(g) for g in grids]:
            raise fault
        return encode(patches, grids, plans)

    model.encode_patches = faulty
    text = {"prompt_token_ids": golden.text_ids}
    other = {"prompt_token_ids": [1, 505, 2], "images": [golden.images[0]]}
    expected = [ends(golden_llm(), [p])[0].token_ids for p in (text, other)]
    first, failed, last = ends(llm, [text, golden.prompt, other])
    assert [first.token_ids, last.token_ids] == expected
    assert failed.finish_reason is FinishReason.ERROR
    assert str(fault) in failed.error
    model.encode_patches = encode
    assert run(llm, [golden.prompt]) == [golden.greedy]


@pytest.mark.parametrize("step_ahead", [True, False])
def test_a_step_that_raises_fails_its_requests_and_no_earlier_token_is_lost(
    golden: Golden, step_ahead: bool
):
    """A fault inside the forward pass of the fifth step, while the fourth is in flight: the tokens
    of the first four were delivered, and the engine goes on."""
    llm = golden_llm(step_ahead=step_ahead)
    model = llm.engine._runner._p.model
    forward, calls = model.forward, iter(range(1000))

    def faulty(*args: Any) -> Any:
        if next(calls) == 4:
            raise ValueError("a kernel said no")
        return forward(*args)

    model.forward = faulty
    (failed,) = ends(llm, [golden.prompt])
    assert failed.finish_reason is FinishReason.ERROR
    assert "a kernel said no" in failed.error
    assert failed.token_ids == golden.greedy[:4]
    assert run(llm, [golden.prompt]) == [golden.greedy]


def test_step_ahead_launches_from_tokens_that_were_not_read(golden: Golden):
    """With step-ahead, a decode is launched before the step that sampled its input is read;
    without, never. (Equal tokens alone would not show that anything runs ahead.)"""
    for step_ahead in (True, False):
        llm = golden_llm(step_ahead=step_ahead)
        runner = llm.engine._runner
        launch, events = runner.launch, []

        def recorded(
            plan: Any, inputs: Any, launch: Any = launch, events: list[Any] = events
        ) -> Any:
            launched = launch(plan, inputs)
            events.append(("launch", plan.index))
            read = launched.read

            def read_later() -> Any:
                events.append(("read", plan.index))
                return read()

            launched.read = read_later
            return launched

        runner.launch = recorded
        assert run(llm, [golden.prompt]) == [golden.greedy]
        ahead = [events.index(("launch", n + 1)) < events.index(("read", n)) for n in range(10)]
        assert ahead == [step_ahead] * 10


def test_no_step_makes_a_plan(golden: Golden, monkeypatch: pytest.MonkeyPatch):
    """All of them were made at start-up, for the tower and for the decoder."""
    llm = golden_llm()

    def too_late(*args: Any) -> Any:
        raise AssertionError(f"planned in a step: {args}")

    monkeypatch.setattr("vitrail.attention.plan._planned", too_late)
    assert run(llm, [golden.prompt, *strangers(golden, 3)])[0] == golden.greedy
    with pytest.raises(AssertionError, match="planned in a step"):
        golden_llm()


def test_more_prompts_than_the_queue_holds_are_all_answered(golden: Golden):
    llm = golden_llm(max_waiting=2, max_running=2)
    assert run(llm, [golden.prompt] * 9) == [golden.greedy] * 9


def test_a_second_call_while_one_is_read_is_refused(golden: Golden):
    llm = golden_llm()
    requests = llm.preparer.requests(llm.prepare(golden.prompt), GREEDY, "a")
    stream = llm.stream(requests)
    next(stream)
    with pytest.raises(Refused, match="one call at a time"):
        llm.generate([golden.prompt], GREEDY)
    tokens = [t for _, delta in stream for t in delta.token_ids]
    assert golden.greedy[-len(tokens) :] == tokens
    assert run(llm, [golden.prompt]) == [golden.greedy]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 10**400}, "top_k"),
        ({"temperature": 1e-310}, "temperature"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"stop": ("",)}, "stop"),
        ({"n": True}, "n"),
    ],
)
def test_parameters_of_another_type_or_range_are_refused_by_name(
    golden: Golden, bad: dict[str, Any], field: str
):
    with pytest.raises(Refused) as refused:
        golden_llm().generate([golden.prompt], SamplingParams(**bad))
    assert refused.value.findings[0].where == field


def test_aborts_at_any_moment_leave_nothing(golden: Golden):
    llm = golden_llm(max_step_tokens=40)
    for stop_after in range(0, 12, 2):
        prompt = llm.prepare(golden.prompt)
        requests = llm.preparer.requests(prompt, GREEDY, f"abort-{stop_after}")
        stream: Iterator[Any] = llm.stream(requests)
        for _, _delta in zip(range(stop_after), stream, strict=False):
            pass
        stream.close()  # pyright: ignore
        settled(llm)
    assert run(llm, [golden.prompt]) == [golden.greedy]


def test_finish_reasons(golden: Golden):
    llm = golden_llm()
    stop = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(golden.greedy[4],))
    got = llm.generate([golden.prompt], stop)[0].outputs[0]
    assert got.finish_reason is FinishReason.STOP
    assert got.stop_reason == golden.greedy[4]
    assert got.token_ids == golden.greedy[: golden.greedy.index(golden.greedy[4]) + 1]
    got = llm.generate([golden.prompt], GREEDY)[0].outputs[0]
    assert got.finish_reason is FinishReason.LENGTH


def test_logprobs_equal_the_golden_logits(golden: Golden):
    llm = golden_llm()
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5, prompt_logprobs=3)
    got = llm.generate([golden.prompt], params)[0]
    logits = golden.logits.astype(np.float64)
    want = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    want -= logits.max(-1, keepdims=True)
    last = got.outputs[0].logprobs[0]
    assert last.token_id == golden.greedy[0]
    assert [i for i, _ in last.top] == np.argsort(-want[-1])[:5].tolist()
    assert last.logprob == pytest.approx(want[-1].max(), abs=1e-4)
    assert [r.token_id for r in got.prompt_logprobs] == got.prompt_token_ids[1:]
    for i, row in enumerate(got.prompt_logprobs):
        assert row.logprob == pytest.approx(want[i, row.token_id], abs=2e-4)


@pytest.mark.parametrize("step_ahead", [True, False])
def test_pictures_encoded_beside_decodes_give_the_same_tokens(step_ahead: bool) -> None:
    """As on a GPU, but for the stream."""
    golden, choices = Golden(), {"prefix_cache": False, "encoder_cache_bytes": 0}
    llm = golden_llm(step_ahead=step_ahead, **choices)
    tokens, plans = pictures_beside_decodes(llm, golden)
    assert tokens == [golden.greedy] * 4
    beside = [p for p in plans if p.encodes and not p.slices]
    assert len(beside) >= 3
    assert all(len(p.decodes) >= 8 for p in beside)
