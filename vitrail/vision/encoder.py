"""The pre-norm transformer encoder that vision towers share.

Parameters: `blocks.N.{norm1,norm2}.{weight,bias}`, `blocks.N.attn.*` (see `attention`),
`blocks.N.mlp.{up,down}.{weight,bias}`, `norm.{weight,bias}`.

Legend: N packed patches, M hidden channels."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.attention.shape import AttentionSite
from vitrail.config.model import VisionConfig
from vitrail.ops.dispatch import select_vision
from vitrail.vision.attention import VisionAttention, VisionAttentionMetadata
from vitrail.vision.linear import TowerLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """What a tower's blocks are made of."""

    site: AttentionSite
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layer_norm_eps: float
    rope_interleaved: bool


def tower_site(config: VisionConfig) -> AttentionSite:
    """Full bidirectional attention within a sequence of patches."""
    return AttentionSite(
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim,
        scale=config.head_dim**-0.5,
        causal=False,
    )


def encoder_shape(config: VisionConfig, num_layers: int, rope_interleaved: bool) -> EncoderShape:
    """Of a tower that computes `num_layers`."""
    return EncoderShape(
        site=tower_site(config),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        layer_norm_eps=config.layer_norm_eps,
        rope_interleaved=rope_interleaved,
    )


class Residual(NamedTuple):
    """x + delta, not added yet; `delta` None: x. Who adds may overwrite delta."""

    x: Float[Tensor, "N M"]
    delta: Float[Tensor, "N M"] | None


def add_norm(x: Residual, norm: nn.LayerNorm) -> tuple[Float[Tensor, "N M"], Float[Tensor, "N M"]]:
    """(norm of the sum, the sum)."""
    ops = select_vision(x.x.device)
    if x.delta is None:
        return ops.layer_norm(x.x, norm.weight, norm.bias, norm.eps), x.x
    return ops.add_layer_norm(x.x, x.delta, norm.weight, norm.bias, norm.eps)


class Mlp(nn.Module):
    """down(gelu(up(x))), gelu by tanh."""

    def __init__(self, shape: EncoderShape, dtype: torch.dtype):
        super().__init__()
        self.up = TowerLinear(shape.hidden_size, shape.intermediate_size, dtype=dtype)
        self.down = TowerLinear(shape.intermediate_size, shape.hidden_size, dtype=dtype)

    def forward(self, x_NM: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
        return self.down(self.up.gelu(x_NM, "tanh"))


class EncoderBlock(nn.Module):
    """x + attn(norm1 x), then x + mlp(norm2 x). The last sum is left to whoever reads it, who norms
    it in the same pass."""

    def __init__(self, shape: EncoderShape, dtype: torch.dtype):
        super().__init__()
        size, eps = shape.hidden_size, shape.layer_norm_eps
        self.norm1 = nn.LayerNorm(size, eps=eps, dtype=dtype)
        self.attn = VisionAttention(shape.site, size, shape.rope_interleaved, dtype)
        self.norm2 = nn.LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = Mlp(shape, dtype)

    def forward(self, x: Residual, meta: VisionAttentionMetadata) -> Residual:
        normed_NM, x_NM = add_norm(x, self.norm1)
        delta_NM = self.attn(normed_NM, meta)
        normed_NM, x_NM = add_norm(Residual(x_NM, delta_NM), self.norm2)
        return Residual(x_NM, self.mlp(normed_NM))


class Encoder(nn.Module):
    """All blocks and the final norm."""

    def __init__(self, shape: EncoderShape, dtype: torch.dtype):
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(shape, dtype) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps, dtype=dtype)

    def forward(
        self, x_NM: Float[Tensor, "N M"], meta: VisionAttentionMetadata
    ) -> Float[Tensor, "N M"]:
        x = Residual(x_NM, None)
        for block in self.blocks:
            x = block(x, meta)
        return add_norm(x, self.norm)[0]
