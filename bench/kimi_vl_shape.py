"""Kimi-VL-A3B's shape (and a small one of its kind) as a checkpoint without weights, and the least
that a step of it can take: bytes over plain reads, FLOPs over what such products reach on an
H200.

    python -m bench.kimi_vl_shape FOLDER
    vitrail bench offline --model FOLDER --weights random --prompt-tokens 1024 --concurrency 32

There is no tokenizer in it: requests are token ids and pictures, as `vitrail bench` makes them."""

import argparse
import json
from pathlib import Path
from typing import Any

BYTES_PER_S, FLOPS_PER_S = 4.2e12, 650e12
IMAGE = 163605
TEXT: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 800000.0,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}
VISION = {
    "model_type": "moonvit",
    "patch_size": 14,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
}
TINY = {
    "vocab_size": 640,
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "bos_token_id": 600,
    "eos_token_id": 601,
    "pad_token_id": 639,
}
TINY_VISION = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 64}


PREPROCESSOR = {
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": 4096,
    "merge_kernel_size": [2, 2],
    "patch_size": 14,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def config_of(text: dict[str, Any], vision: dict[str, Any], image: int) -> dict[str, Any]:
    """What config.json holds."""
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": image,
        "torch_dtype": "bfloat16",
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": False,
    }


def write(folder: Path, text: dict[str, Any], vision: dict[str, Any], image: int) -> None:
    """A checkpoint of one file: config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(text, vision, image)))


def write_published(folder: Path, num_layers: int = 27) -> None:
    """The published shape, with as many decoder layers, and its image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, TEXT | {"num_hidden_layers": num_layers}, VISION, IMAGE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def sizes(text: dict[str, Any]) -> tuple[int, int, int, int]:
    """Parameters: of all layers but routed experts, of the head, of one expert; layers with
    experts."""
    m, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, v = (text[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, layers, dense = (
        text[k] for k in ("kv_lora_rank", "num_hidden_layers", "first_k_dense_replace")
    )
    attention = m * heads * (nope + rope) + m * (rank + rope)
    attention += rank * heads * (nope + v) + heads * v * m
    expert = 3 * m * text["moe_intermediate_size"]
    shared = text["n_shared_experts"] * expert
    fixed = layers * attention + dense * 3 * m * text["intermediate_size"]
    sparse = layers - dense
    return (
        fixed + sparse * (shared + m * text["n_routed_experts"]),
        text["vocab_size"] * m,
        expert,
        sparse,
    )


def decode_floor(text: dict[str, Any], batch: int, context: int) -> tuple[float, float]:
    """(bytes a step, tokens a second): weights once, of the experts those that a random choice
    touches, and every sequence's rows."""
    fixed, head, expert, sparse = sizes(text)
    experts, chosen = text["n_routed_experts"], text["num_experts_per_tok"]
    touched = experts * (1 - (1 - chosen / experts) ** batch)
    row = text["num_hidden_layers"] * (text["kv_lora_rank"] + text["qk_rope_head_dim"])
    read = 2 * (fixed + head + sparse * touched * expert + batch * context * row)
    return read, batch * BYTES_PER_S / read


def prefill_floor(text: dict[str, Any], count: int, length: int) -> float:
    """Tokens a second of the products and the attention alone."""
    fixed, head, expert, sparse = sizes(text)
    each = fixed + sparse * text["num_experts_per_tok"] * expert
    heads = text["num_attention_heads"]
    wide = text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"]
    attended = text["num_hidden_layers"] * length * length * heads * wide
    flops = 2 * count * (length * each + head) + count * attended
    return count * length * FLOPS_PER_S / flops


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_published(parser.parse_args().folder)
