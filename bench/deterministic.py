"""`--deterministic` on a GPU: one prompt's answer among random neighbours, and what the mode costs.

    python bench/deterministic.py [--repeats 1000] [--no-cost] [--no-repeats]
    python bench/deterministic.py --tiny      # a small shape on a CPU: a smoke test

Repeats: Kimi-VL-A3B's channels and experts, few layers, a small vocabulary, random weights in bf16.
A prompt with a picture is asked again and again among prompts of random lengths, with and without
pictures, that come and go: in an engine with every cache, graphs and step-ahead; in one that
caches nothing, launches kernel by kernel, cuts prompts at 300 tokens and has a pool so small that
requests are preempted. Counted are distinct answers: tokens, with their logprobs as bits. Then the
same in an engine without the mode. Cost: decode and prefill at the whole shape, with and
without."""

import argparse
import gc
import hashlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from kimi_vl_shape import TEXT, TINY, TINY_VISION, VISION, write

from vitrail import SamplingParams
from vitrail.config.engine import EngineConfig
from vitrail.engine.build import build_engine
from vitrail.engine.engine import Engine
from vitrail.engine.request import EngineRequest, ImageInput
from vitrail.models.checkpoint import open_checkpoint

Answer = tuple[tuple[int, ...], tuple[float | None, ...]]
SMALL = {"num_hidden_layers": 4, "vocab_size": 8192}
SPECIALS = {"bos_token_id": 8000, "eos_token_id": 8001, "pad_token_id": 8191}
IMAGE = 8100
OUTPUT, RUNNING = 24, 48


def start(text: dict[str, Any], vision: dict[str, Any], image: int, **choices: Any) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), text, vision, image)
        config = EngineConfig(model=folder, weights="random", **choices)
        return build_engine(config, open_checkpoint(folder), None).engine


def probe(rng: np.random.Generator, text: dict[str, Any], side: int, image: int) -> EngineRequest:
    """A picture of side x side patches within 150 ids."""
    ids = rng.integers(0, text["vocab_size"] // 2, 150).tolist()
    return request(rng, ids, side, image, OUTPUT, seed=5)


def request(
    rng: np.random.Generator, ids: list[int], side: int, image: int, output: int, seed: int
) -> EngineRequest:
    """`side` 0: no picture; else it stands after the first ten ids."""
    images: list[ImageInput] = []
    at, tokens = min(10, len(ids)), (side // 2) ** 2
    if side:
        patches = rng.integers(0, 256, (side * side, 588), dtype=np.uint8)
        images = [
            ImageInput(
                identity=hashlib.sha256(patches.tobytes()).digest(),
                offset=at,
                num_tokens=tokens,
                height=side,
                width=side,
                patches=patches,
            )
        ]
    return EngineRequest(
        id="",
        prompt_token_ids=[*ids[:at], *[image] * tokens * bool(side), *ids[at:]],
        images=images,
        params=SamplingParams(
            temperature=0.8, max_tokens=output, ignore_eos=True, logprobs=2, seed=seed
        ),
        max_tokens=output,
        stop_token_ids=frozenset(),
        seed=seed,
    )


def repeat(
    engine: Engine, asked: EngineRequest, times: int, text: dict[str, Any], image: int
) -> Counter[Answer]:
    """How often each answer came, with as many neighbours as repeats, in random order."""
    rng = np.random.default_rng(times)
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float | None]] = {}
    left = [*(f"probe-{i}" for i in range(times)), *(f"other-{i}" for i in range(times))]
    rng.shuffle(left)
    going = 0
    while left or not engine.idle:
        while left and going < RUNNING:
            name = left.pop()
            made = asked if name.startswith("probe") else _neighbour(rng, asked, text, image)
            tokens[name], logprobs[name] = [], []
            engine.add(msgspec.structs.replace(made, id=name))
            going += 1
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            logprobs[output.request_id] += [p.logprob for p in output.logprobs or ()]
            going -= output.finish_reason is not None
    probes = [name for name in tokens if name.startswith("probe")]
    return Counter((tuple(tokens[n]), tuple(logprobs[n])) for n in probes)


def _neighbour(
    rng: np.random.Generator, asked: EngineRequest, text: dict[str, Any], image: int
) -> EngineRequest:
    """Ids of its own, or those of the prompt with others behind; one in four has a picture."""
    ids = rng.integers(0, text["vocab_size"] // 2, int(rng.integers(1, 300))).tolist()
    kind, output = int(rng.integers(4)), int(rng.integers(1, 2 * OUTPUT))
    if kind == 0:
        return request(rng, ids, 2 * int(rng.integers(2, 12)), image, output, seed=int(ids[0]))
    if kind == 1:
        (picture,) = asked.images
        end, cut = picture.offset + picture.num_tokens, 1 + len(ids)
        whole = cut >= end  # a picture is shared whole or not at all
        shared = asked.prompt_token_ids[: cut if whole else min(cut, picture.offset)]
        made = request(rng, [*shared, *ids], 0, image, output, seed=3)
        return msgspec.structs.replace(made, images=asked.images if whole else [])
    return request(rng, ids, 0, image, output, seed=7)


def repeats(times: int, tiny: bool) -> bool:
    """Prints how many answers there were; True where there was one."""
    text, vision = TEXT | SMALL | SPECIALS, VISION | {"num_hidden_layers": 2}
    image, side = IMAGE, 14
    choices: dict[str, Any] = {"max_model_len": 1024, "max_running": RUNNING, "seed": 3}
    choices |= {"encoder_patches": 1024, "kv_cache_bytes": 1 << 30}
    if tiny:
        text, vision, image, side = TEXT | TINY, VISION | TINY_VISION, 620, 4
        choices |= {"device": "cpu", "kv_cache_bytes": 4 << 20}
    row = text["num_hidden_layers"] * (text["kv_lora_rank"] + text["qk_rope_head_dim"])
    few = {"prefix_cache": False, "max_step_tokens": 300, "encoder_cache_bytes": 1 << 20}
    few |= {"kv_cache_bytes": 5000 * row * (4 if tiny else 2)}
    if not tiny:
        few["cuda_graphs"] = 0
    ways = {"every cache, graphs": {}, "no cache, no graphs, small pool, chunks of 300": few}
    asked, all_answers = probe(np.random.default_rng(1), text, side, image), Counter[Answer]()
    for mode in (True, False):
        found = Counter[Answer]()
        for name, more in ways.items():
            began = time.perf_counter()
            engine = start(text, vision, image, **choices | more, deterministic=mode)
            ready = time.perf_counter()
            share = times // 2 if mode else max(times // 20, 2)
            got = repeat(engine, asked, share, text, image)
            found += got
            print(
                f"deterministic {mode}, {name}: {share} repeats among {share} neighbours, "
                f"{len(got)} answers ({len({a for a, _ in got})} by tokens), "
                f"{engine.scheduler.preemptions} preemptions, start {ready - began:.1f} s, "
                f"{time.perf_counter() - ready:.1f} s"
            )
            del engine
            gc.collect()
        print(f"deterministic {mode}: {sum(found.values())} repeats, {len(found)} answers")
        if mode:
            all_answers = found
    return len(all_answers) == 1


def run(engine: Engine, vocabulary: int, count: int, length: int, output: int) -> float:
    """Seconds until all have ended."""
    rng = np.random.default_rng()
    made = [
        msgspec.structs.replace(
            request(rng, rng.integers(0, vocabulary // 2, length).tolist(), 0, 0, output, 1),
            id=f"{i}",
            params=SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
        )
        for i in range(count)
    ]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for each in made:
        engine.add(each)
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def rates(engine: Engine, name: str, runs: int = 2) -> dict[str, float]:
    """Tokens a second: decode at 32 and at 1, and prefill of one prompt."""
    words = TEXT["vocab_size"]

    def median(count: int, length: int, output: int) -> float:
        times = [run(engine, words, count, length, output) for _ in range(runs + 1)]
        return statistics.median(times[1:])

    found = {
        f"decode {n} x 1024": n * 64 / (median(n, 1024, 80) - median(n, 1024, 16)) for n in (32, 1)
    }
    found["prefill 1 x 8192"] = 8192 / median(1, 8192, 1)
    print(name + ": " + ", ".join(f"{what} {rate:.0f} token/s" for what, rate in found.items()))
    return found


def cost(layers: int) -> None:
    """Of the whole shape, or of some of its layers."""
    found: list[dict[str, float]] = []
    for mode in (True, False):
        vision = VISION | {"num_hidden_layers": 1}
        engine = start(
            TEXT | {"num_hidden_layers": layers},
            vision,
            163605,
            deterministic=mode,
            max_model_len=9000,
            max_running=32,
            encoder_patches=256,
            kv_cache_bytes=4 << 30,
        )
        found.append(rates(engine, f"deterministic {mode}"))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    with_mode, without = found
    print("cost: " + ", ".join(f"{k} {without[k] / with_mode[k]:.2f} x" for k in without))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=TEXT["num_hidden_layers"])
    parser.add_argument("--no-repeats", action="store_true")
    parser.add_argument("--no-cost", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    one = args.no_repeats or repeats(args.repeats, args.tiny)
    if not (args.no_cost or args.tiny):
        cost(args.layers)
    return int(not one)


if __name__ == "__main__":
    sys.exit(main())
