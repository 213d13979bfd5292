"""Kimi-VL-A3B's shape with random weights, one GPU: from pictures to tokens, preparation included.

    python -m bench.pictures [--runs 5] [--workers 12]

First token of a request with one 1024 x 1024 picture, and with eight, beside 64 ids (an engine that
is otherwise idle); then 64 requests at once, each with a picture of its own, 64 ids and 128 tokens
out. Pictures are PIL images of uniform noise that no cache has seen. Checks first that a request's
answer does not depend on its neighbours: the first token alone and among eight, where their scores
are not within bf16's rounding of each other."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.kimi_vl_shape import write_published
from vitrail import LLM, SamplingParams
from vitrail.bench.offline import Drive
from vitrail.bench.record import figures
from vitrail.bench.workload import Closed, Synthetic

SIDE, IDS, OUTPUT, MANY = 1024, 64, 128, 64
GREEDY = {"temperature": 0, "ignore_eos": True}


def pictured(llm: LLM, seed: int, count: int) -> dict[str, Any]:
    """`count` pictures among 64 ids."""
    rng = np.random.default_rng(seed)
    image_id = llm.preparer.facts.image_token_id
    assert image_id is not None
    noise = [
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(count)
    ]
    ids = rng.integers(0, 30_000, IDS).tolist()
    return {"prompt_token_ids": [*[image_id] * count, *ids], "images": noise}


def first_token(llm: LLM, prompt: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds from the PIL images to the first token, those before the engine has the request, and
    the token."""
    began = time.perf_counter()
    prepared = llm.prepare(prompt)
    params = SamplingParams(max_tokens=1, **GREEDY)
    requests = llm.preparer.requests(prepared, params, f"first-{began}")
    ready = time.perf_counter() - began
    tokens: list[int] = []
    for _, delta in llm.stream(requests):
        tokens += delta.token_ids
    return time.perf_counter() - began, ready, tokens[0]


def check(llm: LLM) -> None:
    """Raises where the shares of equal first tokens say that neighbours change an answer."""
    prompts = [pictured(llm, 10_000 + i, 1) for i in range(8)]
    params = SamplingParams(max_tokens=1, **GREEDY)
    together = [g.outputs[0].token_ids for g in llm.generate(prompts, params)]
    again = [g.outputs[0].token_ids for g in llm.generate(prompts, params)]
    alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    shares = f"again {same(together, again)}, alone {same(together, alone)}"
    print(f"first tokens equal, together: {shares}")


def same(a: Sequence[object], b: Sequence[object]) -> str:
    return f"{sum(x == y for x, y in zip(a, b, strict=True))} of {len(a)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_published(Path(folder))
        llm = LLM(
            folder,
            weights="random",
            device="cuda",
            max_model_len=12_288,
            image_workers=args.workers,
        )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    check(llm)
    for count in (1, 8):
        taken = [
            first_token(llm, pictured(llm, 100 * count + i, count)) for i in range(args.runs + 1)
        ]
        whole, ready = (statistics.median(x[i] for x in taken[1:]) for i in (0, 1))
        print(
            f"first token, {count} of {SIDE} x {SIDE}: {whole * 1e3:.1f} ms, of which "
            f"{ready * 1e3:.1f} before the engine; all {[round(x[0] * 1e3, 1) for x in taken]}",
            flush=True,
        )
    work = Synthetic(prompt_len=IDS, output_len=OUTPUT, num_pictures=1)
    for run in range(args.runs if args.runs < 3 else 3):
        found = figures(
            Drive(llm, work.items(7, run, MANY), Closed(concurrency=MANY), []).run(), 0.0
        )
        print(
            f"{MANY} requests at once: {found.request_rate:.1f} request/s, "
            f"{found.output_rate:.0f} token/s out, first token p50 {found.first.p50:.0f} ms; "
            f"failures {found.failures}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
