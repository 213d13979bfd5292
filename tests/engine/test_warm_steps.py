"""Decode steps that compilers' processes run: every model's, with a layer of each kind."""

import json
from pathlib import Path

import pytest

from tests.models.cases import CASES
from vitrail.check.steps import shortened
from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.engine.placement import placed
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
