"""The pre-norm transformer encoder that vision towers share.

Parameters: `blocks.N.{norm1,norm2}.{weight,bias}`, `blocks.N.attn.*` (see `attention`),
`blocks.N.mlp.{up,down}.{weight,bias}`, `norm.{weight,bias}`.

Legend: N packed patches, M hidden channels."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.attention.shape import AttentionSite
from vitrail.vision.attention import VisionAttention, VisionAttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """What a tower's blocks are made of. `gelu`: torch's name of the approximation."""

    site: AttentionSite
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_norm_eps: float
    rope_interleaved: bool
    gelu: Literal["none", "tanh"]


class Mlp(nn.Module):
    """down(gelu(up(x)))"""

    def __init__(self, shape: EncoderShape, dtype: torch.dtype):
        super().__init__()
        self.gelu = shape.gelu
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, dtype=dtype)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, dtype=dtype)

    def forward(self, x_NM: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
        return self.down(F.gelu(self.up(x_NM), approximate=self.gelu))


class EncoderBlock(nn.Module):
    """x + attn(norm1 x), then x + mlp(norm2 x)."""

    def __init__(self, shape: EncoderShape, dtype: torch.dtype):
        super().__init__()
        size, eps = shape.hidden_size, shape.layer_norm_eps
        self.norm1 = nn.LayerNorm(size, eps=eps, dtype=dtype)
        self.attn = VisionAttention(shape.site, size, shape.rope_interleaved, dtype)
        self.norm2 = nn.LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = Mlp(shape, dtype)

    def forward(
        self, x_NM: Float[Tensor, "N M"], meta: VisionAttentionMetadata
    ) -> Float[Tensor, "N M"]:
        x_NM = x_NM + self.attn(self.norm1(x_NM), meta)
        return x_NM + self.mlp(self.norm2(x_NM))


class Encoder(nn.Module):
    """All blocks and the final norm."""

    def __init__(self, shape: EncoderShape, dtype: torch.dtype):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(shape, dtype) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps, dtype=dtype)

    def forward(
        self, x_NM: Float[Tensor, "N M"], meta: VisionAttentionMetadata
    ) -> Float[Tensor, "N M"]:
        for block in self.blocks:
            x_NM = block(x_NM, meta)
        return self.norm(x_NM)
