"""What orders the stream of encodings and the one of the steps, on streams made of paper: logs that
are carried out one after another, in any order that events allow."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vitrail.engine import side
from vitrail.engine.side import SideStream


class Event:
    def __init__(self):
        self.happened = False

    def record(self):
        event, self.happened = self, False
        PAPER.current.log.append(("record", event))

    def query(self):
        return self.happened


class Stream:
    def __init__(self, device=None):
        self.log = []

    def wait_event(self, event):
        self.log.append(("wait", event))

    def run(self, most: int = 1000) -> list[str]:
        """Carry out what the events allow: the names of the work done."""
        done = []
        while self.log and most:
            kind, what = self.log[0]
            if kind == "wait" and not what.happened:
                break
            if kind == "record":
                what.happened = True
            elif kind == "work":
                done.append(what)
                most -= 1
            self.log.pop(0)
        return done


class Paper:
    def __init__(self):
        self.main = self.current = Stream()

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def work(self, name):
        self.current.log.append(("work", name))


PAPER = Paper()


@pytest.fixture
def paper(monkeypatch):
    global PAPER
    PAPER = Paper()
    cuda = SimpleNamespace(
        Stream=Stream, Event=Event, stream=PAPER.stream, current_stream=lambda: PAPER.current
    )
    monkeypatch.setattr(side, "torch", SimpleNamespace(cuda=cuda))
    return PAPER


def encode(made, step, *entries):
    with made.encoding(step, entries):
        PAPER.work(f"encode {step}")


def test_a_reader_waits_for_its_own_entries_alone(paper):
    made = SideStream(torch.device("cuda"))
    paper.main.run()
    encode(made, 4, 1, 2)
    paper.work("decode")
    encode(made, 5, 3)
    made.wait({2})
    paper.work("read 2")
    assert paper.main.run() == ["decode"]
    assert made.done(7) == 3
    assert made._stream.run(1) == ["encode 4"]
    made._stream.run(0)
    assert paper.main.run() == []  # its end is not recorded yet
    assert made._stream.run() == ["encode 5"]
    assert paper.main.run() == ["read 2"]
    assert made.done(7) == 7


def test_what_is_known_to_be_done_is_in_order(paper):
    made = SideStream(torch.device("cuda"))
    paper.main.run()
    for step in (1, 3):
        encode(made, step, step)
    assert made.done(6) == 0
    made._stream.run(1)
    made._stream.log.pop(0)[1].happened = True
    assert made.done(6) == 2
    made._stream.run()
    assert made.done(6) == 6
    made.wait({1, 3})
    assert not paper.main.log, "nobody waits for what is done"


def test_encodings_come_after_what_reads_the_memory_that_they_may_use_again(paper):
    made = SideStream(torch.device("cuda"))
    paper.main.run()
    paper.work("read")
    made.follow()
    paper.work("decode")
    encode(made, 1, 1)
    assert made._stream.run() == []
    assert paper.main.run(1) == ["read"]
    paper.main.run(0)
    paper.main.log.pop(0)[1].happened = True
    assert made._stream.run() == ["encode 1"], "and not after the decode"


def test_one_that_raises_is_waited_for_all_the_same(paper):
    made = SideStream(torch.device("cuda"))

    def half():
        with made.encoding(2, [5]):
            raise ValueError("pixels")

    with pytest.raises(ValueError, match="pixels"):
        half()
    assert made.done(2) == 1
    made.wait({5})
    assert paper.main.log[-1][0] == "wait"


def test_on_a_cpu_what_is_launched_is_done():
    made = SideStream(torch.device("cpu"))
    with made.encoding(3, [1]):
        pass
    made.wait({1})
    made.follow()
    assert made.done(3) == 3
