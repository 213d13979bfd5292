"""The four crashes of a large engine's nightly run, and faults of code that others reported, found
before anything runs: models that are faulty in themselves, configurations that kernels, layouts or
devices cannot take."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ask, change
from faulty import (
    Dense,
    Miscounting,
    Renamed,
    Stacking,
    Unplanned,
    Unread,
    entry,
    mimo_like,
    windowless,
)

from tests.models.cases import QWEN2
from vitrail.attention.shape import Phase
from vitrail.check.report import Report
from vitrail.config.finding import Finding
from vitrail.config.hardware import GPUS, find
from vitrail.models import qwen2
from vitrail.models.registry import ARCHITECTURES, Registered

B300 = find("B300")
FA4 = {"fa4": "4.0.0b36", "cute": "4.8.1"}
GOLDEN = Path(__file__).parents[1] / "golden"


def served_by(monkeypatch: pytest.MonkeyPatch, architecture: str, faulty: ModuleType) -> None:
    """Let `architecture` be served by a faulty module."""
    monkeypatch.setitem(sys.modules, "faulty_model", faulty)
    row = ARCHITECTURES[architecture]
    changed = Registered(model="faulty_model", processor=row.processor, folders=row.folders)
    monkeypatch.setitem(ARCHITECTURES, architecture, changed)


def faulty_kimi(monkeypatch: pytest.MonkeyPatch, build: Any, folder: Path, **asked: Any) -> Report:
    served_by(monkeypatch, "KimiVLForConditionalGeneration", entry(build))
    report = ask(folder, **asked)
    assert report.exit_code == 1
    return report


def error(report: Report, row: str, code: str) -> Finding:
    """The one error of this code, which no other row has."""
    found = [f for f in report.row(row).findings if f.code == code]
    assert len(found) == 1, report.row(row)
    assert {r.name for r in report.rows if r.status == "error"} == {row}
    return found[0]


def test_crash_kernels_of_an_old_release_on_a_b300(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero rows a loader thread: heads of 192 and 128 in a long context, tiles halved to 64 keys
    for 128 threads. The release of today runs them."""
    served_by(monkeypatch, "Qwen2ForCausalLM", entry(mimo_like, qwen2))
    folder = dense(tmp_path, max_position_embeddings=65_536)
    asked: dict[str, Any] = {"weights": "random", "page_size": 128, "attention": "fa4"}
    report = ask(folder, B300, installed={"fa4": "4.0.0b18"}, **asked)
    assert report.exit_code == 1
    row = report.row("attention tp=1")
    lost = [f for f in row.findings if f.code == "fa4_zero_rows"]
    assert lost
    assert "64 keys of a tile, pages of 128, for 128 loader threads" in lost[0].saw
    assert "0 rows a thread" in lost[0].saw
    assert "4.0.0b36" in lost[0].change
    assert ask(folder, B300, installed=FA4, **asked).exit_code == 0


def test_crash_kernels_of_an_old_release_for_a_model_that_is_served(tmp_path: Path) -> None:
    """The same without a fault of code: heads of 256 in pages of one token on Hopper."""
    folder = dense(tmp_path, num_key_value_heads=4, head_dim=256, max_position_embeddings=4096)
    asked: dict[str, Any] = {"weights": "random", "page_size": 1}
    report = ask(folder, attention="fa4", installed={"fa4": "4.0.0b18"}, **asked)
    lost = [f for f in report.row("attention tp=1").findings if f.code == "fa4_zero_rows"]
    assert "80 keys of a tile, pages of 1, for 128" in lost[0].saw
    assert ask(folder, installed={"fa4": "4.0.0b18"}, **asked).exit_code == 0, "others serve it"


def test_crash_a_dense_mask_over_two_large_pictures(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = faulty_kimi(monkeypatch, Dense, whole)
    found = error(report, "memory tp=1", "encoder_memory")
    assert "bytes a patch" in found.saw
    assert any(char.isdigit() for char in found.saw)


def test_crash_a_renamed_module_without_its_row(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = faulty_kimi(monkeypatch, Renamed, whole)
    codes = {f.code for f in report.row("weights").findings}
    assert codes == {"unfilled_parameter", "unexpected_tensor"}
    text = str(report.row("weights").findings)
    assert "tower.encoder.blocks.0.final_mlp" in text
    assert "nearest" in text


def test_crash_features_of_unequal_pictures_are_stacked(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found with two sizes on no device; each picture alone works."""
    report = faulty_kimi(monkeypatch, Stacking, whole)
    found = error(report, "images", "unequal_sizes")
    assert "4 x 10 patches, 14 x 6 patches" in found.saw
    assert "stack expects each tensor to be equal size" in found.saw


def test_what_stacks_is_found_whatever_the_axis(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = faulty_kimi(monkeypatch, Stacking, whole, sizes=(5, 1))
    assert report.row("layout tp=5").status == "error"
    assert [f.code for f in report.row("images").findings] == ["unequal_sizes"]
    report = faulty_kimi(monkeypatch, Dense, whole, sizes=(5,))
    assert [f.code for f in report.row("memory tp=5").findings] == ["encoder_memory"]


def test_a_tower_that_fails_alone_is_told_from_one_that_stacks(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = faulty_kimi(monkeypatch, Miscounting, whole)
    found = error(report, "images", "image_path")
    assert "5 tokens for slots of 10" in found.saw


def test_e06_a_weight_that_nothing_reads(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = faulty_kimi(monkeypatch, Unread, whole, weights="random")
    found = error(report, "images", "unread_weight")
    assert found.where == "tower.encoder.blocks.{0..1}.attn.sinks"


def test_d22_a_tower_that_attends_in_another_way_than_planned(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = faulty_kimi(monkeypatch, Unplanned, whole, weights="random")
    assert "sink planned: False" in error(report, "images", "image_path").saw


def dense(folder: Path, **changed: Any) -> Path:
    """A config.json alone: what is checked of it needs no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN2 | changed))
    return folder


def plans(report: Report) -> list[dict[str, Any]]:
    return list(report.row("attention tp=1").facts["plans"])  # pyright: ignore


@pytest.mark.parametrize("heads", [(28, 4), (12, 2), (40, 8), (24, 8), (64, 1), (14, 2), (9, 3)])
def test_d08_every_group_of_query_heads_is_planned(heads: tuple[int, int], tmp_path: Path) -> None:
    q_heads, kv_heads = heads
    for head_dim in (64, 128):
        folder = dense(
            tmp_path, num_attention_heads=q_heads, num_key_value_heads=kv_heads, head_dim=head_dim
        )
        for gpu in ("H200", "B300"):
            report = ask(folder, find(gpu), weights="random", installed=FA4)
            assert report.exit_code == 0
            assert {p["phase"] for p in plans(report)} == {Phase.EXTEND, Phase.DECODE}
            assert {(p["q_heads"], p["kv_heads"]) for p in plans(report)} == {heads}


def test_d12_a_table_of_pages_holds_the_longest_request(tmp_path: Path) -> None:
    """As many pages a request as its length asks for: 65 tokens are two pages of 64."""
    report = ask(dense(tmp_path), weights="random", max_model_len=65, max_running=1)
    facts = report.row("memory tp=1").facts
    assert (facts["kv_tokens"], facts["full_requests"]) == (128, 1)


def test_d22_d23_each_layers_window_is_planned_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = GOLDEN / "text_models" / "qwen2_window"
    report = ask(folder)
    assert report.exit_code == 0
    details = report.row("attention tp=1").details
    assert "layers 0: 4 heads on 2 of 16, all keys" in details
    assert "layers 1-2: 4 heads on 2 of 16, its own and 8 keys before" in details
    assert {p["window"] for p in plans(report)} == {None, 8}
    served_by(monkeypatch, "Qwen2ForCausalLM", entry(windowless, qwen2))
    report = ask(folder)
    assert report.exit_code == 1
    found = [f for f in report.row("attention tp=1").findings if f.code == "unplanned_window"]
    assert [f.where for f in found] == ["layers 1-2"] * 2
    assert "a window of 8 keys" in found[0].saw


@pytest.mark.parametrize("head_dim", [40, 56, 72, 80, 96, 112, 160, 224, 256])
def test_d26_any_head_dim_is_planned_or_refused_before_weights(
    head_dim: int, tmp_path: Path
) -> None:
    folder = dense(tmp_path, head_dim=head_dim)
    for gpu in ("H200", "B300", "RTX 5090"):
        assert ask(folder, find(gpu), weights="random").exit_code == 0
        for backend in ("fa4", "cute"):
            report = ask(folder, find(gpu), weights="random", attention=backend, installed=FA4)
            row = report.row("attention tp=1")
            assert row.status == "error" or {p["backend"] for p in plans(report)} == {backend}
            assert all(f.rule and f.change for f in row.findings)


def test_d25_keys_and_values_of_other_widths_are_planned_as_they_are(whole: Path) -> None:
    """Kimi's 15 and 11 channels, its latent rows of 23 and 17: nothing is padded to the other."""
    found = {(p["phase"], p["head_dim"], p["head_dim_v"]) for p in plans(ask(whole))}
    assert found == {("encode", 12, 12), ("prefill", 15, 11), ("decode", 23, 17)}


@pytest.mark.parametrize("gpu", [g.name for g in GPUS])
def test_d32_64_heads_are_planned_on_every_gpu(gpu: str, tmp_path: Path) -> None:
    folder = dense(tmp_path, num_attention_heads=64, num_key_value_heads=8, head_dim=128)
    report = ask(folder, find(gpu), weights="random", page_size=32)
    assert report.exit_code == 0
    assert {p["phase"] for p in plans(report)} == {Phase.EXTEND, Phase.DECODE}


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 2), (1, 4), (2, 4), (2, 8), (4, 8)])
def test_g07_key_heads_fewer_than_ranks_are_copied(
    kv_heads: int, size: int, tmp_path: Path
) -> None:
    """A rank keeps one head where there are more ranks than heads; the cache is counted so."""
    folder = dense(
        tmp_path,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=64,
        vocab_size=64,
    )
    report = ask(folder, sizes=(1, size), weights="random", kv_cache_bytes=1 << 20)
    assert report.exit_code == 1, "several GPUs are not served"
    alone, cut = (report.row(f"memory tp={n}").facts["kv_tokens"] for n in (1, size))
    assert cut == pytest.approx(alone * kv_heads, rel=0.02)  # pyright: ignore
    copies = size // kv_heads
    assert f"{kv_heads} key heads over {size} ranks: {copies} hold each" in "".join(
        report.row(f"layout tp={size}").details
    )


def test_g07_key_heads_that_neither_divide_nor_are_copied_are_refused(tmp_path: Path) -> None:
    folder = dense(tmp_path, num_attention_heads=12, num_key_value_heads=3, head_dim=8)
    report = ask(folder, sizes=(2,), weights="random")
    assert report.exit_code == 1
    assert "2 ranks for 12 heads, 3 key heads" in report.row("layout tp=2").findings[0].saw


@pytest.mark.parametrize("size", [3, 5, 6, 32])
def test_g08_text_heads_that_do_not_divide_are_refused_with_what_would(
    size: int, tmp_path: Path
) -> None:
    folder = dense(
        tmp_path,
        num_attention_heads=52,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=960,
        vocab_size=960,
    )
    report = ask(folder, sizes=(size,), weights="random")
    assert report.exit_code == 1
    found = report.row(f"layout tp={size}").findings[0]
    assert found.change == "pass --tp 1 or 2 or 4"
    assert report.row(f"layout tp={size}").facts["legal_sizes"] == [1, 2, 4]


def test_g08_a_tower_whose_heads_do_not_divide_is_whole_on_every_rank(folder: Path) -> None:
    """Two heads of a tower over five ranks, whose decoder has five heads."""
    change(
        folder / "config.json",
        vocab_size=685,
        text_config__vocab_size=685,
        text_config__intermediate_size=60,
        text_config__moe_intermediate_size=20,
    )
    report = ask(folder, sizes=(5,), weights="random")
    assert [f.code for f in report.row("layout tp=5").findings] == ["one_gpu"]
    row = report.row("layout tp=5")
    assert row.facts["tower"] == "whole"
    assert any("do not divide" in line for line in row.details)
    assert report.row("attention tp=5").status != "error"
