"""Does anything of the engine grow? By equal rounds, which tell in seconds, or by `bench/churn.py`
for minutes. Where memory grew, the line is named that most of what Python kept was made on."""

import gc
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import vitrail
from bench import churn
from vitrail import LLM
from vitrail.cli import DEMO
from vitrail.engine.request import EngineRequest

ROOT = Path(__file__).parents[2]
REQUESTS, WARM_UP, ROUNDS = 3, 1, 4
# Of a healthy engine: below 0.1 KiB, and 2 objects (setups of rows, which the recorder bounds).
LIMITS = {"KiB in use": 1.0, "objects": 8.0}  # a step
GREW = 3  # exit code
Sample = dict[str, float]


class Rounds:
    """An engine with caches too small for the work of a round: the same requests every time,
    pictures, aborts and preemptions among them, from idle to idle. Nothing in it goes by the clock,
    so a round ends with what the one before it ended with, but for what is kept."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.llm = LLM(
            DEMO,
            device="cpu",
            max_running=2,
            max_model_len=192,
            kv_cache_bytes=3 << 17,
            encoder_cache_bytes=1 << 16,
        )
        self.steps = 0

    def work(self) -> Sample:
        """One round; what the process holds after it."""
        engine, rng = self.llm.engine, random.Random(0)
        source, live, started, self.steps = churn.requests(self.llm, rng), set[str](), 0, 0
        while started < REQUESTS or live:
            while started < REQUESTS and len(live) < self.llm.config.max_running:
                request: EngineRequest = next(source)
                engine.add(request)
                live.add(request.id)
                started += 1
            for output in engine.step():
                assert output.error is None, output.error
                if output.finish_reason is not None:
                    live.discard(output.request_id)
            self.steps += 1
            if live and rng.random() < 0.05:
                engine.abort(victim := rng.choice(sorted(live)))
                live.remove(victim)
        while not engine.idle:
            engine.step()
        engine.scheduler.check()
        assert engine.scheduler.cache_usage().running_pages == 0
        gc.collect()
        in_use = churn.memory_mb()["in use"] * 1e6 / 1024
        return {"KiB in use": in_use, "objects": float(sys.getallocatedblocks())}


def soak_by_rounds() -> None:
    """In a process of its own, which holds what a server's does: in this one tensors' signatures
    are checked at every call. Raises AssertionError where memory grew."""
    words = [sys.executable, "-m", "tests.nightly.soak"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    if done.returncode == GREW:
        raise AssertionError(done.stdout.splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"the soak's process: {done.stderr.strip().splitlines()[-1]}")


def main() -> int:
    """What `soak_by_rounds` runs: its last line says what grew."""
    rounds = Rounds()
    for _ in range(WARM_UP):
        rounds.work()
    samples: list[Sample] = []
    for _ in range(ROUNDS):
        samples.append(rounds.work())
        print(rounds.steps, "steps", samples[-1], rounds.llm.engine.stats(), flush=True)
    said = grown(samples, rounds.steps)
    if said:
        print(f"memory grew, kept by {keeper(rounds)}; {said}")
    return GREW if said else 0


def grown(samples: Sequence[Sample], steps: int) -> str:
    """What grew, "" if nothing did. `samples`: after each of some equal rounds of `steps` steps.
    It grew where even the round that added least added more than the limit: what is kept is kept
    by every round, what the machine or an allocator does is not."""
    said: list[str] = []
    for kind, limit in LIMITS.items():
        values = [sample[kind] for sample in samples]
        added = [(b - a) / steps for a, b in zip(values, values[1:], strict=False)]
        if min(added) > limit:
            said.append(
                f"{kind} {values[0]:.0f} -> {values[-1]:.0f}: "
                f"{min(added):.1f} to {max(added):.1f} more a step, limit {limit:.0f}"
            )
    return ", ".join(said)


def soak(minutes: float, **flags: int) -> None:
    """`bench/churn.py` with its flags. Raises AssertionError where memory grew."""
    samples: list[Sample] = []
    report, grew = churn.report_growth, False

    def reported(found: list[Sample]) -> int:
        nonlocal grew
        samples.extend(found)
        grew = len(found) >= 4 and bool(report(found))
        return 0

    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(churn, "report_growth", reported)
        patch.setattr(sys, "argv", ["churn.py", f"--minutes={minutes}", *given])
        churn.main()
    assert samples, "too slow a machine: not one sample"
    if grew:
        ends = (samples[len(samples) // 4], samples[-1])
        said = (f"{kind} {ends[0][kind]:.0f} -> {ends[1][kind]:.0f} MB" for kind in ends[0])
        raise AssertionError(f"memory grew, kept by {keeper(Rounds())}; {', '.join(said)}")


def keeper(rounds: Rounds) -> str:
    """Under tracemalloc, two rounds more: where most was made in the second that is still there."""
    tracemalloc.start()
    rounds.work()
    before = tracemalloc.take_snapshot()
    rounds.work()
    kept = tracemalloc.take_snapshot().compare_to(before, "lineno")
    tracemalloc.stop()
    package = Path(vitrail.__file__).parents[1]  # it may be installed elsewhere
    for grew in (k for k in kept if k.size_diff > 0):
        at, path = grew.traceback[0], Path(grew.traceback[0].filename)
        for root in (ROOT, package):
            if path.is_relative_to(root) and "site-packages" not in path.relative_to(root).parts:
                return f"{path.relative_to(root)}:{at.lineno} ({grew.size_diff / 1e6:.1f} MB)"
    return "nothing of Python's"


if __name__ == "__main__":
    sys.exit(main())
