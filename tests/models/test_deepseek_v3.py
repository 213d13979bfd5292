"""The decoder's strict reader: what is read, refused, ignored."""

import copy
from typing import Any

import pytest
import torch

from tests.models.cases import DEEPSEEK
from vitrail.config.finding import Finding
from vitrail.models.deepseek_v3 import KV_NORM_EPS, build, read_config, weight_map
from vitrail.weights.sharding import Layout


def changed(**values: Any) -> dict[str, Any]:
    return copy.deepcopy(DEEPSEEK) | values


def findings(config: dict[str, Any], generation: dict[str, Any] | None = None) -> list[Finding]:
    got = read_config(config, generation or {})
    assert isinstance(got, list), got
    return got


def test_a_published_configuration_is_read_whole() -> None:
    got = read_config(DEEPSEEK, {"eos_token_id": [51, 52], "do_sample": True, "temperature": 0.2})
    assert not isinstance(got, list), got
    text = got.text
    assert (got.dtype, got.vision, got.image_token_id) == ("bfloat16", None, None)
    assert (got.bos_token_id, got.pad_token_id, got.eos_token_ids) == (50, 60, (51, 52))
    assert (text.vocab_size, text.hidden_size, text.num_layers) == (61, 40, 3)
    assert (text.num_heads, text.num_kv_heads, text.head_dim) == (5, 5, 15)
    assert (text.rope.theta, text.rope.dim, text.rope.interleaved) == (800000.0, 6, True)
    assert text.mla is not None
    assert text.moe is not None
    assert (text.mla.kv_lora_rank, text.mla.v_head_dim) == (17, 11)
    assert (text.moe.num_experts, text.moe.top_k, text.moe.num_shared) == (7, 3, 2)
    assert (text.moe.routed_scaling, text.moe.normalize, text.moe.first_moe_layer) == (
        2.446,
        True,
        1,
    )


def test_the_latent_norm_s_eps_is_the_authors_not_rms_norm_eps() -> None:
    got = read_config(DEEPSEEK, {})
    assert not isinstance(got, list)
    assert got.text.mla is not None
    assert (got.text.mla.kv_norm_eps, got.text.rms_eps) == (KV_NORM_EPS, 1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("q_lora_rank", 1536),
        ("rope_scaling", {"type": "yarn", "factor": 40}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("n_group", 8),
        ("topk_group", 4),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("num_nextn_predict_layers", 1),
        ("num_key_value_heads", 1),
        ("qk_head_dim", 16),
        ("rope_interleave", False),
        ("model_type", "deepseek_v2"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(key: str, value: object) -> None:
    (finding,) = findings(changed(**{key: value}))
    assert finding.where == f"config.json: {key}"
    assert repr(value) in finding.saw
    assert finding.code == "unsupported_config"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("vocab_size", -5),
        ("qk_rope_head_dim", 7),
        ("num_experts_per_tok", 8),
        ("num_experts_per_tok", 0),
        ("first_k_dense_replace", 4),
        ("n_shared_experts", -1),
        ("kv_lora_rank", "17"),
        ("rms_norm_eps", None),
        ("torch_dtype", "float8_e4m3fn"),
    ],
)
def test_impossible_values_are_refused_by_name(key: str, value: object) -> None:
    assert any(f.where == f"config.json: {key}" for f in findings(changed(**{key: value})))


def test_an_unknown_key_is_a_finding() -> None:
    (finding,) = findings(changed(attention_sink_scale=2))
    assert (finding.where, finding.code) == ("config.json: attention_sink_scale", "unknown_key")
    (finding,) = findings(DEEPSEEK, {"magic": 1})
    assert finding.where == "generation_config.json: magic"


def test_every_finding_is_reported_at_once() -> None:
    config = changed(n_group=8, hidden_act="gelu", unheard_of=1)
    del config["kv_lora_rank"]
    named = {f.where.removeprefix("config.json: ") for f in findings(config, {"magic": 1})}
    assert named >= {"n_group", "hidden_act", "unheard_of", "kv_lora_rank"}
    assert "generation_config.json: magic" in named


def test_newer_writers_spelling_is_read() -> None:
    config = changed(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, dtype="float32")
    del config["rope_theta"], config["torch_dtype"]
    got = read_config(config, {})
    assert not isinstance(got, list), got
    assert (got.text.rope.theta, got.dtype) == (5e5, "float32")


def test_two_thetas_that_differ_are_refused() -> None:
    (finding,) = findings(changed(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    assert finding.where == "config.json: rope_theta"
    (finding,) = findings(changed(rope_parameters={"rope_theta": 8e5, "rope_type": "yarn"}))
    assert finding.where == "config.json: rope_parameters: rope_type"


@pytest.mark.parametrize("ranks", [1, 5])
def test_ranks_share_the_heads_and_each_make_whole_cache_rows(ranks: int) -> None:
    """Five heads; the matrix of queries and latents, cut."""
    config = read_config(DEEPSEEK, {})
    assert not isinstance(config, list)
    (row,) = (r for r in weight_map(config).rows if "qkv_a_proj" in r.parameter)
    with torch.device("meta"):
        whole = dict(build(config, "float32").named_parameters())[row.parameter.format(layer=1)]
    text = config.text
    queries, latent = text.num_heads * text.head_dim, 17 + 6
    assert whole.shape == (queries + latent, text.hidden_size)
    kept: list[int] = []
    for rank in range(ranks):
        layout = Layout(rank=rank, size=ranks)
        cut = row.shard.cut("qkv_a", tuple(whole.shape), (queries, latent), layout)
        assert not isinstance(cut, Finding)
        rows = [r for span in cut.spans for r in range(span.start, span.stop)]
        assert cut.shape == (len(rows), text.hidden_size)
        assert rows[-latent:] == list(range(queries, queries + latent))
        kept += rows[:-latent]
    assert kept == list(range(queries))


def test_a_layout_that_splits_a_head_is_refused() -> None:
    config = read_config(DEEPSEEK, {})
    assert not isinstance(config, list)
    (row,) = (r for r in weight_map(config).rows if "qkv_a_proj" in r.parameter)
    found = row.shard.cut("qkv_a", (98, 40), (75, 23), Layout(rank=0, size=2))
    assert isinstance(found, Finding)
    assert "5 units of 15" in found.saw
