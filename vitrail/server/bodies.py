"""Request bodies in memory. Owns how many bytes they are together, so that clients who send slowly,
or never finish, cannot fill the process: each has a size and a deadline, all have a budget."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from vitrail.config.finding import Refused

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
SECONDS = 60
MAX_BYTES = 512 << 20
BUDGET_BYTES = 1 << 30


class Disconnected(Exception):
    """The client left."""


class Bodies:
    """`held_bytes`: of every body that is being read or whose request is not done."""

    def __init__(self, max_bytes: int = MAX_BYTES, budget_bytes: int = BUDGET_BYTES):
        self._max_bytes = max_bytes
        self._budget_bytes = budget_bytes
        self.held_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, receive: Receive, seconds: float = SECONDS) -> AsyncIterator[bytearray]:
        """The whole body, held for as long as the context lasts. Raises `Disconnected`; `Refused`
        for one that is too large or too slow (its own fault) or for which there is no room now."""
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(seconds):
                    while await self._take(receive, body):
                        pass
            except TimeoutError as error:
                raise Refused.because(
                    "body",
                    f"{len(body)} bytes after {seconds} s, and not complete",
                    f"a body arrives within {seconds} s",
                    "send it faster, or send smaller pictures",
                    "body_too_slow",
                ) from error
            yield body
        finally:
            self.held_bytes -= len(body)

    async def _take(self, receive: Receive, body: bytearray) -> bool:
        """One event's bytes; whether more come."""
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Disconnected
        part = event.get("body", b"")
        body += part
        self.held_bytes += len(part)
        if len(body) > self._max_bytes:
            raise Refused.because(
                "body",
                f"more than {self._max_bytes} bytes",
                f"at most {self._max_bytes} bytes",
                "send fewer or smaller pictures",
                "body_too_large",
            )
        if self.held_bytes > self._budget_bytes:
            raise Refused.because(
                "body",
                f"bodies of {self.held_bytes} bytes at once",
                f"at most {self._budget_bytes} bytes of requests are held together",
                "try again later",
                "overloaded",
            )
        return event.get("more_body", False)
