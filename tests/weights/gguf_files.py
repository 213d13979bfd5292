"""GGUF files for tests, written by llama.cpp's own Python package, and published checkpoints
turned into them as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

Metadata = Mapping[str, Any]

LLAMA: dict[str, Any] = {
    "general.name": "tiny",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 97,
}


def write(
    path: Path,
    metadata: Metadata,
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, str] | None = None,
    architecture: str = "llama",
) -> Path:
    """`tensors` float32, stored as `kinds` says (F32 where it is silent); uint8 ones are blocks of
    that kind already, [rows, bytes]."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        if values.dtype == np.float32 and kind.name != "F32":
            values = gguf.quants.quantize(values, kind)
        raw = kind if kind.name not in ("F32", "F16") else None
        writer.add_tensor(name, values, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def rows_by_pair(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """A row i of a head's first half, then row i of its second: llama.cpp's order."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def convert(folder: Path, config: Mapping[str, Any], path: Path, extra: Metadata) -> Path:
    """The checkpoint in `folder` as a GGUF file of F32 and BF16 tensors; `extra` metadata."""
    kind = config["model_type"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"}
    parts |= {"self_attn.o_proj": "attn_output"}
    parts |= {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    tensors: dict[str, np.ndarray] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        stem, leaf = name.rsplit(".", 1)
        values = stored.float().numpy()
        if stem not in names:
            _, _, layer, part = stem.split(".", 3)
            stem, names[stem] = stem, f"blk.{layer}.{parts[part]}"
            if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                values = rows_by_pair(values, heads[part[-6]])
        tensors[f"{names[stem]}.{leaf}"] = values
    metadata = {
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": heads["q"],
        f"{kind}.attention.head_count_kv": heads["k"],
        f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{kind}.rope.freq_base": config["rope_theta"],
        f"{kind}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    kinds = {name: "BF16" for name, values in tensors.items() if values.ndim == 2}
    return write(path, metadata | dict(extra), tensors, kinds, kind)


def rows_published(stored: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `rows_by_pair`; rows may be blocks."""
    pairs = stored.reshape(num_heads, -1, 2, *stored.shape[1:])
    return pairs.swapaxes(1, 2).reshape(stored.shape)


def as_qwen2(llama: Path, path: Path) -> Path:
    """The same weights as a `qwen2` file: its rows of q and k as published, biases of zero."""
    reader = gguf.GGUFReader(llama)
    contents = {key: field.contents() for key, field in reader.fields.items()}
    metadata = {
        key.replace("llama.", "qwen2.", 1): value
        for key, value in contents.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    heads = {
        "attn_q": contents["llama.attention.head_count"],
        "attn_k": contents["llama.attention.head_count_kv"],
    }
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        layer, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        data = np.asarray(tensor.data)
        tensors[tensor.name] = rows_published(data, heads[part]) if part in heads else data
        if part in ("attn_q", "attn_k", "attn_v"):
            tensors[f"{layer}.{part}.bias"] = np.zeros(int(tensor.shape[1]), np.float32)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    return write(path, metadata, tensors, kinds, "qwen2")
