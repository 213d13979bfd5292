"""The door: arrays arrive as they were sent, at the same offsets for equal shapes; tokens come back
as they were, however late a device does what it was given."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.engine import parcel
from vitrail.engine.parcel import ALIGN_BYTES, DEPTH, Door, Fetching

CPU = torch.device("cpu")


def arrays(seed: int) -> list[np.ndarray]:
    r = np.random.default_rng(seed)
    return [
        r.integers(0, 99, (3, 5)).astype(np.int32),
        r.random((2, 7)),
        np.zeros(0, dtype=np.int64),
        r.integers(0, 1 << 40, 9)[::2],  # not contiguous
        r.random(3).astype(np.float32),
    ]


def test_arrays_arrive_as_they_were_sent():
    door = Door(CPU)
    for step in range(2 * DEPTH):
        sent, given = door.parcel(), arrays(step)
        tickets = [sent.add(a) for a in given]
        got = sent.send()
        for ticket, array in zip(tickets, given, strict=True):
            t = got(ticket)
            assert t.numpy().dtype == array.dtype
            assert np.array_equal(t.numpy(), array)
            assert t.data_ptr() % ALIGN_BYTES == got(tickets[0]).data_ptr() % ALIGN_BYTES
    assert door.copies == 2 * DEPTH


def test_a_head_is_at_a_fixed_address_whatever_follows_it():
    """Also where the whole is longer than the memory there."""
    door, fixed = Door(CPU), torch.zeros(4096, dtype=torch.uint8)
    head = None
    for step, behind in enumerate((0, 10, 100_000)):
        sent = door.parcel()
        ticket = sent.add(np.arange(10) + step)
        tail = sent.add(np.full(behind, step, dtype=np.int32))
        got = sent.send(fixed)
        head = got(ticket) if head is None else head
        assert head.tolist() == (np.arange(10) + step).tolist()
        assert got(ticket).tolist() == head.tolist()
        assert got(tail).tolist() == [step] * behind


def test_an_empty_parcel_is_sent():
    sent = Door(CPU).parcel()
    ticket = sent.add(np.zeros((0, 3), dtype=np.int32))
    assert sent.send()(ticket).shape == (0, 3)


class Late(TorchDispatchMode):
    """A device that copies when somebody waits for it, and no sooner: one stream of copies in
    order, and how often host memory and events were made."""

    def __init__(self):
        super().__init__()
        self.given: list[Callable[[], Any]] = []
        self.made = 0
        late = self

        class Event:
            def __init__(self):
                late.made += 1
                self.mark = 0

            def record(self, stream: object) -> None:
                assert stream in ("stream", None)
                self.mark = len(late.given)

            def synchronize(self) -> None:
                late.run(self.mark)

        def empty(size: int, *, dtype: torch.dtype, **where: Any) -> torch.Tensor:
            self.made += "pin_memory" in where
            return torch.zeros(size, dtype=dtype)

        self.torch = SimpleNamespace(
            cuda=SimpleNamespace(Event=Event, current_stream=lambda _: "stream"),
            empty=empty,
            uint8=torch.uint8,
            int64=torch.int64,
        )
        self.ran, self.at_work = 0, False

    def run(self, mark: int) -> None:
        self.at_work = True
        for i in range(self.ran, mark):
            self.given[i]()
        self.ran, self.at_work = max(self.ran, mark), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not self.at_work:
            self.given.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    made = Late()
    monkeypatch.setattr(parcel, "torch", made.torch)
    return made


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_nothing_under_way_is_written_over(late: Late, ahead: int):
    """Steps of changing sizes, `ahead` of them launched before the first is read: each token is of
    its own step's numbers, though the device works only when it is waited for."""
    random, fixed = np.random.default_rng(ahead), torch.zeros(1 << 12, dtype=torch.uint8)
    tokens, flights = torch.zeros(300, dtype=torch.int64), deque[tuple[Fetching, np.ndarray]]()
    with late:
        door = Door(torch.device("cuda"))
        for step in range(40):
            sent, ids = door.parcel(), random.integers(0, 1 << 40, random.integers(1, 300))
            ticket = sent.add(ids)
            got = sent.send(fixed)
            tokens[: len(ids)].copy_(got(ticket))
            flights.append((door.fetch(tokens[: len(ids)]), ids))
            while len(flights) > ahead or (step == 39 and flights):
                fetched, want = flights.popleft()
                assert fetched.read().tolist() == want.tolist(), step
    assert door.copies == 40


def test_steps_share_their_memory_and_events(late: Late):
    """Two in flight: what the first steps made serves all that follow. Tokens that were read are
    the reader's; those of a launch that nobody reads are nobody else's."""
    with late:
        door = Door(torch.device("cuda"))

        def launch(step: int) -> Fetching:
            sent = door.parcel()
            ticket = sent.add(np.full(7, step))
            return door.fetch(sent.send()(ticket))

        lost, before, read = launch(-1), launch(0), list[np.ndarray]()
        once = launch(1)
        once.read()
        with pytest.raises(AttributeError):  # they may be another's by now
            once.read()
        made = late.made
        for step in range(2, 30):
            after = launch(step)
            read.append(before.read())
            before = after
        assert late.made == made
        assert [r.tolist() for r in read] == [[n] * 7 for n in (0, *range(2, 29))]
        assert lost.read().tolist() == [-1] * 7
