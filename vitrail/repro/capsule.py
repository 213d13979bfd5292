"""Reads a `Capsule` strictly: whoever sends one may be wrong or mean no good, and a replay hands
its numbers to kernels. No torch."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path

import msgspec

from vitrail.config.engine import EngineConfig, validate
from vitrail.config.finding import Finding, Refused, errors
from vitrail.engine.capsule import FORMAT, Array, Capsule, Step, encoded
from vitrail.engine.step import EncodeJob, SequenceStep

__all__ = ["MAX_BYTES", "Capsule", "decoded", "encoded", "read"]

MAX_BYTES = 8 << 20
# of what a replay makes: steps, patches of a job, values of a step's pictures, rows of an image and
# of all that were encoded before, ids of a step's setups
MAX_STEPS, MAX_PATCHES, MAX_VALUES, MAX_ROWS, MAX_IDS = 1024, 1 << 20, 1 << 28, 1 << 20, 1 << 26
Rules = Iterator[tuple[bool, str, object, str]]


class _Versioned(msgspec.Struct):
    version: int


def read(path: Path) -> Capsule:
    """The capsule in a file. Raises `Refused` where it is none, or of another version."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        saw = f"it cannot be read: {error.strerror}"
        raise Refused(_finding(str(path), saw, "a readable file", "give its path")) from error
    return decoded(data, str(path))


def decoded(data: bytes, where: str = "capsule") -> Capsule:
    """The capsule that JSON says. Raises `Refused`."""
    if len(data) > MAX_BYTES:
        rule = f"a capsule is at most {MAX_BYTES} bytes"
        raise Refused(_finding(where, "a larger file", rule, "give another"))
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != FORMAT:
            rule = f"this release reads version {FORMAT}"
            change = "use the release that wrote it"
            raise Refused(_finding(where, f"version {version}", rule, change))
        capsule = msgspec.json.decode(data, type=Capsule)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        saw = f"{type(error).__name__}: {error}"
        rule = "a capsule as `recorder` writes it"
        raise Refused(_finding(where, saw, rule, "give the file as it was written")) from error
    if found := findings(capsule):
        raise Refused(found)
    return capsule


def findings(capsule: Capsule) -> list[Finding]:
    """Why its numbers are not those of an engine's steps."""
    try:
        config = EngineConfig(**capsule.flags)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        rule = "the fields of EngineConfig"
        return [_finding("flags", str(error), rule, "use the release that wrote it")]
    if found := errors(validate(config)):
        return found
    change = "give the file as it was written"
    return [
        _finding(where, str(saw), rule, change)
        for ok, where, saw, rule in _rules(capsule, config)
        if not ok
    ][:8]


def _rules(capsule: Capsule, config: EngineConfig) -> Rules:
    indices = [step.plan.index for step in capsule.steps]
    yield len(indices) <= MAX_STEPS, "steps", len(indices), f"at most {MAX_STEPS}"
    rising = all(a < b for a, b in pairwise(indices))
    yield rising, "steps", indices[:8], "their plans are in order"
    if capsule.kind == "start":
        yield not indices, "steps", len(indices), "a start has none"
        return
    yield capsule.failed in indices, "failed", capsule.failed, "a plan of the steps"
    for entry, rows in capsule.entries:
        yield 0 < rows <= MAX_ROWS, f"entries[{entry}]", rows, f"1 to {MAX_ROWS} rows"
    rows = sum(rows for _, rows in capsule.entries)
    yield rows <= MAX_ROWS, "entries", f"{rows} rows", f"at most {MAX_ROWS} of all"
    sent: dict[int, int] = {}
    for i, step in enumerate(capsule.steps):
        where = f"steps[{i}]"
        tokens = sum(s.length for s in step.plan.rows)
        most = config.max_step_tokens or 0
        yield 0 <= tokens <= most, where, f"{tokens} tokens", f"at most {most} in a step"
        slots = [s.slot for s in step.plan.rows]
        yield len(set(slots)) == len(slots), where, "a slot twice", "a row has one sequence"
        for s in step.plan.rows:
            yield from _row_rules(capsule, config, s, sent, where)
        for s in step.plan.decodes:
            yield s.length == 1 and s.sample, where, s.length, "a decode is one sampled token"
        yield from _step_rules(capsule, config, step, where)


def _row_rules(
    capsule: Capsule, config: EngineConfig, s: SequenceStep, sent: dict[int, int], where: str
) -> Rules:
    where = f"{where}: sequence {s.seq}"
    held, end = capsule.held, s.start + s.length
    yield 0 <= s.slot < config.max_running, where, s.slot, f"a slot of {config.max_running}"
    yield s.start >= 0 and s.length > 0, where, (s.start, s.length), "a range of positions"
    yield end <= held.max_model_len, where, end, f"at most {held.max_model_len} positions"
    before = sent.get(s.seq, 0)
    yield s.pages_before == before, where, s.pages_before, f"{before} pages were sent before"
    bad = [page for page in s.new_pages if not 0 <= page < held.num_pages]
    yield not bad, where, bad[:3], f"pages of {held.num_pages}"
    sent[s.seq] = count = before + len(s.new_pages)
    covered = end <= count * config.page_size <= held.max_model_len + config.page_size - 1
    yield covered, where, f"{count} pages for {end} positions", "pages for all, and no more"


def _step_rules(capsule: Capsule, config: EngineConfig, step: Step, where: str) -> Rules:
    plan, longest = step.plan, capsule.held.max_model_len
    sampled, tokens = len(plan.sampled), sum(s.length for s in plan.prefills)
    for name, column in (("seeds", step.seeds), ("output_index", step.output_index)):
        yield len(column) in (0, sampled), f"{where}.{name}", len(column), f"{sampled} of them"
        ok = all(0 <= value < 2**63 for value in column)
        yield ok, f"{where}.{name}", column[:3], "0 to 2**63 - 1"
    for s in step.setups:
        ok = 0 <= s.slot < config.max_running
        yield ok, f"{where}.setups", s.slot, f"a slot of {config.max_running}"
        sizes = (s.num_prompt, s.num_output, s.num_stop, s.num_bias)
        ok = all(0 <= size <= max(longest, 1024) for size in sizes)
        yield ok, f"{where}.setups", sizes, f"0 to {longest} ids"
    ids = sum(s.num_prompt + s.num_output + s.num_stop + s.num_bias for s in step.setups)
    yield ids <= MAX_IDS, f"{where}.setups", f"{ids} ids", f"at most {MAX_IDS} of all"
    for s in plan.slices:
        ok = min(s.token_start, s.entry_start, s.length) >= 0
        ok = ok and s.token_start + s.length <= tokens and s.entry_start + s.length <= MAX_ROWS
        yield ok, f"{where}: image {s.entry}", s.length, f"rows within {tokens} prompt tokens"
    count = len(plan.encodes)
    yield len(step.pixels) == count, f"{where}.pixels", len(step.pixels), f"{count} pictures"
    values = sum(prod(array.shape) for array in step.pixels)
    yield values <= MAX_VALUES, f"{where}.pixels", values, f"at most {MAX_VALUES} of all"
    for job, array in zip(plan.encodes, step.pixels, strict=False):
        yield from _picture_rules(job, array, f"{where}: image {job.entry}")


def _picture_rules(job: EncodeJob, array: Array, where: str) -> Rules:
    sizes = (job.height, job.width, job.num_tokens, job.count, job.sequences, *(job.block or ()))
    sizes += job.resized or ()
    ok = all(0 < size <= MAX_PATCHES for size in sizes) and job.num_patches <= MAX_PATCHES
    yield ok, where, sizes, f"1 to {MAX_PATCHES} patches"
    ok = 0 <= job.first <= job.sequences - job.count
    yield ok, where, (job.first, job.count), f"a part of {job.sequences} sequences"
    ok = array.dtype in ("uint8", "float32") and all(size > 0 for size in array.shape)
    yield ok and prod(array.shape) <= MAX_VALUES, where, array, f"at most {MAX_VALUES} pixels"
    ok = len(array.shape) == 3 if job.resized else array.shape[:1] == (job.num_patches,)
    yield ok, where, array.shape, "pixels of its patches, or of a picture to resize"


def _finding(where: str, saw: str, rule: str, change: str) -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change=change, code="bad_capsule")
