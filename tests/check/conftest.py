"""A whole tiny checkpoint, written once, and copies of it with one fault each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.checkpoint import write_kimi
from vitrail.check.report import Report
from vitrail.check.run import check
from vitrail.check.subject import Question
from vitrail.config.engine import EngineConfig
from vitrail.config.hardware import Hardware, find

H200 = find("H200")
Ask = Callable[..., Report]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("check") / "kimi")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "kimi"))


def ask(
    model: Path | str,
    gpu: Hardware = H200,
    sizes: tuple[int, ...] = (1,),
    images: tuple[tuple[int, int], ...] = (),
    installed: dict[str, str] | None = None,
    **choices: Any,
) -> Report:
    """The report, with nothing installed beside torch unless said."""
    question = Question(
        choices=EngineConfig(model=str(model), **choices),
        gpu=gpu,
        sizes=sizes,
        images=images,
        installed=installed or {},
    )
    return check(question)


def change(path: Path, **values: Any) -> None:
    """Keys of a JSON file, a dotted one within an object; `...` takes the key away."""
    data = json.loads(path.read_text())
    for name, value in values.items():
        *parents, key = name.split("__")
        inner = data
        for parent in parents:
            inner = inner[parent]
        if value is ...:
            del inner[key]
        else:
            inner[key] = value
    path.write_text(json.dumps(data))
