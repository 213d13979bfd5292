"""The one door of a step's numbers to the device and of its tokens back: arrays joined in a pinned
buffer and sent by one copy that waits for nothing, tokens fetched behind an event. Owns the buffers
and the events, which serve step after step; knows nothing of what the numbers mean."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Parts begin at such borders, which suits every kernel's loads.
ALIGN_BYTES = 64
# Buffers in turn: one that is filled, one on its way, one of the step before that.
DEPTH = 3
SMALLEST_BYTES = 1 << 20
SMALLEST_ROWS = 256
DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def aligned(size: int) -> int:
    """Bytes from one part to the next."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(slots=True)
class _Host:
    """Host memory, free (or filled) once `done` has happened. `head`: as much as travelled last."""

    tensor: Tensor
    array: np.ndarray
    done: torch.cuda.Event | None
    head: Tensor

    def first(self, size: int) -> Tensor:
        if len(self.head) != size:
            self.head = self.tensor[:size]
        return self.head


class Door:
    """Makes parcels and fetches tokens. `copies`: how many parcels were sent, each by one
    host-to-device copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copies = 0
        self._pinned = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None  # of the last parcel
        self._buffers = [self._host(SMALLEST_BYTES, torch.uint8) for _ in range(DEPTH)]
        # rows of nobody; whoever does not come back for his keeps them from the others
        self._rows: list[_Host] = []
        self._into: tuple[Tensor, Tensor] | None = None  # a fixed address and its head

    def parcel(self) -> "Parcel":
        return Parcel(self)

    def _host(self, size: int, dtype: torch.dtype) -> _Host:
        tensor = torch.empty(size, dtype=dtype, pin_memory=self._pinned)
        event = torch.cuda.Event() if self._pinned else None
        return _Host(tensor, tensor.numpy(), event, tensor)

    def send(self, parts: list[tuple[int, np.ndarray]], size: int, out: Tensor | None) -> Tensor:
        """uint8 on the device, each part at its offset: in `out`, or in new memory where there is
        none or it is too short; then it has what it holds of it all the same."""
        at = self.copies % DEPTH
        self.copies += 1
        buffer = self._buffers[at]
        if buffer.done is not None:
            buffer.done.synchronize()  # of DEPTH steps ago: it has happened
        if len(buffer.array) < size:
            buffer = self._buffers[at] = self._host(1 << (size - 1).bit_length(), torch.uint8)
        array = buffer.array
        for offset, part in parts:
            array[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
        if out is None or len(out) < size:
            flat = head = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            flat, head = out, self._head(out, size)
        head.copy_(buffer.first(size), non_blocking=True)
        if buffer.done is not None:
            self._stream = torch.cuda.current_stream(self.device)
            buffer.done.record(self._stream)
        if out is not None and flat is not out:
            out.copy_(flat[: len(out)])
        return flat

    def _head(self, out: Tensor, size: int) -> Tensor:
        """The first `size` bytes: of the same memory as a rule, and as many."""
        into = self._into
        if into is None or into[0] is not out or len(into[1]) != size:
            into = self._into = out, out[:size]
        return into[1]

    def fetch(self, tokens: Tensor) -> "Fetching":
        """Start the copy of `tokens` (int64 [S], made by the step whose parcel was sent last) to
        the host, before anything that overwrites them. What was copied from the device before is
        on the host as well when they are."""
        count = len(tokens)
        rows = self._rows.pop() if self._rows else None
        if rows is None or len(rows.array) < count:
            rows = self._host(max(SMALLEST_ROWS, 1 << (count - 1).bit_length()), torch.int64)
        rows.first(count).copy_(tokens, non_blocking=True)
        if rows.done is not None:
            rows.done.record(self._stream)
        return Fetching(rows, self._rows)


class Fetching:
    """Tokens on their way to the host. Its rows are its own until it is read; a launch that fails
    behind it takes them along."""

    def __init__(self, rows: _Host, free: list[_Host]):
        self._rows, self._free = rows, free

    def __len__(self) -> int:
        return len(self._rows.head)

    def read(self) -> np.ndarray:
        """Wait for them and for nothing after them: int64 [S], the caller's. Once."""
        rows = self._rows
        if rows.done is not None:
            rows.done.synchronize()
        tokens = rows.array[: len(rows.head)].copy()
        self._free.append(rows)
        del self._rows  # somebody else's from now on
        return tokens


class Parcel:
    """Arrays on their way. Equal shapes added in equal order lie at equal offsets; bytes (uint8)
    are somebody's own layout."""

    def __init__(self, door: Door):
        self._door = door
        self._parts: list[tuple[int, np.ndarray]] = []
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """The ticket with which the array is fetched after `send`."""
        assert array.dtype in DTYPES or array.dtype == np.uint8, array.dtype
        self._parts.append((self._size, np.ascontiguousarray(array)))
        self._size += aligned(array.nbytes)
        return len(self._parts) - 1

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._size

    def send(self, out: Tensor | None = None) -> "Received":
        """`out`: uint8 on the device, where the parcel's head, as much as there is room for, is
        wanted at a fixed address."""
        parts = self._parts
        shapes = [(at, p.dtype, p.shape) for at, p in parts]
        return Received(self._door.send(parts, self._size, out), shapes)


class Received:
    """A parcel on the device; call it with a ticket."""

    def __init__(self, flat: Tensor, shapes: list[tuple[int, np.dtype, tuple[int, ...]]]):
        self._flat = flat
        self._shapes = shapes

    def __call__(self, ticket: int) -> Tensor:
        offset, dtype, shape = self._shapes[ticket]
        size = dtype.itemsize
        for n in shape:
            size *= n
        return self._flat[offset : offset + size].view(DTYPES[dtype]).view(shape)
