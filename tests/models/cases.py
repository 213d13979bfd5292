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

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 36,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 6,
    "patch_size": 3,
    "vision_use_head": False,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
NVILA: dict[str, Any] = {
    "architectures": ["NVILAForConditionalGeneration"],
    "model_type": "nvila",
    "text_config": QWEN2,
    "vision_config": SIGLIP,
    "image_token_id": 55,
    "video_token_id": 56,
    "torch_dtype": "bfloat16",
}
NVILA_LITE = NVILA | {
    "architectures": ["NVILALiteForConditionalGeneration"],
    "model_type": "nvila_lite",
    "text_config": QWEN2 | {"tie_word_embeddings": True},
    "vision_config": SIGLIP | {"image_size": 12},
}
# The layout of sub-folders, as the authors publish NVILA-8B. Its image token has no embedding.
NVILA_FOLDERS: dict[str, Any] = {
    "architectures": ["LlavaLlamaModel"],
    "model_type": "llava_llama",
    "llm_cfg": QWEN2 | {"model_max_length": 512, "tokenizer_padding_side": "right"},
    "vision_tower_cfg": SIGLIP | {"num_image_tokens": 4, "projection_dim": 8},
    "mm_projector_cfg": {"model_type": "v2l_projector", "mm_projector_type": "mlp_downsample"},
    "image_aspect_ratio": "dynamic_s2",
    "dynamic_s2": True,
    "s2": False,
    "s2_scales": "448,896,1344",
    "s2_max_split_size": 448,
    "s2_resize_output_to_scale_idx": -1,
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "cls_patch",
    "hidden_size": 40,
    "num_video_frames": 8,
    "time_token_ids": [],
    "tune_language_model": True,
    "model_dtype": "torch.bfloat16",
}
VILA_FOLDERS = NVILA_FOLDERS | {
    "architectures": ["VILAForCasualLM"],
    "model_type": "vila",
    "vision_tower_cfg": SIGLIP | {"image_size": 12},
    "mm_projector_cfg": {"mm_projector_type": "mlp_downsample_3x3_fix"},
    "image_aspect_ratio": "dynamic",
    "dynamic_s2": False,
}


@dataclass(frozen=True)
class Case:
    """config.json, generation_config.json, and the grids of the sequences that it is shown; where
    a picture has several, `blocks` has one entry for each picture."""

    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ()
    blocks: tuple[tuple[int, int] | None, ...] = ()


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
    "nvila": Case(NVILA, grids=((2, 2),) * 7, blocks=((1, 1), None)),
    "nvila_lite": Case(NVILA_LITE, grids=((4, 4),) * 2, blocks=(None, None)),
    "nvila_folders": Case(NVILA_FOLDERS, grids=((2, 2),) * 7, blocks=(None, (1, 1))),
    "vila_folders": Case(VILA_FOLDERS, grids=((4, 4),) * 2, blocks=(None, None)),
    "kimi_vl": Case(KIMI_VL, {"eos_token_id": [51, 52]}, grids=((2, 8), (6, 6), (2, 2))),
}
