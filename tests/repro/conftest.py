"""Faults that a test plants, here and in the processes that it starts."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.driver import Golden
from tests.repro.plants import PLANTS


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plant a fault here, and in trial processes; all is as before afterwards."""
    from vitrail.engine import batch, build, runner
    from vitrail.layers import norm
    from vitrail.models.kimi_vl import model

    for owner, name in (
        (batch.BatchBuilder, "turn_pages"),
        (runner.Runner, "__init__"),
        (runner.Fetched, "read"),
        (norm.RmsNorm, "add"),
        (model.KimiVL, "encode_patches"),
        (build, "capture_graphs"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back at the end

    def planted(name: str) -> None:
        monkeypatch.setenv("PLANTED", name)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path.cwd()), *_path())))
        PLANTS[name]()

    return planted


def _path() -> list[str]:
    return [p for p in (os.environ.get("PYTHONPATH"),) if p]
