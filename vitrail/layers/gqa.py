"""Grouped-query attention: keys and values kept by head in pages, several query heads reading each.

Legend: T packed tokens, M hidden channels, H query heads, K key heads, D head_dim."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.attention.backend import load_backend
from vitrail.attention.metadata import PagedMetadata
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import PagedKv
from vitrail.config.model import DType, GqaConfig, TextConfig
from vitrail.layers.context import ForwardContext
from vitrail.layers.linear import Linear
from vitrail.layers.rotary import Rotary
from vitrail.ops.dispatch import select_paged_queries
from vitrail.ops.gqa.naive import GqaSizes


def gqa_config(text: TextConfig) -> GqaConfig:
    """The grouped-query attention of a model that has one."""
    assert text.gqa is not None, "a model without grouped-query attention"
    return text.gqa


def gqa_cache_spec(text: TextConfig, dtype: DType) -> PagedKv:
    """What each layer keeps for a token. A layer with a window keeps what left it, too."""
    return PagedKv(
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        head_dim_v=text.head_dim,
        dtype=dtype,
    )


def gqa_site(text: TextConfig, layer: int) -> AttentionSite:
    """Scale D^-0.5, and the layer's window."""
    return AttentionSite(
        num_q_heads=text.num_heads,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        head_dim_v=text.head_dim,
        scale=text.head_dim**-0.5,
        causal=True,
        window=gqa_config(text).windows[layer],
    )


def gqa_sites(text: TextConfig) -> tuple[tuple[AttentionSite, Phase], ...]:
    """Every (site, phase) that the layers call."""
    sites = dict.fromkeys(gqa_site(text, layer) for layer in range(text.num_layers))
    return tuple((site, phase) for site in sites for phase in (Phase.EXTEND, Phase.DECODE))


class GqaAttention(nn.Module):
    """Layer `layer` of a decoder. `qkv_proj` gives [q | k | v], each by head."""

    def __init__(self, text: TextConfig, layer: int, dtype: torch.dtype):
        super().__init__()
        gqa, dim = gqa_config(text), text.head_dim
        self.layer, self.site = layer, gqa_site(text, layer)
        self.sizes = GqaSizes(text.num_heads, text.num_kv_heads, dim)
        self.qkv_proj = Linear(text.hidden_size, self.sizes.projected, dtype, gqa.qkv_bias)
        self.o_proj = Linear(text.num_heads * dim, text.hidden_size, dtype, gqa.out_bias)

    def forward(
        self, x_TM: Float[Tensor, "T M"], rotary: Rotary, ctx: ForwardContext
    ) -> Float[Tensor, "T M"]:
        """Writes the tokens' keys and values to the cache, then attends to everything written."""
        paged_queries = select_paged_queries(x_TM.device)
        into = ctx.pool.paged_slots(self.layer, ctx.cache_slots)
        turns = rotary.part(slice(None))
        q_THD = paged_queries(self.qkv_proj(x_TM), turns, self.sizes, into)
        split = ctx.num_prefill
        parts: list[Tensor] = []
        if ctx.prefill is not None:
            parts.append(self._attend(Phase.EXTEND, q_THD[:split], ctx.prefill, ctx))
        if ctx.decode is not None:
            parts.append(self._attend(Phase.DECODE, q_THD[split:], ctx.decode, ctx))
        out_THD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out_THD.flatten(1))

    def _attend(
        self,
        phase: Phase,
        q_THD: Float[Tensor, "T H D"],
        meta: PagedMetadata,
        ctx: ForwardContext,
    ) -> Float[Tensor, "T H D"]:
        plan = ctx.plans.select(self.site, phase, meta.batch, meta.max_kv_len)
        k_NPKD, v_NPKD = ctx.pool.paged(self.layer)
        scales = ctx.pool.scales(self.layer)
        backend = load_backend(plan.backend)
        return backend.paged(plan, q_THD, k_NPKD, v_NPKD, meta, None, scales).out
