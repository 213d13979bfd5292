"""The frontend's handle on an engine process: starts it, submits, aborts, and hands every step's
outputs to whoever listens. One asyncio loop uses it. No torch."""

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine.ipc import (
    Abort,
    FromEngine,
    FrontendCodec,
    ProfileWindow,
    Ready,
    Refusal,
    Staged,
    Start,
    Stats,
    Stepped,
)
from vitrail.engine.prepare import ServingFacts
from vitrail.engine.request import EngineRequest, Output

log = logging.getLogger("vitrail.client")
WORKER = "vitrail.engine.worker"
SOCKET_BYTES = 4 << 20
END_SECONDS = 10


class Listener(NamedTuple):
    """Called on the loop: `take` with each output of a request, the last one with a finish reason;
    `fail` instead, once, if the engine's queue refuses it or the engine ends."""

    take: Callable[[Output], None]
    fail: Callable[[Refused], None]


class EngineClient:
    """Owns the engine's process and the listeners of its live requests. If the engine ends, they
    all fail and `dead` says why. `stats`: the engine's, after its last step."""

    def __init__(self, process: subprocess.Popen[bytes], codec: FrontendCodec):
        self._process = process
        self._codec = codec
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._listeners: dict[str, Listener] = {}
        self._ready: asyncio.Future[ServingFacts] = asyncio.get_running_loop().create_future()
        self.stats: Stats | None = None
        self.dead: str | None = None

    @classmethod
    async def start(
        cls, config: EngineConfig, worker: str = WORKER, profile: ProfileWindow | None = None
    ) -> "tuple[EngineClient, ServingFacts]":
        """Start the process (module `worker`) and wait until it serves. Raises `Refused` with the
        engine's findings."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        command = [sys.executable, "-m", worker, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        client = cls(process, FrontendCodec())
        reader, client._writer = await asyncio.open_connection(sock=ours)
        client._reading = asyncio.create_task(client._read(reader))
        folder = str(client._codec.folder)
        start = Start(config=asdict(config), pixels=folder, profile=profile)
        client._writer.write(client._codec.encode(start))
        try:
            return client, await client._ready
        except BaseException:
            await client.close()
            raise

    def stage(self, requests: Sequence[EngineRequest]) -> Staged:
        """Make requests ready to submit; pictures are copied here, so any thread may do it. Raises
        `Refused` where there is no room for them."""
        return self._codec.stage(requests)

    def submit(self, staged: Staged, listener: Listener) -> None:
        """Queue requests. Raises `Refused` if the engine has ended."""
        if self.dead is not None:
            staged.discard()
            raise Refused(_dead(self.dead))
        for request in staged.requests:
            self._listeners[request.id] = listener
        self._send(staged.frame)

    def abort(self, ids: Sequence[str]) -> None:
        """Forget requests and free what they hold; their listeners are not called again."""
        known = [i for i in ids if self._listeners.pop(i, None) is not None]
        if known and self.dead is None:
            self._send(self._codec.encode(Abort(ids=known)))

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._listeners)

    async def ended(self) -> None:
        """Return when the engine's process is gone."""
        assert self._reading is not None, "started"
        await asyncio.wait((self._reading,))

    async def close(self) -> None:
        """End the process; live requests fail."""
        self._fail("the server is closing")
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
        if await self._exit_code() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._codec.close()

    def _send(self, data: bytes) -> None:
        assert self._writer is not None, "started"
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "the frontend could not read its messages"
        try:
            while data := await reader.read(1 << 20):
                for message in self._codec.feed(data):
                    self._take(message)
            reason = f"its process ended (exit code {await self._exit_code()})"
        except OSError as error:
            reason = f"reading from its process failed ({error})"
        finally:  # whatever ended the reading, nobody may wait for more
            self._fail(reason)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Stepped):
            self.stats = message.stats
            for output in message.outputs:
                listener = self._listeners.get(output.request_id)
                if listener is None:
                    continue
                if output.finish_reason is not None:
                    del self._listeners[output.request_id]
                listener.take(output)
        elif isinstance(message, Refusal):
            refused = Refused(message.findings)
            if message.request_id is None:
                self._ready.set_exception(refused)
            elif message.request_id in self._listeners:
                self._listeners.pop(message.request_id).fail(refused)
        elif isinstance(message, Ready):
            self._ready.set_result(message.facts)
        else:
            log.debug("loading %s: %d of %d bytes", message.name, message.done, message.total)

    async def _exit_code(self) -> int | None:
        """None if the process does not end by itself."""
        try:
            return await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _fail(self, reason: str) -> None:
        """End everything that is live."""
        self.dead = self.dead or reason
        refused = Refused(_dead(reason))
        if not self._ready.done():
            self._ready.set_exception(refused)
        live = list(self._listeners.values())
        self._listeners.clear()
        for listener in live:
            listener.fail(refused)


def _dead(reason: str) -> Finding:
    return Finding(
        where="engine",
        saw=reason,
        rule="requests need a running engine",
        change="restart the server; its log says why the engine ended",
        code="engine_dead",
    )
