"""The door: arrays arrive as they were sent, at the same offsets for equal shapes."""

import numpy as np
import torch

from vitrail.engine.parcel import ALIGN_BYTES, DEPTH, Door

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
