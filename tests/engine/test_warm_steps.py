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
from vitrail.check.steps import shortened
from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine import build, warm_steps
from vitrail.engine.placement import placed
from vitrail.engine.warm_steps import Ahead, Steps, begin, run_steps
from vitrail.models.assets import load_assets
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


def test_one_that_ends_before_it_is_asked_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A pipe without a reader is no reason not to serve."""
    whole = subprocess.Popen

    def gone(command: list[str], **options: int) -> subprocess.Popen[bytes]:
        process = whole([command[0], "-c", "raise SystemExit(3)"], **options)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", gone)
    ahead = Ahead(running=[warm_steps._start(CONFIG, [1, 2])])
    ahead.finish()
    assert "a process for them ended (3)" in caplog.text


def test_a_start_that_is_refused_leaves_none_behind():
    """Each holds memory of the GPU, which the next start would miss."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(Refused), Ahead(running=[process]):
        raise Refused([])
    assert process.poll() is not None


def test_a_refused_stage_of_a_start_ends_them(monkeypatch: pytest.MonkeyPatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(build, "begin", lambda *_: Ahead(running=[process]))
    checkpoint = open_checkpoint(CONFIG.model)
    monkeypatch.setattr(build, "load_weights", _refuse)
    with pytest.raises(Refused, match="a stage"):
        build.build_engine(CONFIG, checkpoint, load_assets(checkpoint).processor)
    assert process.poll() is not None


def _refuse(*_: object) -> None:
    raise Refused(Finding(where="a stage", saw="this", rule="that", change="nothing"))
