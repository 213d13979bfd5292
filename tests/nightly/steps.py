"""Times of the demo model's steps beside a yardstick, whole and by stage: `python -m
tests.nightly.steps` prints the logarithms of their ratios as JSON, by measure. In a process of its
own: in that of the tests, tensors' signatures are checked at every call."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vitrail import LLM, SamplingParams
from vitrail.cli import DEMO, DEMO_PICTURE, DEMO_QUESTION

TURNS, REQUESTS, TOKENS = 12, 4, 16
PARTS = [{"type": "image", "image": DEMO_PICTURE}, {"type": "text", "text": DEMO_QUESTION}]


def yardstick() -> float:
    """Seconds of fixed work of a step's kind: small products, and arithmetic of Python."""
    x = torch.ones(64, 512)
    w = torch.ones(512, 512)
    began = time.perf_counter()
    total = 0
    for i in range(200):
        total += int((x @ w)[0, 0]) + sum(j * i for j in range(300))
    assert total > 0
    return time.perf_counter() - began


@contextmanager
def timed(owner: object, name: str, spent: dict[str, float]) -> Iterator[None]:
    """Seconds in a method of one object, added to `spent["Class.method"]`."""
    method: Callable = getattr(owner, name)
    key = f"{type(owner).__name__}.{name}"

    def measured(*args):
        began = time.perf_counter()
        try:
            return method(*args)
        finally:
            spent[key] = spent.get(key, 0.0) + time.perf_counter() - began

    setattr(owner, name, measured)
    try:
        yield
    finally:
        setattr(owner, name, method)


def measures() -> dict[str, list[float]]:
    """A logarithm a turn, by `Class.method`."""
    torch.set_num_threads(1)  # threads that wait for each other are timed with what they do
    llm = LLM(DEMO, device="cpu", kv_cache_bytes=16 << 20, max_running=REQUESTS)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    logs: dict[str, list[float]] = {}
    engine = llm.engine
    for turn in range(-2, TURNS):
        spent: dict[str, float] = {}
        before = yardstick()
        with (
            timed(engine, "step", spent),
            timed(engine.scheduler, "schedule", spent),
            timed(engine.runner, "launch", spent),
            timed(engine.scheduler, "absorb", spent),
        ):
            llm.chat([[{"role": "user", "content": PARTS}]] * REQUESTS, params)
        unit = (before + yardstick()) / 2
        for name, seconds in spent.items():
            if turn >= 0:  # two turns warm up
                logs.setdefault(name, []).append(math.log(seconds / unit))
    return logs


if __name__ == "__main__":
    json.dump(measures(), sys.stdout)
