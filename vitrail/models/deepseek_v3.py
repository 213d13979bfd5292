"""DeepSeek-V3-style decoders: latent attention, a dense layer or more, then mixtures of experts.
Also the text half of Kimi-VL, which reuses the reader, the rows and the module under its own
prefixes.

Legend: T packed tokens, M hidden channels."""

import math
from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LayerSpec
from vitrail.config.finding import Finding
from vitrail.config.model import DType, MlaConfig, ModelConfig, MoeConfig, RopeConfig, TextConfig
from vitrail.config.reader import Keys
from vitrail.layers.attention import (
    MlaAttention,
    MlaForms,
    mla_cache_spec,
    mla_config,
    mla_context,
    mla_sites,
)
from vitrail.layers.context import ForwardContext
from vitrail.layers.decoder import Decoder
from vitrail.layers.linear import GatedMlp, torch_dtype
from vitrail.layers.moe import MoeLayer
from vitrail.layers.norm import RmsNorm
from vitrail.layers.rotary import Rotary
from vitrail.models.bookkeeping import TRAINING, TRANSFORMERS
from vitrail.models.dense import COLUMNS, ROWS, outer_rows, text_ignored, text_ties
from vitrail.models.reading import (
    MAX_CHANNELS,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    broken,
    model_config,
    sized,
)
from vitrail.weights.mapping import Copy, Experts, Fuse, Row, WeightMap
from vitrail.weights.sharding import Segment, Shard

# The norm of the latent has the authors' class default, which is not rms_norm_eps; engines that use
# rms_norm_eps (1e-5) for it differ from the authors' code in the fifth digit.
KV_NORM_EPS = 1e-6


def read_config(
    config: Mapping[str, object], generation: Mapping[str, object]
) -> ModelConfig | list[Finding]:
    """A stand-alone decoder's config.json and generation_config.json (empty where there is
    none)."""
    keys = Keys(dict(config), "config.json")
    keys.expect("model_type", "deepseek_v3")
    text = read_text_config(keys)
    return model_config("DeepseekV3ForCausalLM", keys, text, generation)


def read_text_config(keys: Keys, tie_default: bool = False) -> TextConfig:
    """Every key of a DeepSeek-V3-style text configuration but the token ids and the dtype. Findings
    are left in `keys`; with any, the result means nothing. `tie_default`: what an enclosing
    configuration says of tied embeddings, where this one says nothing."""
    _expect_implemented(keys)
    theta = _read_theta(keys)
    num_heads = keys.take("num_attention_heads", int)
    rope_dim, nope = keys.take("qk_rope_head_dim", int), keys.take("qk_nope_head_dim", int)
    keys.agree("num_key_value_heads", num_heads, "num_attention_heads")
    keys.agree("qk_head_dim", nope + rope_dim, "the sum of qk_nope_ and qk_rope_head_dim")
    keys.ignore(("head_dim", *TRANSFORMERS, *TRAINING))
    text = TextConfig(
        vocab_size=keys.take("vocab_size", int),
        hidden_size=keys.take("hidden_size", int),
        num_layers=keys.take("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=nope + rope_dim,
        intermediate_size=keys.take("intermediate_size", int),
        rms_eps=keys.take("rms_norm_eps", float),
        rope=RopeConfig(theta=theta, dim=rope_dim, interleaved=True),
        max_position=keys.take("max_position_embeddings", int),
        tie_embeddings=keys.take("tie_word_embeddings", bool, tie_default),
        mla=MlaConfig(
            kv_lora_rank=keys.take("kv_lora_rank", int),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope_dim,
            v_head_dim=keys.take("v_head_dim", int),
            kv_norm_eps=KV_NORM_EPS,
        ),
        moe=MoeConfig(
            num_experts=keys.take("n_routed_experts", int),
            top_k=keys.take("num_experts_per_tok", int),
            intermediate_size=keys.take("moe_intermediate_size", int),
            num_shared=keys.take("n_shared_experts", int, 0),
            routed_scaling=keys.take("routed_scaling_factor", float),
            normalize=keys.take("norm_topk_prob", bool),
            first_moe_layer=keys.take("first_k_dense_replace", int),
        ),
    )
    keys.judge(_size_findings(text))
    return text


def _expect_implemented(keys: Keys) -> None:
    """Choices of which one alone is computed."""
    keys.expect("q_lora_rank", None)
    keys.expect("rope_scaling", None)
    keys.expect("rope_interleave", True)
    keys.expect("quantization_config", None)
    keys.expect("n_group", 1, None)
    keys.expect("topk_group", 1, None)
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    keys.expect("moe_layer_freq", 1)
    keys.expect("attention_bias", False)
    keys.expect("hidden_act", "silu")
    keys.expect("num_nextn_predict_layers", 0, None)


def _read_theta(keys: Keys) -> float:
    """`rope_theta`; newer writers put it in `rope_parameters`. Where both are given they agree."""
    if not keys.has("rope_parameters"):
        keys.ignore(("rope_parameters",))
        return keys.take("rope_theta", float)
    inner = keys.child("rope_parameters")
    theta = inner.take("rope_theta", float)
    inner.expect("rope_type", "default")
    inner.expect("type", "default")
    inner.finish()
    keys.agree("rope_theta", theta, "rope_parameters")
    return theta


def _size_findings(text: TextConfig) -> list[Finding]:
    """Sizes that no such decoder can have."""
    mla, moe = mla_config(text), text.moe
    assert moe is not None
    sizes = {
        "vocab_size": (text.vocab_size, MAX_VOCAB),
        "hidden_size": (text.hidden_size, MAX_CHANNELS),
        "num_hidden_layers": (text.num_layers, MAX_LAYERS),
        "num_attention_heads": (text.num_heads, MAX_HEADS),
        "intermediate_size": (text.intermediate_size, MAX_CHANNELS),
        "max_position_embeddings": (text.max_position, MAX_POSITIONS),
        "kv_lora_rank": (mla.kv_lora_rank, MAX_CHANNELS),
        "qk_nope_head_dim": (mla.qk_nope_head_dim, MAX_CHANNELS),
        "qk_rope_head_dim": (mla.qk_rope_head_dim, MAX_CHANNELS),
        "v_head_dim": (mla.v_head_dim, MAX_CHANNELS),
        "n_routed_experts": (moe.num_experts, MAX_EXPERTS),
        "moe_intermediate_size": (moe.intermediate_size, MAX_CHANNELS),
    }
    eps, theta, scale = text.rms_eps, text.rope.theta, moe.routed_scaling
    rules = [
        ("rms_norm_eps", eps, "above 0 and finite", 0 < eps < math.inf),
        ("rope_theta", theta, "above 1 and finite", 1 < theta < math.inf),
        ("routed_scaling_factor", scale, "above 0 and finite", 0 < scale < math.inf),
        ("qk_rope_head_dim", text.rope.dim, "an even number", text.rope.dim % 2 == 0),
        (
            "num_experts_per_tok",
            moe.top_k,
            f"1 to n_routed_experts, {moe.num_experts}",
            1 <= moe.top_k <= moe.num_experts,
        ),
        (
            "n_shared_experts",
            moe.num_shared,
            f"0 to {MAX_EXPERTS}",
            0 <= moe.num_shared <= MAX_EXPERTS,
        ),
        (
            "first_k_dense_replace",
            moe.first_moe_layer,
            f"0 to num_hidden_layers, {text.num_layers}",
            0 <= moe.first_moe_layer <= text.num_layers,
        ),
    ]
    return [*sized(sizes), *broken(rules)]


def weight_map(config: ModelConfig) -> WeightMap:
    """Published names of a stand-alone decoder."""
    return text_map(config.text)


def text_map(text: TextConfig, published: str = "", ours: str = "") -> WeightMap:
    """Of the decoder, its published names under `published`, its parameters under `ours`. Heads,
    intermediate channels and vocabulary are what ranks share."""
    there, here = f"{published}model.layers.{{layer}}", f"{ours}layers.{{layer}}"
    return WeightMap(
        rows=(
            *outer_rows(text, published, ours),
            *_attention_rows(text, f"{there}.self_attn", f"{here}.attention"),
            *_mlp_rows(text, f"{there}.mlp", f"{here}.mlp"),
        ),
        ties=text_ties(text, published, ours),
        ignored=text_ignored(published),
    )


def _attention_rows(text: TextConfig, there: str, here: str) -> tuple[Row, ...]:
    mla, heads = mla_config(text), text.num_heads
    row = mla.kv_lora_rank + mla.qk_rope_head_dim
    wide = mla.qk_nope_head_dim + mla.v_head_dim
    return (
        # Heads of the queries are shared out; every rank makes whole cache rows.
        Fuse(
            checkpoints=(f"{there}.q_proj.weight", f"{there}.kv_a_proj_with_mqa.weight"),
            parameter=f"{here}.qkv_a_proj.weight",
            sizes=(heads * text.head_dim, row),
            shard=Shard(
                dim=0,
                segments=(
                    Segment(units=heads, width=text.head_dim),
                    Segment(units=1, width=row, replicate=True),
                ),
            ),
        ),
        Copy(f"{there}.kv_a_layernorm.weight", f"{here}.kv_a_norm.weight", init="ones"),
        Copy(
            f"{there}.kv_b_proj.weight",
            f"{here}.kv_b_proj.weight",
            Shard(dim=0, segments=(Segment(units=heads, width=wide),)),
        ),
        Copy(
            f"{there}.o_proj.weight",
            f"{here}.o_proj.weight",
            Shard(dim=1, segments=(Segment(units=heads, width=mla.v_head_dim),)),
        ),
    )


def _mlp_rows(text: TextConfig, there: str, here: str) -> tuple[Row, ...]:
    """Dense layers are gated MLPs; experts are stacked, the shared ones (published as one gated MLP
    of their widths together) after the routed."""
    moe = text.moe
    assert moe is not None
    gate_up = (f"{there}.gate_proj.weight", f"{there}.up_proj.weight")
    return (
        Fuse(checkpoints=gate_up, parameter=f"{here}.gate_up_proj.weight", shard=ROWS),
        Copy(f"{there}.down_proj.weight", f"{here}.down_proj.weight", COLUMNS),
        Copy(f"{there}.gate.weight", f"{here}.router.weight"),
        Copy(f"{there}.gate.e_score_correction_bias", f"{here}.router.bias"),
        _expert_rows(moe, there, ("gate_proj", "up_proj"), f"{here}.gate_up", 0),
        _expert_rows(moe, there, ("down_proj",), f"{here}.down", 1),
    )


def _expert_rows(
    moe: MoeConfig, there: str, kinds: tuple[str, ...], parameter: str, dim: int
) -> Experts:
    """`dim`: of one expert's tensor, the intermediate channels, which ranks share."""
    stems = [f"{there}.experts.{{expert}}"]
    stems += [f"{there}.shared_experts"] if moe.num_shared else []
    return Experts(
        checkpoints=tuple(f"{stem}.{kind}.weight" for stem in stems for kind in kinds),
        parameter=parameter,
        num_experts=moe.num_experts,
        num_shared=moe.num_shared,
        dim=dim,
        shard=Shard(dim=dim + 1),
    )


def build(config: ModelConfig, dtype: DType) -> "DeepseekV3ForCausalLM":
    """The module on the current default device, parameters not initialised."""
    return DeepseekV3ForCausalLM(config.text, dtype)


class DecoderLayer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x); the second addition is fused with the next
    norm."""

    def __init__(self, text: TextConfig, layer: int, dtype: DType, forms: MlaForms):
        super().__init__()
        moe, kind = text.moe, torch_dtype(dtype)
        assert moe is not None
        self.input_norm = RmsNorm(text.hidden_size, text.rms_eps, kind)
        self.attention = MlaAttention(text, layer, kind, forms)
        self.mlp_norm = RmsNorm(text.hidden_size, text.rms_eps, kind)
        self.mlp = (
            MoeLayer(text.hidden_size, moe, kind)
            if layer >= moe.first_moe_layer
            else GatedMlp(text.hidden_size, text.intermediate_size, kind)
        )

    def forward(
        self,
        x_TM: Float[Tensor, "T M"],
        residual_TM: Float[Tensor, "T M"] | None,
        rotary: Rotary,
        ctx: ForwardContext,
    ) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]:
        """(what is to be added, what it is to be added to)."""
        project = self.attention.qkv_a_proj
        row_TX, residual_TM = self.input_norm.add_into(project, x_TM, residual_TM)
        x_TM = self.attention(row_TX, rotary, ctx)
        x_TM, residual_TM = self.mlp_norm.add(x_TM, residual_TM)
        return self.mlp(x_TM), residual_TM


class DeepseekV3ForCausalLM(Decoder):
    """A `Model` without images."""

    def __init__(self, text: TextConfig, dtype: DType, forms: MlaForms | None = None):
        forms = forms or MlaForms()
        layers = (DecoderLayer(text, layer, dtype, forms) for layer in range(text.num_layers))
        super().__init__(text, dtype, layers)
        self.forms = forms

    def cache_specs(self) -> Sequence[LayerSpec]:
        return [mla_cache_spec(self.text, self.dtype)] * self.text.num_layers

    def text_sites(self) -> Sequence[tuple[AttentionSite, Phase]]:
        return mla_sites(self.text, self.forms)

    def forward(self, hidden: Float[Tensor, "T M"], ctx: ForwardContext) -> Float[Tensor, "T M"]:
        return super().forward(hidden, mla_context(ctx, self.forms))
