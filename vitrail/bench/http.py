"""As much of HTTP/1.1 as a streaming client needs, because a general one costs more a chunk than a
server does: one request a connection, which the server is asked to close; the body arrives by
callback with the moment of its arrival. Plain or TLS. Knows nothing of what the bytes mean."""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from vitrail.config.finding import Refused

MAX_HEAD = 1 << 16
MAX_SIZE_LINE = 1 << 10
OnBody = Callable[[bytes, float], None]


class HttpFailed(Exception):
    """The exchange broke: the message says how, in few words."""


class Address(NamedTuple):
    """Where a server listens; `base` is the path before every route."""

    host: str
    port: int
    tls: bool
    base: str


def address(url: str) -> Address:
    """Of "http://host:port" or "https://...", with or without a path such as /v1. Raises
    `Refused`."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise Refused.because(
            where="url",
            saw=repr(url),
            rule="http://HOST:PORT, or https",
            change="give the server's address, for example http://127.0.0.1:8000",
        )
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port, parts.scheme == "https", base)


class Exchange(asyncio.Protocol):
    """One request and its response. Owns the connection. `status` and `done` are set as the
    response arrives; `done` raises `HttpFailed` for what is not HTTP or ends early."""

    def __init__(self, on_body: OnBody):
        self._on_body = on_body
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._body: _Chunked | _Sized | None = None
        self._failure: str | None = None
        self.status = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, data: bytes) -> None:
        """The whole request."""
        assert self._transport is not None, "connected"
        self._transport.write(data)

    def close(self) -> None:
        """Whatever state it is in."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            if self._body is None:
                self._buffer += data
                data = self._head()
            if self._body is not None and not self.done.done():
                for part in self._body.feed(data):
                    self._on_body(part, now)
                if self._body.ended:
                    self._end(None)
        except HttpFailed as failed:
            self._end(str(failed))

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(self._body, _Sized) and self._body.until_close and exc is None:
            self._end(None)
        else:
            self._end("the connection was lost" if self.status else "no response")

    def _end(self, failure: str | None) -> None:
        if not self.done.done():
            if failure is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(HttpFailed(failure))
        self.close()

    def _head(self) -> bytes:
        """Take the status line and the headers off the buffer once they are whole; what follows
        them is the body's beginning."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise HttpFailed("headers without an end")
            return b""
        status, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        rest = bytes(self._buffer[end + 4 :])
        self._buffer.clear()
        version, _, code = status.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not code[:3].isdigit():
            raise HttpFailed("not an HTTP response")
        if code.startswith(b"1"):  # 100 Continue and its like
            self._buffer += rest
            return self._head()
        self.status = int(code[:3])
        headers = {k.strip().lower(): v.strip() for k, _, v in (x.partition(b":") for x in lines)}
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._body = _Chunked()
        else:
            length = headers.get(b"content-length")
            if length is not None and not length.isdigit():
                raise HttpFailed("a content-length that is no number")
            self._body = _Sized(None if length is None else int(length))
        return rest


class _Sized:
    """A body of known length, or until the connection closes."""

    def __init__(self, length: int | None):
        self.until_close = length is None
        self._left = length
        self.ended = length == 0

    def feed(self, data: bytes) -> list[bytes]:
        if self._left is None:
            return [data] if data else []
        taken = data[: self._left]
        self._left -= len(taken)
        self.ended = self._left == 0
        return [taken] if taken else []


class _Chunked:
    """size in hex [;extension] CRLF, so many bytes, CRLF; ... 0 CRLF [trailers] CRLF"""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0  # bytes of the open chunk and its CRLF that are still to come
        self._is_last = False
        self.ended = False

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        parts: list[bytes] = []
        while not self.ended and buffer:
            if self._left:
                if len(buffer) < self._left:  # no half chunks: a piece is seen when it is whole
                    break
                if buffer[self._left - 2 : self._left] != b"\r\n":
                    raise HttpFailed("a chunk without its end")
                parts.append(bytes(buffer[: self._left - 2]))
                del buffer[: self._left]
                self._left = 0
                continue
            end = buffer.find(b"\r\n")
            if end < 0:
                if len(buffer) > MAX_SIZE_LINE:
                    raise HttpFailed("a chunk without a size")
                break
            line = bytes(buffer[:end])
            del buffer[: end + 2]
            self._line(line)
        return parts

    def _line(self, line: bytes) -> None:
        if self._is_last:  # trailers, then an empty line
            self.ended = not line
            return
        digits = line.split(b";")[0].strip()
        try:
            size = int(digits, 16) if digits.isalnum() else -1
        except ValueError:
            size = -1
        if size < 0:
            raise HttpFailed("a chunk without a size")
        self._is_last = size == 0
        self._left = size + 2 if size else 0


async def connect(where: Address, on_body: OnBody) -> Exchange:
    """An open connection. Raises `OSError`."""
    context = ssl.create_default_context() if where.tls else None
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(
        lambda: Exchange(on_body), where.host, where.port, ssl=context
    )
    return exchange


def request(where: Address, method: str, path: str, body: bytes, api_key: str | None) -> bytes:
    """The bytes of a request; `body` is JSON."""
    lines = [
        f"{method} {where.base}{path} HTTP/1.1",
        f"Host: {where.host}:{where.port}",
        "Connection: close",
        "Accept: */*",
    ]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def fetch(where: Address, path: str, api_key: str | None) -> tuple[int, bytes]:
    """GET: status and body. Raises `HttpFailed` or `OSError`."""
    parts: list[bytes] = []
    exchange = await connect(where, lambda data, _: parts.append(data))
    try:
        exchange.send(request(where, "GET", path, b"", api_key))
        await exchange.done
    finally:
        exchange.close()
    return exchange.status, b"".join(parts)
