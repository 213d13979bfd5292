"""Whatever a client sends: a 400 that names the field, what was seen, the rule and the change, and
an engine that lives on. Every field of both routes is in a table."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.checkpoint import MAX_LEN, VOCAB
from tests.server.served import Served
from tests.server.sse import ask, chat_body, error_of
from vitrail.server.openai import ChatRequest, CompletionRequest
from vitrail.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.suite("faults", minutes=2, owner="server")

ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
BASE = {"chat": chat_body(max_tokens=1), "completion": {"prompt": "hi", "max_tokens": 1}}
HUGE = 10**30

# field -> values that are refused. Of both routes, of chat alone, of completions alone.
BOTH: dict[str, list[Any]] = {
    "model": ["other", 1, [], {}, ""],
    "stream": ["yes", 1, [], {}],
    "stream_options": [1, "x", [], {"include_usage": 1}, {"other": True}, {"include_usage": True}],
    "max_tokens": [-1, 1.5, "5", True, [], 10**12, HUGE, MAX_LEN],
    "min_tokens": [-1, 2, 1.5, "1", True, HUGE],
    "temperature": [-0.1, 101, "1", True, [], HUGE],
    "top_p": [0, -1, 1.01, "1", True, HUGE],
    "top_k": [-1, 1.5, "1", True, {}],
    "min_p": [-0.1, 1.1, "0", HUGE],
    "repetition_penalty": [0, -1, "1", True],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, "0"],
    "logit_bias": [
        {"191222": -100, "99999": 5},
        {"-1": 1},
        {"abc": 1},
        {"5": 1e9},
        {"5": "1"},
        {"5": None},
        {"1.5": 1},
        {"٣": 1},
        {str(VOCAB): 1},
        {"9" * 5000: 1},
        [],
        "x",
        1,
    ],
    "seed": [-1, 2**63, 1.5, "1", True, HUGE],
    "stop": ["", [""], [1], {}, 1, ["a"] * 17, [None]],
    "stop_token_ids": [[-1], [VOCAB], ["1"], [True], 5, {}],
    "include_stop_str_in_output": [1, "x", []],
    "ignore_eos": [1, "x", []],
    "n": [0, -1, 129, 1.5, "1", True, HUGE],
    "user": [1, [], {}],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "stringg"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nope"}}},
        {"type": "text", "more": 1},
        "text",
        1,
    ],
    "store": [True, 0, "x"],
    "service_tier": ["flex", 1],
    "metadata": [{"a": "b"}, 1],
    "unknown_field": [None, 1, {}],
}
CHAT: dict[str, list[Any]] = {
    "messages": [None, [], {}, "hi", 1, [1], [None], [[]], ["hi"], [{}], HUGE],
    "max_completion_tokens": [0, -1, 1.5, "5", True, 10**12],
    "logprobs": [1, "x", 5],
    "top_logprobs": [1, -1, 21, "1"],
    "add_generation_prompt": [1, "x"],
    "continue_final_message": [1, "x", True],
    "chat_template_kwargs": [
        [],
        "x",
        {"messages": 1},
        {"tools": 1},
        {"add_generation_prompt": True},
        {"bos_token": "x"},
        {"a": [1]},
        {"a": {}},
    ],
    "tools": [[{"type": "function", "function": {"name": "f"}}], {}, "x", 1, [1]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 1],
    "parallel_tool_calls": ["x", 1],
    "functions": [[{"name": "f"}], 1],
    "function_call": [{"name": "f"}, 1],
    "modalities": [["text", "audio"], "text"],
    "audio": [{"voice": "a"}, 1],
    "prediction": [{"type": "content"}, 1],
    "reasoning_effort": ["high", 1],
    "verbosity": ["low", 1],
    "web_search_options": [{}, 1],
}
COMPLETION: dict[str, list[Any]] = {
    "prompt": [None, [], {}, 1, [[]], [1.5], [True], [-1], [VOCAB], [[VOCAB]], ["a", 1], [["a"]]],
    "echo": [1, "x"],
    "logprobs": [-1, 21, "1", True, 1.5],
    "suffix": ["x", 1],
    "best_of": [2, True, "1"],
    "max_tokens": [0],
}
CASES = [
    (route, name, value)
    for route, table in (("chat", BOTH | CHAT), ("completion", BOTH), ("completion", COMPLETION))
    for name, values in table.items()
    for value in values
]


@pytest.fixture(scope="module", autouse=True)
def alive(servers: dict[str, Served]) -> Iterator[None]:
    yield
    servers["granian"].settled()
    assert len(ask(servers["granian"], max_tokens=2)["choices"]) == 1


def test_the_tables_hold_every_field():
    names = {"chat": {*BOTH, *CHAT}, "completion": {*BOTH, *COMPLETION}}
    for route, kind in (("chat", ChatRequest), ("completion", CompletionRequest)):
        assert names[route] == {*kind.__struct_fields__, "unknown_field"}
    assert set(msgspec.structs.asdict(ChatRequest(messages=[]))) == names["chat"] - {
        "unknown_field"
    }


@pytest.mark.parametrize("stream", [False, True])
def test_b19_b21_b24_every_field_refuses_what_it_cannot_honour(server: Served, stream: bool):
    """B34 to B36 too: what asks for tools or a schema is refused by name, for now."""
    for route, name, value in CASES:
        body = BASE[route] | {name: value}
        if stream and "stream" not in name:
            body |= {"stream": True}
        response = server.client.post(ROUTES[route], json=body)
        error = error_of(response, 404 if name == "model" and isinstance(value, str) else 400)
        param = error["param"]
        named = {"messages": ("messages", "body"), "logprobs": ("logprobs", "top_logprobs")}
        allowed = named.get(name, (name,))
        if name == "max_completion_tokens":
            allowed = (name, "max_tokens")
        assert param.startswith(allowed), (route, name, value, error)
        assert error["type"] == "invalid_request_error"
        assert name in error["message"] or name == "max_completion_tokens", error


GARBAGE = (
    b"",
    b" ",
    b"null",
    b"1",
    b'"x"',
    b"[]",
    b"{",
    b'{"messages"',
    b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}",
    b'{"messages": "\xff"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [], "temperature": NaN}',
    b'{"messages": [], "temperature": -Infinity}',
    b'{"messages": [], "temperature": 1e999}',
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    b'{"max_tokens": 1' + b"0" * 100_000 + b', "messages": []}',
    b'{"' + b"k" * 100_000 + b'": 1}',
    b'{"messages": [{"role": "user", "' + b"k" * 100_000 + b'": 1}]}',
    b'{"messages": [{"role": "' + b"r" * 100_000 + b'", "content": "x"}]}',
    b'{"messages": [], "model": "' + b"m" * 100_000 + b'"}',
    b'{"a`b - at `$.messages`": 1}',
    b"a" * 3_000_000,
)


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_a_400(each_server: Served, body: bytes):
    for path in ROUTES.values():
        response = each_server.client.post(path, content=body)
        error_of(response, 404 if b'"model"' in body and "chat" in path else 400)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user"}, "content"),
        ({"content": "x"}, "role"),
        ({"role": 1, "content": "x"}, "role"),
        ({"role": "robot", "content": "x"}, "role"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": 1}, "content"),
        ({"role": "user", "content": {}}, "content"),
        ({"role": "user", "content": [1]}, "content[0]"),
        ({"role": "user", "content": [{}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}, "content[0].b"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0].type"),
        ({"role": "user", "content": "x", "name": 1}, "name"),
        ({"role": "user", "content": "x", "extra": 1}, "extra"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "tool_calls[0]"),
        ({"role": "assistant", "content": None, "tool_calls": 1}, "tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "audio"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function.name"),
    ],
)
def test_messages_name_the_part(server: Served, message: dict[str, Any], where: str):
    body = {"messages": [{"role": "user", "content": "hi"}, message], "max_tokens": 1}
    error = error_of(server.client.post(ROUTES["chat"], json=body))
    assert error["param"] == f"messages[1].{where}"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_b21_a_limit_may_be_absent_or_null(server: Served, field: str):
    """The rest of the context then; where both are given, max_completion_tokens wins."""
    ends = {"logit_bias": {"425": 100}}
    for more in ({}, {field: None}):
        assert ask(server, **ends, **more)["usage"]["completion_tokens"] == 1
    both = ask(server, max_tokens=3, max_completion_tokens=2, ignore_eos=True)
    assert both["usage"]["completion_tokens"] == 2


def test_c17_too_long_says_both_numbers(server: Served):
    ids = [72] * (MAX_LEN - 4)
    error = error_of(server.client.post(ROUTES["completion"], json={"prompt": ids}))
    assert error["code"] == "context_length_exceeded"
    for number in (MAX_LEN - 4, 16, MAX_LEN + 12, MAX_LEN):
        assert str(number) in error["message"]
    fits = {"prompt": ids[:60], "max_tokens": 4}
    assert server.client.post(ROUTES["completion"], json=fits).status_code == 200
    for length in (MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN):
        body = {"prompt": [72] * length, "max_tokens": 1}
        error = error_of(server.client.post(ROUTES["completion"], json=body))
        assert error["param"] == "prompt"
        assert str(length) in error["message"]


def test_b29_b31_b32_b47_odd_conversations_are_served(server: Served):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user = {"role": "user", "content": "hi"}
    for messages in (
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}, user],
        [user, {"role": "assistant", "content": ""}, user],
        [user, {"role": "assistant", "content": "x", "tool_calls": []}, user],
        [user, {"role": "assistant", "content": []}, user],
        [user, {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "c"}],
        [{"role": "system", "content": [{"type": "text", "text": "be"}]}, user],
        [{"role": "system", "content": "be"}],
        [user, {"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "   "}],
        [{"role": "user", "content": "x"}],
        [user, {"role": "assistant", "content": "y"}] * 300,
    ):
        body = {"messages": messages, "max_tokens": 1}
        response = server.client.post(ROUTES["chat"], json=body)
        assert response.status_code == 200, response.text


def test_b32_a_list_of_texts_is_the_string(server: Served):
    split = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "World"}]
    answers = []
    for content in ("Hello World", split, ["Hello ", "World"]):
        messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        answers.append(server.client.post(ROUTES["chat"], json=body).json())
    assert len({a["usage"]["prompt_tokens"] for a in answers}) == 1
    assert len({a["choices"][0]["message"]["content"] for a in answers}) == 1


def test_continue_final_message(server: Served, kimi_folder: Path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sign"}]
    body = {"messages": messages, "max_tokens": 1}
    opened = server.client.post(ROUTES["chat"], json=body).json()["usage"]["prompt_tokens"]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    response = server.client.post(ROUTES["chat"], json=body | going_on)
    turn = len(Tokenizer.load(kimi_folder).encode("assistant")) + 3
    assert response.json()["usage"]["prompt_tokens"] == opened - turn


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/%ff%00", 404),
        ("GET", "/" + "a" * 5000, 404),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_routes_and_methods(each_server: Served, method: str, path: str, status: int):
    error_of(each_server.client.request(method, path), status)


def test_what_is_no_http_harms_nothing(each_server: Served):
    for sent in (
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST / HTTP/1.1\r\n\xff: \xff\r\n\r\n",
    ):
        with each_server.bare() as sock:
            sock.sendall(sent)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 12):
                    pass
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    upgrade["sec-websocket-key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    assert each_server.client.get("/v1/models", headers=upgrade).status_code == 200
    assert each_server.client.get("/health").status_code == 200


def test_b19_other_requests_are_unharmed(server: Served):
    body = {"max_tokens": 40, "temperature": 0}
    alone = ask(server, **body)
    bad = BASE["chat"] | {"logit_bias": {"191222": -100}}
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, server, **body) for _ in range(4)]
        for _ in range(20):
            assert server.client.post(ROUTES["chat"], json=bad).status_code == 400
        texts = {r.result()["choices"][0]["message"]["content"] for r in running}
    assert texts == {alone["choices"][0]["message"]["content"]}


@pytest.mark.alone
def test_f20_a_megabyte_of_text_does_not_hold_health_up(server: Served):
    body = json.dumps(chat_body("word " * 200_000, max_tokens=1))
    with ThreadPoolExecutor(2) as pool:
        posted = [pool.submit(server.client.post, ROUTES["chat"], content=body) for _ in range(2)]
        waits = []
        while not all(p.done() for p in posted):
            began = time.perf_counter()
            assert server.client.get("/health").status_code == 200
            waits.append(time.perf_counter() - began)
        for p in posted:
            assert error_of(p.result())["code"] == "context_length_exceeded"
    assert sorted(waits)[int(len(waits) * 0.9)] < 0.2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 128, "stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        ({"n": 64, "stop": ["ab" * 20_000]}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(50_000)}}, "logit_bias"),
        ({"stop_token_ids": list(range(10**5, 10**5 + 900))}, "stop_token_ids"),
        ({"prompt": [[72]] * 5000}, "prompt"),
    ],
)
def test_parameters_that_grow_with_every_choice_are_bounded(server: Served, body: dict, field: str):
    """A small body cannot become large work: refused at once, in a few words, the server well."""
    began = time.monotonic()
    response = server.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1} | body)
    assert response.status_code == 400, response.text[:200]
    assert response.json()["error"]["param"] == field
    assert len(response.content) < 2_000
    assert time.monotonic() - began < 5
    assert server.client.get("/health").status_code == 200


def test_the_longest_stop_strings_are_compiled_once_for_all_choices(server: Served):
    body = {"prompt": "hi", "max_tokens": 1, "n": 16, "stop": ["ab" * 512] * 16}
    began = time.monotonic()
    assert server.client.post("/v1/completions", json=body).status_code == 200
    assert time.monotonic() - began < 5
