"""Multi-head latent attention, in its two equal forms.

A token leaves one cache row for all heads: [normed latent | rotated key channels]. *Expanded*: rows
are multiplied out to per-head keys and values, piece by piece, and attended as usual: less work for
a prefill. *Absorbed*: the key matrix moves to the query and the value matrix behind the attention,
which then reads the rows as they are: less memory traffic for a decode.

    q . k  =  q_nope . (W_k c) + q_pe . k_pe  =  (W_k^T q_nope) . c + q_pe . k_pe
    sum p v  =  sum p (W_v c)  =  W_v (sum p c)

Legend: T packed tokens, S gathered cache rows, M hidden channels, H heads, D = N + P query and key
channels (N without position, P rotary), R latent rank, C = R + P cache row, E value channels."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.attention.backend import load_backend
from vitrail.attention.chunked import attend_chunks
from vitrail.attention.metadata import PagedMetadata, gather_slots, with_chunks
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.kv_pool import dequantized
from vitrail.cache.spec import LatentKv
from vitrail.config.model import DType, MlaConfig, TextConfig
from vitrail.layers.context import ForwardContext
from vitrail.layers.linear import Linear
from vitrail.layers.norm import RmsNorm
from vitrail.layers.rotary import Rotary

Form = Literal["expanded", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaForms:
    """Which form each part of a step uses. Equal in value; the defaults are the quick ones."""

    prefill: Form = "expanded"
    decode: Form = "absorbed"


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
    prefill = (
        (expanded_site(text), Phase.PREFILL)
        if forms.prefill == "expanded"
        else (absorbed_site(text), Phase.EXTEND)
    )
    decode = (
        (expanded_site(text), Phase.PREFILL)
        if forms.decode == "expanded"
        else (absorbed_site(text), Phase.DECODE)
    )
    return tuple(dict.fromkeys((prefill, decode)))


def mla_context(ctx: ForwardContext, forms: MlaForms) -> ForwardContext:
    """`ctx` with the pieces that expanding layers attend by, made once for all layers of a step
    where whoever laid it out did not."""
    prefill, decode = ctx.prefill, ctx.decode
    if prefill is not None and forms.prefill == "expanded" and not prefill.chunks:
        prefill = with_chunks(prefill)
    if decode is not None and forms.decode == "expanded":
        decode = with_chunks(decode)
    return replace(ctx, prefill=prefill, decode=decode)


class MlaAttention(nn.Module):
    """Layer `layer` of a decoder. `kv_a_proj` gives [latent | rotary channels]; `k_b_proj` [H N, R]
    and `v_b_proj` [H E, R] are the two halves of the published kv_b_proj, heads outermost."""

    def __init__(self, text: TextConfig, layer: int, dtype: torch.dtype, forms: MlaForms):
        super().__init__()
        mla = mla_config(text)
        self.layer, self.forms = layer, forms
        self.num_heads, self.head_dim = text.num_heads, text.head_dim
        self.nope, self.rank = mla.qk_nope_head_dim, mla.kv_lora_rank
        self.v_dim = mla.v_head_dim
        self.expanded, self.absorbed = expanded_site(text), absorbed_site(text)
        heads, row = text.num_heads, mla.kv_lora_rank + mla.qk_rope_head_dim
        self.q_proj = Linear(text.hidden_size, heads * text.head_dim, dtype)
        self.kv_a_proj = Linear(text.hidden_size, row, dtype)
        self.kv_a_norm = RmsNorm(mla.kv_lora_rank, mla.kv_norm_eps, dtype)
        self.k_b_proj = Linear(mla.kv_lora_rank, heads * mla.qk_nope_head_dim, dtype)
        self.v_b_proj = Linear(mla.kv_lora_rank, heads * mla.v_head_dim, dtype)
        self.o_proj = Linear(heads * mla.v_head_dim, text.hidden_size, dtype)

    def forward(
        self, x_TM: Float[Tensor, "T M"], rotary: Rotary, ctx: ForwardContext
    ) -> Float[Tensor, "T M"]:
        """Writes the tokens' rows to the cache, then attends to everything written, as it was
        stored."""
        q_THD = self.q_proj(x_TM).view(-1, self.num_heads, self.head_dim)
        q_THD = torch.cat((q_THD[..., : self.nope], rotary(q_THD[..., self.nope :])), dim=-1)
        row_TC = self.kv_a_proj(x_TM)
        latent_TR = self.kv_a_norm(row_TC[:, : self.rank])
        k_pe_TP = rotary(row_TC[:, None, self.rank :])[:, 0]
        ctx.pool.write_latent(self.layer, ctx.cache_slots, torch.cat((latent_TR, k_pe_TP), dim=-1))
        split = ctx.num_prefill
        parts: list[Tensor] = []
        if ctx.prefill is not None:
            form = self.forms.prefill
            parts.append(self._attend(form, Phase.EXTEND, q_THD[:split], ctx.prefill, ctx))
        if ctx.decode is not None:
            form = self.forms.decode
            parts.append(self._attend(form, Phase.DECODE, q_THD[split:], ctx.decode, ctx))
        out_THE = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out_THE.flatten(1))

    def _attend(
        self,
        form: Form,
        phase: Phase,
        q_THD: Float[Tensor, "T H D"],
        meta: PagedMetadata,
        ctx: ForwardContext,
    ) -> Float[Tensor, "T H E"]:
        if form == "expanded":
            return self._attend_expanded(q_THD, meta, ctx)
        return self._attend_absorbed(phase, q_THD, meta, ctx)

    def _attend_expanded(
        self, q_THD: Float[Tensor, "T H D"], meta: PagedMetadata, ctx: ForwardContext
    ) -> Float[Tensor, "T H E"]:
        cache_NPC, scale = ctx.pool.latent(self.layer), ctx.pool.scales(self.layer).k

        def expand(
            slots_S: Int[Tensor, "S"],
        ) -> tuple[Float[Tensor, "S H D"], Float[Tensor, "S H E"]]:
            row_SC = dequantized(gather_slots(cache_NPC, slots_S), scale, q_THD.dtype)
            latent_SR, k_pe_SP = row_SC[:, : self.rank], row_SC[:, self.rank :]
            k_SHN = self.k_b_proj(latent_SR).view(-1, self.num_heads, self.nope)
            v_SHE = self.v_b_proj(latent_SR).view(-1, self.num_heads, self.v_dim)
            k_pe_SHP = k_pe_SP[:, None].expand(-1, self.num_heads, -1)
            return torch.cat((k_SHN, k_pe_SHP), dim=-1), v_SHE

        assert meta.chunks, "the model gives its layers an `mla_context`"
        plan = ctx.plans.select(self.expanded, Phase.PREFILL, meta.batch, meta.max_kv_len)
        return attend_chunks(load_backend(plan.backend), plan, q_THD, meta.chunks, expand).out

    def _attend_absorbed(
        self,
        phase: Phase,
        q_THD: Float[Tensor, "T H D"],
        meta: PagedMetadata,
        ctx: ForwardContext,
    ) -> Float[Tensor, "T H E"]:
        k_b_HNR = self.k_b_proj.weight.view(self.num_heads, self.nope, self.rank)
        v_b_HER = self.v_b_proj.weight.view(self.num_heads, self.v_dim, self.rank)
        q_HTN = q_THD[..., : self.nope].transpose(0, 1)
        q_THR = torch.bmm(q_HTN, k_b_HNR).transpose(0, 1)
        q_THC = torch.cat((q_THR, q_THD[..., self.nope :]), dim=-1)
        plan = ctx.plans.select(self.absorbed, phase, meta.batch, meta.max_kv_len)
        cache_NPC, scales = ctx.pool.latent(self.layer), ctx.pool.scales(self.layer)
        out_THR = load_backend(plan.backend).latent(plan, q_THC, cache_NPC, meta, scales).out
        return torch.bmm(out_THR.transpose(0, 1), v_b_HER.transpose(1, 2)).transpose(0, 1)
