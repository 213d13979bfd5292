"""Any requests, through any engine, in any company: each is answered as it is alone, step by step
and without a cache. Some leave, some steps raise; nothing may be left of either."""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from tests.engine.driver import Golden, golden_llm
from vitrail import LLM, SamplingParams
from vitrail.engine.answer import Answer
from vitrail.engine.request import EngineRequest, TokenLogprob

GOLDEN = Golden()
VOCAB, PICTURE, MAX_LEN = 500, 505, 220
TOKEN_BYTES = 3 * 40 * 4
LOGPROB_BOUND = 2e-3  # a batch's sums have another order
T = TypeVar("T")


class Draw:
    """What a seed says."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def of(self, *choices: T) -> T:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, VOCAB, count).tolist()


class Case(NamedTuple):
    prompt: dict[str, Any]
    params: SamplingParams


class Company(NamedTuple):
    """`arrive`, `leave`, `fail`: the chance in a step that one comes, that one leaves, and that it
    raises."""

    arrive: float = 1
    leave: float = 0
    fail: float = 0


NOBODY = Company()


def draw_case(d: Draw) -> Case:
    own = d.ids(d.of(1, 3, 16, 39))
    prompt = d.of(
        {"prompt_token_ids": own},
        {"prompt_token_ids": [*GOLDEN.text_ids[: d.of(1, 16, 33)], *own]},  # shares a prefix
        {"prompt_token_ids": [*own, PICTURE, 3], "images": [d.of(*GOLDEN.images)]},
        GOLDEN.prompt,
        {"prompt_token_ids": GOLDEN.text_ids},
    )
    most = int(d.rng.integers(1, 90))
    asked: dict[str, Any] = {
        "max_tokens": most,
        "min_tokens": min(most, d.of(0, 0, 1, 5, 20)),
        "temperature": d.of(0, 0, 0.7, 1.0, 1.5),
        "seed": int(d.rng.integers(1 << 40)),
    }
    perhaps = {
        "top_k": d.of(1, 5, 50, 100_000),
        "top_p": d.of(0.3, 0.9),
        "min_p": 0.05,
        "repetition_penalty": d.of(0.8, 1.3),
        "presence_penalty": d.of(-1.0, 1.5),
        "frequency_penalty": d.of(-1.0, 1.5),
        "logit_bias": {i: float(d.rng.uniform(-5, 8)) for i in d.ids(4)},
        "stop_token_ids": tuple(d.ids(d.of(1, 5, 30))),
        "logprobs": d.of(0, 1, 5, 20),
        "prompt_logprobs": d.of(0, 1, 5),
        "ignore_eos": True,
        "n": d.of(2, 3),
    }
    asked |= {name: value for name, value in perhaps.items() if d.chance(0.3)}
    return Case(prompt, SamplingParams(**asked))


def draw_engine(d: Draw) -> dict[str, Any]:
    return {
        "page_size": d.of(1, 3, 16),
        "max_running": d.of(2, 4, 9),
        "max_step_tokens": d.of(3, 9, 17, 64, 300),
        "step_ahead": d.of(True, True, False),
        "prefix_cache": d.of(True, False),
        "max_model_len": MAX_LEN,
        "kv_cache_bytes": TOKEN_BYTES * d.of(224, 240, 2000),
    }


def answered(
    llm: LLM, cases: dict[str, Case], d: Draw, company: Company = NOBODY
) -> dict[str, Answer]:
    """By request, of those that did not leave."""
    engine = llm.engine
    launch = type(engine.runner).launch

    def faulty(*planned: Any) -> Any:
        if d.chance(company.fail):
            raise ValueError("planted")
        return launch(engine.runner, *planned)

    engine.runner.launch = faulty
    coming: list[EngineRequest] = []
    for name, (prompt, params) in reversed(cases.items()):
        coming += reversed(llm.preparer.requests(llm.prepare(prompt), params, name))
    answers, left = dict[str, Answer](), set[str]()
    while coming or not engine.idle:
        while coming and (engine.idle or d.chance(company.arrive)):
            request = coming.pop()
            answers[request.id] = Answer(request, None)
            engine.add(request)
        here = [name for name, answer in answers.items() if not answer.done and name not in left]
        if here and d.chance(company.leave):
            left.add(leaver := d.of(*here))
            engine.abort(leaver)
        for output in engine.step():
            assert output.request_id not in left, "of one who left"
            assert not answers[output.request_id].done, "after its end"
            answers[output.request_id].push(output)
        engine.scheduler.check()
    engine.rest()
    assert not engine.scheduler.cache_usage().running_pages
    stayed = {name: answer for name, answer in answers.items() if name not in left}
    assert all(answer.done for answer in stayed.values())
    return stayed


def differences(got: Answer, want: Answer) -> Iterator[str]:
    for name in ("token_ids", "finish_reason", "stop_reason"):
        if getattr(got, name) != getattr(want, name):
            yield f"{name}: {getattr(got, name)}, alone {getattr(want, name)}"
    for name in ("logprobs", "prompt_logprobs"):
        mine, alone = (list[TokenLogprob](getattr(a, name) or ()) for a in (got, want))
        if [p.token_id for p in mine] != [p.token_id for p in alone]:
            yield f"{name}: of other tokens"
            continue
        pairs = [(p.logprob, q.logprob) for p, q in zip(mine, alone, strict=True)]
        for p, q in zip(mine, alone, strict=True):
            pairs += [(a[1], b[1]) for a, b in zip(p.top, q.top, strict=True)]
        for a, b in pairs:
            if (a is None) != (b is None) or abs((a or 0) - (b or 0)) > LOGPROB_BOUND:
                yield f"{name}: {a}, alone {b}"


def hold(seed: int, num_cases: int, rounds: int) -> None:
    d = Draw(seed)
    cases = {f"r{i}": draw_case(d) for i in range(num_cases)}
    alone = golden_llm(prefix_cache=False, step_ahead=False, max_step_tokens=512)
    want = dict[str, Answer]()
    for name, case in cases.items():
        want |= answered(alone, {name: case}, d)
    compared = 0
    for _ in range(rounds):
        choices = draw_engine(d)
        llm = golden_llm(**choices)
        for _ in range(2):  # the second time over what the first left in the caches
            names = d.rng.permutation(list(cases))[: d.of(3, num_cases // 2, num_cases)].tolist()
            company = Company(d.of(0.1, 0.5, 0.95), d.of(0, 0, 0.05, 0.2), d.of(0, 0, 0, 0.02))
            got = answered(llm, {name: cases[name] for name in names}, d, company)
            for name, answer in got.items():
                if answer.error is not None:
                    assert company.fail, answer.error
                    continue
                compared += 1
                case = cases[name.split("-")[0]]
                wrong = list(differences(answer, want[name]))
                assert not wrong, (seed, choices, company, case.params, wrong)
    assert compared > rounds, "nearly everybody left or failed"


def test_any_work_is_answered_as_it_is_alone(request: pytest.FixtureRequest):
    hold(request.config.getoption("--seed"), num_cases=6, rounds=2)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.suite("parity", minutes=6, owner="laws")
def test_much_work_is_answered_as_it_is_alone(request: pytest.FixtureRequest):
    hold(request.config.getoption("--seed"), num_cases=24, rounds=24)
