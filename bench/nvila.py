"""NVILA-8B-shaped, random weights, one GPU: time to first token for one 1920 x 1080 picture, and
decode at batch 1, 32 and 256 against the floor; with transformers' Qwen2 and SigLIP in the same
run.

    python bench/nvila.py [--attention triton] [--no-peer] [--tiny]

Checks first that the picture's prompt gives the same first token cold, from the cache and in a
batch, or one that is as likely within what bf16 rounds. The floor of a decode step is the decoder's
weights and the keys and values read once at 4.2 TB/s. `--tiny`: small sizes on any
machine, to see that the script runs; its figures mean nothing."""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import LLM, SamplingParams

BYTES_PER_S = 4.2e12
CONTEXT, OUTPUT, BATCHES, RUNS = 1024, 128, (1, 32, 256), 5
CLOSE = 0.1  # of a log probability: what 28 layers in bf16 may make of another order of sums
IMAGE = 151_646
TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 151_648,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_VISION = {
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
}


def write(folder: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """A checkpoint without weights or tokenizer."""
    config = {
        "architectures": ["NVILAForConditionalGeneration"],
        "model_type": "nvila",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "torch_dtype": "bfloat16",
    }
    side = vision["image_size"]
    rule = {
        "image_processor_type": "SiglipImageProcessor",
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"height": side, "width": side},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(rule))


def pictured(llm: LLM, seed: int) -> dict[str, Any]:
    """A 1920 x 1080 picture of its own, and 20 ids of text."""
    pixels = np.random.default_rng(seed).integers(0, 256, (1080, 1920, 3), dtype=np.uint8)
    rules = llm.preparer.facts.patch_rules
    assert rules is not None
    assert rules.tile is not None
    tokens = rules.num_tokens(rules.tile, rules.tile, (3, 4))
    return {"prompt_token_ids": [*range(10), *[IMAGE] * tokens, *range(10)], "images": [pixels]}


def first_token(llm: LLM, prompt: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first token from the array of pixels, and of those to prepare it."""
    began = time.perf_counter()
    prepared = llm.prepare(prompt)
    ready = time.perf_counter() - began
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    requests = llm.preparer.requests(prepared, params, f"first-{began}")
    for _ in llm.stream(requests):
        pass
    return time.perf_counter() - began, ready


def decode_rate(llm: LLM, batch: int, context: int, output: int) -> float:
    """Tokens a second of all sequences together, from when all have their first token."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    requests = [
        r
        for i in range(batch)
        for r in llm.preparer.requests(
            llm.prepare({"prompt_token_ids": rng.integers(0, 5000, context).tolist()}),
            params,
            f"decode-{batch}-{i}-{time.perf_counter()}",
        )
    ]
    seen: set[str] = set()
    began, counted = 0.0, 0
    for answer, delta in llm.stream(requests):
        counted += len(delta.token_ids) if began else 0
        seen.add(answer.request.id)
        if len(seen) == batch and not began:
            began = time.perf_counter()
    return counted / (time.perf_counter() - began)


def floor_rate(text: dict[str, Any], batch: int, context: int, output: int) -> float:
    """Tokens a second if weights and keys and values were read once a step and nothing else."""
    hidden, inner, layers = (
        text[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    head = hidden // text["num_attention_heads"]
    kv = text["num_key_value_heads"] * head
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * inner
    weights = layers * layer + text["vocab_size"] * hidden
    cache = batch * (context + output // 2) * layers * 2 * kv
    return batch * BYTES_PER_S / (2 * (weights + cache))


def check(llm: LLM) -> None:
    """The likeliest first token cold, from the cache, and among others. Random weights give the
    first and the second nearly equal logits, so another token may come if it is as likely. Raises
    `AssertionError` where it is not."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=5)
    prompt = pictured(llm, 1)
    others = [{"prompt_token_ids": list(range(5 + i))} for i in range(3)]
    made = [llm.generate(each, params)[-1] for each in ([prompt], [prompt], [*others, prompt])]
    cold, *rest = (out.outputs[0].logprobs[0] for out in made)
    cached = [out.cached_tokens for out in made]
    assert cached[0] == 0 < min(cached[1:]), f"tokens from the cache: {cached}"
    known = dict(cold.top)
    for other in rest:
        assert {cold.token_id, other.token_id} <= set(known), (cold, other)
        expected = known[other.token_id]
        assert other.logprob is not None, (cold, other)
        assert known[cold.token_id] - expected <= CLOSE, (cold, other)
        assert abs(other.logprob - expected) <= CLOSE, (cold, other)


@torch.inference_mode()
def peer(text: dict[str, Any], vision: dict[str, Any], device: str, sizes: list[int]) -> None:
    """transformers: the tower over 17 tiles and a prefill of 3,092 embeddings; greedy decoding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

    rope = {"rope_type": "default", "rope_theta": text["rope_theta"]}
    with torch.device(device):
        decoder = Qwen2ForCausalLM(Qwen2Config(**text, rope_parameters=rope)).bfloat16().eval()
        tower = SiglipVisionModel(SiglipVisionConfig(**vision)).bfloat16().eval()
    side = vision["image_size"]
    pixels = torch.randn(17, 3, side, side, device=device, dtype=torch.bfloat16)
    embeds = torch.randn(1, 3092, text["hidden_size"], device=device, dtype=torch.bfloat16)
    times: list[float] = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        tower(pixels, output_hidden_states=True)
        decoder(inputs_embeds=embeds, logits_to_keep=1).logits.argmax(-1).tolist()
        times.append(time.perf_counter() - began)
    first = statistics.median(times[1:])
    print(f"transformers, tower and prefill without preparing: {first * 1e3:.0f} ms")
    for batch in sizes:
        ids = torch.randint(0, 5000, (batch, CONTEXT), device=device)
        taken: list[float] = []
        for count in (1, 33):
            began = time.perf_counter()
            decoder.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        print(f"transformers decode {batch}: {32 * batch / (taken[1] - taken[0]):.0f} token/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", help="default the planned ones")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    text, vision = TEXT, VISION
    choices: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention": args.attention}
    context, output, batches = CONTEXT, OUTPUT, list(BATCHES)
    if args.tiny:
        text, vision = TEXT | TINY_TEXT, VISION | TINY_VISION
        choices = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 64 << 20}
        context, output, batches = 64, 16, [1, 4]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), text, vision)
        llm = LLM(folder, weights="random", max_model_len=8192, max_step_tokens=8192, **choices)
        name = torch.cuda.get_device_name() if choices["device"] == "cuda" else "cpu"
        print(f"{name}, torch {torch.__version__}")
        check(llm)
        runs = [first_token(llm, pictured(llm, 100 + i)) for i in range(RUNS + 1)][1:]
        whole, ready = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"first token, one 1920 x 1080 picture: {whole * 1e3:.0f} ms, of which "
            f"{ready * 1e3:.0f} ms prepare it on the host"
        )
        for batch in batches:
            rate = decode_rate(llm, batch, context, output)
            floor = floor_rate(text, batch, context, output)
            print(f"decode {batch} x {context}: {rate:.0f} token/s, floor {floor:.0f}")
        del llm  # its memory is the peer's
    gc.collect()
    if choices["device"] == "cuda":
        torch.cuda.empty_cache()
    if not args.no_peer:
        peer(text, vision, choices["device"], batches)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
