"""Workers of one run take turns where they must: a test marked `alone` runs while no other worker
runs any. `scripts/check` has a worker a core; a plain pytest has none and needs no turns."""

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Locks on what is there anyway. Who waits for the room holds the door, so that nobody else comes
# in meanwhile: those who share the room would keep it for ever.
DOOR, ROOM = Path(__file__).parent, Path(__file__)
MOST = 4  # workers: each takes 1 to 2 GB


@contextmanager
def locking(path: Path) -> Iterator[int]:
    """A descriptor that may be locked. Unlocked by word, since a process that a test forked has it
    too."""
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outside the time limit's hook: a wait is nobody's time."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with locking(ROOM) as room:
        with locking(DOOR) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if is_alone(item) else fcntl.LOCK_SH)
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who is alone comes last, when others have least to wait for."""
    items.sort(key=is_alone)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A worker a core; none where a GPU is, whose memory tests measure."""
    import torch

    cores = min(MOST, os.cpu_count() or 1)
    return 0 if cores == 1 or torch.cuda.is_available() else cores


def is_alone(item: pytest.Item) -> bool:
    """It measures the machine, its clock or its memory; or says by its minutes of the night how
    long it takes on a quiet one."""
    return any(item.get_closest_marker(mark) for mark in ("alone", "nightly"))
