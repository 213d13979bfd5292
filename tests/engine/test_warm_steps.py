"""Compilers beside a start: every model's steps run in them, nothing is started where nothing is
compiled, and what fails or hangs in them costs time alone."""

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.models.cases import CASES
from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.engine.placement import placed
from vitrail.engine.warm_steps import Ahead, Steps, begin, run_steps, shortened
from vitrail.models.checkpoint import open_checkpoint

CONFIG = EngineConfig(model=str(DEMO), device="cpu")


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "folders" not in n])
def test_steps_of_every_model_run_with_a_layer_of_each_kind(name: str, tmp_path: Path):
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    config = EngineConfig(model=str(tmp_path), device="cpu")
    checkpoint = open_checkpoint(str(tmp_path))
    whole = placed(config, checkpoint).shapes.model
    small = shortened(whole)
    assert small.text.num_layers <= 2 < whole.text.num_layers or whole.text.moe is not None
    if whole.text.moe is not None:
        both = min(whole.text.num_layers, whole.text.moe.first_moe_layer + 1)
        assert small.text.num_layers == both
    run_steps(config, checkpoint, [1, 4, 24])


def test_nothing_is_started_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    ahead = begin(CONFIG, open_checkpoint(str(DEMO)))
    ahead.finish()
    ahead.note()


def test_the_process_takes_a_configuration_and_sizes():
    command = [sys.executable, "-m", "vitrail.engine.warm_steps"]
    config = {"model": str(DEMO), "device": "cpu", "max_model_len": None, "prefix_cache": True}
    steps = msgspec.json.encode(Steps(config=config, sizes=[2, 3]))
    done = subprocess.run(command, input=steps, capture_output=True, text=False)
    assert done.returncode == 0, done.stderr


def test_what_fails_or_hangs_costs_time_alone(caplog: pytest.LogCaptureFixture):
    ends = ("pass", "raise SystemExit(3)", "import time; time.sleep(60)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in ends]
    began = time.monotonic()
    ahead = Ahead()
    ahead.add(processes)
    ahead.finish(seconds=2)
    assert time.monotonic() - began < 10
    assert [p.returncode for p in processes] == [0, 3, -9]
    assert len([r for r in caplog.records if "a process for them ended" in r.message]) == 2
