"""What the rows say of a checkpoint that will run, and what of text is no file's fault to see."""

import io
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import ask, change
from rich.console import Console
from step_cases import published, short
from test_layouts import facts, folder_of, layouts

from tests.server.checkpoint import CONFIG, MEDIA_PAD
from vitrail.check.prompts import Read, tokenizer_row
from vitrail.check.report import Report, show
from vitrail.config.finding import accept
from vitrail.models.assets import load_tokenizer
from vitrail.models.checkpoint import open_checkpoint
from vitrail.models.registry import load_entry
from vitrail.tokenizer.tokenizer import KimiTokenizer


def shown(report: Report, *, terminal: bool) -> str:
    out = io.StringIO()
    colour = "standard" if terminal else None
    show(report, Console(file=out, width=200, force_terminal=terminal, color_system=colour))
    return out.getvalue()


def test_the_table_has_colour_on_a_terminal_and_none_elsewhere(folder: Path) -> None:
    good = shown(ask(folder), terminal=True)
    assert re.search(r"\x1b\[32m\s*ok", good), "green"
    assert "\x1b[32mIt will run." in good
    bad = ask(folder, page_size=0)
    assert re.search(r"\x1b\[1;31m\s*will not run", shown(bad, terminal=True)), "red"
    assert "\x1b" not in shown(bad, terminal=False)


def test_keys_that_change_nothing_are_named(folder: Path) -> None:
    change(folder / "config.json", transformers_version="4.50.0")
    change(folder / "generation_config.json", temperature=0.6)
    row = ask(folder).row("config")
    assert {"transformers_version", "temperature"} <= set(row.facts["ignored"])  # pyright: ignore
    assert re.search(r"^ignored: .*temperature.*transformers_version", row.details[1])


def test_memory_says_how_many_tokens_and_requests_fit(folder: Path) -> None:
    report = ask(folder, kv_cache_bytes=8 << 20, max_model_len=512, page_size=16)
    row = report.row("memory tp=1")
    found = re.search(
        r"([\d,]+) tokens in ([\d,]+) pages of 16, ([\d,]+) requests? of 512 tokens at once",
        row.details[-1],
    )
    assert found is not None, row.details
    tokens, pages, requests = (int(number.replace(",", "")) for number in found.groups())
    assert tokens == pages * 16 == row.facts["kv_tokens"]
    assert requests == min(tokens // 512, 256)
    assert 0 <= (8 << 20) - int(row.facts["kv_bytes"]) < int(row.facts["kv_bytes"]) / pages  # pyright: ignore


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_ranks_hold_is_the_model_once_and_what_all_hold_again(
    size: int, tmp_path: Path
) -> None:
    report = layouts(folder_of(tmp_path, short(published()["kimi_vl_a3b"])), 1, size)
    rank, whole = facts(report, "layout", size), facts(report, "layout", 1)
    assert size * rank["weight_bytes"] == whole["weight_bytes"] + rank["copied_bytes"]
    hidden, layers, wide, bf16, fp32 = 2048, 3, 1152, 2, 4
    latents = layers * (576 * hidden + 512 + 2 * hidden) + hidden
    tower = 588 * wide + wide + 64 * 64 * wide + 2 * wide + 2 * (5 * wide + wide)
    routers = (layers - 1) * (64 * hidden + 64)
    each = bf16 * (latents + tower + 2 * wide + hidden) + fp32 * routers
    assert rank["copied_bytes"] == (size - 1) * each
    assert whole["copied_bytes"] == 0
    (line,) = (d for d in report.row(f"layout tp={size}").details if "are copies" in d)
    assert "qkv_a_proj" in line, "the latent beside the heads of q"
    assert "pos_embed" in line


def test_an_end_token_that_no_model_can_say_is_an_error_and_one_among_others_a_warning(
    folder: Path,
) -> None:
    change(folder / "config.json", text_config__eos_token_id=9999)
    (found,) = ask(folder).row("tokenizer").findings
    assert (found.code, found.severity) == ("bad_eos", "warning")
    (folder / "generation_config.json").unlink()
    report = ask(folder)
    (found,) = report.row("tokenizer").findings
    assert (found.code, found.severity, report.exit_code) == ("bad_eos", "error", 1)


class Forgetful(KimiTokenizer):
    """Accents are lost."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return super().decode(ids, skip_special).replace("é", "e")


class Trusting(KimiTokenizer):
    """Text that spells the image token is the image token."""

    def encode(self, text: str) -> list[int]:
        literal = "<|media_pad|>"
        return [*super().encode(text), MEDIA_PAD] if literal in text else super().encode(text)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forgetful, ("naïve café", "comes back as", "naïve cafe")),
        (Trusting, ("'<|media_pad|>'", f"becomes id {MEDIA_PAD}")),
    ],
)
def test_text_that_does_not_come_back_or_claims_a_picture_is_found(
    kind: type[KimiTokenizer], words: tuple[str, ...], whole: Path
) -> None:
    config = accept(load_entry("KimiVLForConditionalGeneration").read_config(CONFIG, {}))
    sound = load_tokenizer(open_checkpoint(str(whole)))
    assert tokenizer_row(config, Read(sound, None, None)).status == "ok"
    row = tokenizer_row(config, Read(kind(whole), None, None))
    assert row.status == "error"
    (found,) = row.findings
    for word in words:
        assert word in found.saw
