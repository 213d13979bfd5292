"""The strict reading of folders and headers: what a file says is checked against its size and
against the index; nothing of a tensor's data is read, no other format is opened."""

import json
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from toy_vlm import published, read_ok, save_shards, save_single

from vitrail.config.finding import Finding
from vitrail.weights import headers

GOLDEN = Path(__file__).parent.parent / "golden" / "kimi_vl" / "ckpt"


def refused(folder: Path) -> list[Finding]:
    found = headers.read(folder)
    assert isinstance(found, list), "accepted"
    assert found
    assert all(f.severity == "error" for f in found)
    return found


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("count", [1, 3])
def test_read_finds_each_tensor_where_its_bytes_are(tmp_path: Path, count: int) -> None:
    stored = published(dtype=torch.bfloat16)
    stored["empty"], stored["scalar"] = torch.zeros(0, 3), torch.tensor(7, dtype=torch.int64)
    if count == 1:
        save_single(stored, tmp_path)
    else:
        save_shards(stored, tmp_path, count)
    found = read_ok(tmp_path)
    assert found.warnings == ()
    assert found.tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        header = found.tensors[name]
        assert header.shape == tuple(tensor.shape)
        assert f"torch.{header.dtype}" == str(tensor.dtype)
        data = (tmp_path / header.file).read_bytes()[header.start : header.stop]
        assert data == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_golden_headers_are_what_safetensors_reads() -> None:
    found = read_ok(GOLDEN)
    stored = load_file(GOLDEN / "model.safetensors")
    shapes = {n: (t.shape, f"torch.{t.dtype}") for n, t in found.tensors.items()}
    assert shapes == {n: (tuple(t.shape), str(t.dtype)) for n, t in stored.items()}


@pytest.mark.parametrize("change", [-301, -1, 8])
def test_e14_a_file_of_another_size_is_refused_with_both_sizes(tmp_path: Path, change: int) -> None:
    file = save_shards(published(), tmp_path)[1]
    size = (tmp_path / file).stat().st_size
    os.truncate(tmp_path / file, size + change)
    (found,) = refused(tmp_path)
    assert found.where == file
    assert found.code == "wrong_file_size"
    assert f"have {size + change} bytes, want {size}" in found.saw
    assert f"by {abs(change)}" in found.saw


def test_e14_a_file_cut_within_its_header(tmp_path: Path) -> None:
    save_single(published(), tmp_path)
    for size in (300, 8, 7, 0):
        os.truncate(tmp_path / "model.safetensors", size)
        (found,) = refused(tmp_path)
        assert found.where == "model.safetensors"
        assert str(size) in found.saw


def test_e15_missing_shards_are_listed_by_name(tmp_path: Path) -> None:
    files = save_shards(published(), tmp_path, 4)
    (tmp_path / files[1]).unlink()
    (tmp_path / files[3]).unlink()
    (found,) = refused(tmp_path)
    assert found.code == "missing_shard"
    assert files[1] in found.saw
    assert files[3] in found.saw
    assert files[0] not in found.saw
    assert str(tmp_path) not in str(found)


E16 = {
    "length 2^40": (raw({}, length=1 << 40), "1099511627776"),
    "length 2^63": (raw({}, length=1 << 63), str(1 << 63)),
    "not JSON": (raw(b"{nonsense}"), "not JSON"),
    "not UTF-8": (raw(b"\xff\xfe{}"), "not JSON"),
    "deep JSON": (raw(b"[" * 100_000), "not JSON"),
    "huge integer": (raw(b'{"a": ' + b"9" * 5000 + b"}"), "not JSON"),
    "a list": (raw([1]), "not an object"),
    "entry not an object": (raw({"bad": 1}), "bad"),
    "missing key": (raw({"bad": {"dtype": "F32", "shape": [2]}}, bytes(8)), "bad"),
    "dtype F9": (raw({"bad": entry("F9")}, bytes(8)), "'F9'"),
    "dtype a number": (raw({"bad": entry(9)}, bytes(8)), "dtype 9"),  # type: ignore[arg-type]
    "shape product": (raw({"bad": entry(shape=[3])}, bytes(8)), "[0, 8] for F32 [3]"),
    "negative shape": (raw({"bad": entry(shape=[-2])}, bytes(8)), "[-2]"),
    "float shape": (raw({"bad": entry(shape=[2.0])}, bytes(8)), "2.0"),
    "bool shape": (raw({"bad": entry(shape=[2, True])}, bytes(8)), "True"),
    "99 dims": (raw({"bad": entry(shape=[1] * 98 + [2])}, bytes(8)), "99 dims"),
    "three offsets": (raw({"bad": entry(offsets=[0, 8, 8])}, bytes(8)), "[0, 8, 8]"),
    "reversed": (raw({"bad": entry(offsets=[8, 0])}, bytes(8)), "[8, 0]"),
    "overlapping": (
        raw({"good": entry(), "bad": entry(offsets=[4, 12])}, bytes(12)),
        "overlaps",
    ),
    "a hole": (raw({"good": entry(), "bad": entry(offsets=[9, 17])}, bytes(17)), "a hole"),
    "past the end": (raw({"bad": entry(offsets=[0, 8])}, bytes(7)), "want"),
    "one name twice": (
        raw(b'{"bad": %b, "bad": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "bad twice",
    ),
    "control characters": (raw({"bad\x1b[2J": entry()}, bytes(8)), "1 dims"),
}


@pytest.mark.parametrize("kind", E16)
def test_e16_corrupt_headers_are_one_sentence_naming_the_file(tmp_path: Path, kind: str) -> None:
    data, expected = E16[kind]
    (tmp_path / "model.safetensors").write_bytes(data)
    tracemalloc.start()
    (found,) = refused(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.where.startswith("model.safetensors")
    assert expected in str(found)
    assert "\n" not in str(found)
    assert str(found).isprintable()
    assert peak < 2 << 20, "the declared length is not believed"


def test_e16_every_corrupt_file_is_named_at_once(tmp_path: Path) -> None:
    files = save_shards(published(), tmp_path)
    (tmp_path / files[0]).write_bytes(raw({}, length=1 << 40))
    (tmp_path / files[2]).write_bytes(raw({"bad": entry("F9")}, bytes(8)))
    assert [f.where for f in refused(tmp_path)] == [files[0], f"{files[2]}: bad"]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), edits=st.integers(1, 4))
@example(seed=0, edits=1)
def test_what_is_accepted_is_what_safetensors_accepts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, edits: int
) -> None:
    """Bytes of a valid header are changed: never an exception, and never a file that safetensors
    itself refuses or reads otherwise."""
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.int8)}, path)
    data = bytearray(path.read_bytes())
    for _ in range(edits):
        data[rng.randrange(len(data))] = rng.choice(b'0123456789[]{}",:\x00\xff aF')
    path.write_bytes(data)
    found = headers.read_file(path)
    if isinstance(found, Finding):
        return
    try:
        with safe_open(path, "pt") as opened:
            theirs = {n: tuple(opened.get_tensor(n).shape) for n in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        pytest.fail(f"accepted, and safetensors says {error}")
    assert {t.name: t.shape for t in found} == theirs


def test_e18_the_index_decides_and_other_sets_are_a_warning(tmp_path: Path) -> None:
    stored = published()
    files = save_shards(stored, tmp_path)
    save_file({n: t + 1 for n, t in stored.items()}, tmp_path / "consolidated.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors")
    found = read_ok(tmp_path)
    assert found.tensors.keys() == stored.keys()
    assert {t.file for t in found.tensors.values()} == set(files)
    (warning,) = found.warnings
    assert warning.severity == "warning"
    assert warning.where == "consolidated.safetensors, model.safetensors"


@pytest.mark.parametrize(
    "other", [torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 2)], ids=["eq", "ne", "shape"]
)
def test_e20_a_tensor_in_two_shards_is_refused_naming_both(
    tmp_path: Path, other: torch.Tensor
) -> None:
    save_file({"x": torch.ones(2, 3), "a": torch.ones(1)}, tmp_path / "m1.safetensors")
    save_file({"x": other, "b": torch.ones(1)}, tmp_path / "m2.safetensors")
    index = {"x": "m1.safetensors", "a": "m1.safetensors", "b": "m2.safetensors"}
    (tmp_path / headers.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    (found,) = refused(tmp_path)
    assert (found.code, found.where) == ("duplicate_tensor", "x")
    assert "m1.safetensors (float32 [2, 3])" in found.saw
    assert f"m2.safetensors (float32 {list(other.shape)})" in found.saw


class Harmful:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "adapter_model.bin", "model.pt", "model.pth", "tokenizer.pkl", "a.ckpt"],
)
def test_e23_pickles_are_refused_by_name_and_never_opened(tmp_path: Path, name: str) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Harmful(marker)))
    os.utime(folder / name, (1, 1))
    (found,) = refused(folder)
    assert (found.code, found.where) == ("pickle_file", name)
    save_single(published(), folder)
    (warning,) = read_ok(folder).warnings
    assert warning.where == name
    assert (folder / name).stat().st_atime == 1, "opened"
    assert not marker.exists()


def test_e23_an_index_of_pickles_is_refused(tmp_path: Path) -> None:
    index = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    (tmp_path / headers.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    found = refused(tmp_path)
    assert [f.code for f in found] == ["pickle_file"] * 2
    assert "pytorch_model-2.bin" in found[1].where


@pytest.mark.parametrize(
    "name",
    [
        "../m.safetensors",
        "/m.safetensors",
        "a/m.safetensors",
        "a\\m.safetensors",
        "C:m.safetensors",
        "m\x00.safetensors",
        "m.gguf",
        "",
    ],
)
def test_an_index_names_plain_files_inside_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    for place in (tmp_path, folder / "a"):
        save_file({"x": torch.ones(2)}, place / "m.safetensors")
    (folder / headers.INDEX_FILE).write_text(json.dumps({"weight_map": {"x": name}}))
    (found,) = refused(folder)
    assert found.where.startswith(headers.INDEX_FILE)
    assert "plain *.safetensors name" in found.rule
    assert str(found).isprintable()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    save_single(published(), tmp_path)
    (tmp_path / headers.INDEX_FILE).write_text(text)
    (found,) = refused(tmp_path)
    assert found.where.startswith(headers.INDEX_FILE)


def test_index_and_headers_agree_in_both_directions(tmp_path: Path) -> None:
    for file, names in (("m1.safetensors", "ax"), ("m2.safetensors", "by")):
        save_file({name: torch.ones(2) for name in names}, tmp_path / file)
    index = dict.fromkeys("axb", "m1.safetensors") | {"gone": "m2.safetensors"}
    (tmp_path / headers.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    found = {f.where: f.saw for f in refused(tmp_path)}
    assert found == {
        "b": "the index says m1.safetensors, the headers say m2.safetensors",
        "gone": "the index says m2.safetensors, the headers say no file",
        "y": "the index says no file, the headers say m2.safetensors",
    }


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "absent")[0].saw
    assert "no weights" in refused(tmp_path)[0].saw
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    assert "other.safetensors" in refused(tmp_path)[0].saw
    (tmp_path / "model.safetensors").mkdir()
    assert "not a regular file" in refused(tmp_path)[0].saw
