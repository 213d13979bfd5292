"""The one door of a step's numbers to the device: arrays joined in a pinned buffer and sent by one
copy that waits for nothing. Owns the buffers; knows nothing of what the arrays mean."""

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
class _Buffer:
    """Host memory that may be written once `copied` has happened."""

    tensor: Tensor
    array: np.ndarray
    copied: torch.cuda.Event | None


class Door:
    """Makes parcels. `copies`: how many were sent, each by one host-to-device copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copies = 0
        self._pinned = device.type == "cuda"
        self._buffers = [self._buffer(SMALLEST_BYTES) for _ in range(DEPTH)]

    def parcel(self) -> "Parcel":
        return Parcel(self)

    def _buffer(self, size: int) -> _Buffer:
        tensor = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        event = torch.cuda.Event() if self._pinned else None
        return _Buffer(tensor, tensor.numpy(), event)

    def send(self, parts: list[tuple[int, np.ndarray]], size: int, out: Tensor | None) -> Tensor:
        """uint8 on the device, each part at its offset: in `out`, or in new memory where there is
        none or it is too short; then it has what it holds of it all the same."""
        at = self.copies % DEPTH
        self.copies += 1
        buffer = self._buffers[at]
        if buffer.copied is not None:
            buffer.copied.synchronize()  # of DEPTH steps ago: it has happened
        if len(buffer.array) < size:
            buffer = self._buffers[at] = self._buffer(1 << (size - 1).bit_length())
        array = buffer.array
        for offset, part in parts:
            array[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
        short = out is not None and len(out) < size
        if out is None or short:
            flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            flat = out
        flat[:size].copy_(buffer.tensor[:size], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        if out is not None and short:
            out.copy_(flat[: len(out)])
        return flat


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
