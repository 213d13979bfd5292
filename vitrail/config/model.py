"""What a checkpoint is: frozen facts of the architectures we serve, independent of their file
format.

Units: sizes in elements, lengths in tokens, vision sizes in patches. Sources: facts of each model
as its authors publish them; where engines disagree, the field says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

DType = Literal["float32", "bfloat16", "float16"]
# What a cache stores keys and values as: the activations' dtype, or e4m3 with one scale a tensor.
KvDType = DType | Literal["float8_e4m3fn"]
CHANNELS = 3  # of a pixel
ITEM_BYTES: Mapping[KvDType, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
)


class KvScales(NamedTuple):
    """What a layer's stored keys and values are multiplied by: k = k_stored * scales.k. A latent
    row is key and value at once, so there both are the same."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: frequencies that turn less than `low_freq_factor` times over
    `original_max_position` tokens are divided by `factor`, those that turn more than
    `high_freq_factor` times are kept, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies that turn less than `beta_slow` times over
    `original_max_position` tokens are divided by `factor`, those that turn more than `beta_fast`
    times are kept, a linear ramp over the channels between; the ramp's ends are whole channels if
    `truncate`. Cosines and sines are multiplied by `attention_factor`."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of `dim` channels. `interleaved`: pairs are (2i, 2i+1), else (i, i +
    dim/2). `scaling`: how a longer context than the trained one bends the frequencies."""

    theta: float
    dim: int
    interleaved: bool
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention. `kv_norm_eps` is its own fact: the authors' code uses 1e-6 where
    some engines use the model's rms_norm_eps."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaConfig:
    """Grouped-query attention with dense MLPs. Biases of the q, k and v products, of the output
    product, and of the MLP's three. `windows`: for each layer, how many keys before its own a
    token sees; None: all."""

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts with sigmoid scores; a bias decides the choice, never the weight.
    Layers below `first_moe_layer` are dense. Shared experts form one MLP of
    `num_shared * intermediate_size`."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int
    routed_scaling: float
    normalize: bool
    first_moe_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """A decoder. With `mla` set, `head_dim` is nope + rope and `num_kv_heads` equals
    `num_heads`; `gqa` is set for decoders whose layers keep keys and values by head."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    mla: MlaConfig | None
    moe: MoeConfig | None
    gqa: GqaConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRules:
    """How a tower takes a picture: `merge` x `merge` patches of `patch_size` pixels make a token.
    `tile`: patches a side of the only sequence it takes, whose odd edge is padded with zeros; None:
    any picture of whole tokens is a sequence. `scales`: a picture with a block of (rows, columns)
    tiles brings that many tiles a side of itself before it, one scale after the other."""

    patch_size: int
    merge: int
    tile: int | None = None
    scales: tuple[int, ...] = ()

    def num_sequences(self, block: tuple[int, int] | None) -> int:
        """Attention sequences of a picture."""
        if block is None:
            return 1
        return sum(side * side for side in self.scales) + block[0] * block[1]

    def num_tokens(self, height: int, width: int, block: tuple[int, int] | None) -> int:
        """Tokens of a picture whose sequences have `height` x `width` patches."""
        rows, columns = block or (1, 1)
        return rows * columns * -(-height // self.merge) * -(-width // self.merge)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonVitConfig:
    """Kimi-VL's native-resolution vision tower. `pos_height` x `pos_width` is the learned position
    table, resized bicubically to each image's grid; `merge` patches a side become one token."""

    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    pos_height: int
    pos_width: int
    merge: int
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rules(self) -> PatchRules:
        return PatchRules(patch_size=self.patch_size, merge=self.merge)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    """A SigLIP tower over square tiles of `image_size` pixels, each an attention sequence, read at
    its last layer but one. `num_layers`: as published, the one that is not computed included.
    `merge` and `scales`: see `PatchRules`."""

    patch_size: int
    image_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    layer_norm_eps: float
    merge: int
    scales: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def tile(self) -> int:
        """Patches a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def rules(self) -> PatchRules:
        return PatchRules(
            patch_size=self.patch_size, merge=self.merge, tile=self.tile, scales=self.scales
        )


VisionConfig = MoonVitConfig | SiglipConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A whole checkpoint. `image_token_id` marks image positions in a prompt; it is never sampled,
    and may lie beyond the vocabulary, where its embedding is never read.
    `eos_token_ids` is the union of config.json, generation_config.json and the model's turn end.
    `video_frames`: how many it was trained to see of a video, None where it does not say."""

    architecture: str
    dtype: DType
    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    video_frames: int | None = None
