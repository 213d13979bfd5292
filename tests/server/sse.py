"""Server-sent events of chat and completion streams, parsed strictly."""

import json
from typing import Any, NamedTuple

import httpx

from tests.server.served import Served


class Stream(NamedTuple):
    """`chunks`: every frame's object but [DONE]; `texts` and `reasons` by choice."""

    chunks: list[dict[str, Any]]
    texts: dict[int, str]
    reasons: dict[int, str]
    usage: dict[str, Any] | None


def frames(raw: str) -> list[str]:
    """The payloads of an event stream, which has nothing but data lines."""
    assert raw.endswith("\n\n"), raw[-80:]
    blocks = raw[:-2].split("\n\n")
    assert all(b.startswith("data: ") and "\n" not in b for b in blocks), raw[:400]
    return [b.removeprefix("data: ") for b in blocks]


def parse(raw: str, *, chat: bool) -> Stream:
    """Checks the shape that clients rely on: one [DONE] at the end; `choices` always a list, empty
    only in a last usage chunk; of each choice the role first (chat), then deltas, then exactly one
    finish reason and nothing after it; null until then."""
    payloads = frames(raw)
    assert payloads[-1] == "[DONE]", payloads[-1]
    assert payloads.count("[DONE]") == 1
    chunks = [json.loads(p) for p in payloads[:-1]]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for i, chunk in enumerate(chunks):
        assert chunk["object"] == ("chat.completion.chunk" if chat else "text_completion")
        assert {"id", "created", "model"} <= set(chunk)
        assert isinstance(chunk["choices"], list)
        if not chunk["choices"]:
            assert i == len(chunks) - 1, "a chunk without choices that is not the last"
            usage = chunk["usage"]
            continue
        assert chunk.get("usage") is None
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in reasons, "something after the finish reason"
        assert "finish_reason" in choice
        delta = choice["delta"] if chat else choice
        if chat and index not in texts:
            assert delta == {"role": "assistant", "content": ""}
            texts[index] = ""
            continue
        assert not chat or set(delta) == {"content"}
        texts[index] = texts.get(index, "") + (delta["content"] if chat else delta["text"])
        if choice["finish_reason"] is not None:
            reasons[index] = choice["finish_reason"]
    assert set(reasons) == set(texts)
    return Stream(chunks, texts, reasons, usage)


def chat_body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def stream_chat(server: Served, **body: Any) -> Stream:
    """A streamed chat; `body` as for `chat_body`."""
    response = server.client.post("/v1/chat/completions", json=chat_body(**body) | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse(response.text, chat=True)


def ask(server: Served, **body: Any) -> dict[str, Any]:
    """A chat that is not streamed: the response's object."""
    response = server.client.post("/v1/chat/completions", json=chat_body(**body))
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, which tells what was seen, the rule and the change."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert ". Rule: " in error["message"], error
    assert ". Change: " in error["message"], error
    assert len(error["message"]) < 2000
    return error
