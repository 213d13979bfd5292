"""What clients see when the engine fails, refuses, dies or outruns them: real HTTP servers in front
of a scripted engine process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import parrot
from tests.server.embedded import Embedded, embedded
from tests.server.served import HTTP_KINDS
from tests.server.sse import error_of, frames, parse
from vitrail.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.parametrize("kind", HTTP_KINDS),
    pytest.mark.suite("faults", minutes=2, owner="server"),
]
Scenario = Callable[[Embedded], Awaitable[None]]


def run(folder: Path, kind: Any, scenario: Scenario, **choices: Any) -> None:
    async def main() -> None:
        async with embedded(folder, kind, **choices) as server:
            await scenario(server)
            async with asyncio.timeout(2):
                while server.app.num_active or server.client.num_live:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def body(seed: int = 0, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"prompt": [72, 101, 108], "max_tokens": 9, "seed": seed, "stream": stream, **more}


async def post(server: Embedded, **more: Any) -> httpx.Response:
    return await server.http.post("/v1/completions", json=body(**more))


def test_b38_a_failure_before_the_first_token_is_an_http_error(kimi_folder: Path, kind: str):
    async def scenario(server: Embedded) -> None:
        for stream in (True, False):
            failed = await post(server, seed=parrot.FAIL_FIRST, stream=stream)
            assert failed.status_code == 500
            assert failed.headers["content-type"] == "application/json"
            assert failed.json()["error"]["message"] == "RuntimeError: as asked"
            assert failed.json()["error"]["type"] == "server_error"
            refused = await post(server, seed=parrot.REFUSE, stream=stream)
            assert error_of(refused, 503)["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            assert (await post(server, stream=stream)).status_code == 200

    run(kimi_folder, kind, scenario)


def test_b40_a_failure_after_the_headers_is_one_frame(kimi_folder: Path, kind: str):
    async def scenario(server: Embedded) -> None:
        failed = await post(server, seed=parrot.FAIL_LATER)
        assert failed.status_code == 200
        *chunks, last = frames(failed.text)
        assert json.loads(last)["error"]["message"] == "RuntimeError: as asked"
        assert all("choices" in json.loads(c) for c in chunks)
        assert (await post(server, seed=parrot.FAIL_LATER, stream=False)).status_code == 500

    run(kimi_folder, kind, scenario)


def test_b40_an_engine_that_ends_fails_what_lives_and_refuses_what_comes(
    kimi_folder: Path, kind: str
):
    async def scenario(server: Embedded) -> None:
        waiting = [post(server, seed=parrot.MUTE, stream=s) for s in (True, False)]
        tasks = [asyncio.create_task(w) for w in waiting]
        while server.client.num_live < 2:
            await asyncio.sleep(0.01)
        dying = await post(server, seed=parrot.DIE)
        *_, last = frames(dying.text)
        assert "exit code 7" in json.loads(last)["error"]["message"]
        for task in tasks:  # their headers were not out
            assert error_of(await task, 503)["code"] == "engine_dead"
        for stream in (True, False):
            late = await post(server, stream=stream)
            assert error_of(late, 503)["code"] == "engine_dead"
            assert "retry-after" in late.headers
        health = await server.http.get("/health")
        assert health.status_code == 503
        assert "exit code 7" in health.json()["reason"]

    run(kimi_folder, kind, scenario)


def test_b08_b11_streams_of_scripted_ids(kimi_folder: Path, kind: str):
    """The ids of a text byte by byte: deltas join to the text, and to its part before a stop."""
    text = "ďábelské 👩‍🚀 漢字"
    tokenizer = Tokenizer.load(kimi_folder)
    ids = [tokenizer.encode(chr(b))[0] if b < 128 else b for b in text.encode()]
    assert tokenizer.decode(ids) == text

    async def scenario(server: Embedded) -> None:
        said = await post(server, prompt=ids, max_tokens=len(ids))
        streamed = parse(said.text, chat=False)
        assert streamed.texts == {0: text}
        assert all("\ufffd" not in c["choices"][0]["text"] for c in streamed.chunks)
        cut = await post(server, prompt=ids, max_tokens=100, stop=["🚀 漢x", "🚀 漢"])
        assert parse(cut.text, chat=False).texts == {0: text[: text.index("🚀")]}
        assert parse(cut.text, chat=False).reasons == {0: "stop"}
        half = await post(server, prompt=ids, max_tokens=len(ids) - 1)
        assert parse(half.text, chat=False).texts == {0: text[:-1] + "\ufffd"}

    run(kimi_folder, kind, scenario)


def test_slow_readers_get_merged_chunks_and_hold_nobody_up(kimi_folder: Path, kind: str):
    """A client that does not read makes the server wait, not grow; then it gets all of the text in
    fewer chunks. Meanwhile others are answered."""
    tokens = 150_000
    sent = json.dumps(body(prompt=[72], seed=parrot.BURST, max_tokens=tokens)).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n"
    )

    async def scenario(server: Embedded) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
        writer.write(head % len(sent) + b"\r\n" + sent)
        while server.client.num_live == 0:
            await asyncio.sleep(0.01)
        while server.client.num_live:
            assert (await post(server)).status_code == 200
        raw = await reader.read(-1)
        writer.close()
        chunks = [json.loads(c.split(b"\n\n")[0]) for c in raw.split(b"data: ")[1:-1]]
        text = "".join(c["choices"][0]["text"] for c in chunks)
        assert len(text) == tokens
        assert len(chunks) < tokens / parrot.BURST_TOKENS / 2
        assert b"[DONE]" in raw

    run(kimi_folder, kind, scenario)


def test_c27_more_than_the_queue_holds_is_refused_with_retry_after(kimi_folder: Path, kind: str):
    async def scenario(server: Embedded) -> None:
        quiet = [asyncio.create_task(post(server, seed=parrot.MUTE)) for _ in range(5)]
        while server.client.num_live < 5:
            await asyncio.sleep(0.01)
        refused = await post(server)
        error = error_of(refused, 503)
        assert error["code"] == "overloaded"
        assert "5 requests" in error["message"]
        assert refused.headers["retry-after"] == "1"
        for task in quiet:
            task.cancel()
        await asyncio.gather(*quiet, return_exceptions=True)
        while server.client.num_live:
            await asyncio.sleep(0.01)
        assert (await post(server)).status_code == 200

    run(kimi_folder, kind, scenario, max_running=2, max_waiting=3)
