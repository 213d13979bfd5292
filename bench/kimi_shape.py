"""Kimi-VL-A3B's published shape without its weights: a folder that `--weights random` serves.

    python -m bench.kimi_shape FOLDER
    vitrail bench offline --model FOLDER --weights random --prompt-tokens 1024 --concurrency 32

There is no tokenizer in it: requests are token ids and pictures, as `vitrail bench` makes them."""

import argparse
import json
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 163_840,
    "hidden_size": 2048,
    "intermediate_size": 11_264,
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
    "rms_norm_eps": 1e-5,
    "rope_theta": 800_000.0,
    "rope_scaling": None,
    "max_position_embeddings": 131_072,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 163_584,
    "eos_token_id": 163_585,
    "pad_token_id": 163_839,
    "torch_dtype": "bfloat16",
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "model_type": "kimi_vl",
    "vision_config": {
        "model_type": "moonvit",
        "torch_dtype": "bfloat16",
        "patch_size": 14,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
    },
    "text_config": TEXT,
    "ignore_index": -100,
    "media_placeholder_token_id": 163_605,
    "torch_dtype": "bfloat16",
    "vocab_size": 163_840,
    "tie_word_embeddings": False,
}
PREPROCESSOR = {
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": 4096,
    "merge_kernel_size": [2, 2],
    "patch_size": 14,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_shape(folder: Path) -> Path:
    """config.json and preprocessor_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (("config", CONFIG), ("preprocessor_config", PREPROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(write_shape(parser.parse_args().folder))
