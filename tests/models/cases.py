"""Every model we serve as a tiny configuration of odd sizes. Listing a model here is testing it:
`test_every_model` walks the table."""

from dataclasses import dataclass, field
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_shared_experts": 2,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 17,
    "q_lora_rank": None,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 9,
    "v_head_dim": 11,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 800000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 50,
    "eos_token_id": 51,
    "pad_token_id": 60,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "use_cache": True,
    "ep_size": 1,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "pretraining_tp": 1,
    "transformers_version": "4.50.3",
}
DEEPSEEK = TEXT | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
DENSE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 50,
    "eos_token_id": 51,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "use_cache": True,
    "transformers_version": "4.43.1",
}
QWEN2 = DENSE | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
LLAMA = DENSE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
KIMI_VL: dict[str, Any] = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "model_type": "kimi_vl",
    "vision_config": {
        "model_type": "moonvit",
        "torch_dtype": "bfloat16",
        "patch_size": 3,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "hidden_size": 36,
        "intermediate_size": 41,
        "init_pos_emb_height": 6,
        "init_pos_emb_width": 5,
        "merge_kernel_size": [2, 2],
    },
    "text_config": TEXT,
    "ignore_index": -100,
    "media_placeholder_token_id": 55,
    "torch_dtype": "bfloat16",
    "vocab_size": 61,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """config.json, generation_config.json, and the grids of the pictures it is shown."""

    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ()


CASES = {
    "deepseek_v3": Case(DEEPSEEK),
    "deepseek_v3_tied": Case(DEEPSEEK | {"tie_word_embeddings": True}),
    "deepseek_v3_dense": Case(DEEPSEEK | {"first_k_dense_replace": 3}),
    "deepseek_v3_no_shared": Case(DEEPSEEK | {"first_k_dense_replace": 0, "n_shared_experts": 0}),
    "qwen2": Case(QWEN2, {"eos_token_id": [51, 49], "top_p": 0.8}),
    "qwen2_tied": Case(QWEN2 | {"tie_word_embeddings": True}),
    "qwen2_window": Case(
        QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen2_yarn": Case(QWEN2 | {"rope_scaling": YARN_SCALING}),
    "llama": Case(LLAMA | {"num_key_value_heads": 1, "num_attention_heads": 5}),
    "llama_tied": Case(LLAMA | {"tie_word_embeddings": True, "rope_scaling": LLAMA3_SCALING}),
    "llama_biased": Case(LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 14}),
    "kimi_vl": Case(KIMI_VL, {"eos_token_id": [51, 52]}, grids=((2, 8), (6, 6), (2, 2))),
}
