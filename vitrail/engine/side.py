"""The stream that pictures are encoded on, beside the one that steps run on, and what orders the
two. On a CPU there is none, and what is launched is done."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false

from collections import deque
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class _UnderWay(NamedTuple):
    step: int
    entries: frozenset[int]
    done: torch.cuda.Event


class SideStream:
    """What is allocated while encoding belongs to this stream and is used again on it alone, after
    `follow`: so an entry may be dropped while it is encoded, or read by a step that still runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[_UnderWay] = deque()
        self._before: torch.cuda.Event | None = None
        self.follow()

    def follow(self) -> None:
        """What is encoded from now on comes after all that the current stream has been given."""
        if self._stream is not None:
            self._before = torch.cuda.Event()
            self._before.record()

    @contextmanager
    def encoding(self, step: int, entries: Collection[int]) -> Generator[None]:
        """What is launched within encodes `entries`, in that step."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if self._before is not None:
                self._stream.wait_event(self._before)
            try:
                yield
            finally:
                done = torch.cuda.Event()
                done.record()
                self._under_way.append(_UnderWay(step, frozenset(entries), done))

    def wait(self, entries: Collection[int]) -> None:
        """What the current stream is given from now on reads `entries`."""
        for each in self._under_way:
            if not each.entries.isdisjoint(entries):
                torch.cuda.current_stream().wait_event(each.done)

    def done(self, launched: int) -> int:
        """The last step whose encodings, and those before, are done; of `launched` steps."""
        while self._under_way and self._under_way[0].done.query():
            self._under_way.popleft()
        return self._under_way[0].step - 1 if self._under_way else launched
