"""What a run's figures are, and when two servers are called different."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.bench.compare import T95, compare, turns
from vitrail.bench.record import Figures, Record, figures, spread


def record(first: float, gaps: Sequence[float], *, began: float = 5.0, **more: object) -> Record:
    arrivals = np.cumsum([began + first, *gaps]).tolist()
    made = Record(due=began, began=began, arrivals=arrivals, ended=arrivals[-1] + 0.001)
    made.num_output = made.wanted = len(arrivals)
    for name, value in more.items():
        setattr(made, name, value)
    return made


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_percentiles_are_the_sorted_samples_with_lines_between(seconds: list[float]):
    """Rank (n - 1) q, written out; numpy's default agrees."""
    found, ordered = spread(seconds), sorted(s * 1e3 for s in seconds)
    for q, have in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        rank = (len(ordered) - 1) * q
        low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        want = low + (high - low) * (rank - math.floor(rank))
        assert have == pytest.approx(want, rel=1e-9, abs=1e-9)
        assert have == pytest.approx(float(np.percentile(ordered, q * 100)))
    assert found.mean == pytest.approx(np.mean(ordered))
    assert found.count == len(seconds)


def test_nothing_has_no_percentiles():
    empty = figures([], 0.0)
    assert empty.first.p50 is None
    assert empty.first.count == 0
    assert (empty.seconds, empty.output_rate, empty.requests) == (0.0, 0.0, 0)


def test_the_figures_of_two_answers():
    slow = record(0.2, [0.01, 0.03], num_prompt=10, num_cached=4, wanted=4)
    quick = record(0.1, [], began=5.1, num_prompt=20)
    found = figures([slow, quick], 0.25, (4, 30))
    assert found.first.p50 == pytest.approx(150)
    assert (found.token.count, found.token.p50) == (1, pytest.approx(20))
    assert (found.gap.count, found.gap.p50) == (2, pytest.approx(20))
    assert found.whole.p99 == pytest.approx(101 + 0.99 * 140)
    assert found.seconds == pytest.approx(0.241)
    assert found.output_rate == pytest.approx(4 / 0.241)
    assert found.total_rate == pytest.approx(34 / 0.241)
    assert (found.pieces, found.short, found.cached_tokens) == (4, 1, 4)
    assert (found.hits, found.queries) == (4, 30)


def test_an_answer_in_one_piece_has_no_time_a_token():
    """Its 8 tokens came at once as far as anyone can see; 0 ms would be a lie."""
    assert record(0.1, [], num_output=8).per_token is None


@given(st.lists(st.floats(0.001, 100), max_size=5))
@settings(max_examples=30, deadline=None)
def test_failures_are_counted_and_in_no_figure(wild: list[float]):
    good = [record(0.1 + 0.01 * i, [0.01] * 4) for i in range(5)]
    bad = [record(w, [w], began=5.05, failure="status 500") for w in wild]
    for each in bad:
        each.ended = 5.06  # the run is as long as without them
    alone, mixed = figures(good, 0.0), figures([*good, *bad], 0.0)
    for name in ("first", "token", "gap", "whole", "output_rate", "request_rate", "output_tokens"):
        assert getattr(mixed, name) == getattr(alone, name), name
    assert mixed.failures == ({"status 500": len(wild)} if wild else {})
    assert mixed.requests == 5 + len(wild)


def test_turns_alternate():
    assert turns(3) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def run_of(scale: float) -> Figures:
    return figures([record(0.1 * scale, [0.01 * scale] * 9) for _ in range(4)], 0.0)


def test_a_difference_beyond_the_noise_is_told_with_its_size():
    rng = np.random.default_rng(1)
    drift = np.linspace(1, 2, 6)  # both get slower together: the pairs do not see it
    a = [run_of(d * math.exp(e)) for d, e in zip(drift, rng.normal(0, 0.01, 6), strict=True)]
    b = [run_of(0.9 * d * math.exp(e)) for d, e in zip(drift, rng.normal(0, 0.01, 6), strict=True)]
    for verdict in compare(a, b):
        assert verdict.winner == "B", verdict
        better = 1 / 0.9 if "second" in verdict.name else 0.9
        assert verdict.ratio == pytest.approx(better, rel=0.03)
        assert verdict.low is not None
        assert verdict.high is not None
        assert verdict.low < better < verdict.high
    assert {v.winner for v in compare(b, a)} == {"A"}


def test_equal_servers_are_called_different_one_time_in_twenty():
    rng = np.random.default_rng(2)
    claims = []
    for _ in range(400):
        a, b = ([run_of(math.exp(e)) for e in rng.normal(0, 0.05, 4)] for _ in range(2))
        claims.append(compare(a, b)[0].winner is not None)
    assert 0.02 < np.mean(claims) < 0.08


def test_what_cannot_be_compared_is_said():
    whole, failed = run_of(1), figures([record(0.1, [], failure="cut")], 0.0)
    short = figures([record(0.1, [0.1])], 0.0)
    for other in (failed, short):
        (first, *_) = compare([whole], [other])
        assert (first.pairs, first.ratio, first.winner) == (0, None, None)
        assert "nothing to compare" in first.text
    (first, *_) = compare([whole, whole, whole], [run_of(0.5), failed, run_of(0.5)])
    assert (first.pairs, first.winner) == (2, "B")
    (first, *_) = compare([whole], [run_of(0.5)])
    assert (first.winner, first.low) == (None, None)
    assert "one pair" in first.text


def test_students_points():
    """2.5 % of the density lies above each: integrated here."""
    for freedom in (1, 2, 5, 10, 30):
        log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        scale = math.exp(log) / math.sqrt(freedom * math.pi)
        x = np.linspace(0, T95[freedom - 1], 200_001)
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert np.trapezoid(density, x) == pytest.approx(0.475, abs=1e-4)
