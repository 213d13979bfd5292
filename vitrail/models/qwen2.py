"""Qwen2 and Qwen2.5: the dense decoder with biases on q, k and v, and a window in its later layers
where the configuration asks for one. Also the text half of NVILA, which reuses the reader, the rows
and the module under its own prefixes."""

from collections.abc import Mapping

from vitrail.config.finding import Finding
from vitrail.config.model import DType, GqaConfig, ModelConfig, TextConfig
from vitrail.config.reader import Keys
from vitrail.layers.decoder import DenseForCausalLM
from vitrail.models.dense import gguf_rows, read_dense, text_map
from vitrail.models.reading import MAX_LAYERS, broken, model_config, no_windows
from vitrail.weights.mapping import WeightMap

ARCHITECTURE = "Qwen2ForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"


def read_config(
    config: Mapping[str, object], generation: Mapping[str, object]
) -> ModelConfig | list[Finding]:
    """A stand-alone decoder's config.json and generation_config.json (empty where there is
    none)."""
    keys = Keys(dict(config), "config.json")
    text = read_text_config(keys)
    return model_config(ARCHITECTURE, keys, text, generation)


def read_text_config(keys: Keys, tie_default: bool = False) -> TextConfig:
    """Every key of a Qwen2 text configuration but the token ids and the dtype. Findings are left
    in `keys`; with any, the result means nothing. `tie_default`: what an enclosing configuration
    says of tied embeddings, where this one says nothing."""
    keys.expect("model_type", "qwen2")
    keys.expect("use_mrope", False, None)
    num_layers = keys.take("num_hidden_layers", int)
    gqa = GqaConfig(
        qkv_bias=True, out_bias=False, mlp_bias=False, windows=_read_windows(keys, num_layers)
    )
    return read_dense(keys, num_layers, gqa, theta_default=None, tie_default=tie_default)


def _read_windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window. A published `sliding_window` of W counts the token's own key. Layers
    from `max_window_layers` on have it, unless `layer_types` names them; without
    `use_sliding_window` none has, whatever the other keys say."""
    types = keys.take_strings("layer_types")
    if not 1 <= num_layers <= MAX_LAYERS:  # refused with the other sizes
        keys.ignore(("use_sliding_window", "sliding_window", "max_window_layers"))
        return ()
    if not keys.take("use_sliding_window", bool, False):
        keys.ignore(("sliding_window", "max_window_layers"))
        rule = f"{num_layers} times {FULL}, since use_sliding_window is false"
        held = not types or types == (FULL,) * num_layers
        keys.judge(broken([("layer_types", _counted(types), rule, held)]))
        return no_windows(num_layers)
    width = keys.take("sliding_window", int)
    first = keys.take("max_window_layers", int)
    if not types:
        types = tuple(SLIDING if i >= first else FULL for i in range(num_layers))
    named = len(types) == num_layers and set(types) <= {FULL, SLIDING}
    rules = [
        ("sliding_window", width, "at least 1, the token itself", width >= 1),
        ("max_window_layers", first, "at least 0", first >= 0),
        ("layer_types", _counted(types), f"{num_layers} of {FULL} and {SLIDING}", named),
    ]
    keys.judge(broken(rules))
    return tuple(width - 1 if kind == SLIDING else None for kind in types)


def _counted(types: tuple[str, ...]) -> str:
    return ", ".join(f"{types.count(kind)} {kind!r:.40}" for kind in dict.fromkeys(types))


def weight_map(config: ModelConfig) -> WeightMap:
    """Published names of a stand-alone decoder."""
    return text_map(config.text)


def gguf_map(config: ModelConfig) -> WeightMap:
    """llama.cpp's names; rows as published."""
    return gguf_rows(config, paired=False)


def build(config: ModelConfig, dtype: DType) -> DenseForCausalLM:
    """The module on the current default device, parameters not initialised."""
    return DenseForCausalLM(config.text, dtype)
