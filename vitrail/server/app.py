"""The ASGI callable: routes, bodies, streaming, disconnects. Everything a client can get wrong is
found before the response's headers are sent; what fails after them is an error frame.

    body -> typed request -> (worker thread) prompt and pixels -> engine -> SSE or JSON"""

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.engine.client import EngineClient
from vitrail.engine.prepare import Preparer
from vitrail.engine.request import overloaded
from vitrail.server import errors
from vitrail.server.bodies import Bodies, Disconnected, Event, Receive
from vitrail.server.errors import HttpError
from vitrail.server.jobs import Job, JobMaker, Later
from vitrail.server.metrics import Metrics, Timer
from vitrail.server.stream import DONE, ChoiceFailed, Exchange, usage_of

Scope = MutableMapping[str, Any]
Send = Callable[[Event], Awaitable[None]]
JSON = b"application/json"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"
EVENTS = b"text/event-stream; charset=utf-8"
OPEN_ROUTES = ("/health", "/metrics")  # without a key; they say nothing of any request

log = logging.getLogger("vitrail.server")


class Reply:
    """One response. Owns whether its headers are out, which decides how an error is told."""

    def __init__(self, send: Send, metrics: Metrics):
        self._send = send
        self._metrics = metrics
        self._is_open = False

    async def whole(
        self,
        status: int,
        body: bytes,
        kind: bytes = JSON,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """Headers and body at once."""
        length = (b"content-length", str(len(body)).encode())
        await self._open(status, [(b"content-type", kind), length, *headers])
        await self.part(body, last=True)

    async def stream(self) -> None:
        """Headers of an event stream; `part`s follow."""
        await self._open(200, [(b"content-type", EVENTS), (b"cache-control", b"no-cache")])

    async def part(self, data: bytes, *, last: bool = False) -> None:
        """Some of the body. Waits while the client is slow to read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def error(self, error: HttpError) -> None:
        """A response of its own, or, in a stream, its last frame."""
        if self._is_open:
            await self.part(b"data: " + error.body + b"\n\n", last=True)
        elif error.retry_after is None:
            await self.whole(error.status, error.body)
        else:
            retry = (b"retry-after", str(error.retry_after).encode())
            await self.whole(error.status, error.body, JSON, (retry,))

    async def _open(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._is_open = True
        self._metrics.requests.labels(str(status)).inc()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


Handler = Callable[[Receive, Reply], Awaitable[None]]
Make = Callable[[bytearray], Job | Later]


class App:
    """Owns the frontend's worker threads, its metrics and `num_active`, the generation requests in
    progress."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        preparer: Preparer,
        *,
        name: str,
        api_key: str | None,
    ):
        self._client = client
        self._tokenizer = preparer.assets.tokenizer
        self._jobs = JobMaker(config, preparer, client.stage, name)
        self._key = None if api_key is None else api_key.encode()
        self._threads = ThreadPoolExecutor(config.image_workers, thread_name_prefix="prepare")
        # Videos wait for one another, never what has none for them.
        self._videos = ThreadPoolExecutor(config.image_workers, thread_name_prefix="video")
        self._max_active = config.max_running + config.max_waiting
        self._bodies = Bodies()
        self._gone: set[threading.Event] = set()  # of the requests that are being made
        self.num_active = 0
        self._is_closing = False
        self.metrics = Metrics(lambda: client.stats)
        model = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vitrail",
            "max_model_len": preparer.facts.max_model_len,
        }
        self._models_body = msgspec.json.encode({"object": "list", "data": [model]})
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._show_metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3, of which HTTP; the owner of the app starts and stops what it needs."""
        assert scope["type"] == "http", "servers are told to send neither lifespan nor websockets"
        reply = Reply(send, self.metrics)
        try:
            await self._route(scope)(receive, reply)
        except Refused as found:
            await reply.error(errors.from_refused(found))
        except ChoiceFailed as failed:
            await reply.error(errors.internal(str(failed)))
        except Disconnected:
            self.metrics.requests.labels("disconnected").inc()
        # The isolation boundary: a fault of ours ends this request, and the client is told.
        except Exception as error:  # noqa: BLE001
            log.exception("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await reply.error(errors.internal(f"a fault of the server ({type(error).__name__})"))

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and wait until those in progress are answered, or so long."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.num_active:
                    await asyncio.sleep(0.02)

    def close(self) -> None:
        """End the worker threads, and the videos that they decode."""
        for gone in self._gone:
            gone.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._videos.shutdown(wait=False, cancel_futures=True)

    def _route(self, scope: Scope) -> Handler:
        path, method = scope["path"], scope["method"]
        if self._key is not None and path not in OPEN_ROUTES:
            given = [v for k, v in scope["headers"] if k == b"authorization"]
            self._check_key(given[0] if len(given) == 1 else b"", self._key)
        if path not in self._routes:
            known = ", ".join(self._routes)
            raise Refused.because(
                f"{path!r:.80}", "no such route", f"one of {known}", "use one", "not_found"
            )
        allowed, handler = self._routes[path]
        if method != allowed:
            raise Refused.because(
                path, f"{method!r:.20}", f"{allowed} only", f"send {allowed}", "method_not_allowed"
            )
        return handler

    def _check_key(self, header: bytes, key: bytes) -> None:
        """In a time that says nothing of how much of a key was right."""
        scheme, _, given = header.partition(b" ")
        if not hmac.compare_digest(given.strip(), key) or scheme.lower() != b"bearer":
            raise Refused.because(
                "authorization",
                "a missing or wrong key",
                "Authorization: Bearer KEY",
                "send the server's key",
                "invalid_api_key",
            )

    async def _chat(self, receive: Receive, reply: Reply) -> None:
        await self._generate(self._jobs.chat, receive, reply)

    async def _completions(self, receive: Receive, reply: Reply) -> None:
        await self._generate(self._jobs.completion, receive, reply)

    async def _models(self, _: Receive, reply: Reply) -> None:
        await reply.whole(200, self._models_body)

    async def _health(self, _: Receive, reply: Reply) -> None:
        dead = self._client.dead
        body = {
            "status": "ok" if dead is None else "dead",
            "reason": dead,
            "active": self.num_active,
            "engine": self._client.stats,
        }
        await reply.whole(200 if dead is None else 503, msgspec.json.encode(body))

    async def _show_metrics(self, _: Receive, reply: Reply) -> None:
        await reply.whole(200, self.metrics.render(), TEXT)

    async def _generate(self, make: Make, receive: Receive, reply: Reply) -> None:
        """Read, prepare in a thread, run, answer; a client that leaves at any moment ends it."""
        self._check_room()
        async with self._bodies.read(receive) as body:
            self._check_room()  # others may have taken it meanwhile; a body alone takes none
            self.num_active += 1
            try:
                await self._run(make, body, receive, reply)
            finally:
                self.num_active -= 1

    def _check_room(self) -> None:
        if self._is_closing:
            raise Refused.because(
                "server", "it is closing", "a running server", "ask another", "engine_dead"
            )
        if self.num_active >= self._max_active:
            raise Refused(overloaded(self.num_active, self._max_active))

    async def _run(self, make: Make, body: bytearray, receive: Receive, reply: Reply) -> None:
        exchange = Exchange(self._client, self._tokenizer)
        try:
            gone = asyncio.create_task(_disconnect(receive))
            work = asyncio.create_task(self._answer(make, body, exchange, reply))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise Disconnected
                await work
            finally:
                work.cancel()
                gone.cancel()
        finally:
            exchange.close()
            for answer in exchange.answers:
                reason = "abort" if answer.finish_reason is None else answer.finish_reason.value
                self.metrics.finished.labels(reason).inc()

    async def _answer(self, make: Make, body: bytearray, exchange: Exchange, reply: Reply) -> None:
        timer = Timer(self.metrics)
        job = await self._make(make, body)
        exchange.submit(job.staged)
        self.metrics.prompt_tokens += sum(job.prompt_lens)
        await (self._stream if job.stream else self._whole)(job, exchange, reply, timer)
        timer.end()

    async def _make(self, make: Make, body: bytearray) -> Job:
        """In threads. One that runs cannot be stopped, but for the videos that it decodes."""
        gone = threading.Event()
        self._gone.add(gone)
        making = self._threads.submit(make, body)
        try:
            made = await asyncio.wrap_future(making)
            if isinstance(made, Job):
                return made
            making = self._videos.submit(made, gone)
            return await asyncio.wrap_future(making)
        except asyncio.CancelledError:
            gone.set()
            making.add_done_callback(_discard)
            raise
        finally:
            self._gone.discard(gone)

    async def _whole(self, job: Job, exchange: Exchange, reply: Reply, timer: Timer) -> None:
        while pieces := await exchange.read():
            timer.tokens(sum(len(p.delta.token_ids) for p in pieces))
        if job.only_echo:
            for answer in exchange.answers:
                answer.drop_output()
        usage = usage_of(exchange.answers, job.prompt_lens)
        await reply.whole(200, job.writer.whole(exchange.answers, usage, job.echo))

    async def _stream(self, job: Job, exchange: Exchange, reply: Reply, timer: Timer) -> None:
        """Headers go out with the first output, so that a failure before it is a plain error."""
        pieces = await exchange.read()
        await reply.stream()
        chunks = [job.writer.role(i) for i in range(len(exchange.answers))] if job.chat else []
        while pieces:
            timer.tokens(sum(len(p.delta.token_ids) for p in pieces))
            chunks += map(job.writer.chunk, pieces)
            data = b"".join(chunks)
            if data:
                await reply.part(data)
            chunks.clear()
            pieces = await exchange.read()
        usage = usage_of(exchange.answers, job.prompt_lens)
        await reply.part((job.writer.usage(usage) if job.with_usage else b"") + DONE, last=True)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _discard(making: "Future[Job] | Future[Job | Later]") -> None:
    """A job that nobody waits for."""
    if not making.cancelled() and making.exception() is None:
        made = making.result()
        if isinstance(made, Job):
            made.staged.discard()
