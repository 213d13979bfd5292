"""Bytes of chunks and answers for what a tiny model's own answers do not bring."""

import json
from pathlib import Path
from typing import Any

import pytest

from vitrail.engine.answer import Answer, Delta
from vitrail.engine.request import EngineRequest, FinishReason, Output, SamplingParams, TokenLogprob
from vitrail.server.stream import LOWEST_LOGPROB, Piece, Usage, Writer
from vitrail.tokenizer.tokenizer import Tokenizer

KIMI = Tokenizer.load(Path(__file__).parents[1] / "golden" / "tokenizer_kimi")
NEVER = float("-inf")
ROW = TokenLogprob(token_id=97, logprob=NEVER, top=[(97, -0.5), (98, NEVER)])


def writer(chat: bool, tokenizer: Tokenizer | None = KIMI) -> Writer:
    return Writer(
        chat=chat,
        response_id='a"b',
        created=1,
        model='m"\\\n',
        tokenizer=tokenizer,
        logprobs=True,
    )


def answered() -> Answer:
    answer = Answer(
        EngineRequest(
            id="a",
            prompt_token_ids=[99],
            images=[],
            params=SamplingParams(logprobs=2),
            max_tokens=1,
            stop_token_ids=frozenset(),
            seed=0,
        ),
        KIMI,
    )
    end = FinishReason.LENGTH
    answer.push(Output(request_id="a", token_ids=[97], finish_reason=end, logprobs=[ROW]))
    return answer


def strict(raw: bytes) -> dict[str, Any]:
    return json.loads(raw, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))


@pytest.mark.parametrize("chat", [True, False])
def test_b16_infinite_logprobs_become_a_finite_floor(chat: bool):
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    whole = strict(writer(chat).whole([answered()], usage))
    delta = Delta("a", [97], [ROW], FinishReason.LENGTH)
    raw = writer(chat).chunk(Piece(0, answered(), delta))
    chunk = strict(raw.removeprefix(b"data: "))
    assert raw.endswith(b"\n\n")
    assert whole["model"] == chunk["model"] == 'm"\\\n'
    for choice in (whole["choices"][0], chunk["choices"][0]):
        logprobs = choice["logprobs"]
        assert choice["finish_reason"] == "length"
        if chat:
            (token,) = logprobs["content"]
            assert token["logprob"] == LOWEST_LOGPROB
            assert [t["logprob"] for t in token["top_logprobs"]] == [-0.5, LOWEST_LOGPROB]
        else:
            assert logprobs["token_logprobs"] == [LOWEST_LOGPROB]
            assert logprobs["top_logprobs"] == [{"a": -0.5, "b": LOWEST_LOGPROB}]


def test_b18_candidates_of_equal_or_no_text_are_all_kept():
    """Partial bytes and unassigned ids, in the list and as keys."""
    ids = [195, 196, 97, KIMI.vocab_size, KIMI.vocab_size + 1]
    row = TokenLogprob(token_id=195, logprob=-1.0, top=[(i, -1.0 - i) for i in ids])
    delta = Delta("", [195], [row], None)
    chat = strict(writer(True).chunk(Piece(0, answered(), delta)).removeprefix(b"data: "))
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert [t["bytes"] for t in token["top_logprobs"]] == [[195], [196], [97], [], []]
    assert len({t["token"] for t in token["top_logprobs"]}) == 5
    text = strict(writer(False).chunk(Piece(0, answered(), delta)).removeprefix(b"data: "))
    (top,) = text["choices"][0]["logprobs"]["top_logprobs"]
    assert sorted(top.values()) == sorted(-1.0 - i for i in ids)
    bare = strict(writer(True, None).chunk(Piece(0, answered(), delta)).removeprefix(b"data: "))
    assert bare["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:195"


def test_nothing_to_say_is_no_bytes():
    silent = Writer(
        chat=True, response_id="a", created=1, model="m", tokenizer=KIMI, logprobs=False
    )
    assert silent.chunk(Piece(0, answered(), Delta("", [195], [], None))) == b""
    ended = silent.chunk(Piece(3, answered(), Delta("", [195], [], FinishReason.STOP)))
    (choice,) = strict(ended.removeprefix(b"data: "))["choices"]
    assert choice == {
        "index": 3,
        "delta": {"content": ""},
        "logprobs": None,
        "finish_reason": "stop",
    }
