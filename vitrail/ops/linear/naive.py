"""The definition of linear products.

Legend: T tokens, K input channels, O output channels."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.ops.norm.naive import add_rms_norm


def linear(
    x_TK: Float[Tensor, "T K"], weight_OK: Float[Tensor, "O K"], bias_O: Float[Tensor, "O"] | None
) -> Float[Tensor, "T O"]:
    """x weight^T + bias, rounded once to x's dtype."""
    return F.linear(x_TK, weight_OK, bias_O)


def scores(x_TK: Float[Tensor, "T K"], weight_OK: Float[Tensor, "O K"]) -> Float[Tensor, "T O"]:
    """x weight^T in fp32, of the operands' dtype otherwise: at least as exact as that dtype."""
    return F.linear(x_TK, weight_OK).float()


def add_norm_linear(
    x_TK: Float[Tensor, "T K"],
    residual_TK: Float[Tensor, "T K"] | None,
    norm_K: Float[Tensor, "K"],
    eps: float,
    weight_OK: Float[Tensor, "O K"],
) -> tuple[Float[Tensor, "T O"], Float[Tensor, "T K"]]:
    """(norm(x + residual) weight^T, x + residual), each step rounded to x's dtype; without a
    residual, of x alone."""
    normed_TK, total_TK = add_rms_norm(x_TK, residual_TK, norm_K, eps)
    return F.linear(normed_TK, weight_OK), total_TK
