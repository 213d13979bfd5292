"""The morning's page, in Markdown and in HTML. A page is a list of blocks of plain text; each
renderer escapes every word of it, so nothing that a log says becomes markup."""

import html
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.nightly.records import BAD, JobRecord
from vitrail.nightly.run import measures
from vitrail.nightly.triage import Group, Triage, together

MAX_TRACE_LINES = 40
MAX_TESTS = 12


class Heading(NamedTuple):
    level: int
    text: str


class Text(NamedTuple):
    text: str


class Points(NamedTuple):
    """(label, text) pairs; a label may be ""."""

    items: tuple[tuple[str, str], ...]


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Log(NamedTuple):
    text: str


Block = Heading | Text | Points | Table | Log


def page(t: Triage) -> list[Block]:
    """What the digest says, in its order."""
    state = "green" if t.green else "red"
    counts = (
        f"{len(t.new)} new, {len(t.still)} still failing, {len(t.fixed)} fixed, "
        f"{len(t.known)} known, {len(t.expired)} expired"
    )
    blocks: list[Block] = [
        Heading(1, f"Night of {t.night.began[:10]}: {state}"),
        Text(f"Commit {t.night.commit}, {t.night.machine}. {counts}."),
        *([Text(f"{t.night.speed}.")] if t.night.speed else []),
        _suites(t.night.jobs),
    ]
    for title, groups in (("New", t.new), ("Still failing", t.still), ("Known", t.known)):
        if groups:
            blocks.append(Heading(2, title))
        for what, some in together(groups):
            blocks += [Heading(3, what)] if what else []
            for group in some:
                blocks += _group(group, level=4 if what else 3)
    if t.fixed:
        blocks += [Heading(2, "Fixed"), Points(tuple(("", name) for name in t.fixed))]
    if t.unseen:
        blocks += [Heading(2, "Not run again"), Points(tuple(("", name) for name in t.unseen))]
    if t.expired:
        said = tuple((i.id, f"{i.owner}, expired {i.expires}: {i.why}") for i in t.expired)
        blocks += [Heading(2, "Known issues past their day"), Points(said)]
    return blocks + _figures(t.night.jobs) + _notes(t.night.jobs)


def _suites(records: Sequence[JobRecord]) -> Table:
    rows: list[tuple[str, ...]] = []
    for suite in dict.fromkeys(record.job.suite for record in records):
        of = [record for record in records if record.job.suite == suite]
        seconds = sum(a.seconds for record in of for a in record.attempts)
        tests = sum(len(record.attempts[-1].cases) for record in of if record.attempts)
        bad = sum(record.outcome in BAD for record in of)
        idle = sum(record.outcome in ("skipped", "unsuited") for record in of)
        numbers = (f"{len(of)}", f"{tests}", f"{bad}", f"{idle}", f"{seconds / 60:.1f}")
        rows.append((suite, *numbers))
    return Table(("suite", "jobs", "tests", "failed jobs", "not run", "minutes"), tuple(rows))


def _group(group: Group, level: int) -> list[Block]:
    first = group.sightings[0]
    tests = sorted({s.test for s in group.sightings})
    shown = ", ".join(tests[:MAX_TESTS]) + (
        f" and {len(tests) - MAX_TESTS} more" if len(tests) > MAX_TESTS else ""
    )
    owners = sorted({s.record.job.owner for s in group.sightings})
    points = [
        ("cause", group.frame or "no frame of ours"),
        ("signature", first.cause.signature),
        ("tests", shown),
        ("owner", ", ".join(owners)),
        ("first bad commit", group.first_bad or "not looked for"),
        ("capsule", next((s.capsule for s in group.sightings if s.capsule), "none")),
        (
            "one-file repro",
            group.repro or next((s.repro for s in group.sightings if s.repro), "none"),
        ),
        ("by hand", f"python -m pytest --nightly {_quoted(tests[0])}"),
    ]
    if first.record.outcome != "failed":
        points.append(("how it ended", first.record.why))
    if group.risk:
        points.append(("risk of a change there", group.risk))
    if group.issue is not None:
        issue = group.issue
        points.append(("known", f"{issue.id}, {issue.owner}, until {issue.expires}: {issue.why}"))
        points += [("fix", issue.fix)] if issue.fix else []
    tail = "\n".join(first.cause.trace.strip().splitlines()[-MAX_TRACE_LINES:])
    title = f"{group.key} {group.cause_kind}: {group.title}"
    return [Heading(level, title), Points(tuple(points)), Log(tail)]


def _quoted(test: str) -> str:
    """A job's name as what pytest is called with."""
    suite, found, rest = test.partition(": ")
    if not found or "/" in suite:
        return f"'{test}'" if "[" in test else test
    file, *tests = rest.split(" ")
    return " ".join(f"{file}::{name}" for name in tests) or file


def _figures(records: Sequence[JobRecord]) -> list[Block]:
    """What tests recorded as `figure NAME`, and measures of speed beside their yardstick."""
    said: list[tuple[str, str]] = []
    for record in records:
        for case in record.attempts[-1].cases if record.attempts else ():
            for name, value in case.properties.items():
                if name.startswith("figure "):
                    said.append((name.removeprefix("figure "), value))
            for name, logs in measures(case).items():
                mean = math.exp(sum(logs) / len(logs))
                said.append((name, f"{mean:.3g} yardsticks, {len(logs)} samples"))
    return [Heading(2, "Figures"), Points(tuple(said))] if said else []


def _notes(records: Sequence[JobRecord]) -> list[Block]:
    said: list[tuple[str, str]] = []
    for record in records:
        name = record.job.name
        if record.outcome in ("skipped", "unsuited"):
            said.append((name, f"not run: {record.why}"))
        elif record.outcome == "passed" and len(record.attempts) > 1:
            said.append((name, record.why))
        strays = record.attempts[-1].strays if record.attempts else ()
        if strays and record.outcome != "hang":
            said.append((name, f"left {len(strays)} processes behind: {'; '.join(strays)}"))
    return [Heading(2, "Notes"), Points(tuple(said))] if said else []


def markdown(blocks: Sequence[Block]) -> str:
    """Words that come from anywhere stand in code, which nothing in them can end."""
    parts: list[str] = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"{'#' * level} {_plain(text)}")
            case Text(text):
                parts.append(_plain(text))
            case Points(items):
                parts.append("\n".join(_point(label, text) for label, text in items))
            case Table(head, rows):
                lines = [head, ("---",) * len(head), *rows]
                parts.append("\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines))
            case Log(text):
                fence = "`" * max(3, 1 + _longest_ticks(text))
                parts.append(f"{fence}text\n{text}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _point(label: str, text: str) -> str:
    code = " ".join(text.split())
    ticks = "`" * (1 + _longest_ticks(code))
    pad = " " if code.startswith("`") or code.endswith("`") else ""
    name = f"{_plain(label)}: " if label else ""
    return f"- {name}{ticks}{pad}{code}{pad}{ticks}"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _plain(text: str) -> str:
    """One line in which no character means anything to Markdown or to HTML in it."""
    line = " ".join(text.split())
    if set(line) <= {"-"}:
        return line
    safe = re.sub(r"([\\`*_{}\[\]()#+!|~@$])", r"\\\1", line)
    return safe.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.2em .7em;text-align:left}"
    "pre{background:#f4f4f2;padding:.8em;overflow:auto}code{background:#f4f4f2}"
)


def html_page(blocks: Sequence[Block]) -> str:
    """One page without scripts and without anything from elsewhere."""
    body = "\n".join(_html(block) for block in blocks)
    title = next((_escape(b.text) for b in blocks if isinstance(b, Heading)), "")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{_escape(text)}</p>"
        case Points(items):
            lines = (
                f"<li>{_escape(label) + ': ' if label else ''}<code>{_escape(text)}</code></li>"
                for label, text in items
            )
            return f"<ul>{''.join(lines)}</ul>"
        case Table(head, rows):
            top = "".join(f"<th>{_escape(cell)}</th>" for cell in head)
            lines = (
                f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in rows
            )
            return f"<table><tr>{top}</tr>{''.join(lines)}</table>"
        case Log(text):
            return f"<pre>{_escape(text)}</pre>"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
