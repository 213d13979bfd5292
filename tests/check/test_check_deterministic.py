"""`vitrail check --deterministic`: the plans are start-up's of that mode, and the refusals too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ask, change
from step_cases import published, short

from tests.models.cases import CASES
from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanTable
from vitrail.check.checks import Share, attention_tables
from vitrail.check.fixed import model_of
from vitrail.check.report import Report
from vitrail.check.sizes import encoder_budget
from vitrail.check.subject import Question, build_subject
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused, accept
from vitrail.config.hardware import CPU, Hardware, find
from vitrail.engine import build
from vitrail.models.checkpoint import open_checkpoint
from vitrail.models.registry import load_entry

GPU = [find(name) for name in ("H200", "A100", "B300")]
LENGTH = 512


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def plans(report: Report) -> list[dict[str, Any]]:
    return list(report.row("attention tp=1").facts["plans"])  # pyright: ignore


def both(
    folder: Path, gpu: Hardware, **choices: Any
) -> tuple[tuple[PlanTable | None, PlanTable], tuple[PlanTable, PlanTable]]:
    """Of pictures and of text: check's, and those of start-up."""
    config = EngineConfig(model=str(folder), weights="random", dtype="bfloat16", **choices)
    checkpoint = open_checkpoint(str(folder), weights=False)
    entry = load_entry(checkpoint.architecture)
    read = accept(entry.read_config(checkpoint.config, {}))
    question = Question(choices=config, gpu=gpu, installed=releases())
    subject = build_subject(question, checkpoint, entry, read, None)
    found = attention_tables(subject, Share(subject, 1), LENGTH)
    assert not isinstance(found, list), found
    model = model_of(config, entry, read, "bfloat16", torch.device("cuda"))
    patches = encoder_budget(config, read, None, gpu)
    return found, (
        build.image_plans(config, model, read.vision, "bfloat16", patches, gpu),
        build._text_plans(config, model.text_sites(), "bfloat16", LENGTH, gpu),
    )


@pytest.mark.parametrize("gpu", GPU, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", ["kimi_vl_a3b", "qwen2_window", "nvila"])
def test_plans_are_those_of_start_up(name: str, fixed: bool, gpu: Hardware, tmp_path: Path) -> None:
    config = published()[name] if name in published() else CASES[name].config
    checks, starts = both(folder_of(tmp_path, config), gpu, deterministic=fixed)
    assert list(checks[1]) == list(starts[1])
    assert list(checks[0] or ()) == list(starts[0])
    assert all(p.shape.batch_invariant is fixed for p in (*starts[1], *starts[0]))


def test_the_modes_forms_are_planned(tmp_path: Path) -> None:
    """One form of latent attention, decodes that extend, one backend, no split."""
    folder = folder_of(tmp_path, short(published()["kimi_vl_a3b"]))
    quick = plans(ask(folder, weights="random"))
    fixed = plans(ask(folder, weights="random", deterministic=True))
    assert {p["phase"] for p in quick} == {"encode", "prefill", "decode"}
    assert {p["phase"] for p in fixed} == {"encode", "extend"}
    assert {p["backend"] for p in fixed} == {"triton"}
    assert {p["max_splits"] for p in fixed} == {1}


def test_on_a_cpu_decodes_alone_are_planned(tmp_path: Path) -> None:
    """As extends of one query, in the one form."""
    folder = folder_of(tmp_path, short(published()["kimi_vl_a3b"]))
    report = ask(folder, CPU, weights="random", deterministic=True)
    assert report.exit_code == 0
    found = {(p["phase"], p["head_dim"]) for p in plans(report)}
    assert found == {("encode", 72), ("extend", 576)}
    quick = plans(ask(folder, CPU, weights="random"))
    assert {p["phase"] for p in quick} == {"encode", "prefill", "decode"}


@pytest.mark.parametrize(
    ("word", "values", "choices"),
    [
        ("dtype", {}, {"dtype": "float32"}),
        ("attention", {}, {"attention": "reference", "cuda_graphs": 0}),
        ("experts", {"text_config__moe_intermediate_size": 1404}, {}),
        ("latent", {"text_config__kv_lora_rank": 576}, {}),
    ],
)
def test_what_the_mode_refuses_is_refused_as_at_start_up(
    word: str, values: dict[str, Any], choices: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, short(published()["kimi_vl_a3b"]))
    change(folder / "config.json", **values)
    asked = {"weights": "random", "deterministic": True, **choices}
    report = ask(folder, **asked)
    assert report.exit_code == 1
    found = [f for f in report.row("choices").findings if f.severity == "error"]
    assert [(f.where, f.code) for f in found] == [(f"deterministic: {word}", "not_deterministic")]
    config = EngineConfig(model=str(folder), **asked)
    entry = load_entry("KimiVLForConditionalGeneration")
    read = accept(entry.read_config(open_checkpoint(str(folder), weights=False).config, {}))
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    with pytest.raises(Refused) as refused:
        model_of(config, entry, read, dtype, torch.device("cuda"))
    assert list(refused.value.findings) == found
    assert ask(folder, **(asked | {"deterministic": False})).row("choices").status == "ok"
