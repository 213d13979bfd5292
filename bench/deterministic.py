"""`--deterministic` on a GPU: one prompt's answer among random neighbours, and what the mode costs.

    python bench/deterministic.py [--repeats 1000] [--no-cost] [--no-repeats]
    python bench/deterministic.py --tiny      # a small shape on a CPU: a smoke test

Repeats: Kimi-VL-A3B's channels and experts, few layers, a small vocabulary, random weights in bf16.
A prompt with a picture is asked again and again among prompts of random lengths, with and without
pictures, that come and go: in an engine with every cache, graphs and step-ahead; in one that caches
nothing, launches kernel by kernel, cuts prompts at 300 tokens and has a pool so small that requests
are preempted. Counted are distinct answers: tokens, with their logprobs as bits. Then the same in an
engine without the mode. Cost: decode and prefill at the whole shape, with and without."""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kimi_vl_shape import TEXT, TINY, TINY_VISION, VISION, write

from vitrail import SamplingParams
from vitrail.config.engine import EngineConfig
from vitrail.engine.build import build_engine
from vitrail.engine.checkpoint import open_checkpoint
from vitrail.engine.engine import Engine
from vitrail.engine.request import EngineRequest
from vitrail.vision.preprocess import PatchedImage

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
