"""Faults put into a checkpoint's files or the user's choices, one each: the row that should find it
does, by code and with numbers, and no other row is wrong."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import ask, change
from safetensors.numpy import save_file

from vitrail.check.report import Report, Row
from vitrail.config.hardware import CPU, find

TEXT = Path(__file__).parents[1] / "golden" / "text_models"
LITE = Path(__file__).parents[1] / "golden" / "nvila_lite" / "ckpt"
B300 = find("B300")
SINGLE = "model.safetensors"


class Fault(NamedTuple):
    """`make` breaks a copy of `base`; `asked` are what is asked of it."""

    base: str  # "kimi", or a golden text model
    row: str
    code: str
    words: tuple[str, ...]
    make: Callable[[Path], None] = lambda folder: None
    asked: dict[str, Any] = {}


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **values)


def tokenizer_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer_config.json", **values)


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text) and None


def tensors(edit: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        held = {name: value.view(np.uint16) for name, value in _bf16(folder / SINGLE).items()}
        floats = {name: np.zeros(value.shape, np.float16) for name, value in held.items()}
        edit(floats)
        save_file(floats, folder / SINGLE)

    return make


def _bf16(path: Path) -> dict[str, np.ndarray]:
    """Shapes are what counts: bf16 has no numpy type."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: np.zeros(entry["shape"], np.uint16)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def edit(held: dict[str, np.ndarray]) -> None:
        for name in [n for n in held if old in n]:
            held[name.replace(old, new)] = held.pop(name)

    return tensors(edit)


def without(part: str) -> Callable[[Path], None]:
    return tensors(lambda held: [held.pop(n) for n in list(held) if part in n] and None)


def with_tensor(name: str, value: np.ndarray) -> Callable[[Path], None]:
    return tensors(lambda held: held.__setitem__(name, value))


def cut(num_bytes: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(data[:-num_bytes] if num_bytes > 0 else data + bytes(8))

    return make


def header(length: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        data = (folder / SINGLE).read_bytes()
        (folder / SINGLE).write_bytes(struct.pack("<Q", length) + data[8:])

    return make


def sharded(spoil: Callable[[dict[str, list[str]], Path], None]) -> Callable[[Path], None]:
    """In three shards and an index; `spoil` may change which names each shard holds."""

    def make(folder: Path) -> None:
        held = load_file_shapes(folder / SINGLE)
        (folder / SINGLE).unlink()
        names = sorted(held)
        files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
        index = {name: file for file, inside in files.items() for name in inside}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
        spoil(files, folder)
        for file, inside in files.items():
            save_file({name: held[name] for name in inside}, folder / file)

    return make


def load_file_shapes(path: Path) -> dict[str, np.ndarray]:
    return {name: np.zeros(v.shape, np.float16) for name, v in _bf16(path).items()}


def pickled(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04not opened")


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


NORM = "model.layers.1.input_layernorm.weight"
FIRST = "model-00001-of-00003.safetensors"
NOTHING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_PICTURES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)

FAULTS: dict[str, Fault] = {
    # configuration
    "unknown_key": Fault("qwen2", "config", "unknown_key", ("surprise", "1"), config(surprise=1)),
    "contradiction": Fault(
        "kimi", "config", "unsupported_config", ("vocab_size", "7"), config(vocab_size=7)
    ),
    "other_kind": Fault(
        "qwen2", "config", "unsupported_config", ("model_type",), config(model_type="qwen3")
    ),
    "missing_key": Fault(
        "qwen2", "config", "bad_config", ("hidden_size", "missing"), config(hidden_size=...)
    ),
    "heads_that_do_not_divide": Fault(
        "qwen2", "config", "bad_config", ("num_key_value_heads", "3"), config(num_key_value_heads=3)
    ),
    "quantised": Fault(
        "qwen2",
        "config",
        "unsupported_config",
        ("quantization_config", "fp8"),
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ),
    "unknown_architecture": Fault(
        "qwen2",
        "config",
        "unknown_architecture",
        ("Qwen2ForCausalLM",),
        config(architectures=["Qwen22ForCausalLM"]),
    ),
    # Weights fused for so many ranks, and other counts of key heads by layer: no model of ours.
    "mimo": Fault(
        "qwen2",
        "config",
        "unknown_architecture",
        ("MiMoV2ForCausalLM",),
        config(
            architectures=["MiMoV2ForCausalLM"], model_type="mimo_v2", swa_num_key_value_heads=8
        ),
    ),
    "image_token_beyond": Fault(
        "kimi",
        "config",
        "bad_config",
        ("media_placeholder_token_id", "686"),
        config(media_placeholder_token_id=687),
    ),
    "not_json": Fault("qwen2", "config", "bad_checkpoint", ("JSON",), written("config.json", "{")),
    "adapter": Fault("qwen2", "config", "lora_adapter", ("LoRA",), adapter),
    "image_rule_of_another_tower": Fault(
        "kimi",
        "config",
        "bad_config",
        ("patch_size 16", "14"),
        lambda folder: change(folder / "preprocessor_config.json", patch_size=16),
    ),
    # weights
    "missing_tensor": Fault("qwen2", "weights", "missing_tensor", (NORM,), without(NORM)),
    "unexpected_tensor": Fault(
        "qwen2",
        "weights",
        "unexpected_tensor",
        ("model.layers.1.extra.weight",),
        with_tensor("model.layers.1.extra.weight", np.zeros((2, 3), np.float16)),
    ),
    "renamed_module": Fault(
        "qwen2",
        "weights",
        "unexpected_tensor",
        ("feed_forward",),
        renamed(".mlp.", ".feed_forward."),
    ),
    "wrong_shape": Fault(
        "qwen2",
        "weights",
        "wrong_shape",
        ("[65]", "[64]"),
        with_tensor(NORM, np.zeros(65, np.float16)),
    ),
    "wrong_dtype": Fault(
        "qwen2", "weights", "wrong_dtype", ("int8",), with_tensor(NORM, np.zeros(64, np.int8))
    ),
    "short_by_1": Fault("qwen2", "weights", "wrong_file_size", ("cut short by 1",), cut(1)),
    "short_by_301": Fault("qwen2", "weights", "wrong_file_size", ("cut short by 301",), cut(301)),
    "long_by_8": Fault("qwen2", "weights", "wrong_file_size", ("too long by 8",), cut(0)),
    "huge_header": Fault(
        "qwen2", "weights", "bad_checkpoint", (str(1 << 40), "bytes"), header(1 << 40)
    ),
    "no_weights": Fault("qwen2", "weights", "bad_checkpoint", ("no weights",), gone(SINGLE)),
    "pickle": Fault("qwen2", "weights", "pickle_file", ("pytorch_model.bin",), pickled),
    "other_prefix": Fault(
        "qwen2",
        "weights",
        "unexpected_tensor",
        ("transformer.", "nearest"),
        renamed("model.", "transformer."),
    ),
    "no_head": Fault("qwen2", "weights", "missing_tensor", ("lm_head",), without("lm_head")),
    "missing_shard": Fault(
        "qwen2",
        "weights",
        "missing_shard",
        ("1 missing", FIRST),
        sharded(lambda files, _: files.pop(FIRST) and None),
    ),
    "tensor_in_two_shards": Fault(
        "qwen2",
        "weights",
        "duplicate_tensor",
        (NORM, "00001", "00002"),
        sharded(
            lambda files, _: [f.append(NORM) for f in files.values() if NORM not in f] and None
        ),
    ),
    "index_that_lies": Fault(
        "qwen2",
        "weights",
        "wrong_index",
        (NORM, "no file"),
        sharded(lambda files, _: [f.remove(NORM) for f in files.values() if NORM in f] and None),
    ),
    # parallel layout
    "tp_5": Fault(
        "qwen2", "layout tp=5", "illegal_sharding", ("5", "--tp 1"), asked={"sizes": (5,)}
    ),
    "tp_32": Fault("kimi", "layout tp=32", "illegal_sharding", ("32",), asked={"sizes": (32,)}),
    # memory
    "longer_than_the_model": Fault(
        "qwen2", "memory tp=1", "invalid_value", ("300", "256"), asked={"max_model_len": 300}
    ),
    "cache_too_small": Fault(
        "qwen2",
        "memory tp=1",
        "cache_too_small",
        ("256", "64 tokens"),
        asked={"max_model_len": 256, "kv_cache_bytes": 40_000},
    ),
    "cache_too_large": Fault(
        "qwen2",
        "memory tp=1",
        "out_of_memory",
        ("150000000000", "too many"),
        asked={"kv_cache_bytes": 150_000_000_000},
    ),
    "encoder_that_leaves_nothing": Fault(
        "kimi",
        "memory tp=1",
        "out_of_memory",
        ("bytes left for pages",),
        asked={"encoder_cache_bytes": 150_000_000_000},
    ),
    # attention
    "unknown_backend": Fault(
        "qwen2", "attention tp=1", "unknown_backend", ("flash",), asked={"attention": "flash"}
    ),
    "old_kernels_on_a_b300": Fault(
        "qwen2",
        "attention tp=1",
        "fa4_release",
        ("4.0.0b18", "4.0.0b36"),
        asked={"attention": "fa4", "gpu": B300, "installed": {"fa4": "4.0.0b18"}},
    ),
    "kernels_of_another_gpu": Fault(
        "qwen2", "attention tp=1", "attention_", ("cute",), asked={"attention": "cute", "gpu": B300}
    ),
    # pictures
    "picture_longer_than_the_context": Fault(
        "kimi",
        "images",
        "image_too_large",
        ("64 tokens", "50"),
        asked={"images": ((224, 224),), "max_model_len": 50},
    ),
    "picture_of_too_many_pixels": Fault(
        "kimi",
        "images",
        "image_too_large",
        ("100000000 pixels", "64000000"),
        asked={"images": ((10_000, 10_000),)},
    ),
    "picture_too_thin": Fault(
        "kimi", "images", "image_too_long", ("40000",), asked={"images": ((40_000, 3),)}
    ),
    "picture_beyond_the_budget": Fault(
        "kimi",
        "images",
        "image_too_large",
        ("256 patches", "100"),
        asked={"images": ((224, 224),), "encoder_patches": 100},
    ),
    # conversations
    "broken_template": Fault(
        "kimi", "template", "bad_chat_template", ("default",), template("{% for m in messages %}")
    ),
    "template_without_pictures": Fault(
        "kimi", "template", "bad_chat_template", ("0 of", "2 images"), template(NO_PICTURES)
    ),
    "template_of_text_alone": Fault(
        "kimi", "template", "invalid_value", ("2 images", "text alone"), template(NOTHING)
    ),
    "template_that_says_nothing": Fault(
        "kimi", "template", "bad_chat_template", ("does not come out",), template("hello")
    ),
    "no_template": Fault(
        "kimi", "template", "no_chat_template", ("none",), gone("chat_template.jinja")
    ),
    # text
    "tokens_beyond_the_vocabulary": Fault(
        "kimi",
        "tokenizer",
        "bad_tokenizer",
        ("ordinary tokens", "400 rows"),
        config(
            vocab_size=400,
            text_config__vocab_size=400,
            media_placeholder_token_id=399,
            text_config__eos_token_id=398,
            text_config__bos_token_id=397,
            text_config__pad_token_id=396,
        ),
        {"weights": "random"},
    ),
    "image_token_that_is_no_special": Fault(
        "kimi", "tokenizer", "bad_tokenizer", ("65",), config(media_placeholder_token_id=65)
    ),
    "garbled_tokenizer": Fault(
        "kimi", "tokenizer", "bad_tokenizer", ("line 1",), written("tiktoken.model", "<html>\n")
    ),
    # choices
    "page_of_nothing": Fault(
        "qwen2", "choices", "invalid_value", ("page_size", "0"), asked={"page_size": 0}
    ),
    "two_devices": Fault(
        "qwen2", "choices", "invalid_value", ("cpu", "H200"), asked={"device": "cpu"}
    ),
}
# What another row says, too, of the same fault.
ECHOES = {
    "tokens_beyond_the_vocabulary": {"template"},
    "image_token_that_is_no_special": {"template"},
}


def said(report: Report) -> list[str]:
    """Every finding, for a reader of a failure."""
    return [f"{row.name}: {finding}" for row in report.rows for finding in row.findings]


def copy(fault: Fault, whole: Path, tmp_path: Path) -> Path:
    base = whole if fault.base == "kimi" else TEXT / fault.base
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    fault.make(folder)
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does(
    name: str, whole: Path, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    report = ask(copy(fault, whole, tmp_path), **fault.asked)
    assert report.exit_code == 1, said(report)
    found = [f for f in report.row(fault.row).findings if f.severity == "error"]
    mine = [f for f in found if f.code.startswith(fault.code)]
    assert mine, found
    text = " ".join(str(f) for f in mine)
    for word in fault.words:
        assert word in text, text
    wrong = {row.name for row in report.rows if row.status == "error"}
    assert wrong - {fault.row} == ECHOES.get(name, set()), said(report)


def test_there_are_thirty_faults_and_more() -> None:
    assert len(FAULTS) >= 30


def warned(report: Report, row: str) -> set[str]:
    assert report.exit_code == 0, said(report)
    return {finding.code for finding in report.row(row).findings}


def test_a_budget_below_a_tile_is_refused() -> None:
    report = ask(LITE, encoder_patches=10)
    assert report.exit_code == 1
    (found,) = [f for f in report.row("attention tp=1").findings if f.severity == "error"]
    assert (found.where, found.saw) == ("encoder_patches", "10")


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_a21_an_unknown_key_of_either_file_is_named(folder: Path, file: str) -> None:
    change(folder / file, surprise=17)
    report = ask(folder)
    assert report.exit_code == 1
    (found,) = report.row("config").findings
    assert (found.code, found.where) == ("unknown_key", f"{file}: surprise")
    assert "17" in found.saw


def test_e18_another_set_of_weights_beside_is_a_warning(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TEXT / "qwen2", tmp_path / "model"))
    shutil.copy(folder / SINGLE, folder / "consolidated.safetensors")
    assert warned(ask(folder), "weights") == {"unused_file"}


def test_e11_a_tied_head_that_is_stored_is_a_warning(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TEXT / "llama_tied", tmp_path / "model"))
    held = load_file_shapes(folder / SINGLE)
    if "lm_head.weight" not in held:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
        save_file(held, folder / SINGLE)
    assert "tied_tensor_present" in warned(ask(folder), "weights")


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    """Exit code 2 comes of a row that nobody could decide; an error goes before it."""
    row = Row(name="weights", unknown="the hub does not answer")
    report = Report(model="m", device="H200", seconds=0, rows=(Row(name="config"), row))
    assert (row.status, report.exit_code) == ("unknown", 2)
    report = ask(tmp_path / "nowhere", CPU)
    assert report.exit_code == 1
    assert report.row("weights").status == "unknown"
