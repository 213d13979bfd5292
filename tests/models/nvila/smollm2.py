"""SmolLM2's weights as the decoder of a small NVILA: `llm.*` as Qwen2 with zero biases, its
tokenizer and template, and a tower and projector of random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.models.cases import SIGLIP
from tests.models.nvila.test_nvila_processor import SIGLIP as PREPROCESSOR
from tests.weights.gguf_files import rows_published
from tests.weights.write import tensors_of
from vitrail.config.finding import accept
from vitrail.models.checkpoint import open_checkpoint
from vitrail.models.registry import load_entry
from vitrail.tokenizer.gguf import SPLITS, _named, _templates, _tokenizer_json
from vitrail.weights.gguf import GgufTensors
from vitrail.weights.load import draw, initial, parameters_of

SIDE, IMAGE = 28, 4  # a special of SmolLM2's that no text of ours has
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_TAKEN = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def write_smollm2_nvila(path: Path, folder: Path, *, lite: bool) -> Path:
    """The file `path`, which is a `llama`, as an NVILA's folder in float32."""
    checkpoint = open_checkpoint(str(path))
    file, published = checkpoint.gguf, checkpoint.config
    assert file is not None
    text = {name: published[name] for name in _TAKEN}
    assert text["tie_word_embeddings"], "the file has no head of its own"
    kind = "NVILALite" if lite else "NVILA"
    config = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": "nvila_lite" if lite else "nvila",
        "text_config": {"model_type": "qwen2", **text},
        "vision_config": SIGLIP | {"image_size": SIDE, "patch_size": 14},
        "image_token_id": IMAGE,
        "eos_token_id": published["eos_token_id"],
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _decoder(GgufTensors(file), list(file.headers.tensors), text) | _tower(config)
    save_file(tensors, folder / "model.safetensors")
    metadata = file.metadata
    tokens, types, merges = (
        metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges")
    )
    split = SPLITS[str(metadata["tokenizer.ggml.pre"])]
    size = {"height": SIDE, "width": SIDE}
    for name, data in {
        "config": config,
        "preprocessor_config": PREPROCESSOR | {"size": size},
        "tokenizer": _tokenizer_json(tokens, types, merges, split),
        "tokenizer_config": _named(metadata, tokens) | _templates(metadata),
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def _decoder(
    stored: GgufTensors, names: list[str], text: dict[str, Any]
) -> dict[str, torch.Tensor]:
    heads = {"attn_q": text["num_attention_heads"], "attn_k": text["num_key_value_heads"]}
    made: dict[str, torch.Tensor] = {}
    with stored:
        for name in names:
            values, stem = stored.get(name), name.removesuffix(".weight")
            if stem in _WHOLE:
                made[f"llm.model.{_WHOLE[stem]}.weight"] = torch.from_numpy(values.copy())
                continue
            _, layer, part = stem.split(".")
            if part in heads:
                values = rows_published(values, heads[part])
            there = f"llm.model.layers.{layer}.{_PARTS[part]}"
            made[f"{there}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
            if part in ("attn_q", "attn_k", "attn_v"):
                made[f"{there}.bias"] = torch.zeros(len(values))
    return made


def _tower(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tower's and the projector's tensors, drawn."""
    entry = load_entry(config["architectures"][0])
    read = accept(entry.read_config(config, {}))
    with torch.device("meta"):
        specs = parameters_of(entry.build(read, "float32"))
    specs = {name: spec for name, spec in specs.items() if not name.startswith("decoder.")}
    weight_map, made = entry.weight_map(read), dict[str, torch.Tensor]()
    for name, init in initial(weight_map, specs).items():
        made[name] = torch.empty(specs[name].shape)
        draw(made[name], name, init, 3, 0.3)
    return tensors_of(weight_map, made)
