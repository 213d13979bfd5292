"""The strict reading of a checkpoint folder: which safetensors files count, which tensors they
hold, of which type and shape, at which bytes. Reads lengths, headers and the index, never a
tensor's data; opens no file of another format. Knows nothing of models.

Format: 8 bytes little-endian header length n, n bytes of JSON, then the tensors' bytes without
holes.

Decisions: a tensor held by two files is an error even where the bytes may be equal, since
deciding that would take reading them; a folder's index decides alone which files count, and any
other safetensors file is a warning; pickles (.bin, .pt, ...) are never opened: a warning beside
safetensors, an error instead of them.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from vitrail.config.finding import Finding
from vitrail.config.reader import POINTER, PULL
from vitrail.weights.mapping import numel
from vitrail.weights.sharding import Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 256 << 20
MAX_DIMS = 16
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")

# Header code -> (name, bits of one element).
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": ("float6_e2m3", 6),
    "F6_E3M2": ("float6_e3m2", 6),
    "F4": ("float4_e2m1", 4),
}

_REPAIR = "download the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor: its bytes are [start, stop) of `file`, a path inside the folder, which knows it
    as `name`."""

    name: str
    file: str
    dtype: str
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """Every tensor of a checkpoint by the name that rows know it by; `warnings` are what was seen
    and passed over."""

    tensors: Mapping[str, TensorHeader]
    warnings: tuple[Finding, ...] = ()


# Of files that are not in the folder, by their path in the checkpoint.
Elsewhere = Mapping[str, "list[TensorHeader] | Finding"]
NOWHERE: Elsewhere = {}


def read(
    folder: Path, parts: Sequence[str] = (), elsewhere: Elsewhere = NOWHERE
) -> Headers | list[Finding]:
    """The headers of a checkpoint folder, or everything that is wrong with it. `parts`: its
    sub-folders that are checkpoints of their own; their tensors are found as `part.name`.
    `elsewhere`: headers of files that a hub has and the folder has not."""
    if not parts:
        return _read_one(folder, elsewhere)
    read_parts = {part: _read_one(folder / part, _within(elsewhere, part)) for part in parts}
    findings = [
        replace(finding, where=f"{part}/{finding.where}")
        for part, found in read_parts.items()
        if isinstance(found, list)
        for finding in found
    ]
    if findings:
        return findings
    tensors: dict[str, TensorHeader] = {}
    warnings: list[Finding] = []
    for part, found in read_parts.items():
        assert isinstance(found, Headers)
        warnings += [replace(w, where=f"{part}/{w.where}") for w in found.warnings]
        for name, tensor in found.tensors.items():
            tensors[f"{part}.{name}"] = replace(tensor, file=f"{part}/{tensor.file}")
    return Headers(tensors=tensors, warnings=tuple(warnings))


def _within(elsewhere: Elsewhere, part: str) -> Elsewhere:
    """Of a sub-folder, by the names that its files have there."""
    prefix = f"{part}/"
    return {k.removeprefix(prefix): v for k, v in elsewhere.items() if k.startswith(prefix)}


def _read_one(folder: Path, elsewhere: Elsewhere) -> Headers | list[Finding]:
    if not folder.is_dir():
        rule = "a checkpoint is a folder with safetensors files"
        return [_bad(folder.name, "no such folder", rule, "give the path of a model folder")]
    there = {name for name in elsewhere if "/" not in name}
    present = sorted({path.name for path in folder.iterdir()} | there)
    if INDEX_FILE in present:
        index = _read_index(folder)
        if isinstance(index, list):
            return index
        files = sorted(set(index.values()))
    elif SINGLE_FILE in present:
        index, files = None, [SINGLE_FILE]
    else:
        return [_no_weights(present)]
    findings = _missing_shards(files, present)
    held: list[TensorHeader] = []
    for file in files:
        if file in present:
            tensors = elsewhere[file] if file in there else read_file(folder / file)
            if isinstance(tensors, Finding):
                findings.append(tensors)
            else:
                held += tensors
    findings += _duplicates(held)
    if index is not None and not findings:
        findings += _against_index(index, held)
    if findings:
        return findings
    return Headers(
        tensors={tensor.name: tensor for tensor in held},
        warnings=tuple(_passed_over(files, present)),
    )


def read_file(path: Path) -> list[TensorHeader] | Finding:
    """The tensors of one safetensors file in the order of their bytes; allocates the header
    only."""
    where = path.name
    if not path.is_file():
        return _bad(where, "not a regular file", "a shard is a file", _REPAIR)
    try:
        text, size = _header_text(path)
    except OSError as error:
        return _bad(where, f"not readable ({error.strerror})", "a shard can be read", _REPAIR)
    if isinstance(text, Finding):
        return text
    length = len(text)
    header = _parse_object(text)
    if isinstance(header, str):
        return _bad(where, f"a header that is {header}", "a header is one JSON object", _REPAIR)
    header.pop("__metadata__", None)
    tensors: list[TensorHeader] = []
    for name, entry in header.items():
        tensor = header_of(name, where, entry, 8 + length)
        if isinstance(tensor, Finding):
            return tensor
        tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    return layout_error(tensors, where, 8 + length, size) or tensors


def _header_text(path: Path) -> tuple[bytes | Finding, int]:
    """The header as it stands, or why there is none; and the file's size."""
    where, size = path.name, path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return _bad(where, f"{size} bytes", "a file starts with 8 bytes of length", _REPAIR), 0
        (length,) = struct.unpack("<Q", prefix)
        limit = min(MAX_HEADER_BYTES, size - 8)
        if length > limit:
            if prefix + file.read(len(POINTER) - 8) == POINTER:
                return _bad(where, "a pointer of Git LFS", "the file itself", PULL), 0
            saw = f"a header of {length} bytes in a file of {size}, cut short or another format"
            return _bad(where, saw, f"a header has at most {limit} bytes there", _REPAIR), 0
        return file.read(length), size


def header_of(name: str, file: str, entry: object, base: int) -> TensorHeader | Finding:
    where = f"{file}: {name if name.isprintable() else repr(name)}"
    if not isinstance(entry, dict):
        return _bad(where, f"a {type(entry).__name__}", "an entry is a JSON object", _REPAIR)
    fields = cast(dict[str, object], entry)
    if set(fields) != {"dtype", "shape", "data_offsets"}:
        rule = "an entry has dtype, shape and data_offsets"
        return _bad(where, f"keys {sorted(fields)!r:.200}", rule, _REPAIR)
    code, shape, offsets = fields["dtype"], _ints(fields["shape"]), _ints(fields["data_offsets"])
    if not isinstance(code, str) or code not in DTYPES:
        return _bad(where, f"dtype {code!r:.40}", f"one of {', '.join(DTYPES)}", _REPAIR)
    if shape is None or offsets is None or len(offsets) != 2:
        saw = f"shape {fields['shape']!r:.80}, data_offsets {fields['data_offsets']!r:.80}"
        return _bad(where, saw, "lists of non-negative integers, two offsets", _REPAIR)
    if len(shape) > MAX_DIMS or not name.isprintable():
        rule = f"a printable name and at most {MAX_DIMS} dims"
        return _bad(where, f"{len(shape)} dims", rule, _REPAIR)
    start, stop = offsets
    dtype, bits = DTYPES[code]
    want_bits = numel(shape) * bits
    if start > stop or (stop - start) * 8 != want_bits:
        saw = f"data_offsets [{start}, {stop}] for {code} {list(shape)}"
        rule = f"stop - start is the tensor's {want_bits / 8:g} bytes"
        return _bad(where, saw, rule, _REPAIR)
    return TensorHeader(
        name=name, file=file, dtype=dtype, shape=shape, start=base + start, stop=base + stop
    )


def layout_error(tensors: list[TensorHeader], file: str, base: int, size: int) -> Finding | None:
    """Tensors must follow each other without hole or overlap from `base` to the end of the file."""
    end = base
    for tensor in tensors:
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "leaves a hole"
            saw = f"its bytes start at {tensor.start - base}, which {kind}"
            rule = f"it starts where the one before it stops, at {end - base}"
            return _bad(f"{file}: {tensor.name}", saw, rule, _REPAIR)
        end = tensor.stop
    if end != size:
        kind = "cut short" if size < end else "too long"
        saw = f"have {size} bytes, want {end}: {kind} by {abs(end - size)}"
        return _bad(file, saw, "a file ends with its last tensor", _REPAIR, "wrong_file_size")
    return None


def _read_index(folder: Path) -> dict[str, str] | list[Finding]:
    """Tensor -> file."""
    path = folder / INDEX_FILE
    rule = 'an index is a JSON object with "weight_map": {tensor: file}'
    if not path.is_file():
        return [_bad(INDEX_FILE, "not a regular file", rule, _REPAIR)]
    size = path.stat().st_size
    if size > MAX_INDEX_BYTES:
        return [_bad(INDEX_FILE, f"{size} bytes", f"at most {MAX_INDEX_BYTES}", _REPAIR)]
    index = _parse_object(path.read_bytes())
    if isinstance(index, str):
        return [_bad(INDEX_FILE, index, rule, _REPAIR)]
    entries = index.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        return [_bad(INDEX_FILE, f"weight_map {entries!r:.40}", rule, _REPAIR)]
    weight_map = cast(dict[str, object], entries)
    findings: list[Finding] = []
    for file in sorted({str(value) for value in weight_map.values()}):
        findings += _refused_name(file)
    if findings or not all(isinstance(value, str) for value in weight_map.values()):
        return findings or [_bad(INDEX_FILE, "a file that is not a string", rule, _REPAIR)]
    return cast(dict[str, str], weight_map)


def _refused_name(file: str) -> list[Finding]:
    where = f"{INDEX_FILE}: {file!r:.120}"
    if file.lower().endswith(PICKLES):
        return [_pickle(where)]
    plain = not any(c in "/\\:" or not c.isprintable() for c in file)
    if plain and file.endswith(".safetensors"):
        return []
    rule = "a shard is named by a plain *.safetensors name inside the folder"
    return [_bad(where, "another kind of name", rule, _REPAIR)]


def _missing_shards(files: Iterable[str], present: Iterable[str]) -> list[Finding]:
    missing = sorted(set(files) - set(present))
    if not missing:
        return []
    saw = f"{len(missing)} missing: {', '.join(missing)}"
    rule = "every file that the index names is in the folder"
    return [_bad(INDEX_FILE, saw, rule, "download what is missing", "missing_shard")]


def _duplicates(held: Iterable[TensorHeader]) -> list[Finding]:
    by_name: dict[str, list[TensorHeader]] = {}
    for tensor in held:
        by_name.setdefault(tensor.name, []).append(tensor)
    rule = "a tensor is in one file"
    return [
        _bad(
            name,
            "in " + " and in ".join(f"{t.file} ({t.dtype} {list(t.shape)})" for t in found),
            rule,
            "remove the shards that belong to another save, and download the checkpoint's own",
            "duplicate_tensor",
        )
        for name, found in by_name.items()
        if len(found) > 1
    ]


def _against_index(index: Mapping[str, str], held: Iterable[TensorHeader]) -> list[Finding]:
    """Where the index and the shards' own headers disagree, in both directions."""
    file_of = {tensor.name: tensor.file for tensor in held}
    disagree: dict[tuple[str, str], list[str]] = {}
    for name in sorted(index.keys() | file_of.keys()):
        said, have = index.get(name, "no file"), file_of.get(name, "no file")
        if said != have:
            disagree.setdefault((said, have), []).append(name)
    return [
        _bad(
            ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else ""),
            f"the index says {said}, the headers say {have}",
            "the index and the headers name the same tensors in the same files",
            "download index and shards of one revision",
            "wrong_index",
        )
        for (said, have), names in disagree.items()
    ]


def _no_weights(present: Iterable[str]) -> Finding:
    pickles = [name for name in present if name.lower().endswith(PICKLES)]
    if pickles:
        return _pickle(", ".join(pickles))
    others = [name for name in present if name.endswith(".safetensors")]
    rule = f"a checkpoint has {INDEX_FILE} or {SINGLE_FILE}"
    if not others:
        return _bad("model folder", "no weights", rule, "check that the folder is complete")
    shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if others[4:] else "")
    return _bad("model folder", f"neither, but {shown}", rule, f"download {INDEX_FILE}")


def _passed_over(files: Iterable[str], present: Iterable[str]) -> list[Finding]:
    """Warnings for weight files that lie beside the checkpoint's own."""
    kinds = (".safetensors", *PICKLES)
    beside = [name for name in present if name.lower().endswith(kinds) and name not in set(files)]
    if not beside:
        return []
    return [
        Finding(
            where=", ".join(beside),
            saw=f"beside {', '.join(files)}",
            rule="the files of the index (or model.safetensors) count; pickles are never opened",
            change="nothing, or remove them",
            code="unused_file",
            severity="warning",
        )
    ]


def _pickle(where: str) -> Finding:
    return Finding(
        where=where,
        saw="weights in a pickle or another format that can run code",
        rule="only safetensors files are opened",
        change="convert the checkpoint to safetensors where you trust it",
        code="pickle_file",
    )


def _parse_object(text: bytes) -> dict[str, object] | str:
    """The JSON object in `text`, or what it is instead. A key that comes twice is an error."""
    repeated: list[str] = []

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return value

    try:
        value: object = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error!s:.120})"
    if repeated:
        return f"JSON with {', '.join(repeated[:8])} twice"
    return cast(dict[str, object], value) if isinstance(value, dict) else "not an object"


def _ints(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    items = cast(list[object], value)
    if all(type(item) is int and item >= 0 for item in items):
        return tuple(cast(list[int], items))
    return None


def _bad(where: str, saw: str, rule: str, change: str, code: str = "bad_checkpoint") -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change=change, code=code)
