"""The parent's side of the process that decodes one video (`video_worker` has the protocol): start,
bounds of memory and time, messages, end. Knows nothing of what makes a video acceptable.

What the process costs: 90 ms for three frames of 64 x 48 (median of nine on a two-core host), of
which PyAV's import is nearly all, and 32 MB of memory before a file is opened."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_WORKER = Path(__file__).with_name("video_worker.py")
_POLL_SECONDS = 0.1  # how late a client's leaving is seen
_LINE_BYTES = 4096


class Ended(Exception):
    """The process ended without saying why: its text says with which signal or code."""


class TimedOut(Exception):
    """The time that was given is over."""


class Gone(Exception):
    """Nobody waits for the video any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one process may take. `memory_bytes`: of address space, FFmpeg's own libraries
    among it. `seconds`: waited for the process, and of its CPU."""

    memory_bytes: int
    seconds: float
    max_frames: int
    max_pixels: int


@dataclass(slots=True)
class Process:
    """One running process, as a context: it is dead when the context is left. Owns `waited`, the
    seconds that were waited for it so far."""

    data: bytes
    reader: str
    options: dict[str, str]
    bounds: Bounds
    gone: threading.Event
    waited: float = 0.0
    _child: subprocess.Popen[bytes] = field(init=False)
    _pending: bytearray = field(init=False, default_factory=bytearray)

    def __enter__(self) -> "Process":
        file = os.memfd_create("video")
        try:
            rest = memoryview(self.data)
            while rest:
                rest = rest[os.write(file, rest) :]
            task = {
                "fd": file,
                "reader": self.reader,
                "options": self.options,
                "memory_bytes": self.bounds.memory_bytes,
                "seconds": self.bounds.seconds,
                "max_frames": self.bounds.max_frames,
                "max_pixels": self.bounds.max_pixels,
            }
            # Neither site's hooks nor this process's environment; the modules of this one.
            self._child = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", str(_WORKER), json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                pass_fds=(file,),
            )
        finally:
            os.close(file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.kill()
        with self._child:  # closes the pipes and waits
            pass

    def message(self) -> dict[str, Any]:
        """The next message. Raises `Ended`, `TimedOut`, `Gone`."""
        while b"\n" not in self._pending:
            assert len(self._pending) < _LINE_BYTES, "a message is one short line"
            self._pending += self._some(_LINE_BYTES)
        line, _, rest = self._pending.partition(b"\n")
        self._pending = bytearray(rest)
        return json.loads(line)

    def payload(self, num_bytes: int) -> bytearray:
        """The bytes that follow a message. Raises as `message` does."""
        whole = bytearray(num_bytes)
        at = min(len(self._pending), num_bytes)
        whole[:at] = self._pending[:at]
        del self._pending[:at]
        while at < num_bytes:
            some = self._some(min(1 << 20, num_bytes - at))
            whole[at : at + len(some)] = some
            at += len(some)
        return whole

    def want(self, indices: list[int]) -> None:
        """Ask for frames. Raises `Ended`."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(indices).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _some(self, most: int) -> bytes:
        """At least one byte of what it writes, and at most `most`."""
        assert self._child.stdout is not None
        file = self._child.stdout.fileno()
        start = time.monotonic()
        poll = select.poll()  # not select: a server's descriptors go beyond 1024
        poll.register(file, select.POLLIN)
        try:
            while not poll.poll(_POLL_SECONDS * 1000):
                if self.gone.is_set():
                    raise Gone
                if self.waited + time.monotonic() - start > self.bounds.seconds:
                    raise TimedOut
        finally:
            self.waited += time.monotonic() - start
        if self.gone.is_set():
            raise Gone
        if self.waited > self.bounds.seconds:
            raise TimedOut
        some = os.read(file, most)
        if not some:
            raise self._ended()
        return some

    def _ended(self) -> Ended:
        code = self._child.wait()
        return Ended(f"signal {-code}" if code < 0 else f"code {code}")
