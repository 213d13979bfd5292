"""Checkpoints that nobody would publish by accident: whatever a file of one is, `check` ends soon,
with a finding or a refusal, never with a traceback, and sends no control character to a
terminal."""

import io
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vitrail.check.report import show
from vitrail.check.run import check
from vitrail.check.subject import Question
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused, printable
from vitrail.config.hardware import find
from vitrail.config.reader import MAX_FILE_BYTES, read_file

QWEN = Path(__file__).parents[1] / "golden" / "text_models" / "qwen2"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202e\x9b"
LIMIT_SECONDS = 10.0  # of processor time
DEEP = b"[" * 200_000 + b"]" * 200_000
JSON_FILES = (
    "config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
)
TEXT = {
    "deep": DEEP,
    "no UTF-8": bytes(range(256)),
    "a list": b"[1]",
    "empty": b"",
    "a number without end": b'{"a":' + b"9" * 10_000 + b"}",
    "a name that steers terminals": json.dumps({ESCAPE: ESCAPE}).encode(),
    "half a character": b'{"\\ud800": "\\udfff"}',
    "not a number": b'{"vocab_size": NaN, "hidden_size": Infinity}',
}


def judge(folder: Path, **choices: Any) -> int:
    """The exit code of a check that ended as it must."""
    began, out = time.process_time(), io.StringIO()
    try:
        report = check(
            Question(choices=EngineConfig(model=str(folder), **choices), gpu=find("H200"))
        )
    except Refused as refused:
        out.write("\n".join(map(str, refused.findings)))
        code = 1
    else:
        show(report, Console(file=out, width=200, force_terminal=False))
        code = report.exit_code
        json.loads(report.to_json())
    assert time.process_time() - began < LIMIT_SECONDS
    bad = {c for c in out.getvalue() if not c.isprintable()} - {"\n"}
    assert not bad, f"sent to the terminal: {bad}"
    return code


def put(folder: Path, name: str, data: bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(data)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


KINDS: dict[str, Callable[[Path], None]] = {
    "a link to itself": loop,
    "a folder": lambda path: path.mkdir(),
    "a pipe that nobody writes": lambda path: os.mkfifo(path),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "memory that cannot be read": lambda path: path.symlink_to("/proc/self/mem"),
}


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QWEN, tmp_path / "qwen"))


@pytest.mark.parametrize("what", TEXT)
@pytest.mark.parametrize("file", JSON_FILES)
def test_a_file_that_says_anything(file: str, what: str, folder: Path) -> None:
    put(folder, file, TEXT[what])
    code = judge(folder)
    # Kimi's tokenizer reads no tokenizer.json
    assert code == 1 or file == "tokenizer.json", what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", [*JSON_FILES, WEIGHTS, "tiktoken.model", "chat_template.jinja"])
def test_a_file_that_is_none(file: str, kind: str, folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    KINDS[kind](folder / file)
    assert judge(folder) == 1


def headed(header: bytes | dict[str, Any]) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


def entry(**values: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **values}


HEADERS: dict[str, bytes | dict[str, Any]] = {
    "deep": DEEP,
    "not a number": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "infinite": b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
    "too many digits": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}",
    "larger than any memory": {"a": entry(shape=[1 << 62, 1 << 62])},
    "nothing of a large thing": {"a": entry(shape=[0, 1 << 62], data_offsets=[0, 0])},
    "negative": {"a": entry(shape=[-1])},
    "true": {"a": entry(shape=[True])},
    "before its beginning": {"a": entry(data_offsets=[-4, 0])},
    "far beyond its end": {"a": entry(data_offsets=[0, 1 << 80])},
    "100,000 dims": {"a": entry(shape=[1] * 100_000)},
    "a name that steers terminals": {ESCAPE: entry()},
    "a dtype that steers terminals": {"a": entry(dtype=ESCAPE)},
    "markup": {"[red]x[/red][link=http://a]y": entry()},
    "a long name": {"n" * 200_000: entry()},
    "no name": {"": entry()},
    "half a character": b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "metadata that are none": {"__metadata__": [1, 2]},
    "many": {f"x{i}": entry(shape=[0], data_offsets=[0, 0]) for i in range(20_000)},
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_says_anything(what: str, qwen: Path) -> None:
    put(qwen, WEIGHTS, headed(HEADERS[what]))
    assert judge(qwen) == 1


@pytest.mark.parametrize("data", [b"", b"\1\2", struct.pack("<Q", 0), b"\xff" * 8])
def test_a_shard_of_few_bytes(data: bytes, qwen: Path) -> None:
    put(qwen, WEIGHTS, data)
    assert judge(qwen) == 1


@pytest.mark.parametrize(
    "file",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        f"{ESCAPE}.safetensors",
        "a\0b.safetensors",
        "\ud800.safetensors",
        "b" * 5000 + ".safetensors",
        "x\ny.safetensors",
        INDEX,
        "",
        ".",
        1,
        None,
    ],
)
def test_an_index_that_names_anything(file: object, qwen: Path) -> None:
    (qwen / WEIGHTS).unlink()
    put(qwen, INDEX, json.dumps({"weight_map": {"a": file}}).encode())
    assert judge(qwen) == 1


@pytest.mark.parametrize("name", [f"model-{ESCAPE}.safetensors".encode(), b"m-\xff.safetensors"])
def test_a_file_of_any_name(name: bytes, qwen: Path) -> None:
    os.rename(os.fsencode(qwen / WEIGHTS), os.fsencode(qwen) + b"/" + name)
    assert judge(qwen) == 1


@pytest.mark.parametrize(
    "value",
    [0, -1, 1 << 62, 10**300, 1e308, float("nan"), float("inf"), 1.5, "x", ESCAPE, [], {}, None],
    ids=repr,
)
@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "rope_theta", "eos_token_id"],
)
def test_a_number_of_the_configuration_that_is_anything(
    key: str, value: object, qwen: Path
) -> None:
    config = json.loads((qwen / "config.json").read_text())
    (qwen / "config.json").write_text(json.dumps(config | {key: value}))
    code = judge(qwen)
    assert (
        code == 1
        or (key, value) in [("eos_token_id", end) for end in (0, None, [])]
        or (key == "rope_theta" and value in (1.5, 1e308, 1 << 62))
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10**10 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'x'.center(10**10) }}",
        f"{{{{ raise_exception('{ESCAPE}') }}}}",
    ],
)
def test_a_template_that_does_anything(template: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert judge(folder) == 1


def test_a_finding_is_printable_whatever_it_quotes() -> None:
    found = Finding(where=ESCAPE, saw="a\nb\ud800", rule="é 漢 [red]", change="\u2066x")
    assert str(found).isprintable()
    assert found.where == r"\x1b]0;owned\x07\x1b[31m\u202e\x9b"
    assert found.saw == r"a\nb\ud800"
    assert found.rule == "é 漢 [red]"
    assert printable("as it is") == "as it is"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A sparse one: reading it all would take 20 GB."""
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(Refused) as refused:
        read_file(path)
    assert str(20 << 30) in str(refused.value)
    assert str(MAX_FILE_BYTES) in str(refused.value)
