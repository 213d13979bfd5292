"""The strict reading of GGUF: what llama.cpp's package writes is read exactly, and no byte of a
broken file is believed."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.weights.gguf_files import LLAMA, write
from vitrail.config.finding import Finding, Refused, accept
from vitrail.weights import load
from vitrail.weights.gguf import TYPES, GgufFile, GgufTensors, read
from vitrail.weights.mapping import Copy, WeightMap
from vitrail.weights.plan import resolve

RNG = np.random.default_rng(8)
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def opened(path: Path) -> GgufFile:
    got = read(path)
    assert isinstance(got, GgufFile), got
    return got


def refused(path: Path) -> Finding:
    got = read(path)
    assert isinstance(got, list), "a broken file was read"
    (finding,) = got
    assert finding.where.startswith(path.name)
    return finding


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors whose bytes do not fill their alignment, and one of each kind of metadata."""
    tensors = {
        "a.weight": RNG.normal(size=(3, 5)).astype(np.float32),
        "b.weight": RNG.normal(size=(7,)).astype(np.float32),
    }
    metadata = LLAMA | {"some.words": ["é", "", "x"], "some.flag": True, "some.ints": [3, -4]}
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", metadata, tensors)


def test_metadata_and_headers_are_those_that_were_written(small: Path) -> None:
    file = opened(small)
    reader = gguf.GGUFReader(small)
    for key, value in file.metadata.items():
        assert reader.fields[key].contents() == value, key
    assert file.metadata["some.words"] == ["é", "", "x"]
    assert file.metadata["some.flag"] is True
    assert set(file.headers.tensors) == {"a.weight", "b.weight"}
    header = file.headers.tensors["a.weight"]
    assert (header.shape, header.dtype, header.file) == ((3, 5), "float32", "small.gguf")
    for tensor in reader.tensors:
        with GgufTensors(file) as arrays:
            assert np.array_equal(arrays.get(tensor.name).ravel(), tensor.data.ravel())


def half(values: np.ndarray) -> float:
    return float(values.view(np.float16)[0])


def scales_and_mins(packed: np.ndarray) -> list[tuple[int, int]]:
    """The eight 6-bit (scale, min) pairs of 12 bytes of a K-block."""
    q = [int(b) for b in packed]
    low = [(q[j] & 63, q[j + 4] & 63) for j in range(4)]
    high = [
        ((q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4))
        for j in range(4, 8)
    ]
    return low + high


def by_definition(kind: str, block: np.ndarray) -> list[float]:
    """One block's values, written out one after another from the format's description."""
    d = half(block[:2])
    match kind:
        case "Q4_0":
            nibbles = [int(b) & 15 for b in block[2:]] + [int(b) >> 4 for b in block[2:]]
            return [d * (q - 8) for q in nibbles]
        case "Q4_1":
            m = half(block[2:4])
            nibbles = [int(b) & 15 for b in block[4:]] + [int(b) >> 4 for b in block[4:]]
            return [d * q + m for q in nibbles]
        case "Q5_0" | "Q5_1":
            at = 2 if kind == "Q5_0" else 4
            high, low = int(block[at : at + 4].view("<u4")[0]), block[at + 4 :]
            nibbles = [int(b) & 15 for b in low] + [int(b) >> 4 for b in low]
            values = [q + ((high >> i & 1) << 4) for i, q in enumerate(nibbles)]
            if kind == "Q5_0":
                return [d * (q - 16) for q in values]
            return [d * q + half(block[2:4]) for q in values]
        case "Q8_0":
            return [d * int(q) for q in block[2:].view(np.int8)]
        case "Q2_K":
            d, m = half(block[80:82]), half(block[82:84])
            values = []
            for i in range(256):
                q = int(block[16 + i // 128 * 32 + i % 32]) >> 2 * (i % 128 // 32) & 3
                values.append(d * (block[i // 16] & 15) * q - m * (block[i // 16] >> 4))
            return values
        case "Q3_K":
            mask, low, packed, d = block[:32], block[32:96], block[96:108], half(block[108:])
            values = []
            for i in range(256):
                part, quarter, at, group = i // 128, i % 128 // 32, i % 32, i // 16
                scale = int(packed[group % 8]) >> 4 * (group // 8) & 15
                scale |= (int(packed[8 + group % 4]) >> 2 * (group // 4) & 3) << 4
                q = int(low[part * 32 + at]) >> 2 * quarter & 3
                q -= 0 if int(mask[at]) >> (4 * part + quarter) & 1 else 4
                values.append(d * (scale - 32) * q)
            return values
        case "Q4_K" | "Q5_K":
            m, pairs = half(block[2:4]), scales_and_mins(block[4:16])
            high, low = (block[16:48], block[48:]) if kind == "Q5_K" else (None, block[16:])
            values: list[float] = []
            for i, (scale, least) in enumerate(pairs):
                for at in range(32):
                    q = int(low[i // 2 * 32 + at]) >> 4 * (i % 2) & 15
                    if high is not None:
                        q += (int(high[at]) >> i & 1) << 4
                    values.append(d * scale * q - m * least)
            return values
        case "Q6_K":
            low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
            d = half(block[208:])
            values = []
            for i in range(256):
                part, quarter, at = i // 128, i % 128 // 32, i % 32
                q = int(low[part * 64 + quarter % 2 * 32 + at]) >> 4 * (quarter // 2) & 15
                q |= (int(high[part * 32 + at]) >> 2 * quarter & 3) << 4
                values.append(d * int(scales[i // 16]) * (q - 32))
            return values
    raise AssertionError(kind)


# Where a block keeps its fp16 scales, if not at its start.
SCALES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
SCALES |= {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_unpacked_by_their_definition(kind: str, tmp_path: Path) -> None:
    form = next(t for t in TYPES.values() if t.name == kind)
    blocks = RNG.integers(0, 256, (6, form.block_bytes)).astype(np.uint8)
    for at in SCALES.get(kind, [0]):  # finite ones
        blocks[:, at : at + 2] = RNG.normal(size=(6, 1)).astype(np.float16).view(np.uint8)
    path = write(
        tmp_path / "x.gguf", {}, {"w": blocks.reshape(3, 2 * form.block_bytes)}, {"w": kind}
    )
    with GgufTensors(opened(path)) as arrays:
        got = arrays.get("w")
    assert got.shape == (3, 2 * form.block)
    want = np.array([by_definition(kind, block) for block in blocks], np.float64)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_are_exact(kind: str, tmp_path: Path) -> None:
    values = RNG.normal(size=(3, 4)).astype(np.float32)
    values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bf16 holds them
    stored = values.astype(np.float16) if kind == "F16" else values
    file = opened(write(tmp_path / "x.gguf", {}, {"w": stored}, {"w": kind}))
    assert file.kinds["w"].name == kind
    with GgufTensors(file) as arrays:
        got = arrays.get("w")
    assert got.dtype == np.float32
    assert np.array_equal(got, stored.astype(np.float32))


def test_every_type_has_the_package_s_sizes() -> None:
    assert {*BLOCKS, "F32", "F16", "BF16"} == {kind.name for kind in TYPES.values()}
    for code, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(code)
        assert theirs.name == kind.name
        assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block, kind.block_bytes)


def test_e14_a_gguf_of_another_length_is_refused_with_both_sizes(
    small: Path, tmp_path: Path
) -> None:
    """The last tensor is 28 bytes in a place of 32: the padding may be there or not."""
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for end in (len(data), len(data) - 4):
        path.write_bytes(data[:end])
        opened(path)
    for changed in (data[:-5], data[:-301], data + b"\0" * 8):
        path.write_bytes(changed)
        finding = refused(path)
        assert finding.code in ("wrong_file_size", "bad_checkpoint")
        assert str(len(changed)) in finding.saw


def test_e14_a_gguf_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for end in range(len(data) - 4):
        path.write_bytes(data[:end])
        refused(path)


@given(data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_e16_a_gguf_with_changed_bytes_is_read_or_refused(small: Path, data: st.DataObject) -> None:
    """Never another exception, never a large allocation (counts are held against the file)."""
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.sampled_from([0, 1, 8, 9, 0x7F, 0xFF]))
    changed = small.with_name("changed.gguf")
    changed.write_bytes(raw)
    got = read(changed)
    if isinstance(got, list):
        assert all(f.where.startswith("changed.gguf") for f in got)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def built(entries: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def tensor(name: bytes, shape: tuple[int, ...], code: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


ONE = tensor(b"a", (4,), 0, 0)


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"", "bad_checkpoint", "0 bytes"),
        (built([], [ONE], bytes(16))[:3] + b"X" + bytes(40), "unsupported_gguf", "X"),
        (built([], [ONE], bytes(16), version=1), "unsupported_gguf", "version 1"),
        (built([], [], version=3 << 24), "unsupported_gguf", "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "bad_checkpoint", "at 24"),
        (built([string(b"k") + struct.pack("<I", 13)], []), "bad_checkpoint", "type 13"),
        (built([string(b"k") + struct.pack("<IIQ", 9, 9, 1)], []), "bad_checkpoint", "array"),
        (
            built([string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 40)], []),
            "bad_checkpoint",
            str(4 << 40),
        ),
        (
            built([string(b"k") + struct.pack("<I", 8) + string(b"\xff")], []),
            "bad_checkpoint",
            "UTF",
        ),
        (built([string(b"k") + struct.pack("<II", 4, 1)] * 2, []), "bad_checkpoint", "twice"),
        (
            built([string(b"general.alignment") + struct.pack("<II", 4, 0)], [ONE], bytes(16)),
            "bad_checkpoint",
            "0",
        ),
        (
            built([string(b"split.count") + struct.pack("<IH", 2, 3)], []),
            "unsupported_gguf",
            "3 files",
        ),
        (built([], [tensor(b"a", (256,), 16, 0)]), "unsupported_quantisation", "IQ2_XXS"),
        (built([], [tensor(b"a", (256,), 99, 0)]), "unsupported_quantisation", "99 (unknown)"),
        (built([], [tensor(b"a", (33,), 2, 0)], bytes(18)), "bad_checkpoint", "33"),
        (built([], [tensor(b"a", (), 0, 0)]), "bad_checkpoint", "0 dims"),
        (built([], [tensor(b"a", (1,) * 5, 0, 0)]), "bad_checkpoint", "5 dims"),
        (built([], [tensor(b"a\n", (4,), 0, 0)], bytes(16)), "bad_checkpoint", "name"),
        (built([], [tensor(b"a", (4,), 0, 32)], bytes(48)), "bad_checkpoint", "offset 32"),
        (built([], [ONE, tensor(b"b", (4,), 0, 0)], bytes(48)), "bad_checkpoint", "offset 0"),
        (built([], [ONE, tensor(b"a", (4,), 0, 32)], bytes(48)), "bad_checkpoint", "second"),
        (built([], [tensor(b"a", (1 << 62,), 0, 0)], bytes(16)), "wrong_file_size", "cut short"),
    ],
)
def test_e16_a_corrupt_gguf_is_one_sentence(
    raw: bytes, code: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    finding = refused(path)
    assert (finding.code, words in finding.saw) == (code, True), finding


def test_e16_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    values = np.ones((2, 32), np.float32)
    values[1, 3] = np.nan
    file = opened(write(tmp_path / "nan.gguf", {}, {"w": values, "v": values[:1]}))
    module = nn.Module()
    for name, rows in (("w", 2), ("v", 1)):
        parameter = nn.Parameter(torch.empty(rows, 32, device="meta"))
        module.register_parameter(name, parameter)
    weight_map = WeightMap(rows=(Copy("w", "w"), Copy("v", "v")))
    planned = accept(resolve(weight_map, file.headers, load.parameters_of(module)))
    with pytest.raises(Refused) as caught:
        load.load(planned, module, file, torch.device("cpu"))
    (finding,) = caught.value.findings
    assert (finding.code, finding.where) == ("weights_not_finite", "w")


def test_without_the_package_only_blocks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = {"w": np.ones((2, 32), np.float32)}
    plain = opened(write(tmp_path / "plain.gguf", {}, ones))
    blocks = opened(write(tmp_path / "blocks.gguf", {}, ones, {"w": "Q8_0"}))
    monkeypatch.setitem(__import__("sys").modules, "gguf.quants", None)
    with GgufTensors(plain) as arrays:
        assert arrays.get("w").sum() == 64
    with pytest.raises(Refused) as caught:
        GgufTensors(blocks)
    (finding,) = caught.value.findings
    assert finding.code == "missing_package"
    assert "Q8_0" in finding.saw


def array(kind: int, count: int, data: bytes) -> bytes:
    return string(b"some.array") + struct.pack("<IIQ", 9, kind, count) + data


def test_an_array_of_bytes_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(built([array(0, 1000, b"\x07" * 1000)], []))
    assert opened(tmp_path / "a.gguf").metadata["some.array"] == b"\x07" * 1000


@pytest.mark.parametrize(("kind", "width"), [(4, 4), (7, 1), (10, 8), (8, 8)])
def test_more_listed_values_than_any_vocabulary_are_refused_before_a_list_is_made(
    kind: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.weights.gguf.MAX_LISTED", 100)
    for count, held in ((60, True), (101, False)):
        entry = array(kind, count, bytes(count * width))
        (tmp_path / "a.gguf").write_bytes(built([entry], []))
        got = read(tmp_path / "a.gguf")
        assert isinstance(got, GgufFile) is held
    assert "101 values" in refused(tmp_path / "a.gguf").saw
    second = array(kind, 41, bytes(41 * width)).replace(b"some", b"more")
    (tmp_path / "a.gguf").write_bytes(built([array(4, 60, bytes(240)), second], []))
    assert "101 values" in refused(tmp_path / "a.gguf").saw, "of all arrays together"


def test_e14_a_file_cut_short_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A mapped one would end the process."""
    values = np.arange(1 << 16, dtype=np.float32)
    path = write(tmp_path / "a.gguf", LLAMA, {"a.weight": values, "b.weight": values})
    with GgufTensors(opened(path)) as arrays:
        assert np.array_equal(arrays.get("a.weight"), values)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - (1 << 17))
        with pytest.raises(Refused, match=r"a\.gguf: b\.weight: 131\d+ bytes of 262144"):
            arrays.get("b.weight")
