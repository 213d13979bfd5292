"""The trainer on a CPU, four small pictures a step: the same seed gives the same weights, and a run
that stops and goes on gives those of a run that does not."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageFont
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
FILES = ("resume-0.safetensors", "resume-1.safetensors")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    """The training script, with an atlas of Pillow's own font."""
    sys.path.insert(0, str(ROOT / "demo"))
    import atlas
    import train

    fonts = Namespace(
        truetype=lambda path, em, **_: ImageFont.load_default(em), Layout=ImageFont.Layout
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atlas, "ImageFont", fonts)
        baked = atlas.bake([""])
    train.test_atlas = tmp_path_factory.mktemp("atlas") / "atlas.npz"
    np.savez(train.test_atlas, **vars(baked))
    yield train
    sys.path.remove(str(ROOT / "demo"))


def run(train: Any, out: Path, seconds: float, *resume: Path) -> dict[str, torch.Tensor]:
    """The weights after a run of four steps in all, or of less where the seconds are over."""
    out.mkdir()
    args = [
        "--tiny", "--device", "cpu", "--no-compile", "--attention", "grouped", "--keep-state",
        "--atlas", str(train.test_atlas), "--out", str(out), "--steps", "4", "--seed", "5",
        "--seconds", str(seconds), "--resume", *map(str, resume),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *args])
        patch.setattr(train, "examine", lambda network, exam: ({}, []))
        parsed = train.parse()
        config = train.json.loads((ROOT / "vitrail/demo/config.json").read_text())
        config["vision_config"]["num_hidden_layers"] = 1
        trainer = train.Trainer(parsed, config)
        trainer.run(None)
    return load_file(out / FILES[0]) | load_file(out / FILES[1])


def test_equal_seeds_give_equal_weights(train: Any, tmp_path: Path):
    first, second = (run(train, tmp_path / name, 1e9) for name in "ab")
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.suite("accuracy", minutes=1, owner="demo")
@pytest.mark.nightly
def test_a_stopped_run_goes_on_as_if_it_had_not(train: Any, tmp_path: Path):
    whole = run(train, tmp_path / "whole", 1e9)
    half = tmp_path / "half"
    with pytest.MonkeyPatch.context() as patch:
        clock = iter([0.0] * 7 + [100.0] * 9)  # parse, ready, start, two steps; then time is over
        patch.setattr(train.time, "time", lambda: next(clock))
        stopped = run(train, half, 50)
    assert any(not torch.equal(whole[k], stopped[k]) for k in whole)
    files = [half / name for name in (*FILES, train.STATE)]
    went_on = run(train, tmp_path / "on", 1e9, *files)
    assert all(torch.equal(whole[k], went_on[k]) for k in whole)
