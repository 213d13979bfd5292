"""`check`: every row, in order. What a row needs and could not be had makes it a row that cannot
tell; nothing is guessed, and nothing is left out of the report."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from vitrail.check import checks, memory, prompts
from vitrail.check.checks import Share
from vitrail.check.prompts import Read
from vitrail.check.remote import Hub, cannot_tell, remote_headers
from vitrail.check.report import Report, Row
from vitrail.check.sizes import Sizes
from vitrail.check.subject import Question, Subject, build_subject
from vitrail.check.weights import read_headers
from vitrail.config.engine import validate
from vitrail.config.finding import Finding, Refused, errors
from vitrail.models.assets import load_processor_of, load_template, load_tokenizer
from vitrail.models.checkpoint import Checkpoint, open_checkpoint
from vitrail.models.registry import find, load_entry
from vitrail.weights.headers import Headers

T = TypeVar("T")
LATER = ("weights", "layout", "memory", "attention", "images", "template", "tokenizer")


def check(question: Question, hub: Hub | None = None) -> Report:
    """The report. `hub` None: huggingface_hub's own, asked only for an id that is no local path."""
    began = time.perf_counter()
    rows = _rows(question, hub)
    return Report(
        model=question.choices.model,
        device=question.gpu.name,
        seconds=time.perf_counter() - began,
        rows=tuple(rows),
    )


def _rows(question: Question, hub: Hub | None) -> list[Row]:
    choices = question.choices
    rows = [_choices_row(question)]
    if errors(rows[0].findings):
        return [*rows, *_not_looked_at("config", *LATER, why="the choices are refused")]
    try:
        checkpoint = open_checkpoint(choices.model, choices.revision, weights=False)
        entry = load_entry(checkpoint.architecture)
    except Refused as refused:
        unknown = cannot_tell(refused.findings)
        found = () if unknown is not None else refused.findings
        rows.append(Row(name="config", findings=found, unknown=unknown))
        return [*rows, *_not_looked_at(*LATER, why="no configuration was read")]
    config = entry.read_config(checkpoint.config, checkpoint.generation)
    refusals: list[Finding] = config if isinstance(config, list) else []
    read, bad = _assets(checkpoint)
    rows.append(checks.config_row(checkpoint, [*refusals, *bad["processor"]]))
    if isinstance(config, list):
        return [*rows, *_not_looked_at(*LATER, why="the configuration is refused")]
    try:
        subject = build_subject(question, checkpoint, entry, config, read.processor)
    except Refused as refused:
        rows[0] = _also(rows[0], refused.findings)
        return [*rows, *_not_looked_at(*LATER, why="the choices are refused")]
    rows.append(_weights_row(subject, hub))
    sizes, seen = None, memory.image_findings(subject)
    for size in question.sizes:
        made, planned = _on_ranks(subject, Share(subject, size))
        rows += made
        sizes = planned if sizes is None else sizes
    (first,) = (i for i, row in enumerate(rows) if row.name == f"memory tp={question.sizes[0]}")
    rows[first] = _also(rows[first], seen.memory)
    rows.append(_also(prompts.images_row(subject, sizes), seen.path))
    tokenizer = bad["tokenizer"]
    if tokenizer:
        rows += _not_looked_at("template", why="the tokenizer is refused")
    else:
        rows.append(_or(bad["template"], "template", lambda: prompts.template_row(config, read)))
    rows.append(_or(tokenizer, "tokenizer", lambda: prompts.tokenizer_row(config, read)))
    return rows


def _choices_row(question: Question) -> Row:
    choices, gpu = question.choices, question.gpu
    found = validate(choices)
    if (choices.device == "cpu") != (not gpu.cc) and choices.device != "auto":
        found.append(
            Finding(
                where="device",
                saw=f"--device {choices.device} and --gpu {gpu.name}",
                rule="both mean the same device",
                change="leave one of them out",
            )
        )
    return Row(name="choices", findings=tuple(found))


def _not_looked_at(*names: str, why: str) -> list[Row]:
    return [Row(name=name, unknown=f"not looked at: {why}") for name in names]


def _or(found: list[Finding], name: str, row: Callable[[], Row]) -> Row:
    """The row, unless what it would judge could not be read."""
    return Row(name=name, findings=tuple(found)) if found else row()


def _assets(checkpoint: Checkpoint) -> tuple[Read, dict[str, list[Finding]]]:
    """Each by itself, so that one that is wrong hides no other."""
    bad: dict[str, list[Finding]] = {}

    def tried(name: str, load: Callable[[Checkpoint], T | None]) -> T | None:
        bad[name] = []
        try:
            return load(checkpoint)
        except Refused as refused:
            bad[name] += refused.findings
            return None

    read = Read(
        tokenizer=tried("tokenizer", load_tokenizer),
        template=tried("template", load_template),
        processor=tried("processor", load_processor_of),
    )
    return read, bad


def _weights_row(subject: Subject, hub: Hub | None) -> Row:
    if subject.choices.weights == "random":
        return checks.weights_row(subject, [])
    found = _headers(subject, hub)
    unknown = cannot_tell(found) if isinstance(found, list) else None
    if unknown is not None:
        return Row(name="weights", unknown=unknown)
    return checks.weights_row(subject, found)


def _headers(subject: Subject, hub: Hub | None) -> Headers | list[Finding]:
    """Of the files at hand, or of those that the hub has."""
    choices, checkpoint = subject.choices, subject.checkpoint
    found = read_headers(checkpoint)
    if not isinstance(found, list) or Path(choices.model).expanduser().exists():
        return found
    if hub is None:
        from huggingface_hub import HfApi

        hub = HfApi()
    folders = find(checkpoint.architecture).folders
    elsewhere = remote_headers(hub, choices.model, choices.revision, folders)
    if isinstance(elsewhere, Finding):
        return [elsewhere]
    return read_headers(checkpoint, elsewhere)


def _on_ranks(subject: Subject, share: Share) -> tuple[list[Row], Sizes | None]:
    """Layout, memory and attention on an axis of one size, and what would be served."""
    rows = [checks.layout_row(subject, share)]
    tag = f"tp={share.size}"
    if share.findings:
        why = "the layout is refused"
        return [*rows, *_not_looked_at(f"memory {tag}", f"attention {tag}", why=why)], None
    predicted = memory.predict(subject, share)
    planned = memory.sizes_of(subject, share, predicted)
    sizes = None if isinstance(planned, list) else planned
    longest = subject.choices.max_model_len or subject.config.text.max_position
    length = longest if sizes is None else sizes.max_model_len
    tables = checks.attention_tables(subject, share, length)
    rows.append(memory.memory_row(subject, share, predicted, planned))
    rows.append(checks.attention_row(subject, share, tables))
    if subject.question.compile and share.size == checks.SERVED_SIZE:
        if isinstance(tables, list):
            rows += _not_looked_at("kernels", why="attention is refused")
        else:
            rows.append(checks.kernels_row(subject, tables, length))
    return rows, sizes


def _also(row: Row, findings: Iterable[Finding]) -> Row:
    return replace(row, findings=(*row.findings, *findings))
