"""Capsules of failures on a CUDA device: of decode graphs, of a start, and of a fault that ends the
process; replayed and made small in processes of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitrail.repro.capsule import Capsule, read
from vitrail.repro.outcome import ABSENT, REPRODUCED, verdict
from vitrail.repro.shrink import shrink
from vitrail.repro.trial import Trials

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.suite("faults", minutes=4, owner="repro", gpus=1),
]
PLANTED_TRIAL = "tests.repro.planted_trial"


@pytest.mark.parametrize("name", ["rows", "address", "start"])
def test_a_failure_on_a_gpu_is_seen_again_and_made_small(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    for key, value in (("PLANTED", name), ("PYTHONPATH", path), ("VITRAIL_CAPSULES", tmp_path)):
        monkeypatch.setenv(key, str(value))
    command = [sys.executable, "-m", "tests.repro.planted_crash", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0, done.stdout
    found = sorted(tmp_path.glob("*.json"))
    assert found, done.stderr[-3000:]
    capsule = read(found[0])
    print(name, capsule.signature, len(capsule.steps), "steps", capsule.gpu)
    assert capsule.cc > 0
    with Trials(module=PLANTED_TRIAL) as trials:
        began = time.monotonic()
        outcome = trials.run(capsule, 120)
        print(f"first replay: {time.monotonic() - began:.1f} s", outcome)
        assert verdict(capsule, outcome)[0] == REPRODUCED
        until = time.monotonic() + 25

        def fails(candidate: Capsule) -> bool:
            return verdict(candidate, trials.run(candidate, 60))[0] == REPRODUCED

        made = shrink(capsule, fails, lambda: time.monotonic() < until)
    print(made.trials, "replays", f"{time.monotonic() - began:.1f} s", made.minimal)
    print([step.plan for step in made.capsule.steps], made.capsule.flags)
    if name == "rows":  # the others start a process for each trial
        assert len(made.capsule.steps) == 1
    monkeypatch.setenv("PLANTED", "nothing")
    with Trials(module=PLANTED_TRIAL) as trials:
        assert verdict(capsule, trials.run(capsule, 120))[0] == ABSENT
