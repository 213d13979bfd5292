"""`Finding`: why something cannot be done, in three parts; `Refused`: the error that carries them.

Plans return findings; an edge (HTTP, command line, offline API) turns them into an error. The
sentence is written once, where the rule lives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

Severity = Literal["error", "warning"]
T = TypeVar("T")
INVALID = "invalid_value"
_TEXTS = ("where", "saw", "rule", "change")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason. `where` names the field, tensor or file; `saw` what was asked, with its numbers;
    `rule` what must hold; `change` what to do about it. `code` is a stable machine-readable
    word. `evidence`: the backend, facts and choice that a planner's rule was held to."""

    where: str
    saw: str
    rule: str
    change: str
    code: str = INVALID
    severity: Severity = "error"
    evidence: tuple[str, Mapping[str, int], Mapping[str, int]] | None = field(
        default=None, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        # words of files and requests are quoted, and some would steer a terminal
        texts = (self.where, self.saw, self.rule, self.change)
        if not all(map(str.isprintable, texts)):
            for name, text in zip(_TEXTS, texts, strict=True):
                object.__setattr__(self, name, printable(text))

    def __str__(self) -> str:
        return f"{self.where}: {self.saw}. Rule: {self.rule}. Change: {self.change}."


def printable(text: str) -> str:
    """`text` with what no terminal should be sent, or what is no character, spelled out."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


class Refused(ValueError):
    """Raised where a refusal meets a caller. Holds every finding, not only the first."""

    def __init__(self, findings: Finding | Iterable[Finding]):
        self.findings: tuple[Finding, ...] = (
            (findings,) if isinstance(findings, Finding) else tuple(findings)
        )
        super().__init__("\n".join(str(f) for f in self.findings))

    @classmethod
    def because(
        cls, where: str, saw: str, rule: str, change: str, code: str = INVALID
    ) -> "Refused":
        """For one reason."""
        return cls(Finding(where=where, saw=saw, rule=rule, change=change, code=code))


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those findings that forbid, without the warnings."""
    return [f for f in findings if f.severity == "error"]


def accept(planned: T | list[Finding]) -> T:
    """The plan, or `Refused` with the findings that forbid it."""
    if isinstance(planned, list):
        raise Refused(cast(list[Finding], planned))
    return planned
