"""What `vitrail check` says: rows, a verdict, a table for a terminal and JSON for a program. Knows
no model and no device."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.config.finding import Finding, printable

Status = Literal["ok", "warning", "error", "unknown"]
Fact = str | int | float | bool | None | Sequence["Fact"] | Mapping[str, "Fact"]
WORDS: Mapping[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "error": ("will not run", "bold red"),
    "unknown": ("cannot tell", "magenta"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question and its answer. `details`: lines for a reader; `facts`: the same numbers for a
    program; `unknown`: why it could not be decided."""

    name: str
    details: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    unknown: str | None = None

    @property
    def status(self) -> Status:
        severities = {finding.severity for finding in self.findings}
        if "error" in severities:
            return "error"
        if self.unknown is not None:
            return "unknown"
        return "warning" if severities else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A checkpoint on a device."""

    model: str
    device: str
    seconds: float
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        """0: it will run; 1: it will not; 2: something could not be told."""
        statuses = {row.status for row in self.rows}
        return 1 if "error" in statuses else 2 if "unknown" in statuses else 0

    def row(self, name: str) -> Row:
        """The row of this name."""
        (found,) = (row for row in self.rows if row.name == name)
        return found

    def to_json(self) -> str:
        """Everything, as one object."""
        rows = [
            {
                "name": row.name,
                "status": row.status,
                "details": list(row.details),
                "findings": [_said(finding) for finding in row.findings],
                "facts": dict(row.facts),
                "unknown": row.unknown,
            }
            for row in self.rows
        ]
        return json.dumps(
            {
                "model": self.model,
                "device": self.device,
                "seconds": round(self.seconds, 3),
                "exit_code": self.exit_code,
                "rows": rows,
            },
            indent=2,
        )


def show(report: Report, console: Console) -> None:
    """The table."""
    title = Text(printable(f"{report.model} on {report.device}"))
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was seen")
    for row in report.rows:
        word, colour = WORDS[row.status]
        table.add_row(row.name, Text(word, style=colour), _cell(row))
    console.print(table)
    verdict = {
        0: ("It will run.", "green"),
        1: ("It will not run as asked.", "bold red"),
        2: ("It could not be told whether it will run.", "magenta"),
    }
    text, colour = verdict[report.exit_code]
    console.print(Text(f"{text} ({report.seconds:.1f} s)", style=colour))


def _cell(row: Row) -> Text:
    cell = Text("\n".join(map(printable, row.details)))
    for finding in row.findings:
        colour = WORDS["error" if finding.severity == "error" else "warning"][1]
        lines = (
            (f"{finding.where}: {finding.saw}", colour),
            (f"  rule: {finding.rule}", "default"),
            (f"  change: {finding.change}", "default"),
        )
        for line, style in lines:
            cell.append("\n" if cell else "")
            cell.append(line, style=style)
    if row.unknown is not None:
        cell.append("\n" if cell else "")
        cell.append(printable(row.unknown), style=WORDS["unknown"][1])
    return cell


def _said(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in asdict(finding).items() if name != "evidence"}


def gib(num_bytes: int) -> str:
    """Bytes as a reader takes them in."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} bytes"
