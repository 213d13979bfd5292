"""`bench/step_timeline.py`: a step cut from its events, and the script from start to end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import step_timeline

    return step_timeline


def test_what_overlaps_is_counted_once(bench):
    """Five steps of a copy and two kernels, the second of which begins before the first ends; one
    step has a launch more and is left out."""
    step = (("HtoD", 0, 2), ("first", 5, 15), ("second", 10, 18))
    events = [
        bench.Event(name, 20.0 * i + start, 20.0 * i + end)
        for i in range(5)
        for name, start, end in (*step, *([("more", 18, 19)] if i == 2 else []))
    ]
    steps = bench.cut(events)
    assert len(steps) == 3, "the third is another's, the last has no end"
    lines = [bench.Line(steps, at) for at in range(3)]
    assert [line.start for line in lines] == [0, 5, 10]
    assert [line.took for line in lines] == [2, 10, 8]
    assert [line.gap for line in lines] == [0, 3, -5]
    assert [line.added for line in lines] == [2, 10, 3]
    assert bench.cut([]) == []


def test_it_runs_on_a_cpu():
    run = subprocess.run(
        [sys.executable, ROOT / "bench/step_timeline.py", "--tiny", "--rows", "2,8,8,8"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for name in ("tiles", "rows 2,8,8,8"):
        assert f"{name}: decode 1: " in run.stdout
        assert f"{name}: host a step schedule" in run.stdout
    assert run.stdout.count("tokens as the first's 1.000") == 2
    assert "no GPU to profile" in run.stdout
