"""The memory that `vitrail check` predicts of a whole engine, beside what one takes on a GPU.

    python -m bench.memory [--shape nvila|kimi_vl] [--set name=json]
    python -m bench.memory --tiny      # a small shape on a CPU: a smoke test, which compares pages

Random weights of the published shape. The prediction is made first, from configuration files alone;
then the engine starts as a server's does, prefills and decodes more requests than it runs at once,
among them pictures, and the device is asked what is in use. Goal: bytes, and the pages of the
cache, within 5 % of the prediction. Nothing else may run on the device."""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import kimi_vl_shape, nvila
from vitrail import LLM, SamplingParams
from vitrail.attention.installed import releases
from vitrail.check.run import check
from vitrail.check.subject import Question
from vitrail.config.engine import EngineConfig
from vitrail.engine.placement import hardware_of

GOAL = 0.05
PART = (
    "weights",
    "context",
    "encoder_peak",
    "encoder_cache",
    "tower_graphs",
    "graphs",
    "workspace",
)


def write(folder: Path, shape: str, tiny: bool) -> None:
    if shape == "nvila":
        text = nvila.TEXT | (nvila.TINY_TEXT if tiny else {})
        nvila.write(folder, text, nvila.VISION | (nvila.TINY_VISION if tiny else {}))
        return
    kimi_vl_shape.write_published(folder)
    if tiny:
        text = kimi_vl_shape.TEXT | kimi_vl_shape.TINY
        kimi_vl_shape.write(folder, text, kimi_vl_shape.VISION | kimi_vl_shape.TINY_VISION, 620)


def predicted(config: EngineConfig, device: str) -> dict[str, int]:
    """Facts of check's row on memory."""
    gpu = hardware_of(torch.device(device))
    report = check(Question(choices=config, gpu=gpu, installed=releases()))
    return next(dict(row.facts) for row in report.rows if row.name.startswith("memory"))


def load(llm: LLM, side: int) -> None:
    """Long prompts and pictures, more at once than run at once."""
    facts, rng = llm.preparer.facts, np.random.default_rng(0)
    length = facts.max_model_len // 2
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, ignore_eos=True)
    prompts: list[dict[str, Any]] = [
        {"prompt_token_ids": rng.integers(0, facts.vocab_size // 2, length).tolist()}
        for _ in range(llm.config.max_running + 8)
    ]
    for i in range(8):
        if facts.patch_rules is not None and facts.patch_rules.tile is not None:
            prompts.append(nvila.pictured(llm, i))
            continue
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        prompts.append({"prompt_token_ids": [1, facts.image_token_id, 2], "images": [pixels]})
    llm.generate(prompts, params)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("nvila", "kimi_vl"), default="nvila")
    parser.add_argument("--set", action="append", default=[], help="name=json of EngineConfig")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    device = "cpu" if args.tiny else "cuda"
    choices: dict[str, Any] = {"max_model_len": 8192, "device": device, "weights": "random"}
    if args.tiny:
        choices |= {"max_model_len": 512, "max_running": 4, "kv_cache_bytes": 4 << 20}
    choices |= {name: json.loads(v) for name, v in (pair.split("=", 1) for pair in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.shape, args.tiny)
        plan = predicted(EngineConfig(model=folder, **choices), device)
        began = time.perf_counter()
        llm = LLM(folder, **choices)
        print(f"{args.shape}: start-up {time.perf_counter() - began:.1f} s, {choices}")
    load(llm, 112 if args.tiny else 1024)
    got = llm.engine.scheduler.cache_usage().num_pages
    print(f"pages of the cache: {got:,}, {plan['kv_pages']:,} predicted")
    off = [got / plan["kv_pages"] - 1]
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used, meant = total - free, plan["total"] - plan["kept"]
        parts = ", ".join(f"{name} {plan[name] / 1e9:.2f}" for name in PART)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; predicted, GB: {parts}")
        print(f"in use {used / 1e9:.2f} GB, {meant / 1e9:.2f} predicted: {used / meant - 1:+.2%}")
        off.append(used / meant - 1)
    return int(max(abs(x) for x in off) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
