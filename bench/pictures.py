"""The engine at Kimi-VL-A3B's shape, random weights, fresh pictures of uniform noise as PIL images:
time to the first token with one and with eight, and requests a second with 64 at once.

    python bench/pictures.py [--runs 5] [--many 64]
    python bench/pictures.py --tiny        # a small shape on a CPU: a smoke test

Checked first: a picture that the engine resizes and one that comes as patches give the same token,
and so does a picture again (from its caches) and among others. Processing is in every figure. A
picture of 1024 x 1024 is 1,089 tokens; a prompt has 64 ids beside them. Floors: 25 and 165 ms, 29
request/s."""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kimi_vl_shape import IMAGE, TEXT, TINY, TINY_VISION, VISION, write
from PIL import Image

from vitrail import LLM, SamplingParams
from vitrail.engine.conversation import Picture
from vitrail.engine.request import EngineRequest
from vitrail.vision.image import from_array

PROCESSOR = {
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": 4096,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "pad_input": True,
    "merge_kernel_size": [2, 2],
}
TEXT_IDS = 64


class Bench:
    """An engine and where its time goes."""

    def __init__(self, llm: LLM, side: int, vocab_size: int, image_id: int):
        self.llm, self.side = llm, side
        self._vocab_size, self._image_id = vocab_size, image_id
        self._generator = np.random.default_rng(0)

    def picture(self) -> Image.Image:
        noise = self._generator.integers(0, 256, (self.side, self.side, 3), np.uint8)
        return Image.fromarray(noise)

    def prompt(self, pictures: list[Image.Image]) -> dict[str, Any]:
        """Ids that no other prompt begins with, then the pictures, then the rest."""
        ids = self._generator.integers(0, self._vocab_size * 9 // 10, TEXT_IDS).tolist()
        return {
            "prompt_token_ids": [*ids[:8], *[self._image_id] * len(pictures), *ids[8:]],
            "images": pictures,
        }

    def requests(self, prompts: list[dict[str, Any]], tokens: int) -> list[EngineRequest]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        preparer = self.llm.preparer
        made: list[EngineRequest] = []
        for i, prompt in enumerate(prompts):
            name = f"{time.perf_counter_ns()}-{i}"
            made += preparer.requests(self.llm.prepare(prompt), params, name)
        return made

    def run(self, requests: list[EngineRequest]) -> dict[str, list[int]]:
        engine = self.llm.engine
        tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        for request in requests:
            engine.add(request)
        while not engine.idle:
            for output in engine.step():
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
        return tokens

    def answer(self, prompts: list[dict[str, Any]], tokens: int) -> list[list[int]]:
        requests = self.requests(prompts, tokens)
        got = self.run(requests)
        return [got[request.id] for request in requests]


def checked(bench: Bench) -> bool:
    """The same picture resized by the engine, as patches, cached, and among others."""
    llm, picture = bench.llm, bench.picture()
    prompt = bench.prompt([picture])
    limits, processor = llm.preparer.limits, llm.preparer.assets.processor
    assert processor is not None
    (patched,) = processor.parts(from_array(np.asarray(picture), limits, "bench"), True)
    other = {**prompt, "images": [patched]}
    (first,) = bench.answer([prompt], 4)
    (again,) = bench.answer([prompt], 4)
    (as_patches,) = bench.answer([other], 4)
    whole = llm.preparer.ids(prompt["prompt_token_ids"], [Picture(picture, "bench")])
    print(f"comes as {whole.images[0].patches.shape}; tokens {first}, cached {again}")
    print(f"as patches {as_patches}", flush=True)
    return first == again == as_patches


def clocked(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def first_token(bench: Bench, count: int, runs: int) -> None:
    """From PIL pictures to the token on the host; of it, what comes before the engine."""
    whole: list[float] = []
    before: list[float] = []
    for _ in range(runs + 2):
        prompt = bench.prompt([bench.picture() for _ in range(count)])
        made: list[EngineRequest] = []
        before.append(clocked(lambda p=prompt, m=made: m.extend(bench.requests([p], 1))))
        whole.append(before[-1] + clocked(lambda m=made: bench.run(m)))
    total, prepared = (statistics.median(times[2:]) * 1e3 for times in (whole, before))
    print(
        f"first token, {count} pictures: {total:.1f} ms ({prepared:.1f} before the engine)",
        flush=True,
    )


def many(bench: Bench, count: int, tokens: int) -> None:
    """Requests at once, each with a picture of its own; processing included."""
    for run in range(2):
        prompts = [bench.prompt([bench.picture()]) for _ in range(count)]
        taken = clocked(lambda p=prompts: bench.answer(p, tokens))
        if run:
            print(f"{count} at once, a picture and {tokens} tokens: {count / taken:.1f} request/s")


def profiled(bench: Bench) -> None:
    """The device's busy share of one first token, and its longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    prompt = bench.prompt([bench.picture()])
    requests = bench.requests([prompt], 1)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bench.run(requests)
        torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in trace.events()
        if e.device_type.name == "CUDA"
    ]
    first, last = min(s[0] for s in spans), max(s[1] for s in spans)
    busy = sum(end - start for start, end, _ in spans)
    print(f"one picture on the device: {len(spans)} launches, busy {busy / 1e3:.1f} ms of "
          f"{(last - first) / 1e3:.1f}")  # fmt: skip


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--many", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    text, vision, image = TEXT, VISION, IMAGE
    choices: dict[str, Any] = {"max_model_len": 16384}
    if args.tiny:
        text, vision, image = TEXT | TINY, VISION | TINY_VISION, 630
        choices = {"device": "cpu", "max_model_len": 1024, "kv_cache_bytes": 64 << 20}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, text, vision, image)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        llm = LLM(folder, weights="random", **choices)
    bench = Bench(llm, 112 if args.tiny else 1024, text["vocab_size"], image)
    if not checked(bench):
        print("DIFFERENT: see whether by more than bf16's last place")
    first_token(bench, 1, args.runs)
    first_token(bench, 8, args.runs)
    if torch.cuda.is_available():
        profiled(bench)
    many(bench, 2 if args.tiny else args.many, 4 if args.tiny else 128)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
