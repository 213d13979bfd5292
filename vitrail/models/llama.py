"""Llama and what is published in its form (SmolLM2): the dense decoder, biases and width of heads
as the configuration says."""

from collections.abc import Mapping

from vitrail.config.finding import Finding
from vitrail.config.model import DType, GqaConfig, ModelConfig, TextConfig
from vitrail.config.reader import Keys
from vitrail.layers.decoder import DenseForCausalLM
from vitrail.models.dense import gguf_rows, read_dense, text_map
from vitrail.models.reading import model_config, no_windows
from vitrail.weights.mapping import WeightMap

ARCHITECTURE = "LlamaForCausalLM"
# The authors' class default: the configurations of Llama 1 and 2 do not state it.
THETA = 10000.0


def read_config(
    config: Mapping[str, object], generation: Mapping[str, object]
) -> ModelConfig | list[Finding]:
    """config.json and generation_config.json (empty where there is none)."""
    keys = Keys(dict(config), "config.json")
    text = read_text_config(keys)
    return model_config(ARCHITECTURE, keys, text, generation)


def read_text_config(keys: Keys, tie_default: bool = False) -> TextConfig:
    """Every key but the token ids and the dtype. Findings are left in `keys`; with any, the result
    means nothing."""
    keys.expect("model_type", "llama")
    keys.expect("is_llama_config", True)
    keys.expect("rope_interleaved", False)
    keys.ignore(("transformers.js_config",))
    num_layers = keys.take("num_hidden_layers", int)
    bias = keys.take("attention_bias", bool, False)
    gqa = GqaConfig(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.take("mlp_bias", bool, False),
        windows=no_windows(num_layers),
    )
    return read_dense(keys, num_layers, gqa, theta_default=THETA, tie_default=tie_default)


def weight_map(config: ModelConfig) -> WeightMap:
    """Published names."""
    return text_map(config.text)


def gguf_map(config: ModelConfig) -> WeightMap:
    """llama.cpp's names; its converter stores rows of q and k by rotary pair."""
    return gguf_rows(config, paired=True)


def build(config: ModelConfig, dtype: DType) -> DenseForCausalLM:
    """The module on the current default device, parameters not initialised."""
    return DenseForCausalLM(config.text, dtype)
