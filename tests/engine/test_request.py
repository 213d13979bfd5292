"""What is refused of sampling parameters and requests, at each edge, with its numbers."""

import math

import msgspec
import numpy as np
import pytest

from vitrail.engine.request import (
    EngineRequest,
    ImageInput,
    SamplingParams,
    request_findings,
    sampling_findings,
)

VOCAB = 100


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [None, 1, 10**12], [0, -1]),
        ("min_tokens", [0, 7], [-1]),
        ("temperature", [0.0, 0.7, 100.0], [-0.1, 100.5, math.nan, math.inf]),
        ("top_k", [0, 1, 10**9], [-1]),
        ("top_p", [0.001, 1.0], [0.0, 1.01, -1.0, math.nan]),
        ("min_p", [0.0, 1.0], [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [0.5, 2.0], [0.0, -1.0, math.inf, math.nan]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("n", [1, 128], [0, 129]),
        ("seed", [None, 0, 2**63 - 1], [-1, 2**63]),
        ("stop", [(), ("a",), ("a",) * 16], [("a",) * 17, ("",), ("a", "")]),
        ("stop_token_ids", [(), (0, VOCAB - 1)], [(-1,), (VOCAB,)]),
        # b19: an id outside the vocabulary, or a huge bias, is the client's mistake alone
        ("logit_bias", [{}, {0: -100.0, VOCAB - 1: 100.0}], [{VOCAB: 1.0}, {-1: 1.0}, {5: 1e9}]),
    ],
)
def test_b19_each_field_has_its_range(field: str, good: list[object], bad: list[object]):
    for value in good:
        params = SamplingParams(**{field: value})
        assert sampling_findings(params, VOCAB) == []
    for value in bad:
        found = sampling_findings(SamplingParams(**{field: value}), VOCAB)
        assert [f.where for f in found] == [field], value
        assert found[0].rule
        assert field in found[0].change


def test_every_bad_field_is_reported_at_once_with_what_was_seen():
    params = SamplingParams(temperature=-1.0, top_p=2.0, min_tokens=9, max_tokens=3)
    found = {f.where: f for f in sampling_findings(params, VOCAB)}
    assert found.keys() == {"temperature", "top_p", "min_tokens"}
    assert (found["min_tokens"].saw, found["min_tokens"].rule) == ("9", "at most max_tokens, 3")
    assert found["temperature"].saw == "-1.0"


def test_one_id_in_two_fields_is_reported_for_the_field_that_is_wrong():
    params = SamplingParams(stop_token_ids=(VOCAB,), logit_bias={VOCAB - 1: 1.0})
    assert [f.where for f in sampling_findings(params, VOCAB)] == ["stop_token_ids"]


def test_unknown_fields_are_refused():
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.json.decode(b'{"best_of": 3}', type=SamplingParams)


def test_defaults_are_not_shared():
    assert SamplingParams().logit_bias is not SamplingParams().logit_bias


def _request(num_prompt: int, *grids: tuple[int, int]) -> EngineRequest:
    images = [
        ImageInput(
            identity=bytes(32),
            offset=i,
            num_tokens=1,
            height=height,
            width=width,
            patches=np.zeros((height * width, 1), dtype=np.uint8),
        )
        for i, (height, width) in enumerate(grids)
    ]
    return EngineRequest(
        id="r",
        prompt_token_ids=[1] * num_prompt,
        images=images,
        params=SamplingParams(),
        max_tokens=1,
        stop_token_ids=frozenset(),
        seed=0,
    )


def test_c17_a_prompt_that_never_fits_says_both_numbers_and_which_limit():
    assert request_findings(_request(9), 10, 64, 8) == []
    (found,) = request_findings(_request(10), 10, 64, 8)
    assert found.code == "context_length_exceeded"
    assert (found.where, found.saw) == ("prompt", "10 tokens, images included")
    assert found.rule == "with one token of output at most 10 tokens, the context"
    assert found.change == "send at most 9 tokens"
    (found,) = request_findings(_request(64), 1000, 64, 8)
    assert found.rule == "with one token of output at most 64 tokens, what the KV cache can hold"


def test_an_image_above_the_encoder_budget_is_named_and_all_findings_come_together():
    found = request_findings(_request(100, (2, 4), (3, 3), (1, 9)), 10, 64, 8)
    assert [f.where for f in found] == ["prompt", "images[1]", "images[2]"]
    assert (found[1].saw, found[1].code) == ("3 x 3 = 9 patches", "image_too_large")
    assert found[1].rule == "at most 8 patches are encoded in a step"
