"""How long a step of the demo model takes beside a yardstick, whole and by stage. Nothing is
judged here: the night holds the measures against those of an earlier one
(`vitrail/nightly/speed.py`)."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nightly import steps

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.suite("speed", minutes=1, owner="engine", statistical=True),
]


def test_steps_of_the_demo_model(record_property: Callable[[str, str], None]):
    words = [sys.executable, "-m", steps.__name__]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logs = json.loads(done.stdout)
    assert set(logs) == {
        *("Engine.step", "Scheduler.schedule", "Runner.launch", "Scheduler.absorb")
    }
    for name, values in logs.items():
        assert len(values) == steps.TURNS
        record_property(f"measure demo, cpu: {name}", json.dumps(values))
