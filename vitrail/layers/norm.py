"""RMS norm with a weight.

Legend: T tokens, M channels, O a linear layer's output channels."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.layers.linear import Linear, parameter
from vitrail.ops.dispatch import select_linear, select_norm


class RmsNorm(nn.Module):
    """`weight` [M]."""

    def __init__(self, channels: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = parameter(channels, dtype=dtype)

    def forward(self, x_TM: Float[Tensor, "T M"]) -> Float[Tensor, "T M"]:
        return select_norm(x_TM.device).rms_norm(x_TM, self.weight, self.eps)

    def add(
        self, x_TM: Float[Tensor, "T M"], residual_TM: Float[Tensor, "T M"] | None
    ) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]:
        """(norm of x + residual, x + residual); no residual yet: (norm of x, x)."""
        ops = select_norm(x_TM.device)
        return ops.add_rms_norm(x_TM, residual_TM, self.weight, self.eps)

    def add_into(
        self, linear: Linear, x_TM: Float[Tensor, "T M"], residual_TM: Float[Tensor, "T M"] | None
    ) -> tuple[Float[Tensor, "T O"], Float[Tensor, "T M"]]:
        """`add`, and `linear` (without a bias) of the normed."""
        assert linear.bias is None, "a norm before a product with a bias"
        ops = select_linear(x_TM.device, linear.fixed)
        return ops.add_norm_linear(x_TM, residual_TM, self.weight, self.eps, linear.weight)
