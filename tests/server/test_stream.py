"""Streams and whole answers of both routes, on both HTTP servers, over real connections."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.served import Served
from tests.server.sse import ask, chat_body, error_of, parse, stream_chat


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return answer["choices"][index]["message"]["content"]


def test_streamed_text_is_the_whole_text(each_server: Served):
    whole = ask(each_server, max_tokens=40)
    streamed = stream_chat(each_server, max_tokens=40)
    assert streamed.texts == {0: text_of(whole)}
    assert streamed.reasons == {0: whole["choices"][0]["finish_reason"]}
    assert whole["usage"]["completion_tokens"] == 40
    assert len(streamed.chunks) > 10, "tokens come as they are made"


def test_b01_b04_usage_comes_once_in_the_last_chunk(each_server: Served):
    streamed = stream_chat(each_server, max_tokens=5, stream_options={"include_usage": True})
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 5
    whole = ask(each_server, max_tokens=5)["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.usage[key] == whole[key]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
def test_b02_usage_is_asked_for_by_its_flag(server: Served, options: dict[str, Any] | None):
    streamed = stream_chat(server, max_tokens=3, stream_options=options)
    assert streamed.usage is None
    assert all("usage" not in chunk for chunk in streamed.chunks)


def test_b05_b06_every_choice_has_a_role_and_one_finish_reason(each_server: Served):
    streamed = stream_chat(each_server, n=3, max_tokens=4, temperature=1)
    assert streamed.reasons == dict.fromkeys(range(3), "length")


@pytest.mark.parametrize("route", ["chat", "completion"])
def test_b27_choices_are_apart_and_equal_streamed_or_not(each_server: Served, route: str):
    sampling = {"n": 4, "seed": 11, "temperature": 1, "max_tokens": 24}
    if route == "chat":
        choices = ask(each_server, **sampling)["choices"]
        whole = {c["index"]: c["message"]["content"] for c in choices}
        streamed = stream_chat(each_server, **sampling).texts
    else:
        body = {"prompt": "Hello World", **sampling}
        post = each_server.client.post
        choices = post("/v1/completions", json=body).json()["choices"]
        whole = {c["index"]: c["text"] for c in choices}
        raw = post("/v1/completions", json=body | {"stream": True}).text
        streamed = parse(raw, chat=False).texts
    assert sorted(whole) == [0, 1, 2, 3]
    assert len(set(whole.values())) == 4
    assert streamed == whole


def test_b11_nothing_of_a_stop_string_is_streamed(each_server: Served):
    """The stop string is taken from the middle of the greedy answer, across token borders."""
    text = text_of(ask(each_server, max_tokens=60))
    stop = next(s for at in range(20, 40) if text.find(s := text[at : at + 5]) == at)
    assert "\ufffd" not in stop
    whole = ask(each_server, max_tokens=60, stop=[stop, "never said"])
    streamed = stream_chat(each_server, max_tokens=60, stop=[stop, "never said"])
    assert text_of(whole) == text[: text.index(stop)] == streamed.texts[0]
    assert streamed.reasons == {0: "stop"}
    assert whole["choices"][0]["finish_reason"] == "stop"
    kept = ask(each_server, max_tokens=60, stop=stop, include_stop_str_in_output=True)
    assert text_of(kept) == text[: text.index(stop) + len(stop)]
    each_server.settled()


def test_b08_deltas_hold_whole_characters(server: Served):
    """Bytes of several characters are sampled one by one; no delta holds half of one."""
    three_bytes = {str(i): 60.0 for i in (230, 188, 162, 229, 173, 151)}
    sampling = {"max_tokens": 60, "temperature": 1, "seed": 5, "logit_bias": three_bytes}
    streamed = stream_chat(server, **sampling, logprobs=True)
    content = [c["choices"][0] for c in streamed.chunks]
    raw = b"".join(
        bytes(t["bytes"]) for c in content if c["logprobs"] for t in c["logprobs"]["content"]
    )
    assert raw.decode(errors="replace") == streamed.texts[0]
    assert len(raw) == 60
    assert text_of(ask(server, **sampling)) == streamed.texts[0]


def test_b43_every_request_equals_its_solo_run(server: Served):
    """Different parameters in one batch: each answer is what it is alone."""
    bodies = [
        {
            "text": f"question {i}",
            "max_tokens": 6 + i % 5,
            "temperature": (0, 0.5, 1, 1.7)[i % 4],
            "top_p": (1, 0.7, 0.9)[i % 3],
            "top_k": (0, 5, 40, 3, 1)[i % 5],
            "min_p": (0, 0.05)[i % 2],
            "presence_penalty": (0, 1, -1)[i % 3],
            "frequency_penalty": (0, 0.5)[i % 2],
            "repetition_penalty": (1, 1.3)[i % 2],
            "seed": i,
        }
        for i in range(24)
    ]
    alone = [text_of(ask(server, **b)) for b in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda b: text_of(ask(server, **b)), bodies))
    assert together == alone
    assert len(set(alone)) > 20


def test_b44_a_turn_ends_with_stop_and_without_its_special(each_server: Served):
    """`<|im_end|>` is the only likely token."""
    for body in ({"logit_bias": {"425": 100}}, {"logit_bias": {"424": 100}}):
        answer = ask(each_server, **body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert text_of(answer) == ""
        assert answer["usage"]["completion_tokens"] == 1
        assert stream_chat(each_server, **body).reasons == {0: "stop"}


def test_stop_ids_min_tokens_and_ignore_eos(server: Served):
    forced = {"logit_bias": {"425": 100}}
    assert ask(server, **forced, ignore_eos=True, max_tokens=3)["usage"]["completion_tokens"] == 3
    late = ask(server, **forced, min_tokens=4, max_tokens=9)
    assert late["usage"]["completion_tokens"] == 5
    greedy = ask(server, max_tokens=8, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(greedy) == 8
    said = ask(server, logit_bias={"72": 100}, stop_token_ids=[72], max_tokens=5)
    assert said["choices"][0]["finish_reason"] == "stop"
    assert text_of(said) == ""


def test_b23_completions_default_to_16_tokens(each_server: Served):
    body = {"prompt": "Hello", "ignore_eos": True}
    answer = each_server.client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_b16_echo_with_logprobs_is_finite(server: Served):
    body = {"prompt": "correct horse", "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1}
    response = server.client.post("/v1/completions", json=body | {"max_tokens": 2})
    assert response.status_code == 200, response.text
    (choice,) = json.loads(response.text, parse_constant=pytest.fail)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("correct horse")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(-1e4 < v <= 0 for v in logprobs["token_logprobs"][1:])
    assert len(set(map(len, logprobs.values()))) == 1
    assert "".join(logprobs["tokens"][:11]) == "correct horse"


def test_b20_echo_alone(server: Served):
    body = {"prompt": "Yes", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = server.client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "Yes"
    assert answer["usage"]["completion_tokens"] == 0
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert "".join(tokens) == "Yes"
    refused = server.client.post("/v1/completions", json=body | {"stream": True})
    assert error_of(refused)["param"] == "echo"


def test_b16_an_echo_of_several_choices_has_the_prompts_logprobs_in_each(server: Served):
    body = {"prompt": ["Hello", "World"], "n": 3, "echo": True, "logprobs": 2, "max_tokens": 2}
    choices = server.client.post("/v1/completions", json=body).json()["choices"]
    for group, prompt in ((choices[:3], "Hello"), (choices[3:], "World")):
        for choice in group:
            logprobs = choice["logprobs"]
            assert choice["text"].startswith(prompt)
            assert len(set(map(len, logprobs.values()))) == 1
            prompt_len = len(logprobs["tokens"]) - 2
            assert "".join(logprobs["tokens"][:prompt_len]) == prompt
            values = logprobs["token_logprobs"][:prompt_len]
            assert values == group[0]["logprobs"]["token_logprobs"][:prompt_len]
            assert values[0] is None


def test_completions_of_several_prompts_and_of_ids(server: Served):
    ids = [72, 101, 279, 111]
    body = {"max_tokens": 6, "temperature": 0}
    post = server.client.post
    one = post("/v1/completions", json=body | {"prompt": ids}).json()
    text = post("/v1/completions", json=body | {"prompt": "Hello"}).json()
    several = post("/v1/completions", json=body | {"prompt": [ids, ids[:2]], "n": 2}).json()
    assert one["usage"]["prompt_tokens"] == 4 == text["usage"]["prompt_tokens"]
    assert one["choices"][0]["text"] == text["choices"][0]["text"]
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]
    assert {c["text"] for c in several["choices"][:2]} == {one["choices"][0]["text"]}
    assert several["usage"]["prompt_tokens"] == 6


def test_b18_candidates_that_are_half_a_character(server: Served):
    body = chat_body(max_tokens=12, logprobs=True, top_logprobs=20, temperature=1, seed=3)
    rows = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(rows["content"]) == 12
    partial = 0
    for row in rows["content"]:
        assert len(row["top_logprobs"]) == 20
        values = [t["logprob"] for t in row["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        for token in (row, *row["top_logprobs"]):
            if token["token"].startswith("bytes:"):
                partial += 1
            else:
                assert bytes(token["bytes"]).decode() == token["token"] or not token["bytes"]
    assert partial > 0


def test_streamed_completion_logprobs_equal_the_whole(server: Served):
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0, "logprobs": 2}
    whole = server.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    raw = server.client.post("/v1/completions", json=body | {"stream": True}).text
    chunks = [c["choices"][0]["logprobs"] for c in parse(raw, chat=False).chunks]
    for key in ("tokens", "text_offset"):
        assert [v for c in chunks if c for v in c[key]] == whole[key]
    lengths = [len(t) for t in whole["tokens"]]
    assert whole["text_offset"] == [sum(lengths[:i]) for i in range(9)]
