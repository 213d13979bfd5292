"""Faults to find, planted in a process of tests and nowhere else:

    vitrail nightly --suite soak -- -p tests.nightly.plant --plant=leak

A plugin of pytest: it patches the package as it is imported there, before the first test is. The
package knows nothing of it."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

KEPT: list[bytearray] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", choices=sorted(PLANTS), help="the fault that this process has")


def pytest_sessionstart(session: pytest.Session) -> None:
    """After the suite's own switches, before test modules import what is patched."""
    PLANTS[session.config.getoption("--plant")]()


def tile() -> None:
    """The loader's rows of FlashAttention-4's tiles, rounded down: 64 keys to 128 threads."""
    from types import MappingProxyType

    from vitrail.attention import plan

    backend = plan.KERNEL_BACKENDS["fa4"]

    def rounded_down(f):
        c = backend.choose(f)
        rows = c.tile_n // c.loader_threads if c.loader_threads else c.rows_per_thread
        return c._replace(rows_per_thread=rows)

    faulty = backend._replace(choose=rounded_down)
    plan.KERNEL_BACKENDS = MappingProxyType({**plan.KERNEL_BACKENDS, "fa4": faulty})


def leak() -> None:
    """64 KiB kept of every step."""
    from vitrail.engine.engine import Engine

    step = Engine.step

    def leaky_step(self):
        KEPT.append(bytearray(b"x" * (64 << 10)))
        return step(self)

    Engine.step = leaky_step


def slow() -> None:
    """20 ms more for every schedule."""
    from vitrail.engine.scheduler import Scheduler

    schedule = Scheduler.schedule

    def slow_schedule(self):
        time.sleep(0.02)
        return schedule(self)

    Scheduler.schedule = slow_schedule


def hang() -> None:
    """A step that waits for a process, in a session of its own, that never ends."""
    from vitrail.engine.runner import Runner

    def launch(self, plan, inputs):
        forever = [sys.executable, "-c", "import time; time.sleep(100000)"]
        subprocess.run(forever, start_new_session=True)

    Runner.launch = launch


def rope() -> None:
    """Positions turn half as fast again as they should."""
    from vitrail.ops.rope import naive

    frequencies = naive._frequencies
    naive._frequencies = lambda *args: frequencies(*args) * 1.5


def weight() -> None:
    """One tensor of every checkpoint has another name."""
    from dataclasses import replace

    from vitrail.weights import headers

    read = headers.read

    def renamed(*args):
        found = read(*args)
        tensors = dict(found.tensors)
        tensors["planted.renamed.weight"] = tensors.pop(sorted(tensors)[0])
        return replace(found, tensors=tensors)

    headers.read = renamed


PLANTS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (tile, leak, slow, hang, rope, weight)
}
