"""The definition of the RMS norms.

Legend: T tokens, M channels."""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x_TM: Float[Tensor, "T M"], weight_M: Float[Tensor, "M"], eps: float
) -> Float[Tensor, "T M"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: fp32 inside, rounded once to x's
    dtype."""
    x32 = x_TM.float()
    scale_T1 = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale_T1 * weight_M.float()).to(x_TM.dtype)


def add_rms_norm(
    x_TM: Float[Tensor, "T M"],
    residual_TM: Float[Tensor, "T M"] | None,
    weight_M: Float[Tensor, "M"],
    eps: float,
) -> tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]:
    """(norm of x + residual, x + residual). The sum is rounded to x's dtype before it is normed. No
    residual: (norm of x, x)."""
    if residual_TM is None:
        return rms_norm(x_TM, weight_M, eps), x_TM
    total_TM = x_TM + residual_TM
    return rms_norm(total_TM, weight_M, eps), total_TM
