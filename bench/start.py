"""From a process's start to an engine that is ready: Kimi-VL-A3B's shape, random weights made on
the device, no server.

    python -m bench.start [--runs 2] [--set name=json]
    python -m bench.start --tiny      # a small shape on a CPU: a smoke test

Each run is a process of its own: the first with an empty folder of compiled kernels, the others
with what was left there. Prints what the start says of itself, when, and the processes that it
began: when they were there, and their seconds of CPU. Linux alone."""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

READY = "the engine is ready"
EVERY_S = 0.1
GOALS_S = (25.0, 15.0)  # cold, warm
TICKS = os.sysconf("SC_CLK_TCK")


class Seen:
    """Of a process: when it was first and last there, and its CPU seconds."""

    def __init__(self, name: str, at: float):
        self.name, self.first, self.last, self.cpu = name, at, at, 0.0


def watch(root: int, began: float, ended: threading.Event, found: dict[int, Seen]) -> None:
    """Look at `root` and all that it began until `ended`."""
    while not ended.wait(EVERY_S):
        parents: dict[int, int] = {}
        spent: dict[int, float] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS
        now = time.perf_counter() - began
        for pid in parents:
            above = pid
            while above not in (root, 0):
                above = parents.get(above, 0)
            if above == root:
                seen = found.setdefault(pid, Seen(_command(pid), now))
                seen.last, seen.cpu = now, spent[pid]


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words[1:4]).decode(errors="replace")


def start(kernels: str, rest: list[str]) -> float:
    """Seconds until a process that builds the engine says that it is ready."""
    command = ["env", f"TRITON_CACHE_DIR={kernels}", sys.executable, "-m", "bench.start"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--child", *rest], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    ended, found = threading.Event(), dict[int, Seen]()
    watcher = threading.Thread(target=watch, args=(process.pid, began, ended, found))
    watcher.start()
    took = 0.0
    for line in process.stdout:
        at = time.perf_counter() - began
        print(f"  {at:6.2f} s  {line.rstrip()}")
        took = at if line.startswith(READY) else took
    code = process.wait()
    ended.set()
    watcher.join()
    for pid, seen in sorted(found.items(), key=lambda pair: pair[1].first):
        print(
            f"  {seen.first:6.2f} to {seen.last:6.2f} s, CPU {seen.cpu:5.1f} s: {pid} {seen.name}"
        )
    assert code == 0, f"the start failed ({code})"
    return took


def child(tiny: bool, settings: dict[str, object]) -> None:
    """Build the engine, as the server's process does."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("vitrail").setLevel(logging.DEBUG)
    from bench.kimi_vl_shape import TEXT, TINY, TINY_VISION, VISION, write, write_published
    from vitrail.config.engine import EngineConfig
    from vitrail.engine.ahead import Ahead
    from vitrail.models.assets import load_processor_of
    from vitrail.models.checkpoint import open_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        chosen: dict[str, object] = {"max_model_len": 16384, "device": "cuda"}
        write_published(Path(folder))
        if tiny:
            chosen = {"max_model_len": 256, "device": "cpu"}
            write(Path(folder), TEXT | TINY, VISION | TINY_VISION, 620)
        config = EngineConfig(model=folder, weights="random", **chosen | settings)  # pyright: ignore[reportArgumentType]
        with Ahead.begin(config) as ahead:
            from vitrail.engine.build import build_engine

            print("imported", flush=True)
            checkpoint = open_checkpoint(folder)
            processor = load_processor_of(checkpoint)
            built = build_engine(config, checkpoint, processor, ahead=ahead)
        print(READY, built.facts.kv_tokens, "tokens", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="name=json of EngineConfig")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        pairs = (pair.split("=", 1) for pair in args.set)
        child(args.tiny, {name: json.loads(value) for name, value in pairs})
        return 0
    rest = [word for pair in args.set for word in ("--set", pair)] + ["--tiny"] * args.tiny
    print(f"{os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as kernels:
        took = []
        for number in range(args.runs):
            print(f"run {number}, kernels {'on disk' if number else 'cold'}")
            took.append(start(kernels, rest))
    words = [f"cold {took[0]:.1f} s (goal {GOALS_S[0]:.0f})"]
    words += [f"warm {each:.1f} s (goal {GOALS_S[1]:.0f})" for each in took[1:]]
    print("start to ready: " + ", ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
