"""Kimi-VL-A3B's shape with random weights, one GPU: what pictures cost those who decode.

    python -m bench.beside [--decodes 32] [--pictures 16] [--every 100]

So many requests of 1,024 ids decode; meanwhile a request with a 1024 x 1024 picture and 64 ids
comes every so many milliseconds, prepared before, 16 tokens out. Said are the milliseconds between
two tokens of those who decode, from when the first picture comes to when the last one's request
ends, and from a picture's coming to its first token. Once without pictures, then with pictures that
are encoded within their steps and beside decodes, each as they come and one after another."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.kimi_vl_shape import write_published
from bench.pictures import pictured
from vitrail import LLM, SamplingParams
from vitrail.engine.request import EngineRequest

CONTEXT, OUTPUT, SETTLE = 1024, 16, 12


def decoders(count: int, seed: int) -> list[EngineRequest]:
    """Requests of random ids that decode until they are aborted."""
    ids = np.random.default_rng(seed).integers(0, 140_000, (count, CONTEXT))
    return [
        EngineRequest(
            id=f"decode-{seed}-{i}",
            prompt_token_ids=ids[i].tolist(),
            images=[],
            params=SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True),
            max_tokens=8000,
            stop_token_ids=frozenset(),
            seed=i,
        )
        for i in range(count)
    ]


def watch(
    llm: LLM, count: int, pictures: Sequence[EngineRequest], every: float, seed: int
) -> tuple[list[float], list[float]]:
    """Seconds between steps in which those who decode get a token; of each picture, to its first
    token. `every` 0: a picture comes when the one before has its first token. Without pictures:
    for 2 s."""
    engine, texts = llm.engine, decoders(count, seed)
    for request in texts:
        engine.add(request)
    names, left, got = {t.id for t in texts}, list(pictures), dict[str, list[float]]()
    ready = 0
    while ready < SETTLE:
        ready += sum(o.request_id in names for o in engine.step()) == count
    gaps, came, ended = list[float](), dict[str, float](), 0
    began = last = time.perf_counter()
    while ended < len(pictures) if pictures else last < began + 2:
        now = time.perf_counter()
        due = len(got) == len(came) if not every else now >= began + every * len(came)
        if left and due:
            request = left.pop(0)
            engine.add(request)
            came[request.id] = now
        outputs = engine.step()
        now = time.perf_counter()
        if any(o.request_id in names for o in outputs):
            gaps.append(now - last)
            last = now
        for output in outputs:
            assert output.error is None, output.error
            if output.request_id in came:
                got.setdefault(output.request_id, []).append(now)
                ended += output.finish_reason is not None
    for name in names:
        engine.abort(name)
    while not engine.idle:
        engine.step()
    return gaps, [got[name][0] - at for name, at in came.items()]


def said(name: str, gaps: Sequence[float], firsts: Sequence[float]) -> str:
    ms = np.array(gaps) * 1e3
    mean, top = ms.mean(), ms.max()
    p50, p90, p99 = np.percentile(ms, [50, 90, 99])
    line = f"{name}: a token every {mean:.1f} ms, p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f}, "
    line += f"most {top:.1f} of {len(ms)}"
    if firsts:
        p50, top = np.median(firsts) * 1e3, max(firsts) * 1e3
        line += f"; first tokens of pictures p50 {p50:.1f}, most {top:.1f}"
    return line


def prepared(llm: LLM, count: int, seed: int) -> list[EngineRequest]:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    prompts = [pictured(llm, seed + i, 1) for i in range(count)]
    return [
        llm.preparer.requests(llm.prepare(p), params, f"picture-{seed}-{i}")[0]
        for i, p in enumerate(prompts)
    ]


def compare(llm: LLM, decodes: int, pictures: int, every: float) -> None:
    """The rows, each after one that warms up."""
    encoding = llm.engine.scheduler._claims._budget
    beside, seed = encoding._beside, 1
    for label, patches in (("within steps", 0), (f"beside, {beside} patches", beside)):
        encoding._beside = patches
        for gap in (every, 0.0):
            rows = [
                watch(llm, decodes, prepared(llm, n, seed + 1000 * n), gap, seed + n)
                for n in (2, pictures)
            ]
            how = f"every {gap * 1e3:.0f} ms" if gap else "one after another"
            print(said(f"{decodes} decode, pictures {how}, {label}", *rows[1]), flush=True)
            seed += 100_000
    encoding._beside = beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decodes", type=int, default=32)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--every", type=float, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_published(Path(folder))
        llm = LLM(
            folder, weights="random", device="cuda", max_model_len=12_288, kv_cache_bytes=20 << 30
        )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(said(f"{args.decodes} decode alone", *watch(llm, args.decodes, [], 0, 0)), flush=True)
    compare(llm, args.decodes, args.pictures, args.every / 1e3)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
