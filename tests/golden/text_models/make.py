"""Writes the golden text models: tiny random checkpoints under published names, and what
transformers computed from each in fp32. Run from the repository's root:

    python -m tests.golden.text_models.make

For each case: NAME/config.json, NAME/model.safetensors (bf16 values, as published), and
NAME/reference.npz with `ids` (the prompt), `logits` of all its positions, `greedy` tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
LENGTH, STEPS = 70, 12

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 95,
    "eos_token_id": 96,
    "torch_dtype": "bfloat16",
}
QWEN2 = SIZES | {"model_type": "qwen2", "rope_theta": 1000000.0}
LLAMA = SIZES | {"model_type": "llama", "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
# An original context short enough for every frequency to fall below, within and above the bounds.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2 | {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    "qwen2_window": QWEN2
    | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    | {"tie_word_embeddings": True},
    "qwen2_yarn": QWEN2 | {"rope_theta": 10000.0, "rope_scaling": YARN | {"type": "yarn"}},
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama3": LLAMA | {"rope_theta": 10000.0, "rope_scaling": LLAMA3},
    "llama_linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama_biased": LLAMA
    | {"attention_bias": True, "mlp_bias": True, "head_dim": 22, "num_key_value_heads": 4}
    | {
        "rope_parameters": YARN
        | {"rope_type": "yarn", "rope_theta": 10000.0, "truncate": False}
        | {"beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3},
        "rope_theta": 10000.0,
    },
}


def make(name: str, raw: dict[str, Any], seed: int) -> None:
    kind = transformers.Qwen2ForCausalLM if raw["model_type"] == "qwen2" else None
    kind = kind or transformers.LlamaForCausalLM
    config = kind.config_class(**{k: v for k, v in raw.items() if k != "torch_dtype"})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = kind(config).eval()
    for parameter_name, parameter in model.named_parameters():
        std = 0.3 if "norm" in parameter_name or "bias" in parameter_name else 0.15
        drawn = torch.randn(parameter.shape) * std + (1.0 if "norm" in parameter_name else 0.0)
        parameter.data = drawn.bfloat16().float()
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tied = raw["tie_word_embeddings"]
    stored = {
        n: p.data.bfloat16().contiguous()
        for n, p in model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({"architectures": [kind.__name__]} | raw, indent=1)
    (folder / "config.json").write_text(text + "\n")
    ids = torch.randint(0, 95, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0]
        seen = ids
        for _ in range(STEPS):
            last = model(seen[None], use_cache=False).logits[0, -1]
            top = last.topk(2).values
            assert top[0] - top[1] > 5e-4, f"{name}: a tie within the tolerance; take another seed"
            seen = torch.cat((seen, last.argmax()[None]))
    np.savez_compressed(
        folder / "reference.npz",
        ids=ids.numpy(),
        logits=logits.float().numpy(),
        greedy=seen[LENGTH:].numpy(),
    )


if __name__ == "__main__":
    for number, (case, published) in enumerate(CASES.items()):
        make(case, published, seed=100 + number)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
