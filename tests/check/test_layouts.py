"""`--tp`: what each rank of an axis would hold, by the axes that the weight maps declare, against
arithmetic of one's own; what does not divide; and that several GPUs are not served today."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ask
from step_cases import published, short

from tests.models.cases import CASES
from vitrail.check.report import Report
from vitrail.config.hardware import find

GIB = 1 << 30


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def layouts(folder: Path, *sizes: int, **choices: Any) -> Report:
    return ask(folder, find("H200"), sizes=sizes, weights="random", **choices)


def facts(report: Report, row: str, size: int) -> dict[str, Any]:
    return dict(report.row(f"{row} tp={size}").facts)


def codes(report: Report, size: int) -> list[str]:
    return [f.code for f in report.row(f"layout tp={size}").findings]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_several_ranks_are_laid_out_counted_and_not_served(size: int, tmp_path: Path) -> None:
    """Exit code 1 and not 2: that it does not run is known. The other rows are whole."""
    report = layouts(folder_of(tmp_path, short(published()["kimi_vl_a3b"])), 1, size)
    assert report.exit_code == 1
    assert codes(report, size) == ["one_gpu"]
    assert codes(report, 1) == []
    assert report.row(f"memory tp={size}").status == "ok"
    assert report.row(f"attention tp={size}").status != "error"
    assert [row.name for row in report.rows if row.status == "error"] == [f"layout tp={size}"]


def kimi_bytes(size: int) -> float:
    """A rank's parameters of Kimi-VL-A3B's published widths, by hand."""
    hidden, heads, vocab, layers, blocks = 2048, 16, 163840, 3, 2
    attention = hidden * heads * 192 / size + hidden * 576 + 512 * heads * 256 / size
    attention += hidden * heads * 128 / size + 512 + 2 * hidden
    dense, moe = 3 * hidden * 11264 / size, 3 * hidden * 1408 * 66 / size
    text = layers * attention + dense + (layers - 1) * moe
    text += 2 * vocab * hidden / size + hidden
    router = (layers - 1) * (64 * hidden + 64)
    wide, inner = 1152, 4304
    block = 4 * wide * wide / size + 3 * wide / size + wide  # qkv, out and their biases
    block += 2 * wide * inner / size + inner / size + wide + 4 * wide
    tower = blocks * block + 588 * wide + wide + 64 * 64 * wide + 2 * wide
    merged = 4 * wide
    projector = 2 * wide + merged * merged / size + merged / size + merged * hidden / size + hidden
    return 2 * (text + tower + projector) + 4 * router


@pytest.mark.parametrize("size", [1, 2, 8])
def test_kimi_vls_experts_heads_and_vocabulary_are_cut_its_latents_and_routers_are_not(
    size: int, tmp_path: Path
) -> None:
    report = layouts(folder_of(tmp_path, short(published()["kimi_vl_a3b"])), size)
    held = facts(report, "layout", size)
    assert held["weight_bytes"] == pytest.approx(kimi_bytes(size), rel=1e-9)
    memory = facts(report, "memory", size)
    assert memory["weights"] == held["weight_bytes"]
    # one latent row for all heads: 576 channels of 3 layers, whatever the axis
    assert memory["kv_bytes"] == memory["kv_tokens"] * 576 * 3 * 2
    if size > 1:
        text = " ".join(report.row(f"layout tp={size}").details)
        assert f"{16 // size} of 16 heads" in text
        assert f"{163840 // size:,} of 163,840 rows of the vocabulary" in text
        assert f"{1408 // size:,} of 1,408 channels of each of 66 experts" in text
        assert "latent cache is one row for all heads" in text
        assert held["tower"] == "cut"


def test_what_is_saved_on_weights_is_left_for_pages(tmp_path: Path) -> None:
    report = layouts(folder_of(tmp_path, short(published()["kimi_vl_a3b"])), 1, 2, 4)
    rows = [facts(report, "memory", size) for size in (1, 2, 4)]
    assert len({row["left"] + row["weights"] for row in rows}) == 1
    assert rows[0]["left"] + GIB < rows[1]["left"] < rows[2]["left"]


def test_nvilas_key_heads_are_cut_then_copied_and_its_tower_is_cut_or_whole(
    tmp_path: Path,
) -> None:
    """28 heads on 4 key heads, 16 heads of a tower: 7 and 14 ranks divide the heads, and neither
    key heads nor tower."""
    folder = folder_of(tmp_path, short(published()["nvila_8b"]))
    report = layouts(folder, 1, 2, 4, 7, 14, kv_cache_bytes=8 * GIB)
    assert codes(report, 4) == ["one_gpu"]
    tokens = {size: facts(report, "memory", size)["kv_tokens"] for size in (1, 2, 4)}
    assert tokens[4] == pytest.approx(4 * tokens[1], rel=1e-3)
    assert tokens[2] == pytest.approx(2 * tokens[1], rel=1e-3)
    assert facts(report, "layout", 4)["tower"] == "cut"
    for size in (7, 14):
        assert "illegal_sharding" in codes(report, size)
        assert facts(report, "layout", size)["legal_sizes"] == [1, 2, 4]
        assert report.row(f"memory tp={size}").unknown is not None


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("deepseek_v3", [1]),  # 5 heads, 61 rows of the vocabulary
        ("qwen2", [1]),
        ("llama_biased", [1]),
    ],
)
def test_odd_sizes_divide_over_one_rank_alone_and_every_part_that_does_not_is_named(
    name: str, legal: list[int], tmp_path: Path
) -> None:
    report = layouts(folder_of(tmp_path, CASES[name].config), 2)
    assert facts(report, "layout", 2)["legal_sizes"] == legal
    found = report.row("layout tp=2").findings
    assert found[0].change == "pass --tp 1"
    assert any("61 units" in f.saw for f in found), "the vocabulary"


@pytest.mark.parametrize("part", ["moe_intermediate_size", "intermediate_size", "vocab_size"])
def test_one_part_that_does_not_divide_is_enough_and_is_the_one_that_is_named(
    part: str, tmp_path: Path
) -> None:
    """A decoder of DeepSeek's kind in which all else divides by 4."""
    even = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "vocab_size": 64,
    }
    config = CASES["deepseek_v3"].config | even
    assert codes(layouts(folder_of(tmp_path, config), 4), 4) == ["one_gpu"]
    report = layouts(folder_of(tmp_path, config | {part: even[part] + 2}), 4)
    found = report.row("layout tp=4").findings
    assert report.exit_code == 1
    assert {f.code for f in found} == {"illegal_sharding"}
    assert all(f"{even[part] + 2} units" in f.saw for f in found[1:]), found
    assert found[0].change == "pass --tp 1 or 2"
