"""Messages between a frontend process and its engine process, over one Unix socket pair that only
the two hold. A frame is 4 bytes of length and a msgpack body of a known type; nothing is unpickled.
Arrays travel beside it, one file each in a private folder of shared memory. No torch.

    frontend:  Start, then Submit and Abort
    engine:    Loading..., Ready or Refusal, then Stepped
"""

import fcntl
import itertools
import logging
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vitrail.config.finding import Finding, Refused
from vitrail.engine.prepare import ServingFacts
from vitrail.engine.request import EngineRequest, Output

HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 30
FOLDER_PREFIX = "vitrail-pixels-"
NEW_PREFIX = "vitrail-new-"
# Of shared memory, for it to be used: some dozens of photographs of 12 megapixels, 36 MB each. A
# container has 64 MiB unless told otherwise, which a client fills with two.
LEAST_SHARED = 1 << 30

log = logging.getLogger("vitrail.engine")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message; the tag is the class's name."""


class ProfileWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Which of an engine's steps are recorded: `steps` of those that launch something, after `skip`
    of them; and the folder that the trace is written to."""

    folder: str
    skip: int
    steps: int


class Start(Message, frozen=True):
    """First message: `EngineConfig`'s fields, and the folder where arrays will lie. `profile`: what
    to record, if anything."""

    config: dict[str, str | int | float | bool | None]
    pixels: str
    profile: ProfileWindow | None = None


class Submit(Message, frozen=True):
    """Requests to queue, in order."""

    requests: list[EngineRequest]


class Abort(Message, frozen=True):
    """Requests whose clients left or whose text met a stop string."""

    ids: list[str]


class Loading(Message, frozen=True):
    """Bytes loaded so far, and of what."""

    done: int
    total: int
    name: str


class Ready(Message, frozen=True):
    """The engine takes requests."""

    facts: ServingFacts


class Refusal(Message, frozen=True):
    """The engine will not run, and its process ends; or, with `request_id`, that request was
    refused at the queue."""

    findings: list[Finding]
    request_id: str | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after a step, for /metrics and /health. `*_total` only grow."""

    running: int
    waiting: int
    free_pages: int
    num_pages: int
    steps_total: int
    preemptions_total: int
    images_encoded_total: int
    cache_hit_tokens_total: int
    cache_query_tokens_total: int


class Stepped(Message, frozen=True):
    """Everything that one step gave: one message, one wake-up."""

    outputs: list[Output]
    stats: Stats


FromFrontend = Start | Submit | Abort
FromEngine = Loading | Ready | Refusal | Stepped


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return HEADER.pack(len(body)) + body


def cut_frames(buffer: bytearray) -> list[bytes]:
    """Take the complete frames' bodies off the front of `buffer`. Raises `ValueError` for a length
    that no sender of ours writes."""
    bodies: list[bytes] = []
    at = 0
    while len(buffer) - at >= HEADER.size:
        (length,) = HEADER.unpack_from(buffer, at)
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME} are allowed")
        end = at + HEADER.size + length
        if len(buffer) < end:
            break
        bodies.append(bytes(buffer[at + HEADER.size : end]))
        at = end
    del buffer[:at]
    return bodies


class EngineChannel:
    """The engine's end: blocking sends, receives that wait or only look. One thread uses it."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromFrontend, dec_hook=self._map)
        self._folder: Path | None = None
        self._mapped: dict[str, np.ndarray] = {}

    def start(self) -> Start:
        """The first message."""
        (first, *rest) = self.receive(wait=True)
        assert isinstance(first, Start), f"{type(first).__name__} before Start"
        assert not rest, "requests before Ready"
        self._folder = Path(first.pixels)
        return first

    def send(self, message: Message) -> None:
        """Blocks until the frontend's buffer took it. Raises `OSError` when the frontend is
        gone."""
        self._sock.sendall(frame(self._encoder.encode(message)))

    def receive(self, *, wait: bool) -> list[FromFrontend]:
        """What has arrived; with `wait`, at least one message. Raises `EOFError` when the frontend
        is gone."""
        while True:
            try:
                while True:
                    data = self._sock.recv(1 << 20, 0 if wait else socket.MSG_DONTWAIT)
                    if not data:
                        raise EOFError("the frontend is gone")
                    self._buffer += data
                    wait = False
            except BlockingIOError:
                got = [self._decode(body) for body in cut_frames(self._buffer)]
            wait = bool(self._buffer) and not got  # half a message: its rest is on the way
            if not wait:
                return got

    def _decode(self, body: bytes) -> FromFrontend:
        try:
            return self._decoder.decode(body)
        finally:
            self._mapped.clear()  # from here on the requests alone keep their arrays

    def _map(self, kind: type, value: Any) -> Any:
        """An array's file, mapped and unlinked: its memory goes with the array. Choices of one
        prompt name the same file."""
        assert kind is np.ndarray, kind
        name, dtype, shape = value
        if name not in self._mapped:
            assert self._folder is not None, "arrays before Start"
            assert Path(name).name == name, name
            path = self._folder / name
            self._mapped[name] = np.memmap(path, np.dtype(dtype), mode="c", shape=tuple(shape))
            path.unlink()
        return self._mapped[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Requests about to be sent. `frame` names the files that hold their arrays; `requests` are the
    same without pictures. Either the frame is sent, or `discard` removes the files."""

    requests: list[EngineRequest]
    frame: bytes
    files: list[Path]

    def discard(self) -> None:
        """Remove the files that the engine will not take."""
        for file in self.files:
            file.unlink(missing_ok=True)


class FrontendCodec:
    """The frontend's end, without the socket: messages to bytes and back. Owns the pixel folder,
    which is removed by `close`. The folder is locked while its owner lives; unlocked ones, which
    their owners left behind, are removed when a new one is made."""

    def __init__(self) -> None:
        parent = _pixel_parent(Path("/dev/shm"))
        for stale in parent.glob(f"{FOLDER_PREFIX}*"):
            _remove_unlocked(stale)
        made = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=parent))
        self._lock = _open_folder(made)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = made.rename(parent / made.name.replace(NEW_PREFIX, FOLDER_PREFIX))
        self._names = itertools.count()
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def stage(self, requests: Sequence[EngineRequest]) -> Staged:
        """Write the requests' arrays, each once, and make the frame of their `Submit`. Any thread
        may call it. Raises `Refused` (overloaded) where there is no room for the arrays."""
        files: list[Path] = []
        written: dict[int, tuple[str, str, tuple[int, ...]]] = {}

        def write(value: object) -> tuple[str, str, tuple[int, ...]]:
            if id(value) not in written:
                array = np.asarray(value)
                file = self.folder / f"{next(self._names)}.raw"
                files.append(file)
                array.tofile(file)
                written[id(value)] = (file.name, array.dtype.str, array.shape)
            return written[id(value)]

        encoder = msgspec.msgpack.Encoder(enc_hook=write)
        bare = [msgspec.structs.replace(r, images=[]) for r in requests]
        try:
            body = encoder.encode(Submit(requests=list(requests)))
        except OSError as error:
            Staged(requests=bare, frame=b"", files=files).discard()
            raise Refused(_no_room(self.folder, error)) from error
        if len(body) > MAX_FRAME:  # the engine would refuse it and end
            Staged(requests=bare, frame=b"", files=files).discard()
            raise Refused.because(
                where="body",
                saw=f"{len(requests)} choices that make a message of {len(body)} bytes",
                rule=f"a request's choices together are at most {MAX_FRAME} bytes",
                change="ask for fewer choices or send shorter prompts",
            )
        return Staged(requests=bare, frame=frame(body), files=files)

    def encode(self, message: Start | Abort) -> bytes:
        """One frame."""
        return frame(self._encoder.encode(message))

    def feed(self, data: bytes) -> list[FromEngine]:
        """The messages that `data` completes."""
        self._buffer += data
        return [self._decoder.decode(body) for body in cut_frames(self._buffer)]

    def close(self) -> None:
        """Remove the folder and whatever the engine did not take."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _pixel_parent(shared: Path) -> Path:
    """Where the pixel folder is made: `shared` if it can hold some photographs, else the temporary
    folder, with a warning where it is too small."""
    other = Path(tempfile.gettempdir())
    if not (shared.is_dir() and os.access(shared, os.W_OK)):  # no Linux
        return other
    size = shutil.disk_usage(shared).total
    if size >= LEAST_SHARED:
        return shared
    log.warning(
        "%s holds %d MiB, less than the %d MiB that pictures in flight may take: they go through "
        "%s (in a container: --shm-size)",
        *(shared, size >> 20, LEAST_SHARED >> 20, other),
    )
    return other


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def _remove_unlocked(folder: Path) -> None:
    try:
        lock = _open_folder(folder)
    except OSError:  # another user's, or gone meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # its owner lives
        pass
    finally:
        os.close(lock)


def _no_room(folder: Path, error: OSError) -> Finding:
    return Finding(
        where="images",
        saw=f"pictures that do not fit beside those in flight ({error})",
        rule=f"decoded pictures of queued requests fit in {folder.parent}",
        change="try again later, send fewer or smaller pictures, or give the server more memory",
        code="overloaded",
    )
