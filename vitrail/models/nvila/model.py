"""NVILA, 8B (dynamic S2) and Lite: SigLIP, a projector over neighbouring patches and a Qwen2
decoder. Two layouts of one set of names: one folder (`nvila`, `nvila_lite`), or the sub-folders
llm, vision_tower and mm_projector (`llava_llama`, `vila`), a tensor of a sub-folder being read as
`folder.name`.

Legend: T packed tokens, M hidden channels, V vocabulary, N patches, F patch features, C channels of
the tower."""

import math
from collections.abc import Mapping, Sequence

from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LayerSpec
from vitrail.config.finding import Finding
from vitrail.config.model import CHANNELS, DType, ModelConfig, SiglipConfig
from vitrail.config.reader import Keys
from vitrail.layers.context import ForwardContext
from vitrail.layers.decoder import DenseForCausalLM
from vitrail.layers.linear import torch_dtype
from vitrail.models import qwen2
from vitrail.models.bookkeeping import TRAINING, TRANSFORMERS
from vitrail.models.dense import COLUMNS, ROWS, text_map
from vitrail.models.interface import ImageShape
from vitrail.models.nvila.processor import IMAGE_TOKEN_ID, MERGE, SCALES, projector_kind
from vitrail.models.reading import (
    MAX_CHANNELS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_PATCHES,
    MAX_POSITIONS,
    broken,
    model_config,
    sized,
)
from vitrail.models.rows import linear_rows, norm_rows
from vitrail.ops.vision.naive import Grids
from vitrail.vision.siglip import Siglip
from vitrail.vision.tiles import TileProjector
from vitrail.weights.mapping import Alias, Copy, Flatten, Fuse, Ignore, Row, WeightMap
from vitrail.weights.sharding import Replicate, Segment, Shard

ONE_FOLDER = {
    "nvila": "NVILAForConditionalGeneration",
    "nvila_lite": "NVILALiteForConditionalGeneration",
}
SUB_FOLDERS = {"llava_llama": "LlavaLlamaModel", "vila": "VILAForCasualLM"}
TOWER = "vision_tower.vision_model."
MAX_VIDEO_FRAMES = 8192

# Newer transformers left out the inner prefix.
ALIASES = (
    Alias(prefix="vision_tower.embeddings.", means=f"{TOWER}embeddings."),
    Alias(prefix="vision_tower.encoder.", means=f"{TOWER}encoder."),
    Alias(prefix="vision_tower.post_layernorm.", means=f"{TOWER}post_layernorm."),
)

# Of the sub-folder layout: paths, training, and how the authors' own code samples and pads.
_AUTHORS = (
    "chat_template",
    "drop_path_rate",
    "fps",
    "hidden_size",
    "image_encoder",
    "interpolate_mode",
    "mm_hidden_size",
    "mm_projector_lr",
    "mm_use_im_patch_token",
    "mm_use_im_start_end",
    "model_dtype",
    "model_name_or_path",
    "num_time_tokens",
    "resume_path",
    "s2_max_split_size",
    "soft_ce_std",
    "time_token_format",
    "time_token_ids",
    "tune_language_model",
    "tune_mm_projector",
    "tune_vision_tower",
    "version",
    "video_encoder",
    "vision_resolution",
    "vision_tower_lr",
)
_LLM = ("model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side")
# SigLIP's own head and the sizes of the model it was taken from.
_TOWER = (
    "_attn_implementation",
    "dtype",
    "num_image_tokens",
    "projection_dim",
    "projector_hidden_act",
    "torch_dtype",
    "vision_use_head",
)


def read_config(
    config: Mapping[str, object], generation: Mapping[str, object]
) -> ModelConfig | list[Finding]:
    """config.json and generation_config.json (empty where there is none), of either layout."""
    keys = Keys(dict(config), "config.json")
    kind = keys.take("model_type", str)
    keys.expect("model_type", *ONE_FOLDER, *SUB_FOLDERS)
    keys.expect("quantization_config", None)
    keys.ignore((*TRANSFORMERS, *TRAINING))
    if kind in SUB_FOLDERS:
        architecture, generation_kind = SUB_FOLDERS[kind], _read_sub_folders(keys)
        text_keys, vision_keys = keys.child("llm_cfg"), keys.child("vision_tower_cfg")
        text_keys.ignore(_LLM)
        image_token_id, tied = IMAGE_TOKEN_ID, None
        frames = keys.take_optional("num_video_frames", int)
    else:
        architecture, generation_kind = ONE_FOLDER.get(kind, ""), kind
        text_keys, vision_keys = keys.child("text_config"), keys.child("vision_config")
        image_token_id = keys.take("image_token_id", int)
        keys.ignore(("video_token_id",))
        frames = None
        tied = keys.take_optional("tie_word_embeddings", bool)
    text = qwen2.read_text_config(text_keys, tie_default=tied or False)
    vision = _read_vision(vision_keys, generation_kind)
    if tied is not None:
        keys.agree("tie_word_embeddings", text.tie_embeddings, "text_config")
    keys.judge(_findings(vision, image_token_id, frames))
    return model_config(
        architecture,
        keys,
        text,
        generation,
        inner=(text_keys, vision_keys),
        vision=vision,
        image_token_id=image_token_id,
        video_frames=frames,
    )


def _read_sub_folders(keys: Keys) -> str:
    """The rest of the authors' own config.json; which generation it is."""
    kind = projector_kind(keys)
    keys.expect("image_aspect_ratio", "dynamic_s2" if kind == "nvila" else "dynamic")
    keys.expect("dynamic_s2", kind == "nvila", None)
    keys.expect("s2", False, None)
    keys.expect("s2_scales", "448,896,1344", None)
    keys.expect("s2_resize_output_to_scale_idx", -1, None)
    keys.expect("max_tiles", 12, None)
    keys.expect("video_max_tiles", 1, None)
    keys.expect("mm_vision_select_layer", -2)
    keys.expect("mm_vision_select_feature", "cls_patch")
    keys.ignore((*_AUTHORS, "mm_projector", "vision_tower"))
    where, saw = "mm_projector_cfg: mm_projector_type", kind or "another projector"
    rule = "mlp_downsample (8B) or mlp_downsample_3x3_fix (Lite)"
    keys.judge(broken([(where, saw, rule, bool(kind))]))
    return kind


def _read_vision(keys: Keys, kind: str) -> SiglipConfig:
    keys.expect("model_type", "siglip_vision_model")
    keys.expect("hidden_act", "gelu_pytorch_tanh")
    keys.expect("num_channels", CHANNELS)
    keys.ignore((*_TOWER, *TRANSFORMERS, *TRAINING))
    return SiglipConfig(
        patch_size=keys.take("patch_size", int),
        image_size=keys.take("image_size", int),
        hidden_size=keys.take("hidden_size", int),
        num_layers=keys.take("num_hidden_layers", int),
        num_heads=keys.take("num_attention_heads", int),
        intermediate_size=keys.take("intermediate_size", int),
        layer_norm_eps=keys.take("layer_norm_eps", float, 1e-6),
        merge=MERGE.get(kind, 1),
        scales=SCALES if kind == "nvila" else (),
    )


def _findings(vision: SiglipConfig, image_token_id: int, video_frames: int | None) -> list[Finding]:
    """Sizes that no such tower can have, and numbers of frames that no video is seen in."""
    sizes = {
        "vision: patch_size": (vision.patch_size, MAX_PATCHES),
        "vision: image_size": (vision.image_size, MAX_PATCHES),
        "vision: hidden_size": (vision.hidden_size, MAX_CHANNELS),
        "vision: num_hidden_layers": (vision.num_layers, MAX_LAYERS),
        "vision: num_attention_heads": (vision.num_heads, MAX_HEADS),
        "vision: intermediate_size": (vision.intermediate_size, MAX_CHANNELS),
    }
    found = sized(sizes)
    if found:
        return found
    heads, patch = vision.num_heads, vision.patch_size
    eps, token = vision.layer_norm_eps, 0 <= image_token_id <= MAX_POSITIONS
    seen = video_frames is None or 1 <= video_frames <= MAX_VIDEO_FRAMES
    divides, whole = vision.hidden_size % heads == 0, vision.image_size % patch == 0
    return broken(
        [
            ("vision: hidden_size", vision.hidden_size, f"a multiple of {heads} heads", divides),
            ("vision: image_size", vision.image_size, f"whole patches of {patch}", whole),
            ("vision: layer_norm_eps", eps, "above 0 and finite", 0 < eps < math.inf),
            ("image_token_id", image_token_id, f"0 to {MAX_POSITIONS}", token),
            ("num_video_frames", video_frames, f"1 to {MAX_VIDEO_FRAMES}", seen),
        ]
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Published names of both generations, and other writers' names of them."""
    vision, text = vision_of(config), text_map(config.text, "llm.", "decoder.")
    last = f"{TOWER}encoder.layers.{vision.num_layers - 1}.*"
    unread = "features are those before the last layer"
    return WeightMap(
        rows=(*text.rows, *_tower_rows(vision), *_projector_rows(vision)),
        ties=text.ties,
        ignored=(
            *text.ignored,
            Ignore(checkpoint=last, why=unread),
            Ignore(checkpoint=f"{TOWER}post_layernorm.*", why=unread),
            Ignore(checkpoint=f"{TOWER}head.*", why="no pooled output is asked for"),
        ),
        aliases=ALIASES,
    )


def vision_of(config: ModelConfig) -> SiglipConfig:
    """The tower's facts, which `read_config` always finds."""
    assert isinstance(config.vision, SiglipConfig), f"{config.architecture} without its tower"
    return config.vision


def _tower_rows(vision: SiglipConfig) -> tuple[Row, ...]:
    patch, size = f"{TOWER}embeddings.patch_embedding", vision.patch_size
    there, here = f"{TOWER}encoder.layers.{{layer}}", "tower.blocks.{layer}"
    heads = Segment(units=vision.num_heads, width=vision.head_dim)
    qkv, out = Shard(dim=0, segments=(heads,) * 3), Shard(dim=1, segments=(heads,))
    fused = tuple(
        Fuse(
            checkpoints=tuple(f"{there}.self_attn.{name}_proj.{part}" for name in "qkv"),
            parameter=f"{here}.attn.qkv.{part}",
            shard=qkv,
            init="normal" if part == "weight" else "zeros",
        )
        for part in ("weight", "bias")
    )
    return (
        Flatten(f"{patch}.weight", "tower.patch_embed.weight", inner=(CHANNELS, size, size)),
        Copy(f"{patch}.bias", "tower.patch_embed.bias", init="zeros"),
        Copy(f"{TOWER}embeddings.position_embedding.weight", "tower.pos_embed"),
        *norm_rows(f"{there}.layer_norm1", f"{here}.norm1"),
        *norm_rows(f"{there}.layer_norm2", f"{here}.norm2"),
        *fused,
        *linear_rows(f"{there}.self_attn.out_proj", f"{here}.attn.out", out),
        *linear_rows(f"{there}.mlp.fc1", f"{here}.mlp.up", ROWS),
        *linear_rows(f"{there}.mlp.fc2", f"{here}.mlp.down", COLUMNS),
    )


def _projector_rows(vision: SiglipConfig) -> tuple[Row, ...]:
    """Small, and every rank makes whole tokens: not cut."""
    inner = () if vision.scales else norm_rows("mm_projector.layers.4", "projector.inner_norm")
    published = (2, 4) if vision.scales else (2, 5, 7)
    layers = (
        row
        for ours, index in enumerate(published)
        for row in linear_rows(
            f"mm_projector.layers.{index}", f"projector.layers.{ours}", Replicate()
        )
    )
    return (*norm_rows("mm_projector.layers.1", "projector.norm"), *inner, *layers)


def build(config: ModelConfig, dtype: DType) -> "Nvila":
    """The module on the current default device, parameters not initialised."""
    return Nvila(config, dtype)


class Nvila(nn.Module):
    """An `ImageModel`."""

    def __init__(self, config: ModelConfig, dtype: DType):
        super().__init__()
        vision, kind = vision_of(config), torch_dtype(dtype)
        self.tower = Siglip(vision, kind)
        self.projector = TileProjector(vision, config.text.hidden_size, kind)
        self.decoder = DenseForCausalLM(config.text, dtype)

    def cache_specs(self) -> Sequence[LayerSpec]:
        return self.decoder.cache_specs()

    def text_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return self.decoder.text_sites()

    def image_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return self.tower.sites()

    def embed(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T M"]:
        """The image token may lie beyond the vocabulary; the row it gets is replaced."""
        return self.decoder.embed(token_ids.clamp(max=self.decoder.text.vocab_size - 1))

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
        side = self.tower.config.tile
        packed = grids if isinstance(grids, Grids) else None
        sizes = set(packed.sizes if packed else grids)
        assert sizes <= {(side, side)}, f"tiles of {sizes} patches, not {side} a side"
        return self.tower(patches, plans, packed)

    def project_images(
        self, features: Float[Tensor, "N C"], images: Sequence[ImageShape]
    ) -> Float[Tensor, "tokens M"]:
        return self.projector(features, [image.block for image in images])
