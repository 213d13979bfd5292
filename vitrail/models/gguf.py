"""GGUF as another writer of checkpoints that we serve: its metadata in the words of a published
config.json, read by the same strict readers, and its tensor names. Imports no torch.

llama.cpp's converter stores `llama` rows of q and k by rotary pair, `qwen2` rows as published; it
leaves the head out where it is the embedding, and states Llama 3.1's scaling as a tensor: what each
frequency is divided by."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vitrail.config.finding import Finding
from vitrail.config.reader import Json, Keys

THETA = 10000.0  # llama.cpp's, where a file states none
ROPE_FACTORS = "rope_freqs.weight"
# All that Meta published with such a scaling has these; 3.1 and 3.3 have a factor of 8, 3.2 of 32.
LLAMA3: Mapping[str, float | int] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Written(NamedTuple):
    """An architecture of GGUF's: the model that computes it, whose module has a `gguf_map`.
    `states_biases`: its config.json says whether there are biases."""

    architecture: str
    states_biases: bool


ARCHITECTURES: Mapping[str, Written] = {
    "llama": Written("LlamaForCausalLM", states_biases=True),
    "qwen2": Written("Qwen2ForCausalLM", states_biases=False),
}

_IGNORED_PREFIXES = ("general.", "tokenizer.", "quantize.", "split.")
_WHERE = "GGUF metadata"


def published_config(
    metadata: Mapping[str, object],
    tensors: Mapping[str, object],
    rope_factors: Sequence[float] | None,
) -> Json | list[Finding]:
    """config.json as the model's authors would write it. `tensors`: the file's, by name;
    `rope_factors`: the values of `ROPE_FACTORS`, None where the file has no such tensor."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        return [
            Finding(
                where=f"{_WHERE}: general.architecture",
                saw=f"{name!r:.80}",
                rule=f"one of {', '.join(sorted(ARCHITECTURES))}",
                change="serve a model of one of these architectures",
                code="unknown_architecture",
            )
        ]
    written = ARCHITECTURES[name]
    ours = {k: v for k, v in metadata.items() if not k.startswith(_IGNORED_PREFIXES)}
    keys = Keys({k.removeprefix(f"{name}."): v for k, v in ours.items()}, f"{_WHERE}: {name}")
    config = _sizes(keys) | _heads(keys) | _rope(keys)
    config |= {
        "architectures": [written.architecture],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if written.states_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    keys.finish()
    tokens = Keys(dict(metadata), _WHERE)
    listed = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config:
        config["vocab_size"] = len(listed) if isinstance(listed, list) else 0
    for ours_name, theirs in (("bos", "bos"), ("pad", "padding")):
        config[f"{ours_name}_token_id"] = tokens.take_optional(
            f"tokenizer.ggml.{theirs}_token_id", int
        )
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    config["eos_token_id"] = [i for key in ends for i in tokens.take_ints(key)]
    if rope_factors is not None:
        scaling = _llama3_scaling(config, rope_factors)
        if isinstance(scaling, Finding):
            keys.findings.append(scaling)
        else:
            config["rope_scaling"] = scaling
    return [*keys.findings, *tokens.findings] or config


def _sizes(keys: Keys) -> Json:
    sizes: Json = {
        "num_hidden_layers": keys.take("block_count", int),
        "max_position_embeddings": keys.take("context_length", int),
        "hidden_size": keys.take("embedding_length", int),
        "intermediate_size": keys.take("feed_forward_length", int),
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon", float),
    }
    stated = keys.take_optional("vocab_size", int)
    return sizes if stated is None else sizes | {"vocab_size": stated}


def _heads(keys: Keys) -> Json:
    heads = keys.take("attention.head_count", int)
    found: Json = {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", int, heads),
    }
    width = keys.take_optional("attention.key_length", int)
    keys.agree("attention.value_length", width, "attention.key_length")
    rotated = keys.take_optional("rope.dimension_count", int)
    if width is not None:
        keys.agree("rope.dimension_count", width, "attention.key_length")
    stated = width if width is not None else rotated
    keys.expect("attention.sliding_window", 0, None)
    keys.expect("attention.causal", True)
    return found if stated is None else found | {"head_dim": stated}


def _rope(keys: Keys) -> Json:
    """`rope_theta` and, where the positions are scaled, `rope_scaling`."""
    found: Json = {"rope_theta": keys.take("rope.freq_base", float, THETA)}
    keys.expect("rope.scale_linear", 1.0)
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.ignore(("rope.scaling.finetuned",))
    kind = keys.take("rope.scaling.type", str, "none")
    if kind == "none":
        keys.ignore(("rope.scaling.factor", "rope.scaling.original_context_length"))
        return found
    scaling: Json = {"rope_type": kind, "factor": keys.take("rope.scaling.factor", float)}
    length = keys.take_optional("rope.scaling.original_context_length", int)
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = length
    return found | {"rope_scaling": scaling}


def _llama3_scaling(config: Json, factors: Sequence[float]) -> Json | Finding:
    """The published scaling that these factors were made from."""
    theta, factor = config["rope_theta"], max(factors, default=0.0)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    assert isinstance(theta, float)
    assert isinstance(heads, int)
    assert isinstance(hidden, int)
    width = config.get("head_dim")
    dim = width if isinstance(width, int) else hidden // max(1, heads)
    usual = len(factors) == dim // 2 and theta > 1 and 1 <= factor < math.inf
    usual = usual and "rope_scaling" not in config
    same = usual and all(
        math.isclose(_llama3_factor(theta ** (-2 * i / dim), factor), stated, rel_tol=1e-4)
        for i, stated in enumerate(factors)
    )
    if same:
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    return Finding(
        where=f"GGUF tensor {ROPE_FACTORS}",
        saw=f"{len(factors)} factors up to {factor:g}",
        rule=f"those of Llama 3's scaling with {dict(LLAMA3)}, for {dim // 2} frequencies, alone",
        change="use the checkpoint in the published layout",
        code="unsupported_config",
    )


def _llama3_factor(frequency: float, factor: float) -> float:
    """What the published formula divides `frequency` by."""
    turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - kept) / factor + kept)
