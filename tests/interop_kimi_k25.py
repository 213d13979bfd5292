"""Loads a Kimi-VL checkpoint folder into transformers' Kimi-K2.5 class, in fp32.

transformers has no class for `kimi_vl`; for still images its `kimi_k25` is the same function. Only
the configuration's keys and the projector's names differ.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PROJECTOR = {
    "multi_modal_projector.linear_1.": "mm_projector.proj.0.",
    "multi_modal_projector.linear_2.": "mm_projector.proj.2.",
    "multi_modal_projector.pre_norm.": "mm_projector.pre_norm.",
}


def convert_config(config: dict) -> dict:
    """A kimi_vl config.json as kimi_k25's."""
    vision, text = config["vision_config"], dict(config["text_config"])
    text["model_type"] = "deepseek_v3"
    text["dtype"] = text.pop("torch_dtype", "float32")
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
    return {
        "model_type": "kimi_k25",
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "patch_size": vision["patch_size"],
            "pos_emb_height": vision["init_pos_emb_height"],
            "pos_emb_width": vision["init_pos_emb_width"],
            "num_attention_heads": vision["num_attention_heads"],
            "num_hidden_layers": vision["num_hidden_layers"],
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "merge_kernel_size": vision["merge_kernel_size"],
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
        "projection_hidden_size": vision["hidden_size"],
        "image_token_id": config["media_placeholder_token_id"],
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def convert_name(name: str) -> str:
    for ours, theirs in PROJECTOR.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def load_kimi_k25(folder: Path) -> torch.nn.Module:
    """The checkpoint in `folder` as transformers' model, fp32, on the CPU, in eval mode."""
    from transformers import Kimi_K25ForConditionalGeneration

    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {convert_name(k): v.float() for k, v in load_file(path).items()}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(convert_config(config)))
        save_file(tensors, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        model, info = Kimi_K25ForConditionalGeneration.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {k: v for k, v in info.items() if v and "keys" in k}
    if problems:
        raise ValueError(f"{folder} does not fit Kimi_K25ForConditionalGeneration: {problems}")
    return model.eval()
