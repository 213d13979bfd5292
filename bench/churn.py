"""Does anything grow? 200 requests of the demo model at once, with pictures, aborts and repeats,
for minutes; resident memory is read all along. The caches are small, so that they are soon full.

    python bench/churn.py [--minutes 10] [--running 200] [--cache-mb 64]

Reads both what the process holds (resident) and what it has asked for and not given back (in use,
from the C allocator): the first may creep for a while as free memory is cut into pieces, the second
grows only if something is kept. Checks at the end that the engine is idle with every page free or
only cached, that one answer is still right, and that from the second quarter to the last the memory
in use grew by no more than 2 %, the resident by no more than 5 %: else exit 1."""

import argparse
import ctypes
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail import LLM, SamplingParams
from vitrail.cli import DEMO, DEMO_PICTURE, DEMO_QUESTION
from vitrail.engine.request import EngineRequest

MAX_GROWTH = {"in use": 0.02, "resident": 0.05}
QUESTIONS = ("What does the sign say?", "Read the text.", "How many red circles are there?")


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def memory_mb() -> dict[str, float]:
    """`resident`: pages of the process; `in use`: allocated from the heap or mapped, not freed."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return {
        "in use": (info.uordblks + info.hblkhd) / 1e6,
        "resident": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    }


def requests(llm: LLM, rng: random.Random) -> Iterator[EngineRequest]:
    """Endless: half repeat one picture, half bring a new one; sizes, lengths and sampling vary."""
    number = 0
    while True:
        number += 1
        if rng.random() < 0.5:
            picture: object = DEMO_PICTURE
        else:
            size = (rng.randint(40, 300), rng.randint(40, 200))
            noise = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8)
            picture = Image.fromarray(noise)
        parts = [{"type": "image", "image": picture}]
        parts.append({"type": "text", "text": rng.choice(QUESTIONS)})
        prompt = llm.prepare([{"role": "user", "content": parts}])
        params = SamplingParams(
            max_tokens=rng.randint(1, 60),
            temperature=rng.choice((0.0, 0.8)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            ignore_eos=rng.random() < 0.3,
        )
        yield from llm.preparer.requests(prompt, params, f"churn-{number}")


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--running", type=int, default=200)
    parser.add_argument(
        "--cache-mb", type=int, default=64, help="MiB of keys and values; pictures have an eighth"
    )
    return parser.parse_args()


def main() -> int:
    args = flags()
    torch.set_num_threads(1)
    rng = random.Random(0)
    llm = LLM(
        DEMO,
        device="cpu",
        max_running=args.running,
        kv_cache_bytes=args.cache_mb << 20,
        encoder_cache_bytes=(args.cache_mb << 20) // 8,
    )
    source = requests(llm, rng)
    live: set[str] = set()
    started = done = aborted = failed = 0
    samples: list[dict[str, float]] = []
    began = report = time.monotonic()
    print(f"{platform.machine()}, {os.cpu_count()} cpus, {args.running} at once")
    while time.monotonic() - began < 60 * args.minutes:
        while len(live) < args.running:
            request = next(source)
            llm.engine.add(request)
            live.add(request.id)
            started += 1
        for output in llm.engine.step():
            if output.finish_reason is not None and output.request_id in live:
                live.remove(output.request_id)
                failed += output.error is not None
                done += 1
        if rng.random() < 0.3:
            victim = rng.choice(sorted(live))
            llm.engine.abort(victim)
            live.remove(victim)
            aborted += 1
        if time.monotonic() - report > 60 * args.minutes / 20:
            report = time.monotonic()
            samples.append(memory_mb())
            stats = llm.engine.stats()
            print(
                f"{report - began:5.0f} s  {started} started, {done} done, {aborted} aborted, "
                f"{stats.preemptions_total} preempted, {stats.images_encoded_total} encoded, "
                + ", ".join(f"{mb:.0f} MB {kind}" for kind, mb in samples[-1].items())
            )
    for each in live:
        llm.engine.abort(each)
    while not llm.engine.idle:
        llm.engine.step()
    llm.engine.scheduler.check()
    usage = llm.engine.scheduler.cache_usage()
    assert usage.running_pages == 0, usage
    assert failed == 0, f"{failed} requests failed"
    question = [{"type": "image", "image": DEMO_PICTURE}, {"type": "text", "text": DEMO_QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=32)
    answer = llm.chat([{"role": "user", "content": question}], params)[0].outputs[0].text
    assert answer == "COFFEE $4.50", answer
    return report_growth(samples)


def report_growth(samples: list[dict[str, float]]) -> int:
    """The second quarter's mean beside the last quarter's."""
    quarter = len(samples) // 4
    missed = False
    for kind, limit in MAX_GROWTH.items():
        early = statistics.mean(s[kind] for s in samples[quarter : 2 * quarter])
        late = statistics.mean(s[kind] for s in samples[-quarter:])
        growth = late / early - 1
        missed |= growth > limit
        print(f"{kind}: {early:.0f} -> {late:.0f} MB, {growth:+.1%}; limit {limit:.0%}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
