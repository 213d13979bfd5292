"""Host cost of a step at many running decodes: scheduler, inputs, and the batch's layout.

    python bench/scheduler_step.py [--running 256] [--steps 1000]

Checks first that every request gets its tokens and that nothing leaks, then times schedule,
batch building (on the CPU) and absorb, one step ahead, as the engine does. Prints the wall clock
and this thread's own time (which other work on a busy machine stretches less); no part of the
check is in either."""

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.cache.encoder import EncoderCache
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.manager import Manager
from vitrail.config.hardware import CPU
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.parcel import Door
from vitrail.engine.request import EngineRequest, FinishReason, SamplingParams
from vitrail.engine.scheduler import Scheduler, SchedulerLimits
from vitrail.engine.step import StepPlan, StepResult

PAGE_SIZE = 64
PROMPT = 1024
GOAL_MS = 1.0


Clocks = tuple[float, float]


@dataclass(slots=True)
class Times:
    """(wall, thread) milliseconds a step, steps of `running` decodes alone."""

    schedule: list[Clocks]
    build: list[Clocks]
    absorb: list[Clocks]


def now() -> Clocks:
    return time.perf_counter() * 1e3, time.thread_time() * 1e3


def since(start: Clocks) -> Clocks:
    wall, thread = now()
    return wall - start[0], thread - start[1]


def make(running: int, steps: int, prompt: int = PROMPT) -> Scheduler:
    """`running` requests of their own prompts, each of which decodes `steps` tokens."""
    pages = running * (-(-(prompt + steps + 1) // PAGE_SIZE))
    limits = SchedulerLimits(
        max_running=running,
        max_waiting=running,
        max_step_tokens=8192,
        max_model_len=prompt + steps + 1,
        encoder_patches=1,
        page_size=PAGE_SIZE,
        prefix_cache=True,
    )
    scheduler = Scheduler(limits, Manager(pages, PAGE_SIZE), EncoderCache(0, 1))
    ids = np.random.default_rng(0).integers(0, 1000, (running, prompt))
    for i in range(running):
        scheduler.add(
            EngineRequest(
                id=f"request-{i}",
                prompt_token_ids=ids[i].tolist(),
                images=[],
                params=SamplingParams(),
                max_tokens=steps,
                stop_token_ids=frozenset({1000, 1001}),
                seed=i,
            )
        )
    return scheduler


def tables(running: int) -> tuple[BatchBuilder, PlanTable, KvPool]:
    """What a batch is laid out with; no layer runs, so plans and pool are as small as can be."""
    device = torch.device("cpu")
    limits = PlanLimits(
        dtype="float32", page_size=PAGE_SIZE, max_batch=running, max_q_len=1, max_kv_len=1
    )
    builder = BatchBuilder(max_running=running, max_pages=64, page_size=PAGE_SIZE, device=device)
    pool = KvPool([], num_pages=1, page_size=PAGE_SIZE, device=device)
    return builder, make_table([], limits, CPU, None), pool


def result(plan: StepPlan) -> StepResult:
    """Tokens that tell which position they follow."""
    rows = plan.sampled
    return StepResult(
        token_ids=[(row.start + row.length - 1) % 1000 for row in rows],
        logprobs=[None] * len(rows),
        prompt_rows={},
        failed_entries={},
    )


def run(scheduler: Scheduler, running: int) -> tuple[dict[str, list[int]], Times]:
    """Until idle, one step ahead. Tokens by request, and the times of full decode steps."""
    times = Times([], [], [])
    builder, plans, pool = tables(running)
    door = Door(torch.device("cpu"))
    tokens: dict[str, list[int]] = {}
    pending: list[StepPlan] = []
    while not scheduler.idle:
        start = now()
        planned = scheduler.schedule()
        took = since(start)
        if planned is not None:
            pending.append(planned[0])
            start = now()
            sent = door.parcel()
            packed = builder.pack(*planned, plans, sent)
            builder.unpack(packed, sent.send(), plans, pool)
            built = since(start)
            if planned[0].prefills == () and len(planned[0].decodes) == running:
                times.schedule.append(took)
                times.build.append(built)
        while len(pending) > (planned is not None):
            plan = pending.pop(0)
            got = result(plan)
            start = now()
            outputs = scheduler.absorb(plan, got)
            took = since(start)
            if not plan.prefills and len(plan.decodes) == running:
                times.absorb.append(took)
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                assert output.finish_reason in (None, FinishReason.LENGTH)
    scheduler.check()
    return tokens, times


def verify() -> None:
    """A small run: every request gets exactly its tokens, in order, and the pool is empty after."""
    scheduler = make(7, 130, prompt=65)
    tokens, _ = run(scheduler, 7)
    assert len(tokens) == 7
    assert all(t == list(range(64, 64 + 130)) for t in tokens.values())


def report(name: str, values: list[Clocks]) -> None:
    parts: list[str] = []
    for clock, column in (("wall", 0), ("thread", 1)):
        ms = sorted(v[column] for v in values)
        cut = statistics.quantiles(ms, n=100)
        parts.append(f"{clock} least {ms[0]:.3f} p50 {cut[49]:.3f} p99 {cut[98]:.3f} ms")
    print(f"{name:18} {'   '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    verify()
    _, times = run(make(args.running, args.steps), args.running)
    torch.set_num_threads(1)
    parts = zip(times.schedule, times.build, times.absorb, strict=False)
    steps = [(s[0] + b[0] + a[0], s[1] + b[1] + a[1]) for s, b, a in parts]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cpus, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}, python {platform.python_version()}, ", end="")
    print(f"{args.running} decodes, {len(steps)} steps, page {PAGE_SIZE}")
    report("schedule + inputs", times.schedule)
    report("batch", times.build)
    report("absorb", times.absorb)
    report("step", steps)
    print(f"goal: {GOAL_MS} ms for the step at 256 decodes")


if __name__ == "__main__":
    main()
