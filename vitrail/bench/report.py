"""What a benchmark says: JSON for machines, a table for people, and warnings where the figures may
be the client's own. Pure but for writing files. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from vitrail.bench.compare import Verdict
from vitrail.bench.plot import Curves, draw
from vitrail.bench.record import Figures, Record, Spread
from vitrail.bench.workload import Arrivals, Closed, Synthetic, Workload

BUSY_CLIENT = 0.7  # cores; asyncio has one
LATE_MS = 20.0


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of what is measured: a server, or the engine in this process; its runs in order."""

    name: str
    address: str
    model: str
    runs: list[Figures]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `workload`: what was asked, in words; `seed` and the flags make it again.
    `warm_up_runs`: how many runs before these are not shown."""

    kind: str
    workload: str
    arrivals: str
    seed: int
    warm_up_runs: int
    sides: list[Side]
    verdicts: list[Verdict]
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where a report goes beside the terminal; None: nowhere."""

    json: Path | None
    plot: Path | None


def describe(workload: Workload) -> str:
    """The workload in words."""
    if not isinstance(workload, Synthetic):
        return f"{len(workload.lines)} lines of a file"
    w = workload
    text = f"{w.prompt_len} random tokens in, {w.output_len} out"
    height, width = w.picture_size
    if w.num_pictures:
        text += f", {w.num_pictures} new pictures of {width} x {height}"
    if w.shared_len or w.num_shared_pictures:
        text += f", after {w.shared_len} shared tokens and {w.num_shared_pictures} shared pictures"
    return text


def describe_arrivals(arrivals: Arrivals) -> str:
    """The arrivals in words."""
    if isinstance(arrivals, Closed):
        return f"{arrivals.concurrency} at any time"
    return f"Poisson, {arrivals.rate:g} a second"


def warnings_of(sides: Sequence[Side]) -> list[str]:
    """What makes figures doubtful."""
    found: list[str] = []
    for side in sides:
        busiest = max((f.client_cpu for f in side.runs), default=0.0)
        if busiest > BUSY_CLIENT:
            found.append(
                f"{side.name}: the client used {busiest:.2f} of a core; it may be the limit"
            )
        late = max((f.late.p99 or 0.0 for f in side.runs), default=0.0)
        if late > LATE_MS:
            found.append(f"{side.name}: requests were sent up to {late:.0f} ms late (p99)")
        if not all(f.counted for f in side.runs):
            found.append(f"{side.name}: no usage in its answers; pieces are counted for tokens")
        if any(f.short for f in side.runs):
            short = sum(f.short for f in side.runs)
            found.append(f"{side.name}: {short} answers are shorter than asked for")
        tokens, pieces = (sum(f.output_tokens for f in side.runs), sum(f.pieces for f in side.runs))
        if pieces < 0.5 * tokens:
            found.append(
                f"{side.name}: {tokens} tokens came in {pieces} pieces of text (merged, or without "
                "text, as special tokens are): the first piece is not the first token"
            )
        failed = sum(sum(f.failures.values()) for f in side.runs)
        if failed:
            total = sum(f.requests for f in side.runs)
            found.append(f"{side.name}: {failed} of {total} requests failed; they are in no figure")
    return found


def show(report: Report) -> str:
    """The table for a terminal: of each figure the median of the runs."""
    out = [f"{report.workload}; {report.arrivals}; seed {report.seed}"]
    for side in report.sides:
        out += ["", f"{side.name}  {side.address}  {side.model}  ({len(side.runs)} runs)"]
        out += _side_lines(side.runs)
    if report.verdicts:
        out += ["", "B against A:"]
        out += [f"  {v.name:<26}{v.text}" for v in report.verdicts]
    out += [""] * bool(report.warnings) + [f"warning: {text}" for text in report.warnings]
    return "\n".join(out)


def _side_lines(runs: Sequence[Figures]) -> list[str]:
    head = f"  {'ms':<20}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}"
    lines = [head]
    spreads = (
        ("first token", [f.first for f in runs]),
        ("time a token", [f.token for f in runs]),
        ("between pieces", [f.gap for f in runs]),
        ("end to end", [f.whole for f in runs]),
    )
    for name, each in spreads:
        cells = "".join(_cell([_part(s, k) for s in each]) for k in ("p50", "p90", "p99", "mean"))
        lines.append(f"  {name:<20}{cells}")

    def mid(values: Sequence[float]) -> float:
        return median(values) if values else 0.0

    lines.append(
        f"  output {mid([f.output_rate for f in runs]):.1f} token/s, "
        f"with prompts {mid([f.total_rate for f in runs]):.1f} token/s, "
        f"{mid([f.request_rate for f in runs]):.2f} request/s"
    )
    ok = sum(f.requests - sum(f.failures.values()) for f in runs)
    lines.append(
        f"  {ok} of {sum(f.requests for f in runs)} requests succeeded; "
        f"{sum(f.prompt_tokens for f in runs)} prompt tokens, "
        f"{sum(f.output_tokens for f in runs)} output tokens in {sum(f.pieces for f in runs)} "
        f"pieces; this process used {max((f.client_cpu for f in runs), default=0.0):.2f} of a core"
    )
    lines.append(f"  {_cache_line(runs)}")
    kinds: dict[str, int] = {}
    examples: dict[str, str] = {}
    for figures in runs:
        examples = figures.examples | examples
        for kind, count in figures.failures.items():
            kinds[kind] = kinds.get(kind, 0) + count
    return lines + [
        f"  failed {count} times: {kind}, the first {examples[kind] or '(nothing was said)'}"
        for kind, count in kinds.items()
    ]


def _cache_line(runs: Sequence[Figures]) -> str:
    said = sum(f.cached_tokens for f in runs)
    line = f"cached prompt tokens: {said} by the answers' usage"
    found = [(f.hits, f.queries) for f in runs if f.hits is not None and f.queries is not None]
    if not found:
        return f"{line}; the server has no counters of it"
    hits, queries = sum(h for h, _ in found), sum(q for _, q in found)
    return f"{line}, {hits} of {queries} by the server's counters"


def _part(spread: Spread, name: str) -> float | None:
    values = {"p50": spread.p50, "p90": spread.p90, "p99": spread.p99, "mean": spread.mean}
    return values[name]


def _cell(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{median(known):10.2f}" if known else f"{'-':>10}"


def publish(report: Report, records: Sequence[Sequence[Record]], outputs: Outputs) -> None:
    """Print it, and write what was asked for. `records`: each side's, for the plot."""
    print(show(report))
    if outputs.json is not None:
        outputs.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    if outputs.plot is not None:
        names = [side.name for side in report.sides]
        curves = [
            Curves(name=name, first=first, token=token, whole=whole)
            for name, (first, token, whole) in zip(names, map(_samples, records), strict=True)
        ]
        outputs.plot.write_text(draw(curves, f"{report.workload}; {report.arrivals}"))


def _samples(records: Sequence[Record]) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of what succeeded."""
    good = [r for r in records if r.failure is None]
    tokens = [t * 1e3 for r in good if (t := r.per_token) is not None]
    return [r.first * 1e3 for r in good], tokens, [r.whole * 1e3 for r in good]
