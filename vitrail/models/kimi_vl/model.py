"""Kimi-VL (A3B Instruct, Thinking, Thinking-2506): MoonViT, a projector and a DeepSeek-V3-style
decoder. Its end of turn, `<|im_end|>`, is a tokenizer's fact and stated by neither configuration
file: who prepares requests adds it to `eos_token_ids`.

Legend: T packed tokens, M hidden channels, V vocabulary, N patches, F patch features, C channels of
the tower."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LayerSpec
from vitrail.config.finding import Finding
from vitrail.config.model import CHANNELS, DType, ModelConfig, MoonVitConfig
from vitrail.config.reader import Keys
from vitrail.layers.attention import MlaForms
from vitrail.layers.context import ForwardContext
from vitrail.layers.linear import torch_dtype
from vitrail.models.bookkeeping import TRAINING, TRANSFORMERS
from vitrail.models.deepseek_v3 import DeepseekV3ForCausalLM, read_text_config, text_map
from vitrail.models.dense import COLUMNS, ROWS
from vitrail.models.interface import ImageShape
from vitrail.models.reading import (
    MAX_CHANNELS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_PATCHES,
    broken,
    model_config,
    sized,
)
from vitrail.models.rows import linear_rows, norm_rows
from vitrail.ops.vision.naive import Grids
from vitrail.vision.moonvit import MoonVit
from vitrail.vision.projector import MergeProjector
from vitrail.weights.mapping import Alias, Copy, Flatten, Row, WeightMap
from vitrail.weights.sharding import Segment, Shard

MERGE_SIDES = [2, 2]

# How other writers name the same tensors: newer transformers, and the K2.5 projector.
ALIASES = (
    Alias(prefix="model.language_model.", means="language_model.model."),
    Alias(prefix="lm_head.", means="language_model.lm_head."),
    Alias(prefix="model.vision_tower.", means="vision_tower."),
    Alias(prefix="model.multi_modal_projector.", means="multi_modal_projector."),
    Alias(prefix="mm_projector.pre_norm.", means="multi_modal_projector.pre_norm."),
    Alias(prefix="mm_projector.proj.0.", means="multi_modal_projector.linear_1."),
    Alias(prefix="mm_projector.proj.2.", means="multi_modal_projector.linear_2."),
)


def read_config(
    config: Mapping[str, object], generation: Mapping[str, object]
) -> ModelConfig | list[Finding]:
    """config.json and generation_config.json (empty where there is none). `eos_token_ids` is the
    union of what the three places in them say."""
    keys = Keys(dict(config), "config.json")
    keys.expect("model_type", "kimi_vl")
    keys.expect("quantization_config", None)
    text_keys, vision_keys = keys.child("text_config"), keys.child("vision_config")
    tied = keys.take_optional("tie_word_embeddings", bool)
    text = read_text_config(text_keys, tie_default=tied or False)
    vision = _read_vision(vision_keys)
    image_token_id = keys.take("media_placeholder_token_id", int)
    keys.agree("vocab_size", text.vocab_size, "text_config: vocab_size")
    keys.agree("tie_word_embeddings", text.tie_embeddings, "text_config")
    keys.ignore((*TRANSFORMERS, *TRAINING))
    keys.judge(_vision_findings(vision, image_token_id, text.vocab_size))
    return model_config(
        "KimiVLForConditionalGeneration",
        keys,
        text,
        generation,
        inner=(text_keys, vision_keys),
        vision=vision,
        image_token_id=image_token_id,
    )


def _read_vision(keys: Keys) -> MoonVitConfig:
    keys.expect("model_type", "moonvit")
    keys.expect("merge_kernel_size", MERGE_SIDES)
    keys.ignore(("torch_dtype", "dtype", "_attn_implementation", *TRANSFORMERS))
    return MoonVitConfig(
        patch_size=keys.take("patch_size", int),
        hidden_size=keys.take("hidden_size", int),
        num_layers=keys.take("num_hidden_layers", int),
        num_heads=keys.take("num_attention_heads", int),
        intermediate_size=keys.take("intermediate_size", int),
        pos_height=keys.take("init_pos_emb_height", int),
        pos_width=keys.take("init_pos_emb_width", int),
        merge=MERGE_SIDES[0],
    )


def _vision_findings(vision: MoonVitConfig, image_token_id: int, vocab: int) -> list[Finding]:
    """Sizes that no such tower can have."""
    sizes = {
        "vision_config: patch_size": (vision.patch_size, MAX_PATCHES),
        "vision_config: hidden_size": (vision.hidden_size, MAX_CHANNELS),
        "vision_config: num_hidden_layers": (vision.num_layers, MAX_LAYERS),
        "vision_config: num_attention_heads": (vision.num_heads, MAX_HEADS),
        "vision_config: intermediate_size": (vision.intermediate_size, MAX_CHANNELS),
        "vision_config: init_pos_emb_height": (vision.pos_height, MAX_PATCHES),
        "vision_config: init_pos_emb_width": (vision.pos_width, MAX_PATCHES),
    }
    rules: list[tuple[str, object, str, bool]] = []
    rules.append(
        (
            "vision_config: hidden_size",
            vision.hidden_size,
            f"{vision.num_heads} heads of a multiple of 4 channels, for two rotary axes",
            vision.num_heads >= 1 and vision.hidden_size % (4 * vision.num_heads) == 0,
        )
    )
    rules.append(
        (
            "media_placeholder_token_id",
            image_token_id,
            f"0 to {vocab - 1}, an id of the vocabulary",
            0 <= image_token_id < vocab,
        )
    )
    return [*sized(sizes), *broken(rules)]


def weight_map(config: ModelConfig) -> WeightMap:
    """Every published name of the three checkpoints, and other writers' names of them."""
    text = text_map(config.text, "language_model.", "decoder.")
    rows = (*text.rows, *_tower_rows(vision_of(config)), *_projector_rows())
    return replace(text, rows=rows, aliases=ALIASES)


def vision_of(config: ModelConfig) -> MoonVitConfig:
    """The tower's facts, which `read_config` always finds."""
    assert isinstance(config.vision, MoonVitConfig), f"{config.architecture} without its tower"
    return config.vision


def _tower_rows(vision: MoonVitConfig) -> tuple[Row, ...]:
    patch, size = ("vision_tower.patch_embed", "tower.patch_embed"), vision.patch_size
    there, here = "vision_tower.encoder.blocks.{block}", "tower.encoder.blocks.{block}"
    heads = Segment(units=vision.num_heads, width=vision.head_dim)
    qkv, out = Shard(dim=0, segments=(heads,) * 3), Shard(dim=1, segments=(heads,))
    return (
        Flatten(f"{patch[0]}.proj.weight", f"{patch[1]}.weight", inner=(CHANNELS, size, size)),
        Copy(f"{patch[0]}.proj.bias", f"{patch[1]}.bias", init="zeros"),
        Copy(f"{patch[0]}.pos_emb.weight", "tower.pos_embed"),
        *norm_rows(f"{there}.norm0", f"{here}.norm1"),
        *norm_rows(f"{there}.norm1", f"{here}.norm2"),
        *linear_rows(f"{there}.wqkv", f"{here}.attn.qkv", qkv),
        *linear_rows(f"{there}.wo", f"{here}.attn.out", out),
        *linear_rows(f"{there}.mlp.fc0", f"{here}.mlp.up", ROWS),
        *linear_rows(f"{there}.mlp.fc1", f"{here}.mlp.down", COLUMNS),
        *norm_rows("vision_tower.encoder.final_layernorm", "tower.encoder.norm"),
    )


def _projector_rows() -> tuple[Row, ...]:
    return (
        *norm_rows("multi_modal_projector.pre_norm", "projector.norm"),
        *linear_rows("multi_modal_projector.linear_1", "projector.up", ROWS),
        *linear_rows("multi_modal_projector.linear_2", "projector.down", COLUMNS),
    )


def build(config: ModelConfig, dtype: DType) -> "KimiVL":
    """The module on the current default device, parameters not initialised."""
    return KimiVL(config, dtype)


class KimiVL(nn.Module):
    """A `Model` with images."""

    def __init__(self, config: ModelConfig, dtype: DType, forms: MlaForms | None = None):
        super().__init__()
        vision, kind = vision_of(config), torch_dtype(dtype)
        self.tower = MoonVit(vision, kind)
        self.projector = MergeProjector(vision, config.text.hidden_size, kind)
        self.decoder = DeepseekV3ForCausalLM(config.text, dtype, forms)

    def cache_specs(self) -> Sequence[LayerSpec]:
        return self.decoder.cache_specs()

    def text_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return self.decoder.text_sites()

    def image_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return self.tower.sites()

    def embed(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T M"]:
        return self.decoder.embed(token_ids)

    def forward(self, hidden: Float[Tensor, "T M"], ctx: ForwardContext) -> Float[Tensor, "T M"]:
        return self.decoder(hidden, ctx)

    def logits(self, hidden: Float[Tensor, "T M"]) -> Float[Tensor, "T V"]:
        return self.decoder.logits(hidden)

    def encode_patches(
        self,
        patches: Float[Tensor, "N F"] | UInt8[Tensor, "N F"],
        grids: Sequence[tuple[int, int]] | Grids,
        plans: PlanTable,
    ) -> Float[Tensor, "N C"]:
        return self.tower(patches, grids, plans)

    def project_images(
        self, features: Float[Tensor, "N C"], images: Sequence[ImageShape]
    ) -> Float[Tensor, "tokens M"]:
        return self.projector(features, [(image.height, image.width) for image in images])
