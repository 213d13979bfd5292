"""What planning costs on this CPU, one thread, the best of many:

    python bench/plan_cost.py

`cold` makes a plan (facts, choice, every rule, the plan itself), `cached` asks for it again; goal:
20 us a call site. A step only selects plans from the start-up's table, once a layer, and turns
lengths into records, once for all layers."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vitrail.attention.plan import (
    KERNEL_BACKENDS,
    AttentionPlan,
    PlanLimits,
    make_table,
    order,
    plan,
    plan_on,
)
from vitrail.attention.records import make_records
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.hardware import find

GOAL_US = 20.0
H200 = find("H200")


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more: int) -> AttentionSite:
    return AttentionSite(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        scale=dim**-0.5,
        causal=True,
        **more,
    )


def shape(where: AttentionSite, phase: Phase, batch: int, kv_len: int) -> AttentionShape:
    return AttentionShape(
        site=where,
        phase=phase,
        dtype="bfloat16",
        page_size=64 if phase in PAGED else None,
        batch=batch,
        max_q_len=1 if phase is Phase.DECODE else 2048,
        max_kv_len=kv_len,
    )


GQA, MLA = site(32, 8, 128, 128), site(16, 1, 576, 512, latent_rank=512)
EXPANDED = site(16, 16, 192, 128)
SITES = {
    "decode 32/8 x 128": shape(GQA, Phase.DECODE, 64, 8192),
    "decode MLA 16": shape(MLA, Phase.DECODE, 64, 8192),
    "extend 32/8 x 128": shape(GQA, Phase.EXTEND, 64, 8192),
    "prefill 16 x 192/128": shape(EXPANDED, Phase.PREFILL, 64, 8192),
}


def best_us(run: Callable[[int], object], number: int = 100, rounds: int = 60) -> float:
    """Microseconds of run(i), i counting up: the quickest of `rounds` means over `number` calls."""
    times: list[float] = []
    for first in range(0, number * rounds, number):
        calls = range(first, first + number)
        began = time.perf_counter()
        for i in calls:
            run(i)
        times.append((time.perf_counter() - began) / number)
    return min(times) * 1e6


def show(name: str, what: str, us: float, tail: str = "", goal: float = GOAL_US) -> None:
    missed = "" if us <= goal else f"  misses the goal x{us / goal:.2f}"
    print(f"  {name:22s} {what:22s} {us:8.2f} us{missed}  {tail}".rstrip(), flush=True)


def planning() -> None:
    print(f"plan on an H200; goal {GOAL_US:.0f} us a call site")
    for name, facts in SITES.items():
        # Shapes that nobody asked for yet: the cache cannot know them.
        fresh = [replace(facts, max_kv_len=facts.max_kv_len + i) for i in range(6000)]
        made = plan(facts, H200)
        backend = made.backend if isinstance(made, AttentionPlan) else "refused"
        tried = " > ".join(order(facts, H200))
        show(name, "cold", best_us(lambda i, f=fresh: plan(f[i], H200)), f"{backend} of {tried}")
        show("", "cached", best_us(lambda _, f=facts: plan(f, H200)))
        for backend in ("reference", *KERNEL_BACKENDS):
            planned = isinstance(plan_on(backend, facts, H200), AttentionPlan)
            us = best_us(lambda _, b=backend, f=facts: plan_on(b, f, H200))
            show("", f"cold, {backend} alone", us, "" if planned else "refused, with sentences")


def steps() -> None:
    limits = PlanLimits(
        dtype="bfloat16", page_size=64, max_batch=256, max_q_len=2048, max_kv_len=131_072
    )
    sites = [(GQA, Phase.DECODE), (GQA, Phase.EXTEND), (MLA, Phase.DECODE)]
    began = time.perf_counter()
    table = make_table(sites, limits, H200, "triton")
    took = time.perf_counter() - began
    print(f"start-up: {len(table)} plans of 3 sites in {1e3 * took:.1f} ms")
    print("a step")
    us = best_us(lambda i: table.select(MLA, Phase.DECODE, 1 + i % 256, 1 + i % 131_072))
    show("select, a layer", "", us)
    rng = np.random.default_rng(0)
    for where, name in ((GQA, "32/8 x 128"), (MLA, "MLA 16")):
        for batch in (1, 32, 256):
            lens = rng.integers(1, 16_384, batch).tolist()
            made = table.select(where, Phase.DECODE, batch, max(lens))
            starts = [n - 1 for n in lens]
            ones, rows = [1] * batch, list(range(batch))
            us = best_us(
                lambda _, a=(made, ones, lens, starts, rows): make_records(*a), number=10, rounds=40
            )
            items = len(make_records(made, ones, lens, starts, rows).items)
            show("make_records, a step", f"{name}, batch {batch}", us, f"{items} items", 1e3)


def main() -> None:
    planning()
    steps()


if __name__ == "__main__":
    main()
