"""The load on a server that speaks OpenAI's API: bodies, streams, and when each is sent. What a
stream says is read as little as possible while it runs. Knows nothing of percentiles. No torch."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pybase64

from vitrail.bench.http import Address, HttpFailed, connect, fetch, request
from vitrail.bench.record import Record
from vitrail.bench.workload import Arrivals, Closed, Item, Noise, conversation
from vitrail.config.finding import Refused

MAX_BODIES_BYTES = 16 << 30  # of a run's requests, which are made before it begins
MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and how it is asked. `ignore_eos`: that answers go on to the length asked for."""

    url: str
    where: Address
    model: str
    api_key: str | None
    ignore_eos: bool
    timeout_s: float


class Call(msgspec.Struct, frozen=True):
    """A request's bytes, and the tokens that it asks for."""

    data: bytes
    wanted: int


async def served_model(where: Address, api_key: str | None) -> str:
    """The first model that a server names. Raises `Refused` where it does not answer."""
    try:
        status, body = await fetch(where, "/v1/models", api_key)
        if status == 200:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        saw = f"status {status}: {body[:MAX_ERROR_CHARS].decode(errors='replace')}"
    except (OSError, HttpFailed) as error:
        saw = str(error)
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        saw = f"an answer of another form ({error})"
    raise Refused.because(
        where=f"{where.host}:{where.port}/v1/models",
        saw=saw,
        rule="a running server names its models",
        change="start it, or correct the URL or VITRAIL_API_KEY",
        code="no_server",
    )


def calls(target: Target, items: Sequence[Item]) -> list[Call]:
    """Every request's bytes. Pictures are made here, so that the run itself only sends. Raises
    `Refused` where they would not fit in memory."""
    pixels = sum(p.height * p.width for item in items for p in item.pictures)
    if 4 * pixels > MAX_BODIES_BYTES:
        raise Refused.because(
            where="requests",
            saw=f"{len(items)} requests with pictures of {4 * pixels} bytes in all",
            rule=f"the requests of a run are made before it: at most {MAX_BODIES_BYTES} bytes",
            change="ask for fewer requests, or fewer or smaller pictures",
        )
    count = Counter(p for item in items for p in item.pictures)
    shared = {p: _picture(p) for p, times in count.items() if times > 1}
    return [_call(target, item, shared) for item in items]


def _call(target: Target, item: Item, shared: dict[Noise, dict[str, Any]]) -> Call:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if item.prompt is not None:
        route, body["prompt"] = "/v1/completions", item.prompt
    elif item.messages is not None or item.pictures:
        pictures = [shared.get(p) or _picture(p) for p in item.pictures]
        route, body["messages"] = "/v1/chat/completions", conversation(item, pictures)
    else:
        route, body["prompt"] = "/v1/completions", [*item.shared_ids, *item.ids]
    data = request(target.where, "POST", route, msgspec.json.encode(body), target.api_key)
    return Call(data, item.max_tokens)


def _picture(noise: Noise) -> dict[str, Any]:
    url = "data:image/png;base64," + pybase64.b64encode(noise.png()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> bool:
        """Whether it brings text."""
        if self.delta is None:
            return bool(self.text)
        return bool(self.delta.content or self.delta.reasoning_content or self.delta.reasoning)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Stream:
    """Reads server-sent events into a record. A piece is an event that brings text; where an answer
    has no text at all, its last event counts."""

    def __init__(self, record: Record):
        self._record = record
        self._buffer = b""
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._usage: _Usage | None = None
        self._finished_at = 0.0
        self._is_done = False
        self.failure: tuple[str, str] | None = None  # kind, detail
        self.raw = b""  # of a response that is no stream, its beginning

    def feed(self, data: bytes, now: float) -> None:
        if len(self.raw) < MAX_ERROR_CHARS:
            self.raw += data[:MAX_ERROR_CHARS]
        data = self._buffer + data
        *lines, self._buffer = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = self._decode(payload)
        except msgspec.DecodeError:
            self.failure = ("an event that is no chunk", payload.decode(errors="replace"))
            return
        if chunk.error is not None:
            self.failure = ("an error in the stream", str(chunk.error))
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.said:
                self._record.arrivals.append(now)
            if choice.finish_reason is not None:
                self._finished_at = now

    def close(self) -> None:
        """Settle the record after the last byte."""
        record = self._record
        if self.failure is None and not (self._is_done and self._finished_at):
            self.failure = ("a stream that ended early", "")
        if not record.arrivals and self._finished_at:
            record.arrivals.append(self._finished_at)
        if self._usage is None:
            record.counted, record.num_output = False, len(record.arrivals)
            return
        record.num_prompt = self._usage.prompt_tokens
        record.num_output = self._usage.completion_tokens
        details = self._usage.prompt_tokens_details
        record.num_cached = 0 if details is None else details.cached_tokens or 0


async def ask(target: Target, call: Call, due: float) -> Record:
    """Send one request and read its answer to the end. The clock starts when the request is
    written to an open connection. Raises nothing: what goes wrong is the record's failure."""
    record = Record(due=due, wanted=call.wanted)
    stream = _Stream(record)
    exchange = None
    try:
        async with asyncio.timeout(target.timeout_s):
            exchange = await connect(target.where, stream.feed)
            record.began = time.perf_counter()
            exchange.send(call.data)
            await exchange.done
        if exchange.status != 200:
            stream.failure = (f"status {exchange.status}", stream.raw.decode(errors="replace"))
    except TimeoutError:
        stream.failure = (f"no end within {target.timeout_s:g} s", "")
    except (OSError, HttpFailed) as error:
        broken = ("a broken connection" if record.began else "no connection", str(error))
        stream.failure = stream.failure or broken  # what the server said explains more
    finally:
        if exchange is not None:
            exchange.close()
    record.ended = time.perf_counter()
    stream.close()
    if stream.failure is not None:
        record.failure = stream.failure[0]
        record.detail = " ".join(stream.failure[1].split())[:MAX_ERROR_CHARS]
    return record


async def load(
    target: Target, requests: Sequence[Call], arrivals: Arrivals, times: Sequence[float]
) -> list[Record]:
    """Every request's record, in order. `times`: for Poisson arrivals, when each is due, in seconds
    from now."""
    if isinstance(arrivals, Closed):
        return await _closed(target, requests, arrivals.concurrency)
    start = time.perf_counter()

    async def at(call: Call, due: float) -> Record:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await ask(target, call, due)

    pairs = zip(requests, times, strict=True)
    return await asyncio.gather(*(at(call, start + seconds) for call, seconds in pairs))


async def _closed(target: Target, requests: Sequence[Call], concurrency: int) -> list[Record]:
    records: dict[int, Record] = {}
    numbers = itertools.count()

    async def worker() -> None:
        while (number := next(numbers)) < len(requests):
            records[number] = await ask(target, requests[number], time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(requests)))))
    return [records[number] for number in range(len(requests))]
