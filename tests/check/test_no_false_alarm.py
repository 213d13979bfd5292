"""No false alarm: every checkpoint of the suite will run, on every kind of device, and the warnings
are those that are true of it."""

import json
from pathlib import Path

import pytest
from conftest import ask

from tests.models.cases import CASES
from tests.models.test_gguf_models import made
from vitrail.check.report import Report
from vitrail.config.hardware import CPU, find

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
DEMO = TESTS.parent / "vitrail" / "demo"
FOLDERS = [
    DEMO,
    *(GOLDEN / name / "ckpt" for name in ("kimi_vl", "nvila_s2", "nvila_lite")),
    *sorted(path.parent for path in GOLDEN.glob("text_models/*/config.json")),
]
# True of folders without a tokenizer or an image rule, of a template without tools, of devices
# without the packages of the quickest kernels, and of a context cut to what fits.
EXPECTED = {
    "no_tokenizer",
    "no_processor",
    "bad_eos",
    "tools_ignored",
    "fa4_not_installed",
    "cutlass_not_installed",
    "tied_tensor_present",
}


def quiet(report: Report) -> None:
    assert report.exit_code == 0, report.to_json()
    for row in report.rows:
        assert row.status in ("ok", "warning"), row
        for finding in row.findings:
            assert finding.severity == "warning", finding
            planned = finding.code.startswith("attention_")
            assert planned or finding.code in EXPECTED, finding


@pytest.mark.parametrize("gpu", ["H200", "B300", "cpu"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.parent.name + "-" + p.name)
def test_no_false_alarm(folder: Path, gpu: str) -> None:
    quiet(ask(folder, CPU if gpu == "cpu" else find(gpu)))


def test_no_false_alarm_on_a_whole_checkpoint(whole: Path) -> None:
    report = ask(whole)
    quiet(report)
    assert [row.name for row in report.rows] == [
        "choices",
        "config",
        "weights",
        "layout tp=1",
        "memory tp=1",
        "attention tp=1",
        "images",
        "template",
        "tokenizer",
    ]
    assert json.loads(report.to_json())["exit_code"] == 0


@pytest.mark.parametrize("case", ["llama_tied", "qwen2"])
def test_no_false_alarm_on_a_gguf_file(case: str, tmp_path: Path) -> None:
    quiet(ask(made(case, tmp_path)))


def test_random_weights_need_no_file(whole: Path) -> None:
    report = ask(whole, weights="random")
    quiet(report)
    assert report.row("weights").details == ("random weights: no file is read",)


def test_every_checkpoint_of_the_suite_is_asked() -> None:
    whole = {path.parent for path in (TESTS.parent / "vitrail").rglob("*.safetensors")}
    whole |= {path.parent for path in GOLDEN.rglob("*.safetensors")}
    assert {path for path in whole if (path / "config.json").exists()} <= set(FOLDERS)


@pytest.mark.parametrize("name", [n for n in CASES if "vila" not in n])  # golden, above
def test_no_false_alarm_on_every_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES[name].config))
    quiet(ask(tmp_path, weights="random"))
