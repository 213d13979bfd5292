"""The strict reading of a GGUF file, llama.cpp's single-file checkpoint: metadata, tensor headers,
and tensors dequantised to float32 as they are read. Knows no models, no names, no torch.

Format (little-endian): "GGUF", u32 version, u64 tensors, u64 metadata entries; each entry a string
key, a u32 type and a value; each tensor a string name, u32 dims, their u64 extents (fastest
first), a u32 type and a u64 offset; padding to `general.alignment`; the tensors' bytes, each
aligned. A string is a u64 length and UTF-8. Quantised rows are blocks of 32 or 256 values.

Decisions: every count and length is held against the bytes that are left before anything is
allocated; tensors stand in the order of their offsets with no more than padding between them; a
file ends within the last tensor's padding; files in parts and big-endian files are refused. It
is read and never mapped: one that is cut short meanwhile is a finding, not a signal.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from blake3 import blake3

from vitrail.config.finding import Finding, Refused
from vitrail.weights.headers import Headers, TensorHeader
from vitrail.weights.mapping import numel

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_DIMS, MAX_KEY_BYTES, MAX_ALIGNMENT = 4, 65_535, 1 << 16
MAX_LISTED = 1 << 22  # values of all arrays that become lists: three vocabularies and more
ALIGNMENT = 32  # where the file states none


class Quantisation(NamedTuple):
    """A tensor type: `block` values of a row take `block_bytes`."""

    name: str
    block: int
    block_bytes: int


# Types that are read, by their code; all but the first three are blocks.
TYPES: Mapping[int, Quantisation] = MappingProxyType(
    {
        0: Quantisation("F32", 1, 4),
        1: Quantisation("F16", 1, 2),
        30: Quantisation("BF16", 1, 2),
        2: Quantisation("Q4_0", 32, 18),
        3: Quantisation("Q4_1", 32, 20),
        6: Quantisation("Q5_0", 32, 22),
        7: Quantisation("Q5_1", 32, 24),
        8: Quantisation("Q8_0", 32, 34),
        10: Quantisation("Q2_K", 256, 84),
        11: Quantisation("Q3_K", 256, 110),
        12: Quantisation("Q4_K", 256, 144),
        13: Quantisation("Q5_K", 256, 176),
        14: Quantisation("Q6_K", 256, 210),
    }
)
# Other types, to refuse them by name.
OTHER_TYPES = MappingProxyType(
    {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"}
    | {21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
    | {28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
)
PLAIN = ("F32", "F16", "BF16")
UNPACKED_BLOCKS = 1 << 14

# Metadata types of fixed size: code -> struct format.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_BYTES = (0, 1)  # of arrays of these the bytes are kept, no list is made
_REPAIR = "download the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """One file's facts. `metadata`: ints, floats, bools, strings and lists of them by key; an array
    of 8-bit integers is `bytes`. `headers`: its tensors, outermost dim first, of dtype float32,
    which is what reading gives. `kinds`: how each is stored. `digest`: 32 bytes over everything
    before the tensors."""

    path: Path
    metadata: Mapping[str, object]
    headers: Headers
    kinds: Mapping[str, Quantisation]
    digest: bytes


class _Bad(Exception):
    """What is wrong at a place; becomes a finding at the module's border."""

    def __init__(self, where: str, saw: str, rule: str, code: str = "bad_checkpoint"):
        super().__init__(where)
        self.where, self.saw, self.rule, self.code = where, saw, rule, code


def read(path: Path) -> GgufFile | list[Finding]:
    """Metadata and headers of the file, or what is wrong with it."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        if size < 24:
            raise _Bad("the file", f"{size} bytes", "at least the 24 bytes of a header")
        with path.open("rb") as file:
            return _parse(path, _Cursor(file, size))
    except _Bad as bad:
        finding = Finding(
            where=f"{path.name}: {bad.where}",
            saw=bad.saw,
            rule=bad.rule,
            change=_REPAIR if bad.code == "bad_checkpoint" else "use a file of a known kind",
            code=bad.code,
        )
        return [finding]


class _Cursor:
    """Reads forward; `where` names what is being read."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self.size, self.at, self.where = file, size, 0, "the header"
        self._listed = 0

    def take(self, count: int) -> bytes:
        self.need(count)
        data = self._file.read(count)
        if len(data) != count:
            raise _Bad(self.where, f"{len(data)} bytes of {count}", "a file is not cut meanwhile")
        self.at += count
        return data

    def again(self) -> bytes:
        """Everything up to here, once more."""
        count, self.at = self.at, 0
        self._file.seek(0)
        return self.take(count)

    def need(self, count: int) -> None:
        """Refuses where fewer than `count` bytes are left."""
        if count > self.size - self.at:
            saw = f"{count} bytes at {self.at} of a file of {self.size}"
            raise _Bad(self.where, saw, "what the file states lies within it")

    def unpack(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))
        return value

    def count(self, least_bytes: int) -> int:
        """A u64 number of things of at least so many bytes each."""
        count: int = self.unpack("Q")
        self.need(count * least_bytes)
        return count

    def string(self, limit: int | None = None) -> str:
        length = self.count(1)
        if limit is not None and length > limit:
            raise _Bad(self.where, f"a name of {length} bytes", f"at most {limit} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Bad(self.where, f"a string that is not UTF-8 ({error})", "UTF-8") from error

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            known = ", ".join(map(str, sorted({*_SCALARS, _STRING, _ARRAY})))
            raise _Bad(self.where, f"a value of type {kind}", f"one of the types {known}")
        return self.unpack(_SCALARS[kind])

    def _array(self) -> list[object] | bytes:
        kind: int = self.unpack("I")
        if kind != _STRING and kind not in _SCALARS:
            raise _Bad(self.where, f"an array of type {kind}", "an array of scalars or strings")
        width = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        count = self.count(width)
        if kind in _BYTES:
            return self.take(count)
        self._listed += count
        if self._listed > MAX_LISTED:
            saw = f"{self._listed} values of arrays up to here"
            raise _Bad(self.where, saw, f"at most {MAX_LISTED} in a file", "unsupported_gguf")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        raw = self.take(count * width)
        return cast(list[object], np.frombuffer(raw, dtype).tolist())


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    magic, version = cursor.take(4), cursor.unpack("I")
    if magic != MAGIC or version not in VERSIONS:
        swapped = magic == MAGIC and int.from_bytes(version.to_bytes(4, "little")) in VERSIONS
        saw = "a big-endian file" if swapped else f"{magic!r}, version {version}"
        rule = f"{MAGIC!r} of version {' or '.join(map(str, VERSIONS))}, little-endian"
        raise _Bad("the header", saw, rule, "unsupported_gguf")
    num_tensors, num_entries = cursor.unpack("Q"), cursor.unpack("Q")
    cursor.need(num_tensors * 25 + num_entries * 13)
    metadata: dict[str, object] = {}
    for number in range(num_entries):
        cursor.where = f"metadata entry {number}"
        key = cursor.string(MAX_KEY_BYTES)
        cursor.where = f"{key!r:.80}"
        if key in metadata:
            raise _Bad(cursor.where, "a key that comes twice", "a key comes once")
        metadata[key] = cursor.value(cursor.unpack("I"))
    _refuse_parts(metadata)
    entries = [_tensor(cursor, number) for number in range(num_tensors)]
    tensors, kinds = _laid_out(path.name, cursor, entries, _alignment(metadata))
    return GgufFile(
        path=path,
        metadata=MappingProxyType(metadata),
        headers=Headers(tensors=tensors),
        kinds=MappingProxyType(kinds),
        digest=blake3(cursor.again()).digest(),
    )


def _refuse_parts(metadata: Mapping[str, object]) -> None:
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        rule = "a checkpoint in one file"
        raise _Bad("'split.count'", f"one of {parts} files", rule, "unsupported_gguf")


def _alignment(metadata: Mapping[str, object]) -> int:
    stated = metadata.get("general.alignment", ALIGNMENT)
    if type(stated) is not int or not 8 <= stated <= MAX_ALIGNMENT or stated % 8:
        rule = f"a multiple of 8, at most {MAX_ALIGNMENT}"
        raise _Bad("'general.alignment'", f"{stated!r:.40}", rule)
    return stated


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: Quantisation
    offset: int
    num_bytes: int


def _tensor(cursor: _Cursor, number: int) -> _Entry:
    cursor.where = f"tensor {number}"
    name = cursor.string(MAX_KEY_BYTES)
    cursor.where = f"tensor {name!r:.80}"
    if not name or not name.isprintable():
        raise _Bad(cursor.where, "another kind of name", "a printable name")
    dims: int = cursor.unpack("I")
    if not 1 <= dims <= MAX_DIMS:
        raise _Bad(cursor.where, f"{dims} dims", f"1 to {MAX_DIMS} dims")
    shape = tuple(reversed([cast(int, cursor.unpack("Q")) for _ in range(dims)]))
    code: int = cursor.unpack("I")
    offset: int = cursor.unpack("Q")
    if code not in TYPES:
        saw = f"type {code} ({OTHER_TYPES.get(code, 'unknown')})"
        rule = f"one of {', '.join(kind.name for kind in TYPES.values())}"
        raise _Bad(cursor.where, saw, rule, "unsupported_quantisation")
    kind = TYPES[code]
    if shape[-1] % kind.block:
        saw = f"rows of {shape[-1]} values in blocks of {kind.block} ({kind.name})"
        raise _Bad(cursor.where, saw, "a row is whole blocks")
    return _Entry(name, shape, kind, offset, numel(shape) // kind.block * kind.block_bytes)


def _laid_out(
    file: str, cursor: _Cursor, entries: list[_Entry], alignment: int
) -> tuple[dict[str, TensorHeader], dict[str, Quantisation]]:
    """Places in the file. Offsets count from the first aligned byte after the headers."""

    def aligned(offset: int) -> int:
        return -(-offset // alignment) * alignment

    base, end = aligned(cursor.at), 0
    tensors: dict[str, TensorHeader] = {}
    for name, shape, _, offset, num_bytes in sorted(entries, key=lambda e: e.offset):
        if offset != aligned(end) or name in tensors:
            saw = f"offset {offset}" if name not in tensors else "a second tensor of this name"
            rule = f"the next tensor stands at {aligned(end)}, names are unique"
            raise _Bad(f"tensor {name!r:.80}", saw, rule)
        end = offset + num_bytes
        tensors[name] = TensorHeader(
            name=name, file=file, dtype="float32", shape=shape, start=base + offset, stop=base + end
        )
    if not base + end <= cursor.size <= base + aligned(end):
        which = "cut short" if cursor.size < base + end else "too long"
        saw = f"have {cursor.size} bytes, want {base + end}: {which}"
        raise _Bad("the file", saw, "a file ends with its last tensor", "wrong_file_size")
    return tensors, {entry.name: entry.kind for entry in entries}


class GgufTensors:
    """The tensors of an open file as float32 arrays, one at a time: the last one read is kept, as
    rows that a map spreads are read one after another. A context manager."""

    def __init__(self, file: GgufFile):
        blocks = sorted({k.name for k in file.kinds.values()} - set(PLAIN))
        if blocks:
            _need_dequantiser(file.path.name, blocks)
        self._file = file
        self._data = file.path.open("rb")
        self._last: tuple[str, np.ndarray] | None = None

    def __enter__(self) -> "GgufTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._last = None
        self._data.close()

    def get(self, name: str) -> np.ndarray:
        """float32 [shape], as the file says them."""
        if self._last is None or self._last[0] != name:
            self._last = None  # first let go of it
            self._last = (name, self._read(name))
        return self._last[1]

    def _read(self, name: str) -> np.ndarray:
        header, kind = self._file.headers.tensors[name], self._file.kinds[name]
        raw = np.empty(header.stop - header.start, np.uint8)
        self._data.seek(header.start)
        got = self._data.readinto(raw.data)
        if got != len(raw):
            raise Refused.because(
                where=f"{header.file}: {name}",
                saw=f"{got} bytes of {len(raw)} at {header.start}",
                rule="a file is not cut short while it is read",
                change=_REPAIR,
                code="wrong_file_size",
            )
        return _dequantised(raw, kind).reshape(header.shape)


def _dequantised(raw: np.ndarray, kind: Quantisation) -> np.ndarray:
    """float32, flat, in memory of its own."""
    match kind.name:
        case "F32":
            return raw.view("<f4")
        case "F16":
            return raw.view("<f2").astype(np.float32)
        case "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case _:
            return _unpacked(raw.reshape(-1, kind.block_bytes), kind)


def _unpacked(blocks: np.ndarray, kind: Quantisation) -> np.ndarray:
    """Blocks by the package's own definition, some at once to bound what lies beside them."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = np.empty((len(blocks), kind.block), np.float32)
    for start in range(0, len(blocks), UNPACKED_BLOCKS):
        part = blocks[start : start + UNPACKED_BLOCKS]
        # as one row: the package's loop is over rows
        flat = dequantize(part.reshape(1, -1), GGMLQuantizationType[kind.name])
        values[start : start + len(part)] = flat.reshape(part.shape[0], -1)
    return values.reshape(-1)


def _need_dequantiser(file: str, kinds: list[str]) -> None:
    try:
        import gguf.quants  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        raise Refused.because(
            where=file,
            saw=f"{', '.join(kinds)} tensors, and no package gguf",
            rule="the package gguf dequantises them",
            change="pip install 'vitrail[gguf]'",
            code="missing_package",
        ) from error
