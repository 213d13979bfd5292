"""`deterministic` on a CPU, in fp32: bit for bit the same logits and tokens, whoever shares the
steps, wherever prompts are cut, whatever is cached, preempted or launched ahead. (Without it most
of the first test's logits have other bits.)"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import Golden, golden_llm
from vitrail import LLM, Refused, SamplingParams
from vitrail.config.engine import EngineConfig, validate

GOLDEN = Golden()
TOKEN_BYTES = 3 * 40 * 4
PROMPTS: tuple[dict[str, Any], ...] = (
    {"prompt_token_ids": GOLDEN.text_ids},
    {"prompt_token_ids": GOLDEN.ids[:25], "images": GOLDEN.images[:1]},
)


def params(**more: Any) -> SamplingParams:
    kinds = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    return SamplingParams(**(kinds | more))


PARAMS = (params(), params(temperature=0.9, seed=11))


def answers(llm: LLM, prompts: list[Any], asked: list[SamplingParams]) -> list[Any]:
    """Tokens, with their logprobs as bits."""
    outputs = [g.outputs[0] for g in llm.generate(prompts, asked)]
    llm.engine.scheduler.check()
    return [
        (o.token_ids, [(p.token_id, p.logprob, p.top) for p in o.logprobs or ()]) for o in outputs
    ]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Each probe by itself, in an engine of its own: greedy, and drawn."""
    return [answers(deterministic(), [PROMPTS[i]], [PARAMS[i]])[0] for i in range(len(PROMPTS))]


def deterministic(**choices: Any) -> LLM:
    return golden_llm(deterministic=True, **choices)


@pytest.mark.parametrize("chunk", [7])
def test_chunked_logits_are_those_of_the_whole(chunk: int):
    whole = deterministic()
    ids = [*GOLDEN.ids[:25], *GOLDEN.text_ids[:20]]
    cut = deterministic(max_step_tokens=chunk).score(ids, GOLDEN.images[:1])
    assert np.array_equal(whole.score(ids, GOLDEN.images[:1]), cut)
    assert np.abs(whole.score(GOLDEN.text_ids) - GOLDEN.text_logits).max() <= 1e-4


@pytest.mark.suite("parity", minutes=2, owner="laws")
@pytest.mark.nightly
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_a_request_among_random_neighbours_is_as_it_is_alone(alone: list[Any], data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    llm = deterministic(
        max_step_tokens=data.draw(st.sampled_from([5, 16, 33, 200])),
        page_size=data.draw(st.sampled_from([3, 16])),
        step_ahead=data.draw(st.booleans()),
        prefix_cache=data.draw(st.booleans()),
        max_running=data.draw(st.sampled_from([2, 4, 9])),
    )
    for _ in range(2):  # the second time whatever the first left is cached
        others = [neighbour(rng) for _ in range(data.draw(st.integers(1, 3)))]
        prompts, asked = [*PROMPTS, *others], [*PARAMS, *(params() for _ in others)]
        order = rng.permutation(len(prompts))
        got = answers(llm, [prompts[i] for i in order], [asked[i] for i in order])
        assert [got[list(order).index(i)] for i in range(len(PROMPTS))] == alone


def neighbour(rng: np.random.Generator) -> dict[str, Any]:
    """Other ids, or those of a probe with others behind; some have a picture."""
    ids = rng.integers(0, 500, rng.integers(1, 25)).tolist()
    kind = rng.integers(3)
    if kind == 0:
        return {"prompt_token_ids": ids}
    if kind == 1:
        return {"prompt_token_ids": [*GOLDEN.text_ids[: len(ids)], *ids]}
    return {"prompt_token_ids": [*ids, 505], "images": [GOLDEN.images[rng.integers(3)]]}


def test_what_decodes_left_in_the_cache_is_what_a_prompt_would_have():
    """A conversation goes on: its first answer's rows were written one by one."""
    llm = deterministic(page_size=4)
    first = answers(llm, [PROMPTS[0]], [params(max_tokens=12)])[0]
    longer = {"prompt_token_ids": [*GOLDEN.text_ids, *first[0], 7, 8, 9]}
    cold = answers(deterministic(prefix_cache=False), [longer], [params()])
    again = llm.generate([longer], [params()])[0]
    assert again.cached_tokens > len(GOLDEN.text_ids)
    assert answers(llm, [longer], [params()]) == cold
    assert again.outputs[0].token_ids == cold[0][0]


@pytest.mark.suite("parity", minutes=1, owner="laws")
@pytest.mark.nightly
def test_a_preempted_request_is_as_it_is_alone():
    """A pool of one and a half of three requests of 38 tokens."""
    asked = [params(max_tokens=20)] * 3
    prompts = [{"prompt_token_ids": GOLDEN.text_ids[i : 18 + i]} for i in range(3)]
    expected = [answers(deterministic(), [p], [a])[0] for p, a in zip(prompts, asked, strict=True)]
    llm = deterministic(page_size=4, kv_cache_bytes=4 * 15 * TOKEN_BYTES, max_model_len=40)
    assert answers(llm, prompts, asked) == expected
    assert llm.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("attention", ["fa4", "cute"])
def test_backends_that_have_some_phases_alone_are_refused(attention: str):
    found = validate(EngineConfig(model="any", deterministic=True, attention=attention))
    assert [f.where for f in found] == ["attention"]
    with pytest.raises(Refused, match="deterministic"):
        golden_llm(deterministic=True, attention=attention)
