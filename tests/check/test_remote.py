"""A hub id is checked from the files' headers where they lie: small files are fetched, weights are
never asked for."""

import json
import shutil
import struct
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import H200
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo

from vitrail.check.remote import remote_headers
from vitrail.check.report import Report
from vitrail.check.run import check
from vitrail.check.subject import Question
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding
from vitrail.weights import headers

REPO = "org/tiny"
SINGLE = "model.safetensors"


class Hub:
    """Serves a folder as huggingface_hub's `HfApi` would; records what was asked."""

    def __init__(self, folder: Path):
        self.folder, self.asked = folder, list[str]()
        self.down = False

    def model_info(self, repo_id: str, *, revision: str | None, files_metadata: bool) -> Any:
        if self.down:
            raise ConnectionError("no route to the hub")
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        siblings = [
            SimpleNamespace(rfilename=str(p.relative_to(self.folder)), size=p.stat().st_size)
            for p in files
        ]
        return SimpleNamespace(siblings=siblings)

    def parse_safetensors_file_metadata(
        self, repo_id: str, filename: str, *, revision: str | None
    ) -> SafetensorsFileMetadata:
        self.asked.append(filename)
        with (self.folder / filename).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(e["dtype"], e["shape"], tuple(e["data_offsets"]))
            for name, e in header.items()
        }
        return SafetensorsFileMetadata(metadata={}, tensors=tensors)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], tuple[Hub, Path]]:
    """A hub over a folder, and where its small files land."""

    def make(folder: Path) -> tuple[Hub, Path]:
        place = tmp_path / "snapshot"

        def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
            assert model == REPO
            for path in folder.rglob("*"):
                name = path.relative_to(folder)
                if path.is_file() and any(fnmatch(str(name), p) for p in allow_patterns):
                    (place / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place / name)
            return str(place)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return Hub(folder), place

    return make


def ask_hub(hub: Hub) -> Report:
    return check(Question(choices=EngineConfig(model=REPO), gpu=H200), hub)


def test_a_hub_id_is_checked_from_headers_alone(whole: Path, fetched: Any) -> None:
    hub, place = fetched(whole)
    report = ask_hub(hub)
    assert report.exit_code == 0
    assert report.row("weights").status == "ok"
    assert hub.asked == [SINGLE]
    assert not list(place.rglob("*.safetensors"))
    assert (place / "tiktoken.model").is_file()


def test_what_is_wrong_with_remote_files_is_found(folder: Path, fetched: Any) -> None:
    path = folder / SINGLE
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(data[: len(data) - length - 100])
    hub, _ = fetched(folder)
    report = ask_hub(hub)
    assert report.exit_code == 1
    (found,) = report.row("weights").findings
    assert found.code == "wrong_file_size"
    assert "cut short" in found.saw
    text = data.replace(b"multi_modal_projector.linear_1", b"multi_modal_projector.linear_9")
    path.write_bytes(text)
    codes = {f.code for f in ask_hub(hub).row("weights").findings}
    assert codes == {"missing_tensor", "unexpected_tensor"}
    path.write_bytes(struct.pack("<Q", 40) + b"not a header")
    (found,) = ask_hub(hub).row("weights").findings
    assert found.code == "bad_checkpoint"
    assert SINGLE in found.where


def test_a_hub_that_cannot_be_asked_is_no_verdict(whole: Path, fetched: Any) -> None:
    hub, _ = fetched(whole)
    hub.down = True
    report = ask_hub(hub)
    assert report.exit_code == 2
    assert "no route to the hub" in (report.row("weights").unknown or "")
    assert report.row("template").status == "ok"


def test_files_that_are_here_are_not_asked_for(whole: Path, fetched: Any) -> None:
    """A hub's own cache may hold the weights already."""
    hub, place = fetched(whole)
    place.mkdir()
    shutil.copy(whole / SINGLE, place)
    assert ask_hub(hub).exit_code == 0
    assert hub.asked == []


def test_sub_folders_are_read_as_folders_are(whole: Path, tmp_path: Path) -> None:
    parts = ("llm", "tower")
    there, here = tmp_path / "there", tmp_path / "here"
    for part in parts:
        (there / part).mkdir(parents=True)
        (here / part).mkdir(parents=True)
        shutil.copy(whole / SINGLE, there / part)
    shutil.copy(whole / SINGLE, there)
    elsewhere = remote_headers(Hub(there), REPO, None, parts)
    assert not isinstance(elsewhere, Finding)
    assert set(elsewhere) == {f"{part}/{SINGLE}" for part in parts}
    remote, local = headers.read(here, parts, elsewhere), headers.read(there, parts)
    assert isinstance(remote, headers.Headers)
    assert isinstance(local, headers.Headers)
    assert set(remote.tensors) == set(local.tensors)
    for name, tensor in remote.tensors.items():
        twin = local.tensors[name]
        assert (tensor.shape, tensor.dtype, tensor.file) == (twin.shape, twin.dtype, twin.file)
