"""Collects what is wrong with names and reports alike names together, so that a missing layer is
a few findings, not hundreds. Knows names and sentences only."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from vitrail.config.finding import Finding
from vitrail.weights.mapping import template

MAX_LABELS = 8
_NUMBER = re.compile(r"[0-9]+")


class Problems:
    """Findings by kind. Names that differ only in indices, with the same sentence, become one."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], list[str]] = {}

    def add(self, code: str, name: str, *, saw: str, rule: str, change: str) -> None:
        """One bad name; the sentences must not spell its indices."""
        key = (code, template(name), saw, rule, change)
        self._names.setdefault(key, []).append(name)

    def findings(self) -> list[Finding]:
        """Every problem, in the order of each kind's first."""
        return [
            Finding(
                where=labels(names),
                saw=saw if len(names) == 1 else f"{len(names)} such names, {saw}",
                rule=rule,
                change=change,
                code=code,
            )
            for (code, _, saw, rule, change), names in self._names.items()
        ]


class Neighbours:
    """Finds the names that look most like another; those that differ in indices only count once."""

    def __init__(self, names: Iterable[str]):
        self._names: dict[str, str] = {}
        for name in names:
            self._names.setdefault(template(name), name)
        self._known: dict[str, str] = {}

    def near(self, name: str) -> str:
        """` (nearest: ...)` with up to three names; empty if none is near."""
        key = template(name)
        if key not in self._known:
            found = get_close_matches(key, self._names, n=3, cutoff=0.5)
            near = ", ".join(self._names[candidate] for candidate in found)
            self._known[key] = f" (nearest: {near})" if near else ""
        return self._known[key]


def labels(names: Sequence[str]) -> str:
    """Names that differ in indices only, as `layers.{0..26}.norm.weight`; only names that are
    there."""
    found = _boxes(sorted(tuple(int(i) for i in _NUMBER.findall(name)) for name in names))
    parts = _NUMBER.split(names[0])
    spelled = [
        "".join(a + b for a, b in zip(parts, [*map(_runs, box), ""], strict=True))
        for box in found[:MAX_LABELS]
    ]
    more = f"; and {len(found) - MAX_LABELS} more groups" if len(found) > MAX_LABELS else ""
    return "; ".join(spelled) + more


def _boxes(rows: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Sorted, distinct index tuples as products of index sets."""
    columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
    product = 1
    for column in columns:
        product *= len(column)
    if product == len(rows):
        return [columns]
    axis = next(i for i, column in enumerate(columns) if len(column) > 1)
    return [
        box
        for value in columns[axis]
        for box in _boxes([row for row in rows if row[axis] == value])
    ]


def _runs(values: list[int]) -> str:
    """`7`, or `{0..3,5}`."""
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"
