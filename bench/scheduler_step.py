"""Host cost of a step at many running decodes: scheduler, inputs, and the batch's layout.

    python bench/scheduler_step.py [--running 256] [--steps 1000] [--spread 0] [--wait 0]

Checks first that every request gets its tokens and that nothing leaks, then times schedule, what a
graph's launch does before the device (Kimi-VL's latent attention planned for an H200, greedy rows;
the parcel ends on the CPU) and absorb, one step ahead, as the engine does. Beside them, what laying
a batch out without graphs takes. `--spread`: prompts are of lengths up to so much apart, so that
some page is full in most steps; `--wait`: milliseconds of sleep before a step, as a GPU makes them,
after which the host's caches hold less. Prints the wall clock and this thread's own time (which
other work on a busy machine stretches less); no part of the check is in either."""

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from vitrail.attention.plan import CUTLASS_RELEASE, PlanLimits, make_table
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.encoder import EncoderCache
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.manager import Manager
from vitrail.check.sizes import ladder
from vitrail.config.hardware import find
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.graphs import DecodeGraphs, GraphParts
from vitrail.engine.parcel import Door
from vitrail.engine.policy import SchedulerLimits
from vitrail.engine.request import EngineRequest, FinishReason, SamplingParams
from vitrail.engine.sampler import Sampler
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.step import StepInputs, StepPlan, StepResult
from vitrail.models.interface import Model

INSTALLED = {"cute": CUTLASS_RELEASE}
SITE = AttentionSite(
    num_q_heads=16,
    num_kv_heads=1,
    head_dim=576,
    head_dim_v=512,
    scale=192**-0.5,
    causal=True,
    latent_rank=512,
)
PAGE_SIZE = 64
PROMPT = 1024
GOAL_MS = 0.3


Clocks = tuple[float, float]


@dataclass(slots=True)
class Times:
    """(wall, thread) milliseconds a step, steps of `running` decodes alone."""

    schedule: list[Clocks]
    graph: list[Clocks]
    eager: list[Clocks]
    absorb: list[Clocks]


def now() -> Clocks:
    return time.perf_counter() * 1e3, time.thread_time() * 1e3


def since(start: Clocks) -> Clocks:
    wall, thread = now()
    return wall - start[0], thread - start[1]


def make(running: int, steps: int, prompt: int = PROMPT, spread: int = 0) -> Scheduler:
    """`running` requests of their own prompts, of `prompt` tokens and up to `spread` more, each of
    which decodes `steps` tokens."""
    pages = running * (-(-(prompt + spread + steps + 1) // PAGE_SIZE))
    limits = SchedulerLimits(
        max_running=running,
        max_waiting=running,
        max_step_tokens=8192,
        max_model_len=prompt + spread + steps + 1,
        encoder_patches=1,
        patches_beside=0,
        page_size=PAGE_SIZE,
        prefix_cache=True,
    )
    scheduler = Scheduler(limits, Manager(pages, PAGE_SIZE), EncoderCache(0, 1))
    random = np.random.default_rng(0)
    ids = random.integers(0, 1000, (running, prompt + spread))
    lengths = prompt + random.integers(0, spread + 1, running)
    for i in range(running):
        scheduler.add(
            EngineRequest(
                id=f"request-{i}",
                prompt_token_ids=ids[i, : lengths[i]].tolist(),
                images=[],
                params=SamplingParams(temperature=0),
                max_tokens=steps,
                stop_token_ids=frozenset({1000, 1001}),
                seed=i,
            )
        )
    return scheduler


class Tables:
    """What a step is laid out with; no layer runs, so there is neither model nor pool."""

    def __init__(self, running: int):
        device, max_len = torch.device("cpu"), 64 * PAGE_SIZE
        limits = PlanLimits(
            dtype="bfloat16",
            page_size=PAGE_SIZE,
            max_batch=running,
            max_q_len=1,
            max_kv_len=max_len,
        )
        sites = [(SITE, Phase.DECODE)]
        self.plans = make_table(sites, limits, find("H200"), "cute", INSTALLED)
        self.door = Door(device)
        self.builder = BatchBuilder(
            max_running=running, max_pages=64, page_size=PAGE_SIZE, device=device, sites=sites
        )
        self.sampler = Sampler(running, 32, [], device)
        self.parts = GraphParts(
            model=cast(Model, Decoder()),
            pool=KvPool([], num_pages=1, page_size=PAGE_SIZE, device=device),
            plans=self.plans,
            builder=self.builder,
            sampler=self.sampler,
            scratch_page=0,
            max_len=max_len,
        )
        self.graphs = DecodeGraphs(self.parts, ladder(running), device)

    def graph(self, plan: StepPlan, inputs: StepInputs) -> None:
        """A launch up to the replay."""
        sent = self.door.parcel()
        slots = self.graphs.pack(plan, sent)
        self.sampler.ask(slots, lambda: inputs.draws, inputs.output_index, sent)
        sent.send(self.graphs.inputs)

    def eager(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Without graphs, up to the first layer; attention's work without what its backend needs on
        the device."""
        sent = self.door.parcel()
        self.builder.pack(plan, inputs, self.plans, sent)
        sent.send()


class Decoder:
    """As much of a model as a graph's head asks of one."""

    def text_sites(self) -> list[tuple[AttentionSite, Phase]]:
        return [(SITE, Phase.DECODE)]


def result(plan: StepPlan) -> StepResult:
    """Tokens that tell which position they follow."""
    rows = plan.sampled
    return StepResult(
        token_ids=np.array([(row.start + row.length - 1) % 1000 for row in rows], np.int64),
        logprobs={},
        prompt_rows={},
        failed_entries={},
        encoded=0,
    )


def run(
    scheduler: Scheduler, running: int, wait: float = 0.0
) -> tuple[dict[str, list[int]], Times]:
    """Until idle, one step ahead. Tokens by request, and the times of full decode steps. `wait`:
    seconds before each."""
    times, tables = Times([], [], [], []), Tables(running)
    tokens: dict[str, list[int]] = {}
    pending: list[StepPlan] = []
    while not scheduler.idle:
        if wait:
            time.sleep(wait)
        start = now()
        planned = scheduler.schedule()
        took = since(start)
        if planned is not None:
            pending.append(planned[0])
            tables.sampler.setup(planned[1].setups)
            if planned[0].prefills:
                tables.eager(*planned)
            elif len(planned[0].decodes) == running:
                times.schedule.append(took)
                start = now()
                tables.graph(*planned)
                times.graph.append(since(start))
                start = now()
                tables.eager(*planned)
                times.eager.append(since(start))
            else:
                tables.graph(*planned)
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
    parser.add_argument("--spread", type=int, default=0)
    parser.add_argument("--wait", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # else threads share the copy that a GPU's driver makes
    verify()
    made = make(args.running, args.steps, spread=args.spread)
    _, times = run(made, args.running, args.wait / 1e3)
    parts = zip(times.schedule, times.graph, times.absorb, strict=False)
    steps = [(s[0] + b[0] + a[0], s[1] + b[1] + a[1]) for s, b, a in parts]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cpus, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}, python {platform.python_version()}, ", end="")
    print(f"{args.running} decodes, {len(steps)} steps, page {PAGE_SIZE}, ", end="")
    print(f"spread {args.spread}, wait {args.wait} ms")
    report("schedule + inputs", times.schedule)
    report("graph's parcel", times.graph)
    report("absorb", times.absorb)
    report("step", steps)
    report("without graphs", times.eager)
    print(f"goal: {GOAL_MS} ms for the step at 256 decodes")


if __name__ == "__main__":
    main()
