"""Two servers, the same work, in turns: A B A B ... The runs of one turn are a pair, so that what
drifts is in both. For each figure the pairs' ratios give a mean and a 95 % interval (Student's, on
their logarithms); a difference is claimed only where the interval leaves 1 out. Pure. No torch."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from vitrail.bench.record import Figures

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; beyond them the last is
# kept, which is wider than right.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Measure(NamedTuple):
    """A figure of a run that two servers are compared by; None where the run has none."""

    name: str
    of: Callable[[Figures], float | None]
    more_is_better: bool


MEASURES = (
    Measure("first token, p50", lambda f: f.first.p50, False),
    Measure("first token, p99", lambda f: f.first.p99, False),
    Measure("time a token, p50", lambda f: f.token.p50, False),
    Measure("time a token, p99", lambda f: f.token.p99, False),
    Measure("end to end, p50", lambda f: f.whole.p50, False),
    Measure("end to end, p99", lambda f: f.whole.p99, False),
    Measure("output tokens a second", lambda f: f.output_rate, True),
    Measure("requests a second", lambda f: f.request_rate, True),
)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """B against A by one figure: `ratio` B / A with its interval [low, high], None below two
    pairs; `winner` "A", "B" or None where the pairs do not tell."""

    name: str
    pairs: int
    ratio: float | None
    low: float | None
    high: float | None
    winner: str | None
    text: str


def turns(pairs: int) -> list[tuple[int, int]]:
    """(server, pair) of each run in order: 0 is A, 1 is B."""
    return [(server, pair) for pair in range(pairs) for server in (0, 1)]


def compare(a: Sequence[Figures], b: Sequence[Figures]) -> list[Verdict]:
    """A verdict for each measure. A pair in which either run had failures, or answers of unequal
    numbers of tokens, compares different work: it is left out."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if _is_equal_work(x, y)]
    return [_verdict(measure, pairs) for measure in MEASURES]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval (Student's), of two values or more."""
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, T95[min(count - 1, len(T95)) - 1] * math.sqrt(variance / count)


def _is_equal_work(x: Figures, y: Figures) -> bool:
    return not x.failures and not y.failures and x.output_tokens == y.output_tokens


def _verdict(measure: Measure, pairs: Sequence[tuple[Figures, Figures]]) -> Verdict:
    found = [(measure.of(x), measure.of(y)) for x, y in pairs]
    logs = [math.log(y / x) for x, y in found if x and y]
    if not logs:
        return _told(measure.name, 0, None, None, "nothing to compare: no pair of equal work")
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        text = f"{_percent(mean)}; one pair says nothing of noise"
        return _told(measure.name, len(logs), mean, None, text)
    mean, half = spread(logs)
    span = f"{_percent(mean - half)} to {_percent(mean + half)}, {len(logs)} pairs"
    if mean - half <= 0 <= mean + half:
        return _told(measure.name, len(logs), mean, half, f"no difference seen ({span})")
    winner = "B" if (mean > 0) == measure.more_is_better else "A"
    text = f"{winner} is better: B / A {_percent(mean)} ({span})"
    return _told(measure.name, len(logs), mean, half, text, winner)


def _told(
    name: str,
    pairs: int,
    mean: float | None,
    half: float | None,
    text: str,
    winner: str | None = None,
) -> Verdict:
    known = None if mean is None or half is None else (mean - half, mean + half)
    return Verdict(
        name=name,
        pairs=pairs,
        ratio=None if mean is None else math.exp(mean),
        low=None if known is None else math.exp(known[0]),
        high=None if known is None else math.exp(known[1]),
        winner=winner,
        text=text,
    )


def _percent(log: float) -> str:
    return f"{math.expm1(log) * 100:+.1f} %"
