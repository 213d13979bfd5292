"""A server of OpenAI's streams that knows nothing and keeps time: what each request gets, and when,
is what the test says. It runs in the test's own loop."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vitrail.bench.client import Target
from vitrail.bench.http import address


@dataclass
class Fake:
    """`first_s` until the first token, `token_s` for each one after it. `fail`: which requests, by
    number, fail how: "500", "cut" (a stream without its end), "error" (an error frame), "hang".
    `usage`: whether answers count their tokens. `bodies`, `at`: what came, and when."""

    first_s: float = 0.0
    token_s: float = 0.0
    usage: bool = True
    metrics: str | None = None
    fail: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.active += 1
        try:
            await self._answer(reader, writer)
        except ConnectionError:
            pass
        finally:
            self.active -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            return self._whole(writer, 200, json.dumps({"data": [{"id": "fake"}]}))
        if head.startswith("GET /metrics "):
            found = self.metrics
            return self._whole(writer, 404 if found is None else 200, found or "")
        self.most_active = max(self.most_active, self.active)
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        number = len(self.bodies)
        self.bodies.append(body)
        self.at.append(time.perf_counter())
        kind = self.fail.get(number)
        if kind == "500":
            return self._whole(writer, 500, '{"error": {"message": "broken"}}')
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        return await self._stream(writer, body, kind)

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], kind: str | None
    ) -> None:
        chat, wanted = "messages" in body, body["max_tokens"]
        if chat:
            self._event(writer, [{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        await asyncio.sleep(self.first_s)
        for n in range(wanted):
            if n:
                await asyncio.sleep(self.token_s)
            if kind == "error":
                return self._frame(writer, b'data: {"error": {"message": "no memory"}}\n\n')
            said: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
            end = "length" if n == wanted - 1 else None
            self._event(writer, [{"index": 0, **said, "finish_reason": end}])
            if kind == "hang":
                await asyncio.sleep(0.6)
            if kind == "cut":
                return None
        if self.usage:
            details = {"cached_tokens": 3}
            counts = {"prompt_tokens": 7, "completion_tokens": wanted}
            self._event(writer, [], counts | {"prompt_tokens_details": details})
        self._frame(writer, b"data: [DONE]\n\n")
        self._frame(writer, b"")
        return None

    def _event(
        self,
        writer: asyncio.StreamWriter,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
    ) -> None:
        data = json.dumps({"id": "1", "choices": choices, "usage": usage})
        self._frame(writer, f"data: {data}\n\n".encode())

    def _frame(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        data = text.encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)


@asynccontextmanager
async def running(fake: Fake) -> AsyncIterator[Fake]:
    """`fake` on a port of its own."""
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        while fake.active:
            await asyncio.sleep(0.01)


def target(fake: Fake, timeout_s: float = 10.0) -> Target:
    """How the fake is asked."""
    return Target(
        url=fake.url,
        where=address(fake.url),
        model="fake",
        api_key=None,
        ignore_eos=True,
        timeout_s=timeout_s,
    )
