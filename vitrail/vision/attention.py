"""`VisionAttention`: the only attention of every vision tower. Packed sequences of patches, each
attending to itself; what varies by tower is in its `AttentionSite` (window, sink) and in how the
rotary pairs are laid out.

Parameters: `qkv.{weight [(H + 2K) D, M], bias}` (rows q | k | v), `out.{weight [M, H D], bias}`,
and `sink [H]` where the site has one.

Legend: N packed patches, M hidden channels, H query heads, K key heads, D head_dim, F rotary
pairs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.attention.backend import load_backend
from vitrail.attention.metadata import VarlenMetadata
from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.ops.dispatch import select_vision
from vitrail.ops.vision.naive import Grids
from vitrail.vision.linear import TowerLinear


class RotaryTable(NamedTuple):
    """fp32 cos and sin of every patch's rotary pairs."""

    cos: Float[Tensor, "N F"]
    sin: Float[Tensor, "N F"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionAttentionMetadata:
    """What all layers of a tower need to know of a batch. `rotary` None: nothing is rotated."""

    varlen: VarlenMetadata
    rotary: RotaryTable | None
    plans: PlanTable


def prepare_vision_attention_metadata(
    grids: Grids, rotary: RotaryTable | None, plans: PlanTable
) -> VisionAttentionMetadata:
    """Once a batch, from host ints; no layer asks the device for anything. A grid is an attention
    sequence."""
    lengths = tuple(height * width for height, width in grids.sizes)
    varlen = VarlenMetadata(
        q_lens=lengths,
        kv_lens=lengths,
        q_starts=(0,) * len(lengths),
        cu_q=grids.edges,
        cu_kv=grids.edges,
        longest=grids.longest,
        mended=rotary is not None and select_vision(grids.ints.device).MENDS,
    )
    return VisionAttentionMetadata(varlen=varlen, rotary=rotary, plans=plans)


class VisionAttention(nn.Module):
    """Fused projection, rotation, planned attention, output projection."""

    def __init__(
        self, site: AttentionSite, hidden_size: int, rope_interleaved: bool, dtype: torch.dtype
    ):
        super().__init__()
        assert site.head_dim == site.head_dim_v, "one fused projection for keys and values"
        self.site = site
        self.rope_interleaved = rope_interleaved
        self.heads = (site.num_q_heads, site.num_kv_heads, site.num_kv_heads)
        self.qkv = TowerLinear(hidden_size, sum(self.heads) * site.head_dim, dtype=dtype)
        self.out = TowerLinear(site.num_q_heads * site.head_dim, hidden_size, dtype=dtype)
        self.sink = nn.Parameter(torch.zeros(site.num_q_heads, dtype=dtype)) if site.sink else None

    def forward(
        self, x_NM: Float[Tensor, "N M"], meta: VisionAttentionMetadata
    ) -> Float[Tensor, "N M"]:
        qkv_NHD = self.qkv(x_NM).unflatten(1, (sum(self.heads), self.site.head_dim))
        if meta.rotary is None:
            q_NHD, k_NKD, v_NKD = qkv_NHD.split(self.heads, dim=1)
        else:
            q_NHD, k_NKD, v_NKD = select_vision(x_NM.device).rotate_heads(
                qkv_NHD, self.heads, *meta.rotary, self.rope_interleaved
            )
        varlen = meta.varlen
        plan = meta.plans.select(self.site, Phase.ENCODE, varlen.batch, varlen.max_kv_len)
        backend = load_backend(plan.backend)
        out_NHD, _ = backend.varlen(plan, q_NHD, k_NKD, v_NKD, varlen, self.sink)
        return self.out(out_NHD.flatten(1))
