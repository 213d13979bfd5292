"""What readers and maps of dense decoders share: sizes, rotary scaling, and the published names.
Llama and Qwen2 differ in their defaults, biases and windows; those are in their own modules."""

import math
from dataclasses import replace
from typing import NamedTuple

from vitrail.config.finding import Finding
from vitrail.config.model import (
    GqaConfig,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    TextConfig,
    YarnScaling,
)
from vitrail.config.reader import Keys
from vitrail.layers.gqa import gqa_config
from vitrail.models.bookkeeping import TRAINING, TRANSFORMERS
from vitrail.models.gguf import ROPE_FACTORS
from vitrail.models.reading import (
    MAX_CHANNELS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    broken,
    sized,
)
from vitrail.weights.mapping import Copy, Fuse, Ignore, Row, Tie, WeightMap
from vitrail.weights.sharding import Replicate, Rule, Segment, Shard

ROWS, COLUMNS = Shard(dim=0), Shard(dim=1)

# The ramp of YaRN where a configuration does not state it (the paper's values).
BETA_FAST, BETA_SLOW = 32.0, 1.0
# Turns that are counted: of those below a millionth or above a million no channel is left.
MIN_BETA, MAX_BETA = 1e-6, 1e6


def read_dense(
    keys: Keys, num_layers: int, gqa: GqaConfig, theta_default: float | None, tie_default: bool
) -> TextConfig:
    """The keys that all dense decoders have; `num_layers` and `gqa` were read before. Findings
    are left in `keys`; with any, the result means nothing. `theta_default`: the authors' class
    default, None where every published configuration states it."""
    keys.expect("hidden_act", "silu")
    keys.expect("quantization_config", None)
    keys.expect("partial_rotary_factor", 1.0, None)
    keys.ignore((*TRANSFORMERS, *TRAINING))
    hidden, heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    stated = keys.take_optional("head_dim", int)
    head_dim = stated if stated is not None else hidden // max(1, heads)
    text = TextConfig(
        vocab_size=keys.take("vocab_size", int),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.take("num_key_value_heads", int, heads),
        head_dim=head_dim,
        intermediate_size=keys.take("intermediate_size", int),
        rms_eps=keys.take("rms_norm_eps", float),
        rope=_read_rope(keys, head_dim, theta_default),
        max_position=keys.take("max_position_embeddings", int),
        tie_embeddings=keys.take("tie_word_embeddings", bool, tie_default),
        mla=None,
        moe=None,
        gqa=gqa,
    )
    keys.judge(_size_findings(text, stated))
    return text


def _size_findings(text: TextConfig, stated_head_dim: int | None) -> list[Finding]:
    """Sizes that no such decoder can have."""
    heads, kv_heads, hidden = text.num_heads, text.num_kv_heads, text.hidden_size
    sizes = {
        "vocab_size": (text.vocab_size, MAX_VOCAB),
        "hidden_size": (hidden, MAX_CHANNELS),
        "num_hidden_layers": (text.num_layers, MAX_LAYERS),
        "num_attention_heads": (heads, MAX_HEADS),
        "num_key_value_heads": (kv_heads, MAX_HEADS),
        "intermediate_size": (text.intermediate_size, MAX_CHANNELS),
        "max_position_embeddings": (text.max_position, MAX_POSITIONS),
    }
    if stated_head_dim is not None:
        sizes["head_dim"] = (stated_head_dim, MAX_CHANNELS)
    found = sized(sizes)
    if found:
        return found
    divides = stated_head_dim is not None or hidden % heads == 0
    even = text.head_dim >= 2 and text.head_dim % 2 == 0
    return broken(
        [
            ("hidden_size", hidden, f"a multiple of num_attention_heads, {heads}", divides),
            (
                "num_key_value_heads",
                kv_heads,
                f"a divisor of num_attention_heads, {heads}",
                heads % kv_heads == 0,
            ),
            ("head_dim", text.head_dim, "an even number, for rotary pairs", even or not divides),
            ("rms_norm_eps", text.rms_eps, "above 0", 0 < text.rms_eps < math.inf),
            (
                "rope_theta",
                text.rope.theta,
                "above 1 and finite",
                1 < text.rope.theta < math.inf,
            ),
        ]
    )


def _read_rope(keys: Keys, dim: int, theta_default: float | None) -> RopeConfig:
    """`rope_theta` and `rope_scaling`; newer writers put both in `rope_parameters`. What is stated
    twice must agree."""
    both = [name for name in ("rope_parameters", "rope_scaling") if keys.has(name)]
    keys.ignore(("rope_parameters", "rope_scaling"))
    outer = keys.take_optional("rope_theta", float)
    read = [_read_scaling(keys.child(name)) for name in both]
    thetas = {theta for theta in (outer, *(theta for theta, _ in read)) if theta is not None}
    scalings = {scaling for _, scaling in read}
    for name, values in (("rope_theta", thetas), ("rope_scaling", scalings)):
        if len(values) > 1:
            rule = "stated once, or alike in rope_theta, rope_scaling and rope_parameters"
            keys.judge(broken([(name, sorted(map(repr, values)), rule, False)]))
    if not thetas and theta_default is None:
        keys.take("rope_theta", float)
    theta = next(iter(thetas), theta_default or 0.0)
    scaling = next(iter(scalings), None)
    return RopeConfig(theta=theta, dim=dim, interleaved=False, scaling=scaling)


def _read_scaling(keys: Keys) -> tuple[float | None, RopeScaling | None]:
    """(theta if stated, scaling) of one object; other ways of scaling are refused by name."""
    theta = keys.take_optional("rope_theta", float)
    kind = keys.take("rope_type", str, keys.take_optional("type", str) or "default")
    keys.agree("type", kind, "rope_type")
    keys.expect("partial_rotary_factor", 1.0, None)
    scaling: RopeScaling | None = None
    rules: list[tuple[str, object, str, bool]] = []
    match kind:
        case "default":
            pass
        case "linear":
            scaling = LinearScaling(factor=keys.take("factor", float))
        case "llama3":
            scaling = _read_llama3(keys)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            ordered = 0 < low < high < math.inf
            rules.append(("high_freq_factor", high, f"above low_freq_factor, {low}", ordered))
        case "yarn":
            scaling = _read_yarn(keys)
            fast, slow = scaling.beta_fast, scaling.beta_slow
            ordered = MIN_BETA <= slow < fast <= MAX_BETA
            rule = f"above beta_slow, {slow}, both from {MIN_BETA} to {MAX_BETA}"
            rules.append(("beta_fast", fast, rule, ordered))
            factor = scaling.attention_factor
            rules.append(("attention_factor", factor, "above 0, finite", 0 < factor < math.inf))
        case _:
            known = ("default", "linear", "llama3", "yarn")
            keys.expect("rope_type" if keys.has("rope_type") else "type", *known)
    if scaling is not None:
        rules.append(("factor", scaling.factor, "at least 1", 1 <= scaling.factor < math.inf))
    if isinstance(scaling, Llama3Scaling | YarnScaling):
        length = scaling.original_max_position
        held = 1 <= length <= MAX_POSITIONS
        rule = f"at least 1 and at most {MAX_POSITIONS}"
        rules.append(("original_max_position_embeddings", length, rule, held))
    if kind in ("default", "linear", "llama3", "yarn"):
        keys.finish()
    keys.judge(broken((f"rope scaling: {rule[0]}", *rule[1:]) for rule in rules))
    return theta, scaling


def _read_llama3(keys: Keys) -> Llama3Scaling:
    return Llama3Scaling(
        factor=keys.take("factor", float),
        low_freq_factor=keys.take("low_freq_factor", float),
        high_freq_factor=keys.take("high_freq_factor", float),
        original_max_position=keys.take("original_max_position_embeddings", int),
    )


def _read_yarn(keys: Keys) -> YarnScaling:
    """The attention factor where it is not stated: m(factor, mscale) / m(factor, mscale_all_dim)
    with m(s, a) = 0.1 a ln s + 1, or m(factor, 1) without the two."""
    factor = keys.take("factor", float)
    stated = keys.take_optional("attention_factor", float)
    mscale, all_dim = (keys.take_optional(k, float) for k in ("mscale", "mscale_all_dim"))
    log = math.log(factor) if 1 < factor < math.inf else 0.0
    inferred = 0.1 * log + 1
    if mscale and all_dim:
        over = 0.1 * all_dim * log + 1
        inferred = (0.1 * mscale * log + 1) / over if over > 0 else 0.0  # which no rule allows
    return YarnScaling(
        factor=factor,
        attention_factor=inferred if stated is None else stated,
        beta_fast=keys.take("beta_fast", float, BETA_FAST),
        beta_slow=keys.take("beta_slow", float, BETA_SLOW),
        original_max_position=keys.take("original_max_position_embeddings", int),
        truncate=keys.take("truncate", bool, True),
    )


class Names(NamedTuple):
    """How a writer spells the decoder's tensors, without `.weight` and `.bias`. `layer` stands
    before the names from `input_norm` on. `paired`: rows of q and k are stored by rotary pair."""

    embedding: str
    norm: str
    head: str
    layer: str
    input_norm: str
    mlp_norm: str
    qkv: tuple[str, str, str]
    out: str
    gate_up: tuple[str, str]
    down: str
    paired: bool = False


PUBLISHED = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{layer}",
    input_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)

GGUF = Names(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{layer}",
    input_norm="attn_norm",
    mlp_norm="ffn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    out="attn_output",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
)


def text_map(text: TextConfig, published: str = "", ours: str = "") -> WeightMap:
    """Of a dense decoder, its published names under `published`, its parameters under `ours`."""
    return WeightMap(
        rows=text_rows(text, published, ours),
        ties=text_ties(text, published, ours),
        ignored=text_ignored(published),
    )


def text_rows(
    text: TextConfig, published: str, ours: str, names: Names = PUBLISHED
) -> tuple[Row, ...]:
    """Heads, intermediate channels and vocabulary are what ranks share."""
    gqa, n = gqa_config(text), names
    there, here = f"{published}{n.layer}.", f"{ours}layers.{{layer}}."
    counts = (text.num_heads, text.num_kv_heads, text.num_kv_heads)
    heads, *kv = (
        Segment(units=c, width=text.head_dim, replicate=i > 0) for i, c in enumerate(counts)
    )
    pair = text.head_dim if n.paired else 0
    qkv = Fuse(
        checkpoints=tuple(there + name for name in n.qkv),
        parameter=f"{here}attention.qkv_proj",
        sizes=tuple(c * text.head_dim for c in counts),
        pairs=(pair, pair, 0),
        shard=Shard(dim=0, segments=(heads, *kv)),
    )
    gate_up = Fuse(
        checkpoints=tuple(there + name for name in n.gate_up),
        parameter=f"{here}mlp.gate_up_proj",
        shard=ROWS,
    )
    out = Shard(dim=1, segments=(heads,))
    return (
        *outer_rows(text, published, ours, n),
        *_fused(qkv, gqa.qkv_bias),
        *_linear(there + n.out, f"{here}attention.o_proj", out, gqa.out_bias),
        *_fused(gate_up, gqa.mlp_bias),
        *_linear(there + n.down, f"{here}mlp.down_proj", COLUMNS, gqa.mlp_bias),
    )


def outer_rows(
    text: TextConfig, published: str, ours: str, names: Names = PUBLISHED
) -> tuple[Row, ...]:
    """Of embedding, head and norms, which every decoder has."""
    there, here = f"{published}{names.layer}.", f"{ours}layers.{{layer}}."
    head = Copy(f"{published}{names.head}.weight", f"{ours}lm_head.weight", ROWS)
    return (
        Copy(f"{published}{names.embedding}.weight", f"{ours}embed_tokens.weight", ROWS),
        Copy(f"{published}{names.norm}.weight", f"{ours}norm.weight", init="ones"),
        *(() if text.tie_embeddings else (head,)),
        Copy(f"{there}{names.input_norm}.weight", f"{here}input_norm.weight", init="ones"),
        Copy(f"{there}{names.mlp_norm}.weight", f"{here}mlp_norm.weight", init="ones"),
    )


def _linear(there: str, here: str, rule: Shard, bias: bool = False) -> tuple[Row, ...]:
    """A bias is cut with the rows of its weight; where columns are cut, every rank holds it."""
    weight = Copy(f"{there}.weight", f"{here}.weight", rule)
    kept: Rule = rule if rule.dim == 0 else Replicate()
    return (weight, Copy(f"{there}.bias", f"{here}.bias", kept)) if bias else (weight,)


def _fused(products: Fuse, bias: bool) -> tuple[Row, ...]:
    """Rows of a fused product's weight, and of its bias where it has one, given their stems."""
    return tuple(
        replace(
            products,
            checkpoints=tuple(f"{stem}.{kind}" for stem in products.checkpoints),
            parameter=f"{products.parameter}.{kind}",
        )
        for kind in (("weight", "bias") if bias else ("weight",))
    )


def text_ties(text: TextConfig, published: str, ours: str) -> tuple[Tie, ...]:
    """The head is the embedding where the configuration says so; otherwise the checkpoint has
    one, or is refused."""
    if not text.tie_embeddings:
        return ()
    head, embedding = f"{ours}lm_head.weight", f"{ours}embed_tokens.weight"
    return (Tie(parameter=head, to=embedding, checkpoint=f"{published}lm_head.weight"),)


def gguf_rows(config: ModelConfig, paired: bool) -> WeightMap:
    """llama.cpp's names of a stand-alone decoder. A head that is not there is the embedding, by
    the configuration made from the same file."""
    rows = text_rows(config.text, "", "", GGUF._replace(paired=paired))
    factors = Ignore(ROPE_FACTORS, why="read as the configuration's rope_scaling")
    return WeightMap(rows=rows, ties=text_ties(config.text, "", ""), ignored=(factors,))


def text_ignored(published: str) -> tuple[Ignore, ...]:
    """Tensors that old writers stored beside the weights."""
    inverse = f"{published}model.layers.{{layer}}.self_attn.rotary_emb.inv_freq"
    return (Ignore(checkpoint=inverse, why="computed from rope_theta"),)
