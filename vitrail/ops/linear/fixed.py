"""Linear products on a GPU whose rows do not depend on how many there are: one kernel in tiles that
follow from the matrix alone, every sum over all channels in their order.

Legend: T tokens, K input channels, O output channels."""

import torch
from torch import Tensor

from vitrail.ops.launch import launch
from vitrail.ops.linear.table import fixed_way
from vitrail.ops.linear.triton import fixed_kernel
from vitrail.ops.norm.triton import add_rms_norm


def linear(x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """`naive.linear`."""
    return product(x_TK, weight_OK, bias_O, x_TK.dtype)


def scores(x_TK: Tensor, weight_OK: Tensor) -> Tensor:
    """`naive.scores`, rounded to fp32 alone."""
    return product(x_TK, weight_OK, None, torch.float32)


def add_norm_linear(
    x_TK: Tensor, residual_TK: Tensor | None, norm_K: Tensor, eps: float, weight_OK: Tensor
) -> tuple[Tensor, Tensor]:
    """`naive.add_norm_linear`."""
    normed_TK, total_TK = add_rms_norm(x_TK, residual_TK, norm_K, eps)
    return linear(normed_TK, weight_OK, None), total_TK


def product(x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x weight^T + bias in `dtype`. Leading axes of x are as they were."""
    lead, (outputs, channels) = x_TK.shape[:-1], weight_OK.shape
    assert x_TK.shape[-1] == channels, f"{tuple(x_TK.shape)}, {tuple(weight_OK.shape)}"
    assert x_TK.dtype == weight_OK.dtype, (x_TK.dtype, weight_OK.dtype)
    assert weight_OK.stride(1) == 1, weight_OK.stride()
    rows_TK = x_TK if x_TK.dim() == 2 and x_TK.stride(1) == 1 else x_TK.reshape(-1, channels)
    rows_TK = rows_TK if rows_TK.stride(1) == 1 else rows_TK.contiguous()
    tokens = len(rows_TK)
    out_TO = torch.empty((tokens, outputs), dtype=dtype, device=x_TK.device)
    made = fixed_way(outputs)
    if tokens:
        across = -(-outputs // made.outputs)
        launch(
            fixed_kernel,
            (-(-tokens // made.tokens) * across,),
            x_TK.device,
            rows_TK,
            weight_OK,
            weight_OK if bias_O is None else bias_O,
            out_TO,
            tokens,
            rows_TK.stride(0),
            weight_OK.stride(0),
            OUTPUTS=outputs,
            K=channels,
            T_BLOCK=made.tokens,
            O_BLOCK=made.outputs,
            K_BLOCK=made.channels,
            BIAS=bias_O is not None,
            num_warps=made.warps,
            num_stages=made.stages,
        )
    return out_TO.view(*lead, outputs)
