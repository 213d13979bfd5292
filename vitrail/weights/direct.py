"""Reads whose bytes are a parameter's bytes: same type, one run in the file, one run in the
parameter. Threads read them with `preadv`, in segments of the files' order: on a CPU into the
parameters themselves, on a GPU into pinned buffers, from which the device copies while the next
segment is read. Knows no names of models and decides nothing."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Shaped
from torch import Tensor

from vitrail.config.finding import Refused
from vitrail.weights.headers import TensorHeader
from vitrail.weights.mapping import Box, extents, numel
from vitrail.weights.plan import Read
from vitrail.weights.sharding import Shape

SEGMENT_BYTES = 8 << 20
MAX_THREADS = (
    8  # with 16 an H200's host loads a fifth slower: they wait for the driver and for Python
)
MAX_VECTORS = 512  # buffers of one call, below every system's limit


class Span(NamedTuple):
    """`target`, uint8 of one dim, is filled by the bytes of `file` from `start` on."""

    file: str
    start: int
    target: Tensor
    name: str


def span_of(read: Read, header: TensorHeader, parameter: Shaped[Tensor, "..."]) -> Span | None:
    """The read as a run of bytes; None where it is not one, or casts, or reorders."""
    if str(parameter.dtype) != f"torch.{header.dtype}" or not parameter.is_contiguous():
        return None
    if read.order != tuple(range(len(read.order))):
        return None
    source = _run(read.view or header.shape, read.source)
    target = _run(tuple(parameter.shape), read.target)
    count = numel(extents(read.target))
    if source is None or target is None or count == 0:
        return None
    flat = parameter.view(-1)[target : target + count].view(torch.uint8)
    start = header.start + source * parameter.element_size()
    return Span(read.file, start, flat, read.tensor)


def _run(shape: Shape, box: Box) -> int | None:
    """Where a box's elements begin in a row-major tensor, if they follow one another."""
    at, stride, is_cut = 0, 1, False
    for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
        if is_cut and stop - start != 1:
            return None
        at += start * stride
        stride *= size
        is_cut = is_cut or stop - start != size
    return at


@dataclass(slots=True)
class Segment:
    """One run of bytes in a file, as long as one buffer at most, and what it fills, in order."""

    file: str
    start: int
    name: str
    num_bytes: int = 0
    targets: list[Tensor] = field(default_factory=list[Tensor])


def segments(spans: Sequence[Span], limit: int) -> list[Segment]:
    """The spans in the order of the files, cut at `limit` bytes and joined where they touch."""
    made: list[Segment] = []
    for span in sorted(spans, key=lambda s: (s.file, s.start)):
        at, left = span.start, span.target
        while left.numel():
            last = made[-1] if made else None
            joins = last is not None and (last.file, last.start + last.num_bytes) == (span.file, at)
            if last is None or not joins or last.num_bytes == limit:
                last = Segment(span.file, at, span.name)
                made.append(last)
            part = left[: limit - last.num_bytes]
            last.targets.append(part)
            last.num_bytes += part.numel()
            at, left = at + part.numel(), left[part.numel() :]
    return made


def fill(
    spans: Sequence[Span],
    folder: Path,
    device: torch.device,
    threads: int | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> Iterator[tuple[int, str]]:
    """Fill every span's target, yielding (bytes, tensor) of each segment that is there. At the end
    all of them are. Raises `Refused` for a file that ends before its tensors do."""
    listed = segments(spans, segment_bytes)
    if threads is None:
        threads = min(MAX_THREADS, os.cpu_count() or 1, max(1, len(listed)))
    todo, done = iter(listed), SimpleQueue[Segment | None]()
    failed = threading.Event()
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / name).open("rb", buffering=0)).fileno()
            for name in sorted({segment.file for segment in listed})
        }

        def work() -> None:
            try:
                lane = _PinnedLane(device, segment_bytes) if device.type == "cuda" else _HostLane()
                for segment in todo:  # each goes to one thread: the iterator is shared
                    if failed.is_set():
                        break
                    lane.run(segment, files[segment.file])
                    done.put(segment)
                lane.finish()
            except BaseException:
                failed.set()
                raise
            finally:
                done.put(None)

        if device.type == "cuda":  # what is queued for the parameters' memory comes first
            torch.cuda.current_stream(device).synchronize()
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="weights"))
        workers = [pool.submit(work) for _ in range(threads)]
        try:
            for _ in workers:
                while (segment := done.get()) is not None:
                    yield segment.num_bytes, segment.name
            for worker in workers:
                worker.result()
        finally:  # whoever stops listening stops the threads
            failed.set()


class _HostLane:
    """Parameters in host memory are read into."""

    def run(self, segment: Segment, file: int) -> None:
        views = [_bytes_of(target) for target in segment.targets]
        _read(file, views, segment.start, segment)

    def finish(self) -> None:
        """Nothing is on its way."""


class _PinnedLane:
    """One thread's two pinned buffers, and its stream. While one buffer is copied from, the other
    is read into."""

    def __init__(self, device: torch.device, num_bytes: int):
        self._stream = torch.cuda.Stream(device)
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._views = [_bytes_of(buffer) for buffer in self._buffers]
        self._free = [torch.cuda.Event() for _ in range(2)]  # a new event is not waited for
        self._next = 0

    def run(self, segment: Segment, file: int) -> None:
        number, self._next = self._next, 1 - self._next
        self._free[number].synchronize()
        _read(file, [self._views[number][: segment.num_bytes]], segment.start, segment)
        at = 0
        with torch.cuda.stream(self._stream):
            for target in segment.targets:
                part = self._buffers[number][at : at + target.numel()]
                target.copy_(part, non_blocking=True)
                at += target.numel()
            self._free[number].record()

    def finish(self) -> None:
        """Wait for the copies."""
        self._stream.synchronize()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.numpy()))


def _read(file: int, views: list[memoryview], at: int, segment: Segment) -> None:
    """Fill all views from byte `at` of the file on."""
    while views:
        count = os.preadv(file, views[:MAX_VECTORS], at)
        if count == 0:
            missing = sum(len(view) for view in views)
            raise Refused.because(
                where=f"{segment.file}: {segment.name}",
                saw=f"the file ends at byte {at}, {missing} bytes before this part of it",
                rule="a file does not change while it is read",
                change="copy or download it again, and start when that is done",
                code="wrong_file_size",
            )
        at += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
