"""A steady decode step of the engine at Kimi-VL-A3B's shape with random weights: its rate, the time
from one step to the next as the host sees it, the host's own work, and a step kernel by kernel.
With `--rows`, of one token's experts in tiles and by rows in registers, in one engine, in turns.

    python bench/step_timeline.py [--batch 1] [--rows 2,8,8,8 2,4,4,4] [--file ALL]
    python bench/step_timeline.py --tiny        # a small shape on a CPU: a smoke test

`rows` are output channels of a program and its warps, for up and for down. Each is first held to
fp32 (bench/moe.py), and says how many of its tokens are those of the first. Kernel times are
medians over steps, us; `added` is from the end of all before to a kernel's end, so that what
overlaps counts once."""

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import moe
import torch
from engine import (
    CONTEXT,
    OUTPUT,
    Event,
    Ran,
    Shape,
    agreement,
    decode_rate,
    profiled,
    requests,
)
from kimi_vl_shape import IMAGE, TEXT, TINY, TINY_VISION, VISION, write

from vitrail.config.engine import EngineConfig
from vitrail.engine.build import build_engine
from vitrail.engine.engine import Engine
from vitrail.engine.graphs import AHEAD, DecodeGraphs, Recorder
from vitrail.engine.runner import Runner
from vitrail.models.checkpoint import open_checkpoint
from vitrail.ops.moe import fused
from vitrail.ops.moe import plan as moe_plan
from vitrail.ops.moe.tile import ExpertsPlan, Rows

STEPS = 24  # profiled
ROUNDS = 2  # of rates, in turns
FIRST = "absorbed"  # near the beginning of a layer
HOST = ("schedule", "launch", "absorb")


def cut(events: Sequence[Event]) -> list[list[Event]]:
    """Steps, from where their numbers are sent; those of the usual number of launches."""
    starts = [i for i, e in enumerate(events) if "HtoD" in e.name]
    steps = [list(events[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    if not steps:
        return []
    usual = statistics.mode(len(step) for step in steps)
    return [step for step in steps if len(step) == usual]


class Line:
    """One launch of a step, over steps."""

    def __init__(self, steps: list[list[Event]], at: int):
        self.name = steps[0][at].name
        self.start = statistics.median(s[at].start - s[0].start for s in steps)
        self.took = statistics.median(s[at].end - s[at].start for s in steps)
        before = [max((e.end for e in s[:at]), default=s[0].start) for s in steps]
        pairs = list(zip(steps, before, strict=True))
        self.gap = statistics.median(s[at].start - b for s, b in pairs)
        self.added = statistics.median(max(0.0, s[at].end - max(s[at].start, b)) for s, b in pairs)

    def __str__(self) -> str:
        name = self.name.removeprefix("void ").replace("at::native::", "")[:58]
        times = f"took {self.took:6.1f} gap {self.gap:6.1f} added {self.added:6.1f}"
        return f"{self.start:8.1f} {times}  {name}"


class Pace(NamedTuple):
    """us: of each step, from the one before; of the host's parts of a step; tokens."""

    periods: list[float]
    host: dict[str, list[float]]
    ran: Ran


def begin(engine: Engine, batch: int, shape: Shape, steps: int) -> dict[str, list[int]]:
    """Requests until all of them decode: their tokens so far."""
    asked = requests(shape, batch, shape.context, steps, 5)
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while not all(tokens.values()):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def pace(engine: Engine, batch: int, shape: Shape) -> Pace:
    """Of OUTPUT steps, nobody profiling."""
    tokens = begin(engine, batch, shape, shape.output + 8)
    host: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            made = call(*args)
            host[name].append(1e6 * (time.perf_counter() - began))
            return made

        return wrapper

    watched = ((engine.scheduler, HOST[0]), (engine.runner, HOST[1]), (engine.scheduler, HOST[2]))
    for target, name in watched:
        target.__dict__[name] = timed(name, getattr(target, name))
    at = [time.perf_counter()]
    for _ in range(shape.output):
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        at.append(time.perf_counter())
    for target, name in watched:
        del target.__dict__[name]
    while not engine.idle:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    periods = [1e6 * (b - a) for a, b in zip(at, at[1:], strict=False)]
    return Pace(periods, host, Ran(at[-1] - at[0], tokens))


def show_pace(name: str, found: Pace) -> None:
    """Whether a mean above the median is a few long steps or all of them, whether steps become
    longer with their contexts, and whether the device ever waited for the host."""
    periods, part = sorted(found.periods), max(1, len(found.periods) // 8)
    middle = statistics.median(periods)
    long = [t for t in periods if t > 1.1 * middle]
    parts = {k: statistics.median(v) for k, v in found.host.items()}
    work = [sum(times) for times in zip(*found.host.values(), strict=False)]
    waited = [max(0.0, p - w) for p, w in zip(found.periods, work, strict=False)]
    print(
        f"{name}: a step {statistics.mean(periods):.1f} us by the mean, {middle:.1f} by the median,"
        f" {periods[0]:.1f} to {periods[-1]:.1f}; first eighth "
        f"{statistics.median(found.periods[:part]):.1f}, last "
        f"{statistics.median(found.periods[-part:]):.1f}; {len(long)} over 1.1 medians, by "
        f"{sum(long) - middle * len(long):.0f} us in all"
    )
    print(
        f"{name}: host a step "
        + ", ".join(f"{k} {t:.0f}" for k, t in parts.items())
        + f", most in all {max(work):.0f}; waited {statistics.median(waited):.0f} for the device, "
        f"{min(waited):.0f} at least"
    )


def record(engine: Engine, batch: int, shape: Shape) -> list[Event]:
    begin(engine, batch, shape, STEPS + 40)
    for _ in range(8):
        engine.step()
    events: list[Event] = []
    with profiled(events):
        for _ in range(STEPS):
            engine.step()
    while not engine.idle:
        engine.step()
    return events


def show(name: str, events: Sequence[Event], file: str | None) -> None:
    """The first and the last mixture, what is before and behind, and sums by kernel."""
    steps = cut(events)[2:]
    if not steps:
        print(f"{name}: the profiler saw no step")
        return
    lines = [Line(steps, i) for i in range(len(steps[0]))]
    begins = [s[0].start for s in steps]
    periods = [b - a for a, b in zip(begins, begins[1:], strict=False)] or [0.0]
    ends = statistics.median(max(e.end for e in s) - s[0].start for s in steps)
    print(
        f"{name}: {len(lines)} launches a step, us from one to the next "
        f"{statistics.median(periods):.1f} by the median, {statistics.mean(periods):.1f} by the "
        f"mean; {ends:.1f} from copy to end"
    )
    layers = [i for i, line in enumerate(lines) if FIRST in line.name]
    shown = lines
    if len(layers) > 3:
        print(*lines[: layers[2]], sep="\n")
        print("...")
        shown = lines[layers[-1] :]
    print(*shown, sep="\n")
    groups: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        groups[line.name].append(line.added)
    idle = sum(max(0.0, line.gap) for line in lines)
    print(f"{name}: gaps with nothing at work {idle:.1f} us; added by kernel:")
    for kernel, added in sorted(groups.items(), key=lambda pair: -sum(pair[1]))[:16]:
        print(f"{sum(added):8.1f} {len(added):4} x {statistics.median(added):6.2f}  {kernel[:60]}")
    if file:
        Path(file).write_text("\n".join(map(str, lines)) + "\n", encoding="utf-8")


def use(rows: Rows | None) -> None:
    """In every measured plan of one token."""
    moe_plan.MEASURED = MappingProxyType(
        {
            key: ((1, replace(plans[0][1], rows=rows)), *plans[1:])
            for key, plans in moe_plan.MEASURED.items()
        }
    )


@torch.inference_mode()
def again(engine: Engine, batch: int) -> Engine:
    """The same model, pages and scheduler, its decodes captured anew."""
    parts = engine.runner.parts
    if parts.graphs is None:
        return Engine(engine.scheduler, Runner(parts), step_ahead=True)
    device = parts.door.device
    graphs = DecodeGraphs(parts.graphs._p, [batch], device)  # noqa: SLF001
    graphs.capture(parts.door, Recorder(device, AHEAD))
    return Engine(engine.scheduler, Runner(replace(parts, graphs=graphs)), step_ahead=True)


def right(one: moe.Batch, rows: Rows, plan: ExpertsPlan) -> bool:
    """As near to fp32 as bench/moe.py asks, and the very same when run again."""
    by_rows = replace(plan, rows=rows)

    def run() -> torch.Tensor:
        layer = one.layer
        return fused.one_token(one.x, one.routing, layer.gate_up, layer.down, moe.SHARED, by_rows)

    return moe.correct(str(rows), one, run) and torch.equal(run(), run())


def those_right(asked: Sequence[str]) -> dict[str, Rows | None]:
    """Tiles, and of the rows asked for those that may be timed."""
    found: dict[str, Rows | None] = {"tiles": None}
    if not asked:
        return found
    on_gpu = torch.cuda.is_available()
    ((_, few), *_) = next(iter(moe_plan.MEASURED.values()))
    one = moe.draw(moe.make_layers()[0], 1, True) if on_gpu else None
    for text in asked:
        rows = parse(text)
        if one is None or right(one, rows, few):
            found[f"rows {text}"] = rows
        else:
            print(f"rows {text}: WRONG, not timed")
    return found


def compare(engine: Engine, batch: int, shape: Shape, asked: dict[str, Rows | None]) -> str:
    """Rates in turns; the name of the quickest."""
    rates: dict[str, list[float]] = defaultdict(list)
    found: dict[str, Pace] = {}
    engines = {}
    for name, rows in asked.items():
        use(rows)
        engines[name] = again(engine, batch)
    for _ in range(ROUNDS):
        for name, one in engines.items():
            rates[name].append(decode_rate(one, batch, shape))
    for name, one in engines.items():
        found[name] = pace(one, batch, shape)
        rate, (first, *_) = statistics.median(rates[name]), found.values()
        same, _ = agreement(first.ran, found[name].ran)
        print(
            f"{name}: decode {batch}: {rate:.1f} token/s, {1e6 * batch / rate:.1f} us a step (of "
            + ", ".join(f"{r:.1f}" for r in rates[name])
            + f"); tokens as the first's {same:.3f}"
        )
        show_pace(name, found[name])
    return max(rates, key=lambda name: statistics.median(rates[name]))


def parse(text: str) -> Rows:
    up, up_warps, down, down_warps = map(int, text.split(","))
    return Rows(up=up, up_warps=up_warps, down=down, down_warps=down_warps)


def build(tiny: bool, batch: int) -> tuple[Engine, Shape]:
    shape, vision, image = Shape(TEXT, CONTEXT, OUTPUT, (), 2), VISION, IMAGE
    choices: dict[str, Any] = {"memory_fraction": 0.45, "max_model_len": 16384}
    choices["cuda_graphs"] = max(8, batch)
    if tiny:
        shape = Shape(TEXT | TINY, 40, 8, (), 1)
        vision, image = VISION | TINY_VISION, 620
        choices = {"kv_cache_bytes": 16 << 20, "max_model_len": 256, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shape.text, vision, image)
        config = EngineConfig(model=folder, weights="random", **choices)
        engine = build_engine(config, open_checkpoint(folder), None).engine
    gc.collect()
    gc.freeze()  # as the server's worker does
    return engine, shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rows", nargs="*", default=[], metavar="UP,WARPS,DOWN,WARPS")
    parser.add_argument("--file", help="every launch of the quickest's step")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    engine, shape = build(args.tiny, args.batch)
    print(f"start-up {time.perf_counter() - began:.1f} s", flush=True)
    asked = those_right(args.rows)
    best = compare(engine, args.batch, shape, asked)
    print(f"quickest: {best} [{time.perf_counter() - began:.0f} s]", flush=True)
    if not torch.cuda.is_available():
        print("no GPU to profile")
        return
    for name in dict.fromkeys(["tiles", best]):
        use(asked[name])
        events = record(again(engine, args.batch), args.batch, shape)
        show(name, events, args.file if name == best else None)
    print(f"[{time.perf_counter() - began:.0f} s]")


if __name__ == "__main__":
    main()
