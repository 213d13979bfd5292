"""Multi-head latent attention, in its two equal forms.

A token leaves one cache row for all heads: [normed latent | rotated key channels]. *Expanded*: rows
are multiplied out to per-head keys and values, piece by piece, and attended as usual: less work for
a prefill. *Absorbed*: the key matrix moves to the query and the value matrix behind the attention,
which then reads the rows as they are: less memory traffic for a decode.

    q . k  =  q_nope . (W_k c) + q_pe . k_pe  =  (W_k^T q_nope) . c + q_pe . k_pe
    sum p v  =  sum p (W_v c)  =  W_v (sum p c)

Legend: T packed tokens, S gathered cache rows, M hidden channels, H heads, D = N + P query and key
channels (N without position, P rotary), R latent rank, C = R + P cache row, E value
channels, X = H D + C a token's projected row."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.attention.backend import load_backend
from vitrail.attention.chunked import attend_chunks
from vitrail.attention.metadata import PagedMetadata, gather_slots, with_chunks
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.kv_pool import LatentSlots, dequantized
from vitrail.cache.spec import LatentKv
from vitrail.config.model import DType, MlaConfig, TextConfig
from vitrail.layers.context import ForwardContext
from vitrail.layers.linear import Linear
from vitrail.layers.norm import RmsNorm
from vitrail.layers.rotary import Rotary
from vitrail.ops.dispatch import select_mla
from vitrail.ops.mla.naive import LatentNorm, MlaSizes
from vitrail.ops.rope.naive import Turns

Form = Literal["expanded", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaForms:
    """Which form each part of a step uses. Equal in value; the defaults are the quick ones."""

    prefill: Form = "expanded"
    decode: Form = "absorbed"


ONE_FORM = MlaForms(prefill="absorbed", decode="absorbed")


def mla_config(text: TextConfig) -> MlaConfig:
    """The latent attention of a model that has one."""
    assert text.mla is not None, "a model without latent attention"
    return text.mla


def mla_cache_spec(text: TextConfig, dtype: DType) -> LatentKv:
    """What each layer keeps for a token."""
    mla = mla_config(text)
    return LatentKv(latent_rank=mla.kv_lora_rank, rope_dim=mla.qk_rope_head_dim, dtype=dtype)


def expanded_site(text: TextConfig) -> AttentionSite:
    """Per-head keys and values; scale (N + P)^-0.5."""
    mla = mla_config(text)
    return AttentionSite(
        num_q_heads=text.num_heads,
        num_kv_heads=text.num_heads,
        head_dim=text.head_dim,
        head_dim_v=mla.v_head_dim,
        scale=text.head_dim**-0.5,
        causal=True,
    )


def absorbed_site(text: TextConfig) -> AttentionSite:
    """One latent row for all heads; the scale stays that of the expanded form."""
    mla = mla_config(text)
    return AttentionSite(
        num_q_heads=text.num_heads,
        num_kv_heads=1,
        head_dim=mla.kv_lora_rank + mla.qk_rope_head_dim,
        head_dim_v=mla.kv_lora_rank,
        scale=text.head_dim**-0.5,
        causal=True,
        latent_rank=mla.kv_lora_rank,
    )


def mla_sites(text: TextConfig, forms: MlaForms) -> tuple[tuple[AttentionSite, Phase], ...]:
    """Every (site, phase) that a layer with these forms calls."""
    pairs = ((forms.prefill, Phase.EXTEND), (forms.decode, Phase.DECODE))
    return tuple(
        dict.fromkeys(
            (expanded_site(text), Phase.PREFILL)
            if form == "expanded"
            else (absorbed_site(text), phase)
            for form, phase in pairs
        )
    )


def mla_context(ctx: ForwardContext, forms: MlaForms) -> ForwardContext:
    """`ctx` with the pieces that expanding layers attend by, made once for all layers of a step
    where whoever laid it out did not."""
    prefill, decode = ctx.prefill, ctx.decode
    if prefill is not None and forms.prefill == "expanded":
        prefill = _mended(prefill if prefill.chunks else with_chunks(prefill))
    if decode is not None and forms.decode == "expanded":
        decode = _mended(with_chunks(decode))
    return replace(ctx, prefill=prefill, decode=decode)


def _mended(meta: PagedMetadata) -> PagedMetadata:
    """Keys and values of several sequences are expanded as `kernels/mend.py` makes them."""
    if meta.batch == 1:
        return meta
    chunks = (replace(c, meta=replace(c.meta, mended=True)) for c in meta.chunks)
    return replace(meta, chunks=tuple(chunks))


class MlaAttention(nn.Module):
    """Layer `layer` of a decoder. `qkv_a_proj` gives [queries by head | latent | rotary channels];
    `kv_b_proj` [H (N + E), R] is the published one: by head key rows, then value rows. `fixed`: see
    `layers.fixed`."""

    fixed = False

    def __init__(self, text: TextConfig, layer: int, dtype: torch.dtype, forms: MlaForms):
        super().__init__()
        mla = mla_config(text)
        self.layer, self.forms = layer, forms
        self.sizes = MlaSizes(
            heads=text.num_heads,
            nope=mla.qk_nope_head_dim,
            rope=mla.qk_rope_head_dim,
            rank=mla.kv_lora_rank,
            value=mla.v_head_dim,
        )
        self.expanded, self.absorbed = expanded_site(text), absorbed_site(text)
        heads, hidden = text.num_heads, text.hidden_size
        self.qkv_a_proj = Linear(hidden, self.sizes.projected, dtype)
        self.kv_a_norm = RmsNorm(mla.kv_lora_rank, mla.kv_norm_eps, dtype)
        wide = mla.qk_nope_head_dim + mla.v_head_dim
        self.kv_b_proj = Linear(mla.kv_lora_rank, heads * wide, dtype)
        self.o_proj = Linear(heads * mla.v_head_dim, hidden, dtype)

    def forward(
        self, row_TX: Float[Tensor, "T X"], rotary: Rotary, ctx: ForwardContext
    ) -> Float[Tensor, "T M"]:
        """Of the tokens' rows that `qkv_a_proj` gave, which it may overwrite. Writes cache rows,
        then attends to everything written, as it was stored."""
        split = ctx.num_prefill
        parts: list[Tensor] = []
        if ctx.prefill is not None:
            tokens = self._tokens(Phase.EXTEND, slice(0, split), row_TX, rotary, ctx)
            parts.append(self._attend(self.forms.prefill, tokens, ctx.prefill, ctx))
        if ctx.decode is not None:
            tokens = self._tokens(Phase.DECODE, slice(split, None), row_TX, rotary, ctx)
            parts.append(self._attend(self.forms.decode, tokens, ctx.decode, ctx))
        return self.o_proj(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _tokens(
        self,
        phase: Phase,
        at: slice,
        row_TX: Float[Tensor, "T X"],
        rotary: Rotary,
        ctx: ForwardContext,
    ) -> "_Tokens":
        into = ctx.pool.latent_slots(self.layer, ctx.cache_slots[at])
        return _Tokens(phase, row_TX[at], rotary.part(at), into)

    def _attend(
        self, form: Form, tokens: "_Tokens", meta: PagedMetadata, ctx: ForwardContext
    ) -> Float[Tensor, "T HE"]:
        if form == "expanded":
            return self._attend_expanded(tokens, meta, ctx)
        return self._attend_absorbed(tokens, meta, ctx)

    def _attend_expanded(
        self, tokens: "_Tokens", meta: PagedMetadata, ctx: ForwardContext
    ) -> Float[Tensor, "T HE"]:
        ops, sizes = select_mla(tokens.row_TX.device, self.fixed), self.sizes
        norm = LatentNorm(self.kv_a_norm.weight, self.kv_a_norm.eps)
        q_THD = ops.expanded_queries(tokens.row_TX, norm, tokens.turns, sizes, tokens.into)
        cache_NPC, scale = ctx.pool.latent(self.layer), ctx.pool.scales(self.layer).k

        # no shapes in its signature: they would be read again in every layer
        def expand(slots_S: Tensor) -> tuple[Tensor, Tensor]:
            row_SC = dequantized(gather_slots(cache_NPC, slots_S), scale, q_THD.dtype)
            return ops.expanded_keys(row_SC, self.kv_b_proj.weight, sizes, meta.batch > 1)

        assert meta.chunks, "the model gives its layers an `mla_context`"
        plan = ctx.plans.select(self.expanded, Phase.PREFILL, meta.batch, meta.max_kv_len)
        backend = load_backend(plan.backend)
        return attend_chunks(backend, plan, q_THD, meta.chunks, expand).out.flatten(1)

    def _attend_absorbed(
        self, tokens: "_Tokens", meta: PagedMetadata, ctx: ForwardContext
    ) -> Float[Tensor, "T HE"]:
        ops, sizes = select_mla(tokens.row_TX.device, self.fixed), self.sizes
        norm = LatentNorm(self.kv_a_norm.weight, self.kv_a_norm.eps)
        kv_b_HXR = self.kv_b_proj.weight.view(sizes.heads, -1, sizes.rank)
        k_b_HNR, v_b_HER = kv_b_HXR[:, : sizes.nope], kv_b_HXR[:, sizes.nope :]
        q_THC = ops.absorbed_queries(tokens.row_TX, k_b_HNR, norm, tokens.turns, sizes, tokens.into)
        plan = ctx.plans.select(self.absorbed, tokens.phase, meta.batch, meta.max_kv_len)
        cache_NPC, scales = ctx.pool.latent(self.layer), ctx.pool.scales(self.layer)
        out_THR = load_backend(plan.backend).latent(plan, q_THC, cache_NPC, meta, scales).out
        return ops.values(out_THR, v_b_HER)


class _Tokens(NamedTuple):
    """A phase's tokens: their projected rows, rotation and cache slots."""

    phase: Phase
    row_TX: Tensor
    turns: Turns
    into: LatentSlots
