"""The sampler: whoever shares a batch, a row's token is a function of its own logits, parameters,
draw and history."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.engine.parcel import Door
from vitrail.engine.request import SamplingParams
from vitrail.engine.sampler import Sampled, Sampler
from vitrail.engine.step import SlotSetup

VOCAB = 37
CPU = torch.device("cpu")


def make(params, never=(), prompt=(1, 2, 3), output=(), stops=frozenset({5})) -> Sampler:
    sampler = Sampler(len(params), VOCAB, never, CPU)
    sampler.setup(
        [
            SlotSetup(
                slot=i,
                seq=i,
                params=p,
                prompt_token_ids=list(prompt),
                output_token_ids=list(output),
                stop_token_ids=stops,
                want_logits=False,
            )
            for i, p in enumerate(params)
        ]
    )
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, slots, u, index=None) -> list[int]:
    at = np.zeros(len(slots), np.int64) if index is None else np.asarray(index)
    return sample(sampler, logits, slots, u, at).token_ids.tolist()


def sample(sampler: Sampler, logits: torch.Tensor, slots, u, index) -> Sampled:
    """One step, its numbers through the door."""
    sent = Door(CPU).parcel()
    asked = sampler.ask(np.asarray(slots), lambda: np.asarray(u, np.float64), index, sent)
    got = sent.send()
    sampler.settle(asked, got)
    return sampler.sample(logits, asked, got)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_plain_sampling_follows_the_softmax():
    """The share of a uniform grid of draws that gives each id is its probability."""
    logits = random_logits(1)
    n = 20_000
    sampler = make([SamplingParams(temperature=0.7)])
    u = (np.arange(n) + 0.5) / n
    tokens = sample(sampler, logits.expand(n, -1), [0] * n, u, np.zeros(n, int)).token_ids
    share = torch.bincount(tokens, minlength=VOCAB) / n
    want = torch.softmax(logits[0] / 0.7, -1)
    assert (share - want).abs().max() < 2 / n + 1e-6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=9, top_p=0.8, min_p=0.05, temperature=1.7),
    ],
)
def test_filtered_sampling_follows_the_definition(params: SamplingParams):
    logits = random_logits(1, seed=3)
    p = torch.softmax(logits[0].double() / params.temperature, -1)
    order = p.sort(descending=True).indices.tolist()
    kept = order[: params.top_k] if params.top_k else order
    total = sum(float(p[i]) for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= params.top_p:
            break
        nucleus.append(i)
        mass += float(p[i]) / total
    nucleus = [i for i in nucleus if p[i] >= params.min_p * p[order[0]]]
    n = 5_000
    u = (np.arange(n) + 0.5) / n
    sampler = make([params])
    tokens = sample(sampler, logits.expand(n, -1), [0] * n, u, np.zeros(n, int)).token_ids
    share = torch.bincount(tokens, minlength=VOCAB).double() / n
    want = torch.zeros(VOCAB, dtype=torch.float64)
    want[nucleus] = p[nucleus] / p[nucleus].sum()
    assert (share - want).abs().max() < 2 / n


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_b43_a_row_is_the_same_alone_and_among_strangers(data: st.DataObject):
    one = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.5]),
        logit_bias=st.sampled_from([{}, {7: 5.0}]),
        min_tokens=st.sampled_from([0, 3]),
    )
    params = data.draw(st.lists(one, min_size=2, max_size=7))
    logits = random_logits(len(params), seed=data.draw(st.integers(0, 1000)))
    u = [data.draw(st.floats(0, 1, exclude_max=True)) for _ in params]
    together = draw(make(params), logits, list(range(len(params))), u)
    for i, p in enumerate(params):
        assert draw(make([p]), logits[i : i + 1], [0], u[i : i + 1]) == [together[i]]


def test_extreme_draws_never_give_an_impossible_id():
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 11] = 0.0
    logits[:, 20] = -1.0
    params = [SamplingParams(), SamplingParams(top_p=0.99)]
    for u in (0.0, math.nextafter(1.0, 0.0)):
        sampler = make(params)
        x = torch.nan_to_num(logits, neginf=-1e30)
        assert set(draw(sampler, x, [0, 1], [u, u])) <= {11, 20}


def test_image_ids_are_never_sampled_whatever_the_bias():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 100.0
    params = [SamplingParams(temperature=0, logit_bias={9: 100.0})]
    assert draw(make(params, never=[9]), logits, [0], [0.5]) != [9]


def test_min_tokens_masks_end_ids_until_reached():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 10.0
    logits[0, 6] = 5.0
    sampler = make([SamplingParams(temperature=0, min_tokens=2)])
    assert [draw(sampler, logits, [0], [0.5], [i])[0] for i in range(3)] == [6, 6, 5]


def test_penalties_match_their_formulas_and_survive_a_resume():
    p = SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3
    )
    logits = random_logits(1, seed=9)
    prompt, output = [1, 2, 3], []
    sampler = make([p], prompt=prompt)
    for step in range(12):
        x = logits[0].clone()
        for t in set(prompt + output):
            x[t] = x[t] / 1.5 if x[t] > 0 else x[t] * 1.5
        for t in set(output):
            x[t] -= 0.4 + 0.3 * output.count(t)
        resumed = make([p], prompt=prompt, output=output)
        want = int(x.argmax())
        assert draw(sampler, logits, [0], [0.5], [step]) == [want]
        assert draw(resumed, logits, [0], [0.5], [step]) == [want]
        output.append(want)
    assert len(set(output)) > 1


def test_a_row_with_nan_fails_alone():
    logits = random_logits(3)
    logits[1, 4] = torch.nan
    params = [SamplingParams(), SamplingParams(), SamplingParams(top_k=3)]
    tokens = draw(make(params), logits, [0, 1, 2], [0.3, 0.3, 0.3])
    assert tokens[1] == -1
    assert min(tokens[0], tokens[2]) >= 0


def test_logprobs_are_of_the_models_own_distribution():
    logits = random_logits(1, seed=4)
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={8: 100.0})
    sampled = sample(make([params]), logits, [0], [0.5], np.array([0]))
    assert sampled.logprobs is not None
    (got,) = sampled.logprobs.read([8])
    want = torch.log_softmax(logits[0], -1)
    assert sampled.token_ids.tolist() == [8]
    assert got.logprob == pytest.approx(float(want[8]), abs=1e-6)
    assert [i for i, _ in got.top] == want.topk(3).indices.tolist()


def test_a_row_with_nothing_left_to_sample_fails_alone():
    """Every id is an end id and min_tokens forbids them all: no masked id is sampled."""
    logits = random_logits(2)
    sampler = make([SamplingParams(min_tokens=2)], stops=frozenset(range(VOCAB)))
    assert draw(sampler, logits[:1], [0], [0.3]) == [-1]
    assert draw(sampler, logits[:1], [0], [0.3], [2])[0] >= 0


def test_rows_beyond_a_block_are_sampled_alike():
    params = [SamplingParams(top_p=0.8) if i % 2 else SamplingParams() for i in range(90)]
    logits = random_logits(90, seed=8)
    u = np.linspace(0, 0.999, 90)
    together = draw(make(params), logits, list(range(90)), u)
    alone = [draw(make([p]), logits[i : i + 1], [0], u[i : i + 1])[0] for i, p in enumerate(params)]
    assert together == alone


def test_logprobs_of_several_rows_are_read_as_each_row_asked():
    logits = random_logits(3, seed=2)
    params = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprobs=0)]
    sampled = sample(make(params), logits, [0, 1, 2], np.full(3, 0.4), np.zeros(3, int))
    ids = sampled.token_ids.tolist()
    assert sampled.logprobs is not None
    assert sampled.logprobs.rows == [0, 2]
    first, last = sampled.logprobs.read([ids[0], ids[2]])
    assert len(first.top) == 2
    assert last.top == []
    want = torch.log_softmax(logits[2], -1)[ids[2]]
    assert last.logprob == pytest.approx(float(want), abs=1e-6)
