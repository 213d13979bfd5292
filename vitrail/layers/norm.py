"""RMS norm with a weight.

Legend: T tokens, M channels."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.layers.linear import parameter
from vitrail.ops.norm.naive import add_rms_norm, rms_norm


class RmsNorm(nn.Module):
    """`weight` [M]."""

    def __init__(self, channels: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = parameter(channels, dtype=dtype)

    def forward(self, x_TM: Float[Tensor, "T M"]) -> Float[Tensor, "T M"]:
        return rms_norm(x_TM, self.weight, self.eps)

    def add(
        self, x_TM: Float[Tensor, "T M"], residual_TM: Float[Tensor, "T M"] | None
    ) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]:
        """(norm of x + residual, x + residual); no residual yet: (norm of x, x)."""
        if residual_TM is None:
            return self(x_TM), x_TM
        return add_rms_norm(x_TM, residual_TM, self.weight, self.eps)
