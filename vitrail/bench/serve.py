"""`vitrail bench serve`: one server, or two in turns."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.bench.client import Target, calls, load, served_model
from vitrail.bench.compare import compare, turns
from vitrail.bench.counters import cache_counters
from vitrail.bench.http import address
from vitrail.bench.record import Figures, Record, figures
from vitrail.bench.report import (
    Outputs,
    Report,
    Side,
    describe,
    describe_arrivals,
    publish,
    warnings_of,
)
from vitrail.bench.workload import Arrivals, Closed, Item, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked: `requests` of `workload` a run, `runs` runs, after `warm_up` that are not
    shown."""

    workload: Workload
    arrivals: Arrivals
    requests: int
    runs: int
    warm_up: int
    seed: int

    def run(self, index: int) -> tuple[list[Item], list[float]]:
        """The requests of run `index`, warm-up runs being the first, and when each is due (empty
        for a closed loop)."""
        items = self.workload.items(self.seed, index, self.requests)
        if isinstance(self.arrivals, Closed):
            return items, []
        return items, self.arrivals.times(self.seed, index, self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Servers and how they are asked. `model` None: what each names first."""

    urls: tuple[str, ...]
    model: str | None
    api_key: str | None
    ignore_eos: bool
    timeout_s: float


class Run(NamedTuple):
    """One run of one server."""

    records: list[Record]
    figures: Figures


def bench_serve(asked: Asked, work: Work, outputs: Outputs) -> int:
    """Exit code 0, or 1 where no request succeeded. Raises `Refused`."""
    return asyncio.run(_bench(asked, work, outputs))


async def _bench(asked: Asked, work: Work, outputs: Outputs) -> int:
    targets = [await _target(asked, url) for url in asked.urls]
    runs = await measure(targets, work)
    sides = [
        Side(
            name="AB"[i] if len(targets) > 1 else "server",
            address=target.url,
            model=target.model,
            runs=[run.figures for run in runs[i]],
        )
        for i, target in enumerate(targets)
    ]
    report = Report(
        kind="serve",
        workload=describe(work.workload),
        arrivals=describe_arrivals(work.arrivals),
        seed=work.seed,
        warm_up_runs=work.warm_up,
        sides=sides,
        verdicts=compare(sides[0].runs, sides[1].runs) if len(sides) == 2 else [],
        warnings=warnings_of(sides),
    )
    records = [[r for run in each for r in run.records] for each in runs]
    publish(report, records, outputs)
    return int(all(r.failure is not None for each in records for r in each))


async def _target(asked: Asked, url: str) -> Target:
    where = address(url)
    served = await served_model(where, asked.api_key)
    return Target(
        url=url,
        where=where,
        model=asked.model or served,
        api_key=asked.api_key,
        ignore_eos=asked.ignore_eos,
        timeout_s=asked.timeout_s,
    )


async def measure(targets: Sequence[Target], work: Work) -> list[list[Run]]:
    """Each target's runs. Two targets take turns, and both get the same requests in a turn; but one
    server against itself, which shows the noise, gets others for its second side: it would know
    the first's."""
    found: list[list[Run]] = [[] for _ in targets]
    total = work.warm_up + work.runs
    is_same = len(targets) == 2 and targets[0].where == targets[1].where
    order = turns(total) if len(targets) == 2 else [(0, pair) for pair in range(total)]
    for server, pair in order:
        index = pair + total * server * is_same
        run = await _run(targets[server], work, index)
        if pair >= work.warm_up:
            found[server].append(run)
    return found


async def _run(target: Target, work: Work, index: int) -> Run:
    items, times = work.run(index)
    made = calls(target, items)
    before = await cache_counters(target.where, target.api_key)
    wall, cpu = time.perf_counter(), time.process_time()
    records = await load(target, made, work.arrivals, times)
    used = (time.process_time() - cpu) / (time.perf_counter() - wall)
    after = await cache_counters(target.where, target.api_key)
    cache = None
    if before is not None and after is not None:
        cache = (after[0] - before[0], after[1] - before[1])
    return Run(records, figures(records, used, cache))
