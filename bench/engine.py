"""The engine at Kimi-VL-A3B's shape, random weights, no server: rates, idle time, a profile.

    python bench/engine.py [--batches 1,32,256] [--no-profile] [--no-check]
    python bench/engine.py --tiny        # a small shape on a CPU: a smoke test

Checks first: the same tokens step by step, one step ahead and (on a GPU) from graphs; how many of a
batch's tokens are those of its requests alone. Decode rate = batch x OUTPUT / (time of WARM +
OUTPUT tokens - time of WARM tokens), prefill rate = prompt tokens / time to one token out, random
ids, nothing shared; medians of RUNS after one warm-up. Floors: bytes of the weights and rows that a
step reads over 4.2 TB/s; FLOPs over 650 TFLOP/s. Then a profile by kernel group."""

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from kimi_vl_shape import IMAGE, TEXT, TINY, TINY_VISION, VISION, decode_floor, prefill_floor, write
from torch.profiler import ProfilerActivity, profile

from vitrail import SamplingParams
from vitrail.config.engine import EngineConfig
from vitrail.engine.build import build_engine
from vitrail.engine.engine import Engine
from vitrail.engine.request import EngineRequest
from vitrail.engine.runner import Runner
from vitrail.models.checkpoint import open_checkpoint

WARM, OUTPUT, CONTEXT, RUNS = 16, 128, 1024, 3
PROFILED_STEPS = 12
LONG_GAP_US = 4  # between kernels of one stream there are one or two
# A kernel belongs to the first group one of whose words its name has.
GROUPS = (
    ("copies", ("memcpy", "memset")),
    ("attention", ("decodesm90", "attend", "combine", "flash", "mend")),
    ("experts", ("grouped", "expert", "moe", "groupproblem")),
    ("products", ("gemm", "nvjet", "cublas", "xmma", "cutlass", "gemv", "splitk")),
    ("sampling", ("argmax", "sample", "finite", "draw")),
    ("sort, top-k", ("sort", "topk", "radix", "searchsorted", "scan")),
    ("norm", ("norm",)),
    ("reduce", ("reduce",)),
    ("gather, scatter", ("index", "gather", "scatter")),
    ("concatenate", ("catarray", "cat_")),
)


class Shape(NamedTuple):
    """What is run: text facts, lengths, sizes of batches."""

    text: dict[str, Any]
    context: int
    output: int
    prefills: tuple[tuple[int, int], ...]
    runs: int


class Ran(NamedTuple):
    seconds: float
    tokens: dict[str, list[int]]


def requests(shape: Shape, count: int, length: int, output: int, seed: int) -> list[EngineRequest]:
    """Random prompts of their own, greedy, to the last token."""
    ids = np.random.default_rng(seed).integers(
        0, shape.text["vocab_size"] * 9 // 10, (count, length)
    )
    return [
        EngineRequest(
            id=f"{seed}-{i}-{time.perf_counter_ns()}",
            prompt_token_ids=ids[i].tolist(),
            images=[],
            params=SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
            max_tokens=output,
            stop_token_ids=frozenset(),
            seed=i,
        )
        for i in range(count)
    ]


def run(engine: Engine, asked: list[EngineRequest]) -> Ran:
    """Until all have ended."""
    tokens: dict[str, list[int]] = {r.id: [] for r in asked}
    synchronize()
    began = time.perf_counter()
    for request in asked:
        engine.add(request)
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return Ran(time.perf_counter() - began, tokens)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(measure: Callable[[int], float], runs: int) -> float:
    """Of `runs` after one warm-up; the argument is the number of the run."""
    return statistics.median([measure(i) for i in range(runs + 1)][1:])


def decode_rate(engine: Engine, batch: int, shape: Shape) -> float:
    """Tokens a second."""

    def took(output: int) -> float:
        return median(
            lambda i: (
                run(
                    engine, requests(shape, batch, shape.context, output, 1000 * batch + output + i)
                ).seconds
            ),
            shape.runs,
        )

    return batch * shape.output / (took(WARM + shape.output) - took(WARM))


def prefill_rate(engine: Engine, shape: Shape, count: int, length: int) -> float:
    seconds = median(
        lambda i: run(engine, requests(shape, count, length, 1, 77 * length + i)).seconds,
        shape.runs,
    )
    return count * length / seconds


class Event(NamedTuple):
    """A kernel or a copy, microseconds."""

    name: str
    start: float
    end: float


@contextmanager
def profiled(found: list[Event]) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
        synchronize()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    for e in results.events():
        if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0:
            start = e.start_ns() / 1e3
            found.append(Event(e.name(), start, start + e.duration_ns() / 1e3))
    found.sort(key=lambda e: e.start)


def group_of(name: str) -> str:
    lowered = name.lower()
    for group, words in GROUPS:
        if any(word in lowered for word in words):
            return group
    return "element-wise, other"


def show_profile(title: str, events: list[Event], steps: int, top: int) -> None:
    """Time a step by group and by kernel, and the share in which the GPU had nothing to do. What
    runs beside others counts from where they end."""
    if not events:
        print(f"{title}: the profiler saw no kernel")
        return
    reached, gaps = events[0].start, []
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for e in events:
        added = max(0.0, e.end - max(e.start, reached))
        groups[group_of(e.name)] += added
        kernels[e.name].append(added)
        if e.start > reached:
            gaps.append(e.start - reached)
        reached = max(reached, e.end)
    span, busy = reached - events[0].start, sum(groups.values())
    long = [g for g in gaps if g > LONG_GAP_US]
    print(
        f"{title}: {span / steps:.0f} us a step, {len(events) / steps:.0f} kernels, idle "
        f"{100 * (1 - busy / span):.1f} %, of which gaps over {LONG_GAP_US} us "
        f"{100 * sum(long) / span:.1f} % ({len(long) / steps:.1f} a step, longest "
        f"{max(gaps, default=0.0):.0f} us)"
    )
    line = sorted(groups.items(), key=lambda pair: -pair[1])
    print("   ", ", ".join(f"{name} {t / steps:.0f}" for name, t in line), "us")
    for name, times in sorted(kernels.items(), key=lambda pair: -sum(pair[1]))[:top]:
        print(
            f"    {sum(times) / steps:8.1f} us {len(times) / steps:6.1f} x "
            f"{statistics.median(times):7.1f}  {group_of(name)[:10]:10} {name[:96]}"
        )


def profile_decode(engine: Engine, batch: int, shape: Shape) -> None:
    asked = requests(shape, batch, shape.context, WARM + PROFILED_STEPS + 8, 5 * batch)
    for request in asked:
        engine.add(request)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {output.request_id for output in engine.step()}
    for _ in range(4):
        engine.step()
    events: list[Event] = []
    with profiled(events):
        for _ in range(PROFILED_STEPS):
            engine.step()
    while not engine.idle:
        engine.step()
    show_profile(f"decode {batch}", events, PROFILED_STEPS, 22)


def profile_prefill(engine: Engine, shape: Shape, count: int, length: int) -> None:
    events: list[Event] = []
    with profiled(events):
        run(engine, requests(shape, count, length, 1, length + 13))
    show_profile(f"prefill {count} x {length}", events, 1, 22)


def agreement(a: Ran, b: Ran) -> tuple[float, float]:
    """Shares of equal tokens, and of requests whose tokens are all equal."""
    pairs = list(zip(a.tokens.values(), b.tokens.values(), strict=True))
    same = [x == y for p, q in pairs for x, y in zip(p, q, strict=True)]
    return sum(same) / len(same), sum(p == q for p, q in pairs) / len(pairs)


def check(engine: Engine, shape: Shape, batches: list[int]) -> None:
    """The same tokens again, step by step and kernel by kernel; then batched against alone, where
    bf16 rounds otherwise. A first run computes the whole prompts, the others find them cached."""
    for batch in batches:
        asked = lambda n=batch: requests(shape, n, 100, 24, 3)  # noqa: E731
        cold, first = run(engine, asked()), run(engine, asked())
        behind = Engine(engine.scheduler, engine_runner(engine), step_ahead=False)
        found = {
            "cold": agreement(first, cold),
            "again": agreement(first, run(engine, asked())),
            "step by step": agreement(first, run(behind, asked())),
        }
        if (eager := eager_engine(engine)) is not None:
            found["without graphs"] = agreement(first, run(eager, asked()))
        alone = [run(engine, [r]) for r in asked()[:4]]
        four = Ran(0, dict(list(first.tokens.items())[:4]))
        found["four alone"] = agreement(
            four, Ran(0, {k: v for a in alone for k, v in a.tokens.items()})
        )
        print(
            f"check, batch {batch}: shares of equal tokens, and of requests equal to the last: "
            + ", ".join(f"{name} {a:.3f} {b:.3f}" for name, (a, b) in found.items())
        )


def engine_runner(engine: Engine) -> Runner:
    return engine._runner  # noqa: SLF001


def eager_engine(engine: Engine) -> Engine | None:
    """The same without graphs, None where there are none."""
    parts = engine_runner(engine)._p  # noqa: SLF001
    if parts.graphs is None:
        return None
    return Engine(engine.scheduler, Runner(replace(parts, graphs=None)), step_ahead=True)


@contextmanager
def survived(what: str) -> Iterator[None]:
    """A part that fails says so; the others still run."""
    try:
        yield
    except Exception:  # noqa: BLE001
        print(f"FAILED: {what}")
        traceback.print_exc()


def host_times(engine: Engine, batch: int, shape: Shape) -> None:
    """Milliseconds of schedule, launch and absorb of a decode step, each by itself, as the host
    sees them while the GPU is at work."""
    asked = requests(shape, batch, shape.context, WARM + 40, 9 * batch)
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            made = call(*args)
            times[name].append(1e3 * (time.perf_counter() - began))
            return made

        return wrapper

    for request in asked:
        engine.add(request)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {output.request_id for output in engine.step()}
    runner = engine_runner(engine)
    parts = runner._p  # noqa: SLF001
    watched: list[tuple[Any, str]] = [
        (engine.scheduler, "schedule"),
        (runner, "launch"),
        (engine.scheduler, "absorb"),
        (parts.door, "send"),
        (parts.door, "fetch"),
        (parts.sampler, "ask"),
        (parts.sampler, "sample"),
        (parts.model, "logits"),
        (runner, "_keep"),
    ]
    if parts.graphs is not None:
        watched += [(parts.graphs, n) for n in ("pack", "replay", "replay_greedy")]
    for target, name in watched:
        target.__dict__[name] = timed(name, getattr(target, name))
    step = timed("step", engine.step)
    for _ in range(30):
        step()
    for target, name in watched:
        del target.__dict__[name]
    while not engine.idle:
        engine.step()
    took = {name: statistics.median(values) for name, values in times.items()}
    host = sum(took[name] for name in ("schedule", "launch", "absorb"))
    print(
        f"host, decode {batch}: "
        + ", ".join(f"{name} {ms:.3f}" for name, ms in took.items())
        + f" ms; schedule + launch + absorb {host:.3f} ms"
    )


def measure(engine: Engine, shape: Shape, batches: list[int], args: argparse.Namespace) -> None:
    if not args.no_check:
        with survived("check"):
            check(engine, shape, [b for b in batches if b <= 64])
    for batch in batches:
        with survived(f"decode {batch}"):
            rate = decode_rate(engine, batch, shape)
            read, floor = decode_floor(shape.text, batch, shape.context + shape.output // 2)
            print(
                f"decode {batch} x {shape.context}: {rate:.0f} token/s, {1e3 * batch / rate:.3f} ms"
                f" a step; floor {floor:.0f} token/s ({read / 1e9:.2f} GB)"
            )
            host_times(engine, batch, shape)
    for count, length in shape.prefills:
        with survived(f"prefill {count} x {length}"):
            rate, floor = (
                prefill_rate(engine, shape, count, length),
                prefill_floor(shape.text, count, length),
            )
            print(f"prefill {count} x {length}: {rate:.0f} token/s; floor {floor:.0f}")
    if torch.cuda.is_available() and not args.no_profile:
        for batch in batches:
            with survived(f"profile of decode {batch}"):
                profile_decode(engine, batch, shape)
        for count, length in shape.prefills:
            with survived(f"profile of prefill {count} x {length}"):
                profile_prefill(engine, shape, count, length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="name=json of EngineConfig")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    batches = [int(b) for b in args.batches.split(",")]
    shape = Shape(TEXT, CONTEXT, OUTPUT, ((1, 8192), (64, 1024)), args.runs)
    vision, image = VISION, IMAGE
    choices: dict[str, Any] = {"max_model_len": 16384}
    if args.tiny:
        shape = Shape(TEXT | TINY, 40, 8, ((1, 100), (4, 30)), args.runs)
        vision, image, batches = VISION | TINY_VISION, 620, [1, 4]
        choices = {"kv_cache_bytes": 16 << 20, "max_model_len": 256, "device": "cpu"}
    choices |= {name: json.loads(v) for name, v in (pair.split("=") for pair in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shape.text, vision, image)
        config = EngineConfig(model=folder, weights="random", **choices)
        began = time.perf_counter()
        engine = build_engine(config, open_checkpoint(folder), None).engine
        print(f"start-up {time.perf_counter() - began:.1f} s")
    gc.collect()
    gc.freeze()  # as the server's worker does
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{name}, torch {torch.__version__}, {choices}")
    measure(engine, shape, batches, args)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(
            f"memory: {peak / 1e9:.2f} GB allocated at most, {kept / 1e9:.2f} reserved, "
            f"{(total - free) / 1e9:.2f} of {total / 1e9:.2f} in use; planned "
            f"{config.memory_fraction * total / 1e9:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
