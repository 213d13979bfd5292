"""Decode steps that compilers' processes run: every model's, with a layer of each kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.check.step_cases import published
from tests.models.cases import CASES
from vitrail.attention.backends import kept
from vitrail.check.steps import shortened
from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.config.hardware import find
from vitrail.engine import warm_steps
from vitrail.engine.placement import Placed, placed
from vitrail.engine.warm_steps import missing_steps, run_steps
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


def test_nothing_is_missing_on_a_cpu():
    assert missing_steps(CONFIG, open_checkpoint(str(DEMO))) == (None, [])


@pytest.mark.parametrize(("total_gib", "parts"), [(139, 7), (80, 3), (48, 0), (24, 0)])
def test_the_processes_take_a_share_of_what_the_weights_leave(
    total_gib: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Kimi-VL-A3B's weights load meanwhile: a share of the whole GPU would not be free."""
    (tmp_path / "config.json").write_text(json.dumps(published()["kimi_vl_a3b"]))
    config, checkpoint = EngineConfig(model=str(tmp_path)), open_checkpoint(str(tmp_path))
    shapes = replace(placed(config, checkpoint).shapes, dtype="bfloat16")
    gpu = find("H200")
    assert gpu is not None
    gpu = replace(gpu, hbm_bytes=total_gib << 30)
    where = Placed(shapes, gpu, torch.device("cuda"))
    monkeypatch.setattr(warm_steps, "placed", lambda *_: where)
    monkeypatch.setattr(kept, "noted", lambda _: False)
    monkeypatch.setattr(warm_steps.os, "cpu_count", lambda: 16)
    assert len(missing_steps(config, checkpoint)[1]) == parts
