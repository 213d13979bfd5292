"""Does anything grow? Requests of every kind at random moments, for minutes, at Kimi-VL-A3B's shape
with random weights on a GPU, where other processes may be at work.

    python -m bench.growth [--seconds 480] [--rate 4] [--memory-fraction 0.9] [--set name=json]
    python -m bench.growth --tiny --seconds 60      # a small shape on a CPU

Text, one picture and eight, prompts and pictures that are cached and that are not, penalties,
filters, logprobs; one request in ten is aborted. Caches are small, so that they are soon full. At
40 moments: what the allocator holds and keeps of the device, the process's resident memory and what
it has in use, its threads, open files and objects of Python. Exit 1 where a mean of the last
quarter is above the second quarter's by more than its tolerance (bytes, objects), or the most of
the one above the most of the other (threads, files), where a request failed, or where pages are
held at the end. Of the whole device no more than a line is printed: others move that."""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.churn import memory_mb
from bench.kimi_vl_shape import TEXT, TINY, TINY_VISION, VISION, write, write_published
from vitrail import LLM, SamplingParams
from vitrail.engine.request import EngineRequest

SAMPLES = 40
# Of what is measured, how much more the last quarter may have; what is counted may not grow at all.
TOLERANCES = {
    "allocated": 0.02,
    "reserved": 0.02,
    "resident": 0.03,
    "in use": 0.02,
    "objects": 0.02,
}
COUNTED = ("threads", "files")
ABORTED = 0.1
Sample = dict[str, float]


def sample(device: str) -> Sample:
    """MB, and numbers. Objects that only cycles hold are given back first."""
    gc.collect()
    found = memory_mb() | {
        "objects": float(len(gc.get_objects())),
        "threads": float(len(list(Path("/proc/self/task").iterdir()))),
        "files": float(len(list(Path("/proc/self/fd").iterdir()))),
    }
    if device == "cuda":
        found["allocated"] = torch.cuda.memory_allocated() / 1e6
        found["reserved"] = torch.cuda.memory_reserved() / 1e6
    return found


def grown(samples: Sequence[Sample]) -> list[str]:
    """What grew from the second quarter to the last; prints all."""
    quarter = len(samples) // 4
    assert quarter, f"{len(samples)} samples, and a quarter of them is looked at"
    said: list[str] = []
    for name in samples[0]:
        early, late = (
            [s[name] for s in part] for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        if name in COUNTED:
            line = f"{name}: at most {max(early):.0f} -> {max(late):.0f}, limit {max(early):.0f}"
            grew = max(late) > max(early)
        else:
            before, after = statistics.mean(early), statistics.mean(late)
            limit = TOLERANCES[name]
            line = (
                f"{name}: {before:.1f} -> {after:.1f}, {after / before - 1:+.2%}, limit {limit:.0%}"
            )
            grew = after > before * (1 + limit)
        print(line)
        said += [line] * grew
    return said


class Mixed:
    """Prompts at random, of ids below `vocabulary`; pictures of up to `side` pixels."""

    def __init__(self, llm: LLM, rng: random.Random, side: int):
        facts = llm.preparer.facts
        assert facts.image_token_id is not None
        self._llm, self._rng, self._side = llm, rng, side
        self._image_id, self._words = facts.image_token_id, facts.vocab_size // 2
        self._most = facts.max_model_len
        self._system = self._ids(self._most // 8)
        self._known = [self._picture() for _ in range(4)]

    def requests(self) -> Iterator[EngineRequest]:
        """Endless."""
        number = 0
        while True:
            number += 1
            prepared = self._llm.prepare(self._prompt())
            yield from self._llm.preparer.requests(prepared, self._params(), f"mixed-{number}")

    def _prompt(self) -> dict[str, Any]:
        rng = self._rng
        start = self._system if rng.random() < 0.5 else []
        ids = [*start, *self._ids(rng.randint(1, self._most // 8))]
        count = rng.choices((0, 1, 8), (5, 4, 1))[0]
        pictures = [
            rng.choice(self._known) if rng.random() < 0.3 else self._picture() for _ in range(count)
        ]
        return {"prompt_token_ids": [*[self._image_id] * count, *ids], "images": pictures}

    def _params(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            max_tokens=rng.randint(1, self._most // 32),
            temperature=rng.choice((0.0, 0.8)),
            top_p=rng.choice((1.0, 0.9)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, None, 3)),
            ignore_eos=True,
            seed=rng.randrange(1 << 30),
        )

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._words) for _ in range(count)]

    def _picture(self) -> Image.Image:
        size = [self._rng.randint(self._side // 8, self._side) for _ in "hw"]
        noise = np.random.default_rng(self._rng.randrange(1 << 30))
        return Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8))


class Counts:
    """What became of the requests."""

    started = done = aborted = 0


def drive(llm: LLM, side: int, rate: float, seconds: float, device: str) -> list[Sample]:
    """Samples of `seconds` at `rate` requests a second; all have ended afterwards."""
    rng, samples, counts = random.Random(0), list[Sample](), Counts()
    source, live = Mixed(llm, rng, side).requests(), dict[str, bool]()
    began = due = time.monotonic()
    while len(samples) < SAMPLES:
        now = time.monotonic()
        while due <= now and len(live) < llm.config.max_running:
            request = next(source)
            llm.engine.add(request)
            live[request.id] = rng.random() < ABORTED
            counts.started += 1
            due += rng.expovariate(rate)
        if llm.engine.idle:
            time.sleep(max(0.0, min(due - time.monotonic(), 0.01)))
        _step(llm, live, counts)
        if now - began >= (len(samples) + 1) * seconds / SAMPLES:
            samples.append(sample(device))
            if len(samples) % (SAMPLES // 8) == 0:
                _say(now - began, counts, len(live), samples[-1])
    while not llm.engine.idle:
        _step(llm, live, counts)
    assert not live, f"{len(live)} requests never ended"
    return samples


def _step(llm: LLM, live: dict[str, bool], counts: Counts) -> None:
    """One step; those that are to be aborted are, at their first token."""
    for output in llm.engine.step():
        name = output.request_id
        assert output.error is None, output.error
        if output.finish_reason is not None:
            counts.done += live.pop(name, None) is not None
        elif live.get(name):
            llm.engine.abort(name)
            del live[name]
            counts.aborted += 1


def _say(at: float, counts: Counts, live: int, found: Sample) -> None:
    words = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
    print(
        f"{at:5.0f} s  {counts.started} started, {counts.done} done, {counts.aborted} aborted, "
        f"{live} live; {words}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--rate", type=float, default=4, help="requests a second")
    parser.add_argument("--memory-fraction", type=float, default=0.9)
    parser.add_argument("--set", action="append", default=[], help="name=json of EngineConfig")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device, side = ("cpu", 128) if args.tiny else ("cuda", 1024)
    choices: dict[str, Any] = {
        "max_model_len": 12_288,
        "max_running": 64,
        "kv_cache_bytes": 2 << 30,
        "encoder_cache_bytes": 256 << 20,
        "memory_fraction": args.memory_fraction,
    }
    if args.tiny:
        torch.set_num_threads(1)
        choices |= {"max_model_len": 512, "max_running": 16, "kv_cache_bytes": 2 << 20}
        choices |= {"encoder_cache_bytes": 1 << 18}
    choices |= {name: json.loads(v) for name, v in (pair.split("=", 1) for pair in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        write_published(Path(folder))
        if args.tiny:
            write(Path(folder), TEXT | TINY, VISION | TINY_VISION, 620)
        llm = LLM(folder, weights="random", device=device, **choices)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cpus"
    print(f"{name}, torch {torch.__version__}, {args.rate} a second, {choices}", flush=True)
    samples = drive(llm, side, args.rate, args.seconds, device)
    llm.engine.rest()
    usage, stats = llm.engine.scheduler.cache_usage(), llm.engine.stats()
    assert usage.running_pages == 0, usage
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        print(f"the device: {(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB, others' among it")
    print(
        f"{stats.steps_total} steps, {stats.images_encoded_total} pictures encoded, "
        f"{stats.preemptions_total} preemptions, {usage.hit_tokens} of {usage.query_tokens} prompt "
        f"tokens found, {usage.cached_pages} of {usage.num_pages} pages cached at the end"
    )
    return int(bool(grown(samples)))


if __name__ == "__main__":
    sys.exit(main())
