"""Capsules of every kind of model and cache replay without a failure of their own: from the middle
of requests, pictures in parts, every way of sampling; and what is sampled is finite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Golden, golden_llm
from tests.engine.test_recorder import break_forward
from tests.models.test_dense_parity import read_golden
from tests.nvila import KINDS, GoldenNvila
from vitrail import LLM, SamplingParams
from vitrail.engine import recorder
from vitrail.engine.runner import Launched
from vitrail.repro.capsule import Capsule, read
from vitrail.repro.outcome import Outcome
from vitrail.repro.replay import replay

Made = Callable[[], list[Path]]
SAMPLINGS = (
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=1),
    SamplingParams(
        max_tokens=30,
        min_tokens=20,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 2.0, 7: -1.0},
        logprobs=3,
        prompt_logprobs=2,
    ),
)


def kimi(**choices: Any) -> tuple[LLM, list[Any]]:
    golden = Golden()
    return golden_llm(**choices), [golden.prompt, {"prompt_token_ids": golden.text_ids}]


def nvila(kind: str, **choices: Any) -> tuple[LLM, list[Any]]:
    golden = GoldenNvila(kind)
    return golden.llm(**choices), [golden.prompt, {"prompt_token_ids": golden.ids[:4]}]


def dense(case: str, **choices: Any) -> tuple[LLM, list[Any]]:
    golden = read_golden(case)
    return golden.llm(**choices), [golden.prompt, {"prompt_token_ids": golden.ids[:7]}]


MODELS: dict[str, Callable[..., tuple[LLM, list[Any]]]] = {
    "kimi": kimi,
    "kimi e4m3": lambda **c: kimi(kv_cache_dtype="fp8_e4m3", **c),
    "llama deterministic": lambda **c: dense("llama_tied", deterministic=True, **c),
    **{kind: lambda kind=kind, **c: nvila(kind, **c) for kind in KINDS},
    "nvila_s2 in parts": lambda **c: nvila("nvila_s2", encoder_patches=192, **c),
    "llama": lambda **c: dense("llama3", **c),
    "qwen2 e4m3": lambda **c: dense("qwen2", kv_cache_dtype="fp8_e4m3", **c),
}


def broken_at(capsules: Made, made: tuple[LLM, list[Any]], at: int) -> Capsule:
    """What is left when the `at`-th forward pass raises, every prompt sampled in every way."""
    llm, prompts = made
    break_forward(llm, at, ValueError("x"))
    requests = [
        r
        for i, params in enumerate(SAMPLINGS)
        for k, prompt in enumerate(prompts)
        for r in llm.preparer.requests(llm.prepare(prompt), params, f"r{i}{k}")
    ]
    for _ in llm.stream(requests):
        pass
    return read(capsules()[-1])


@pytest.mark.parametrize("name", [name for name in MODELS if "deterministic" not in name])
def test_a_replay_has_no_failure_of_its_own(
    capsules: Made, monkeypatch: pytest.MonkeyPatch, name: str
):
    replays(capsules, monkeypatch, name, 9)


@pytest.mark.nightly
@pytest.mark.suite("faults", minutes=3, owner="repro")
@pytest.mark.parametrize("at", [2, 25])
@pytest.mark.parametrize("name", MODELS)
def test_nor_at_a_beginning_or_an_end(
    capsules: Made, monkeypatch: pytest.MonkeyPatch, name: str, at: int
):
    replays(capsules, monkeypatch, name, at)


def replays(capsules: Made, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    monkeypatch.setattr(recorder, "WINDOW", 6)
    capsule = broken_at(capsules, MODELS[name](max_step_tokens=24), at)
    assert capsule.steps
    tokens: list[int] = []
    own = Launched.read

    def watched(self: Any) -> Any:
        result = own(self)
        tokens.extend(result.token_ids)
        return result

    monkeypatch.setattr(Launched, "read", watched)
    assert replay(capsule) == Outcome(gpu="cpu")
    sampled = sum(len(step.plan.sampled) for step in capsule.steps)
    assert len(tokens) == sampled
    assert min(tokens, default=0) >= 0
