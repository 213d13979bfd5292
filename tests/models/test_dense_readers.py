"""The strict readers of Qwen2 and Llama: what is read, refused, ignored."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.cases import LLAMA, LLAMA3_SCALING, QWEN2, YARN_SCALING
from tests.models.driver import Driver
from vitrail.config.finding import Finding
from vitrail.config.model import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    TextConfig,
    YarnScaling,
)
from vitrail.layers.decoder import DenseForCausalLM
from vitrail.models import llama, qwen2
from vitrail.weights.load import randomize

Read = Callable[..., ModelConfig | list[Finding]]
BOTH = pytest.mark.parametrize(
    ("read", "base"),
    [(qwen2.read_config, QWEN2), (llama.read_config, LLAMA)],
    ids=["qwen2", "llama"],
)


def text_of(got: ModelConfig | list[Finding]) -> TextConfig:
    assert isinstance(got, ModelConfig), got
    return got.text


def findings(got: ModelConfig | list[Finding]) -> list[Finding]:
    assert isinstance(got, list), got
    return got


def test_the_published_configuration_of_qwen2_7b() -> None:
    """Whose sliding window is stated and not used."""
    published = QWEN2 | {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "vocab_size": 152064,
    }
    config = qwen2.read_config(published, {"eos_token_id": [151645, 151643], "top_k": 20})
    text = text_of(config)
    assert isinstance(config, ModelConfig)
    assert config.eos_token_ids == (151643, 151645)
    assert (text.head_dim, text.num_kv_heads, text.rope.theta) == (128, 4, 1e6)
    assert text.gqa is not None
    assert (text.gqa.qkv_bias, text.gqa.out_bias, text.gqa.mlp_bias) == (True, False, False)
    assert text.gqa.windows == (None,) * 28
    with torch.device("meta"):
        model = qwen2.build(config, "bfloat16")
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    (spec,) = set(model.cache_specs())
    assert spec.bytes_per_token() == 4 * 256 * 2


def test_the_published_configuration_of_llama_3_1_8b() -> None:
    published = LLAMA | {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    }
    config = llama.read_config(published, {})
    text = text_of(config)
    assert text.rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert isinstance(config, ModelConfig)
    with torch.device("meta"):
        model = llama.build(config, "bfloat16")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248


def test_llama_states_its_heads_width_and_biases() -> None:
    text = text_of(llama.read_config(LLAMA | {"head_dim": 14, "attention_bias": True}, {}))
    assert text.gqa is not None
    assert (text.head_dim, text.rope.dim) == (14, 14)
    assert (text.gqa.qkv_bias, text.gqa.out_bias, text.gqa.mlp_bias) == (True, True, False)
    bare = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "num_key_value_heads")}
    text = text_of(llama.read_config(bare, {}))
    assert (text.rope.theta, text.num_kv_heads) == (10000.0, 4), "as the authors' class says"


@BOTH
@pytest.mark.parametrize(
    ("written", "want"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        (
            LLAMA3_SCALING,
            Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
            ),
        ),
        (
            YARN_SCALING,
            YarnScaling(
                factor=4.0,
                attention_factor=1.1386294361119891,
                beta_fast=32.0,
                beta_slow=1.0,
                original_max_position=128,
                truncate=True,
            ),
        ),
        (
            YARN_SCALING
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False},
            YarnScaling(
                factor=4.0,
                attention_factor=1.0,
                beta_fast=16.0,
                beta_slow=1.0,
                original_max_position=128,
                truncate=False,
            ),
        ),
    ],
)
def test_scalings(
    read: Read, base: dict[str, Any], written: dict[str, Any] | None, want: RopeScaling | None
) -> None:
    for config in (
        base | {"rope_scaling": written},
        base
        | {"rope_parameters": None if written is None else written | {"rope_theta": 1e4}}
        | {"rope_theta": 1e4},
    ):
        assert text_of(read(config, {})).rope.scaling == want


@BOTH
@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling: rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "type"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope scaling: factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "window": 3}}, "window"),
        ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": YARN_SCALING | {"beta_slow": 64}}, "beta_fast"),
        ({"rope_scaling": YARN_SCALING | {"beta_fast": float("inf")}}, "beta_fast"),
        ({"rope_scaling": YARN_SCALING | {"attention_factor": 0.0}}, "attention_factor"),
        (
            {"rope_scaling": YARN_SCALING | {"mscale": 1.0, "mscale_all_dim": -99.0}},
            "attention_factor",
        ),
        ({"rope_scaling": YARN_SCALING | {"original_max_position_embeddings": 0}}, "original"),
        ({"rope_parameters": {"rope_theta": 5e3, "rope_type": "default"}}, "rope_theta"),
        (
            {"rope_scaling": YARN_SCALING, "rope_parameters": YARN_SCALING | {"factor": 8.0}},
            "rope_scaling",
        ),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "hidden_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 40}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"model_type": "mistral"}, "model_type"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_refused_by_name(
    read: Read, base: dict[str, Any], change: dict[str, Any], where: str
) -> None:
    found = findings(read(copy.deepcopy(base) | change, {}))
    assert any(where in f.where for f in found), found


@BOTH
def test_every_finding_is_reported_at_once(read: Read, base: dict[str, Any]) -> None:
    config = base | {"hidden_act": "gelu", "unheard_of": 1}
    del config["intermediate_size"], config["num_hidden_layers"]
    said = "\n".join(map(str, findings(read(config, {"magic": 1}))))
    for name in ("hidden_act", "unheard_of", "intermediate_size", "num_hidden_layers", "magic"):
        assert f"{name}:" in said, said


WINDOWED = QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, (None, 6, 6)),
        ({"max_window_layers": 0}, (6, 6, 6)),
        ({"max_window_layers": 28}, (None, None, None)),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (6, None, None),
        ),
        ({"use_sliding_window": False}, (None, None, None)),
    ],
)
def test_qwen2_s_windows(change: dict[str, Any], want: tuple[int | None, ...]) -> None:
    text = text_of(qwen2.read_config(WINDOWED | change, {}))
    assert text.gqa is not None
    assert text.gqa.windows == want


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"max_window_layers": -1}, "max_window_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        (
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "layer_types",
        ),
    ],
)
def test_windows_that_contradict_are_refused(change: dict[str, Any], where: str) -> None:
    assert any(where in f.where for f in findings(qwen2.read_config(WINDOWED | change, {})))


@pytest.mark.parametrize("decode", [False, True])
def test_d23_a_window_sees_its_last_key_and_none_before(decode: bool) -> None:
    """One layer, a window of 7 with the token's own key: the token 6 before changes the logits, the
    one 7 before does not, in a prefill and in a decode."""
    config = qwen2.read_config(WINDOWED | {"num_hidden_layers": 1, "max_window_layers": 0}, {})
    assert isinstance(config, ModelConfig)
    with torch.device("meta"):
        model = DenseForCausalLM(config.text, "float32")
    randomize(qwen2.weight_map(config), model, torch.device("cpu"), seed=1, std=0.3)
    ids = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]

    def last(prompt: list[int]) -> torch.Tensor:
        run = Driver(model, "float32", 4, len(ids))
        sequence = run.add(prompt)
        if not decode:
            return run.step([(sequence, len(ids))])[0][-1]
        run.step([(sequence, len(ids) - 1)])
        return run.step(decodes=[sequence])[0][-1]

    want = last(ids)
    for back in range(1, len(ids)):
        changed = list(ids)
        changed[-1 - back] = 40
        assert torch.equal(last(changed), want) == (back >= 7), back
