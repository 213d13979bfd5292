"""A steady decode step of the engine, kernel by kernel, at Kimi-VL-A3B's shape with random weights:
what is before the layers, the first and the last mixture, what is behind them, and what lies
between two steps. Microseconds, medians over steps; `added` is from the end of all before to a
kernel's end, so that what overlaps counts once.

    python bench/step_timeline.py [--batch 1] [--file ALL] [--alone UP,UP_WARPS,DOWN,DOWN_WARPS]"""

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from engine import CONTEXT, OUTPUT, Event, Shape, decode_rate, profiled, requests
from kimi_vl_shape import IMAGE, TEXT, VISION, write

from vitrail.config.engine import EngineConfig
from vitrail.engine.build import build_engine
from vitrail.engine.engine import Engine
from vitrail.models.checkpoint import open_checkpoint
from vitrail.ops.moe import plan as moe_plan
from vitrail.ops.moe.tile import Alone

STEPS = 24
FIRST = "absorbed"  # near the beginning of a layer


def steps_of(events: list[Event]) -> list[list[Event]]:
    """Cut where a step's numbers are sent; the usual number of launches each."""
    starts = [i for i, e in enumerate(events) if "HtoD" in e.name]
    cut = [events[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    usual = statistics.mode(len(step) for step in cut)
    return [step for step in cut if len(step) == usual]


class Line:
    """One launch of a step, over steps."""

    def __init__(self, step: list[list[Event]], at: int):
        self.name = step[0][at].name
        self.start = statistics.median(s[at].start - s[0].start for s in step)
        self.took = statistics.median(s[at].end - s[at].start for s in step)
        before = [max((e.end for e in s[:at]), default=s[0].start) for s in step]
        pairs = list(zip(step, before, strict=True))
        self.gap = statistics.median(s[at].start - b for s, b in pairs)
        self.added = statistics.median(max(0.0, s[at].end - max(s[at].start, b)) for s, b in pairs)

    def __str__(self) -> str:
        name = self.name.removeprefix("void ").replace("at::native::", "")[:58]
        times = f"took {self.took:6.1f} gap {self.gap:6.1f} added {self.added:6.1f}"
        return f"{self.start:8.1f} {times}  {name}"


def record(engine: Engine, batch: int) -> list[Event]:
    asked = requests(Shape(TEXT, CONTEXT, OUTPUT, (), 1), batch, CONTEXT, STEPS + 40, 5)
    for request in asked:
        engine.add(request)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {output.request_id for output in engine.step()}
    for _ in range(8):
        engine.step()
    events: list[Event] = []
    with profiled(events):
        for _ in range(STEPS):
            engine.step()
    while not engine.idle:
        engine.step()
    return events


def show(events: list[Event], file: str | None) -> None:
    steps = steps_of(events)[2:]
    lines = [Line(steps, i) for i in range(len(steps[0]))]
    begins = [s[0].start for s in steps]
    period = statistics.median(b - a for a, b in zip(begins, begins[1:], strict=False))
    ends = statistics.median(max(e.end for e in s) - s[0].start for s in steps)
    print(
        f"{len(lines)} launches a step, {period:.1f} us from one to the next, "
        f"{ends:.1f} from copy to end"
    )
    layers = [i for i, line in enumerate(lines) if FIRST in line.name]
    for line in lines[: layers[2]]:
        print(line)
    print("...")
    for line in lines[layers[-1] :]:
        print(line)
    groups: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        groups[line.name].append(line.added)
    idle = sum(max(0.0, line.gap) for line in lines)
    print(f"gaps with nothing at work {idle:.1f} us; added by kernel:")
    for name, added in sorted(groups.items(), key=lambda pair: -sum(pair[1]))[:24]:
        print(f"{sum(added):8.1f} {len(added):4} x {statistics.median(added):6.2f}  {name[:60]}")
    if file:
        Path(file).write_text("\n".join(map(str, lines)) + "\n", encoding="utf-8")


def use(alone: Alone) -> None:
    """Rows in registers for one token."""
    one = replace(ROWS[0][1], alone=alone)
    moe_plan.MEASURED = MappingProxyType({KEY: ((1, one), *ROWS)})


((KEY, ROWS),) = moe_plan.MEASURED.items()


def measure(batch: int, name: str, file: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), TEXT, VISION, IMAGE)
        config = EngineConfig(
            model=folder,
            weights="random",
            max_model_len=16384,
            memory_fraction=0.45,  # two of them, one after the other
            cuda_graphs=max(8, batch),
        )
        began = time.perf_counter()
        engine = build_engine(config, open_checkpoint(folder), None).engine
        print(f"{name}: start-up {time.perf_counter() - began:.1f} s")
    rate = decode_rate(engine, batch, Shape(TEXT, CONTEXT, OUTPUT, (), 3))
    print(f"{name}: decode {batch}: {rate:.0f} token/s, {1e3 * batch / rate:.3f} ms a step")
    show(record(engine, batch), file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--file")
    parser.add_argument("--alone", help="and so once more")
    args = parser.parse_args()
    measure(args.batch, "tiles", args.file)
    if args.alone:
        gc.collect()
        torch.cuda.empty_cache()
        up, up_warps, down, down_warps = map(int, args.alone.split(","))
        use(Alone(up=up, up_warps=up_warps, down=down, down_warps=down_warps))
        measure(args.batch, args.alone, None)


if __name__ == "__main__":
    main()
