"""Kimi-VL's strict reader and its map: every published key and name, and what happens without
one."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.cases import KIMI_VL
from tests.models.conftest import Golden
from tests.models.driver import Driver, fill, resolve_folder
from vitrail.config.finding import Finding, Refused
from vitrail.config.model import ModelConfig
from vitrail.models.kimi_vl.model import KimiVL, build, read_config, weight_map
from vitrail.weights.headers import Headers, read
from vitrail.weights.load import parameters_of
from vitrail.weights.plan import LoadPlan, resolve

# The published sizes of the three checkpoints.
PUBLISHED_TEXT = {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}
PUBLISHED_VISION = {
    "patch_size": 14,
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
}


def changed(path: str, value: object) -> dict[str, Any]:
    """The tiny configuration with the value at `a.b` replaced."""
    config = copy.deepcopy(KIMI_VL)
    *parents, key = path.split(".")
    inner = config
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    return config


def read_whole(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    got = read_config(config, generation or {})
    assert isinstance(got, ModelConfig), got
    return got


def test_the_published_configuration() -> None:
    config = copy.deepcopy(KIMI_VL) | {"media_placeholder_token_id": 163605, "vocab_size": 163840}
    config["text_config"] |= PUBLISHED_TEXT
    config["vision_config"] |= PUBLISHED_VISION
    got = read_whole(config)
    assert got.vision is not None
    assert (got.vision.head_dim, got.vision.merge, got.vision.pos_height) == (72, 2, 64)
    assert (got.text.head_dim, got.text.num_layers, got.text.vocab_size) == (192, 27, 163840)
    assert (got.image_token_id, got.bos_token_id, got.pad_token_id) == (163605, 163584, 163839)
    assert got.dtype == "bfloat16"
    with torch.device("meta"):
        model = build(got, "bfloat16")
    sizes = [p.numel() for p in model.parameters()]
    assert 16.3e9 < sum(sizes) < 16.5e9
    assert {(s.latent_rank, s.rope_dim) for s in model.cache_specs()} == {(512, 64)}


@pytest.mark.parametrize(
    ("outer", "generation", "want"),
    [(None, {}, (51,)), (52, {}, (51, 52)), (None, {"eos_token_id": [53, 51]}, (51, 53))],
)
def test_end_ids_are_the_union(
    outer: int | None, generation: dict[str, Any], want: tuple[int, ...]
) -> None:
    assert read_whole(changed("eos_token_id", outer), generation).eos_token_ids == want


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("media_placeholder_token_id", 61, "media_placeholder_token_id"),
        ("media_placeholder_token_id", None, "media_placeholder_token_id"),
        ("vocab_size", 62, "vocab_size"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
        ("model_type", "kimi_k25", "model_type"),
        ("vision_config", None, "vision_config"),
        ("vision_config.merge_kernel_size", [2, 3], "vision_config: merge_kernel_size"),
        ("vision_config.hidden_size", 38, "vision_config: hidden_size"),
        ("vision_config.num_attention_heads", 0, "vision_config: num_attention_heads"),
        ("vision_config.temporal_patch_size", 2, "vision_config: temporal_patch_size"),
        ("text_config.q_lora_rank", 8, "text_config: q_lora_rank"),
        ("text_config.unheard_of", 8, "text_config: unheard_of"),
        ("media_token", 8, "media_token"),
    ],
)
def test_what_we_cannot_serve_is_refused_by_name(path: str, value: object, named: str) -> None:
    found = read_config(changed(path, value), {})
    assert isinstance(found, list)
    assert f"config.json: {named}" in {f.where for f in found}


def test_a_tie_is_read_where_it_is_stated() -> None:
    config = changed("tie_word_embeddings", True)
    del config["text_config"]["tie_word_embeddings"]
    assert read_whole(config).text.tie_embeddings
    assert not read_whole(KIMI_VL).text.tie_embeddings


def test_the_map_resolves_the_golden_checkpoint_without_a_finding(golden: Golden) -> None:
    plan = resolve_folder(golden.model(), golden.config, golden.folder)
    assert isinstance(plan, LoadPlan), plan
    assert (plan.warnings, plan.ignored) == ((), ())
    stored = load_file(golden.folder / "model.safetensors")
    assert {read.tensor for read in plan.reads} == set(stored)
    assert sum(read.num_bytes for read in plan.reads) == sum(t.nbytes for t in stored.values())


def test_a_row_that_is_missing_is_all_findings_at_once(golden: Golden) -> None:
    """As after renaming two modules without their rows: two parameters nobody fills, and what the
    checkpoint holds for them."""
    whole = weight_map(golden.config)
    lost = ("projector.up.weight", "decoder.layers.{layer}.attention.kv_a_norm.weight")
    rows = tuple(row for row in whole.rows if row.parameter not in lost)
    headers = read(golden.folder)
    assert isinstance(headers, Headers)
    found = resolve(replace(whole, rows=rows), headers, parameters_of(golden.model()))
    assert isinstance(found, list)
    said = "\n".join(map(str, found))
    for name in ("projector.up.weight", "attention.kv_a_norm.weight"):
        assert name in said
    for name in ("multi_modal_projector.linear_1.weight", "self_attn.kv_a_layernorm.weight"):
        assert name in said


def stored(golden: Golden, folder: Path, rename: Callable[[str], str | None]) -> Path:
    """The golden checkpoint under other names; None leaves a tensor out."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(golden.folder / "model.safetensors").items():
        new = rename(name)
        if new is not None:
            tensors[new] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def fresh(config: ModelConfig) -> KimiVL:
    with torch.device("meta"):
        return build(config, "float32")


def newer_transformers(name: str) -> str:
    name = name.replace("language_model.lm_head.", "lm_head.")
    name = name.replace("language_model.model.", "model.language_model.")
    heads = ("vision_tower.", "multi_modal_projector.")
    return f"model.{name}" if name.startswith(heads) else name


def k25_projector(name: str) -> str:
    for old, new in (
        ("multi_modal_projector.linear_1.", "mm_projector.proj.0."),
        ("multi_modal_projector.linear_2.", "mm_projector.proj.2."),
        ("multi_modal_projector.pre_norm.", "mm_projector.pre_norm."),
    ):
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("rename", [newer_transformers, k25_projector])
def test_e07_other_writers_names_load_the_same(
    golden: Golden, tmp_path: Path, rename: Callable[[str], str]
) -> None:
    folder = stored(golden, tmp_path, rename)
    model = fill(fresh(golden.config), golden.config, folder)
    run = Driver(model, "float32", 16, 64)
    logits = run.step([(run.add(golden.text), 37)])[0]
    assert (logits - golden.reference["text_logits"]).abs().max() <= 1e-4


def test_e07_an_unknown_prefix_names_what_it_may_mean(golden: Golden, tmp_path: Path) -> None:
    folder = stored(golden, tmp_path, lambda name: name.replace("vision_tower.", "vit."))
    found = resolve_folder(fresh(golden.config), golden.config, folder)
    assert isinstance(found, list)
    said = "\n".join(map(str, found))
    assert "vit.encoder.blocks" in said
    assert "vision_tower.encoder.blocks" in said


def test_e09_blocks_left_out_are_listed(golden: Golden, tmp_path: Path) -> None:
    def without(name: str) -> str | None:
        return None if name.startswith("vision_tower.encoder.blocks.1.") else name

    found = resolve_folder(fresh(golden.config), golden.config, stored(golden, tmp_path, without))
    assert isinstance(found, list)
    said = "\n".join(map(str, found))
    for part in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1"):
        assert f"vision_tower.encoder.blocks.1.{part}.weight" in said


def tied(config: ModelConfig) -> ModelConfig:
    return replace(config, text=replace(config.text, tie_embeddings=True))


def test_e10_a_tied_head_is_the_embedding(golden: Golden, tmp_path: Path) -> None:
    head = "language_model.lm_head.weight"
    folder = stored(golden, tmp_path, lambda name: None if name == head else name)
    model = fill(fresh(tied(golden.config)), tied(golden.config), folder)
    decoder = model.decoder
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    want = hidden @ decoder.embed_tokens.weight.T
    torch.testing.assert_close(model.logits(hidden), want, atol=1e-5, rtol=1e-5)


def test_e10_a_missing_head_that_is_not_tied_is_a_finding(golden: Golden, tmp_path: Path) -> None:
    head = "language_model.lm_head.weight"
    folder = stored(golden, tmp_path, lambda name: None if name == head else name)
    found = resolve_folder(fresh(golden.config), golden.config, folder)
    assert isinstance(found, list)
    assert any(head in str(finding) for finding in found)


def test_e11_a_tied_head_stored_with_other_values_is_refused(golden: Golden) -> None:
    with pytest.raises(Refused) as caught:
        fill(fresh(tied(golden.config)), tied(golden.config), golden.folder)
    assert [f.code for f in caught.value.findings] == ["tied_tensor_differs"]


def test_inv_freq_of_old_writers_is_ignored(golden: Golden, tmp_path: Path) -> None:
    stored(golden, tmp_path, lambda name: name)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "language_model.model.layers.2.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {name: torch.ones(4)}, tmp_path / "model.safetensors")
    plan = resolve_folder(fresh(golden.config), golden.config, tmp_path)
    assert isinstance(plan, LoadPlan), plan
    assert plan.ignored == (name,)


def test_the_router_stays_fp32_in_a_bf16_model(golden: Golden) -> None:
    with torch.device("meta"):
        model = build(golden.config, "bfloat16")
    kept = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {
        f"decoder.layers.{layer}.mlp.router.{part}"
        for layer in (1, 2)
        for part in ("weight", "bias")
    }


def test_findings_have_all_their_parts() -> None:
    found = read_config({"text_config": {}, "vision_config": {}}, {})
    assert isinstance(found, list)
    assert len(found) > 20
    assert all(isinstance(f, Finding) and f.saw and f.rule and f.change for f in found)
