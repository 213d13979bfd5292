"""What a newcomer gives `vitrail check` by mistake: each is answered by one finding that says what
it is and what to do, and by the exit code that is true of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ask, change
from huggingface_hub.errors import LocalEntryNotFoundError

from vitrail.cli import main
from vitrail.config.finding import Finding
from vitrail.config.reader import POINTER

SINGLE = "model.safetensors"
LFS = POINTER + b"v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


class Odd(NamedTuple):
    row: str
    where: str
    words: tuple[str, ...]
    make: Callable[[Path], None]


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **values)


def holding(name: str, data: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return make


def cut(num_bytes: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:num_bytes])

    return make


def one_shard_alone(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")


ODD: dict[str, Odd] = {
    # a stand-in for what is missing breaks rules that the file does not
    "a key that is missing": Odd(
        "config",
        "config.json: text_config: hidden_size",
        ("missing", "int"),
        config(text_config__hidden_size=...),
    ),
    "an object that is missing": Odd(
        "config", "config.json: text_config", ("missing",), config(text_config=...)
    ),
    "an object that is a number": Odd(
        "config", "config.json: vision_config", ("3 of type int",), config(vision_config=3)
    ),
    "a key that two readers miss": Odd(
        "config",
        "config.json: vision_config: patch_size",
        ("missing",),
        config(vision_config__patch_size=...),
    ),
    "a number that is a word": Odd(
        "config",
        "config.json: text_config: vocab_size",
        ("'512' of type str", "int"),
        config(text_config__vocab_size="512"),
    ),
    "a number beyond 64 bits": Odd(
        "config",
        "config.json: text_config: hidden_size",
        (str(10**20), "at most"),
        config(text_config__hidden_size=10**20),
    ),
    "two keys that contradict": Odd(
        "config",
        "config.json: text_config: num_key_value_heads",
        ("3", "num_attention_heads says"),
        config(text_config__num_key_value_heads=3),
    ),
    "an object that contradicts its inner one": Odd(
        "config",
        "config.json: vocab_size",
        ("7", "as text_config: vocab_size says"),
        config(vocab_size=7),
    ),
    "two dtypes": Odd(
        "config",
        "config.json: torch_dtype",
        ("'float16'", "decoder's dtype says"),
        config(dtype="bfloat16", torch_dtype="float16", text_config__torch_dtype=None),
    ),
    "another dtype within": Odd(
        "config",
        "config.json: torch_dtype",
        ("'float16'", "'bfloat16'", "decoder's dtype"),
        config(torch_dtype="float16", text_config__torch_dtype="bfloat16"),
    ),
    "no architecture": Odd(
        "config", "config.json: architectures", ("missing",), config(architectures=...)
    ),
    "a configuration of no bytes": Odd(
        "config", "config.json", ("0 bytes", "download"), holding("config.json", b"")
    ),
    "a tokenizer of no bytes": Odd(
        "tokenizer", "tiktoken.model", ("0 bytes", "download"), holding("tiktoken.model", b"")
    ),
    "a template of no bytes": Odd(
        "template", "chat_template.jinja", ("0 bytes",), holding("chat_template.jinja", b"")
    ),
    "no template": Odd(
        "template",
        "chat template",
        ("none in the checkpoint",),
        lambda folder: (folder / "chat_template.jinja").unlink(),
    ),
    "a clone without git lfs": Odd(
        "weights", SINGLE, ("pointer of Git LFS", "git lfs pull"), holding(SINGLE, LFS)
    ),
    "a tokenizer without git lfs": Odd(
        "tokenizer", "tiktoken.model", ("pointer of Git LFS",), holding("tiktoken.model", LFS)
    ),
    "a header cut short": Odd("weights", SINGLE, ("in a file of 100", "cut short"), cut(100)),
    "a length cut short": Odd("weights", SINGLE, ("3 bytes", "8 bytes of length"), cut(3)),
    "shards without their index": Odd(
        "weights",
        "model folder",
        ("model-00001-of-00001", "download model.safetensors.index.json"),
        one_shard_alone,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_one_mistake_is_one_finding(name: str, folder: Path) -> None:
    odd = ODD[name]
    odd.make(folder)
    report = ask(folder)
    assert report.exit_code == 1
    (found,) = (f for row in report.rows for f in row.findings if f.severity == "error")
    assert found in report.row(odd.row).findings
    assert found.where == odd.where
    for word in odd.words:
        assert word in str(found)


def test_no_row_says_that_all_is_read_of_what_is_refused(folder: Path) -> None:
    assert "every key is read" in ask(folder).row("config").details[0]
    change(folder / "config.json", surprise=1)
    assert "every key" not in " ".join(ask(folder).row("config").details)


def only(model: Path | str, **choices: Any) -> Finding:
    report = ask(model, **choices)
    assert report.exit_code == 1
    (found,) = report.row("config").findings
    return found


def test_a_path_that_is_no_checkpoint_is_told_what_it_is(folder: Path, tmp_path: Path) -> None:
    found = only(folder / SINGLE)
    assert "a file, not its folder" in found.saw
    assert found.change == f"give its folder, {folder}"
    found = only(tmp_path)
    assert "there is one in kimi" in found.saw
    assert found.change == f"give {folder}"
    (tmp_path / "none").mkdir()
    assert only(tmp_path / "none").saw == f"no such file in {tmp_path / 'none'}"
    assert "no such folder" in only(tmp_path / "nowhere").saw
    assert "''" in only("").saw, "not the folder that the shell is in"


def test_a_revision_of_a_folder_is_refused(folder: Path) -> None:
    found = only(folder, revision="main")
    assert (found.where, "'main'" in found.saw) == ("revision", True)


def test_an_id_that_no_hub_answers_for_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether it would run: 2, as where weights cannot be asked for."""

    def down(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", down)
    report = ask("org/name")
    assert report.exit_code == 2
    assert "no route to the hub" in (report.row("config").unknown or "")


def test_an_id_that_the_hub_does_not_know_will_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> str:
        raise OSError("404")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    assert "404" in only("org/name").saw


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pgae-size", "3"], ("--pgae-size; the nearest is --page-size",)),
        (["--gpus=h200"], ("--gpus=h200; the nearest is --gpu",)),
        (["--zzzz"], ("unrecognized arguments: --zzzz\n",)),
        (["--gpu", "h2000"], ("'h2000'", "H200")),
        (["--tp", "0"], ("at least 1 rank",)),
        (["--tp", "two"], ("'two'",)),
        (["--image-size", "1024*768"], ("WIDTHxHEIGHT",)),
        (["--release", "flash-attn-4"], ("NAME==RELEASE",)),
    ],
)
def test_flags_that_mean_nothing_are_2_since_nothing_was_told_of_the_checkpoint(
    flags: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["check", *flags])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    for word in words:
        assert word in said.err


def test_a_gpu_that_is_not_here_is_asked_for_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["check", str(folder), "--device", "cuda"]) == 2
    assert "--gpu h200" in capsys.readouterr().err


def test_sizes_of_the_axis_add_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(folder), "--gpu", "h200", "--json", "--tp", "1", "3", "--tp", "2"])
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert [n for n in names if n.startswith("layout")] == [
        "layout tp=1",
        "layout tp=3",
        "layout tp=2",
    ]


def test_three_ranks_are_told_which_sizes_divide(folder: Path) -> None:
    report = ask(folder, sizes=(3,))
    assert report.exit_code == 1
    assert report.row("layout tp=3").findings[0].change.startswith("pass --tp 1")
    assert report.row("memory tp=3").status == "unknown"


def test_what_another_file_of_the_folder_is_does_not_matter(folder: Path) -> None:
    """Only what is read must say something."""
    shutil.copy(folder / "config.json", folder / "notes.json")
    (folder / "empty.json").write_bytes(b"")
    assert ask(folder).exit_code == 0
