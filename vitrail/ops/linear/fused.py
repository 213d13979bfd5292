"""Linear products on a GPU: ours in Triton where `table.way` says so, else the library's.

Legend: T tokens, K input channels, O output channels."""

import torch
from torch import Tensor

from vitrail.ops.launch import launch_early, may_start_early
from vitrail.ops.linear.table import Way, way
from vitrail.ops.linear.triton import rows_kernel
from vitrail.ops.norm.triton import add_rms_norm


def linear(x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """`naive.linear`."""
    chosen = None if bias_O is not None else _way(x_TK, weight_OK)
    if chosen is None:
        return torch.nn.functional.linear(x_TK, weight_OK, bias_O)
    return product(chosen, x_TK, weight_OK, x_TK.dtype)


def scores(x_TK: Tensor, weight_OK: Tensor) -> Tensor:
    """`naive.scores`, rounded to fp32 alone."""
    chosen = _way(x_TK, weight_OK)
    if chosen is not None:
        return product(chosen, x_TK, weight_OK, torch.float32)
    if x_TK.dtype == torch.float32:
        return torch.nn.functional.linear(x_TK, weight_OK)
    return torch.mm(x_TK, weight_OK.t(), out_dtype=torch.float32)


def add_norm_linear(
    x_TK: Tensor, residual_TK: Tensor | None, norm_K: Tensor, eps: float, weight_OK: Tensor
) -> tuple[Tensor, Tensor]:
    """`naive.add_norm_linear`; for a few tokens in one launch."""
    chosen = _way(x_TK, weight_OK, normed=True)
    if chosen is not None:
        return norm_product(chosen, x_TK, residual_TK, norm_K, eps, weight_OK)
    normed_TK, total_TK = add_rms_norm(x_TK, residual_TK, norm_K, eps)
    return linear(normed_TK, weight_OK, None), total_TK


def product(chosen: Way, x_TK: Tensor, weight_OK: Tensor, dtype: torch.dtype) -> Tensor:
    """x weight^T in `dtype`, the way that was chosen."""
    outputs, _ = _check(x_TK, weight_OK)
    out_TO = torch.empty((len(x_TK), outputs), dtype=dtype, device=x_TK.device)
    _launch(chosen, x_TK, (x_TK, x_TK), weight_OK, (out_TO, out_TO), 0.0, NORM=False, ADD=False)
    return out_TO


def norm_product(
    chosen: Way,
    x_TK: Tensor,
    residual_TK: Tensor | None,
    norm_K: Tensor,
    eps: float,
    weight_OK: Tensor,
) -> tuple[Tensor, Tensor]:
    """`naive.add_norm_linear`, the way that was chosen."""
    tokens, (outputs, channels) = len(x_TK), _check(x_TK, weight_OK)
    assert norm_K.shape == (channels,), f"{tuple(norm_K.shape)} for {channels} channels"
    out_TO = x_TK.new_empty((tokens, outputs))
    add = x_TK if residual_TK is None else residual_TK
    assert add.shape == x_TK.shape, f"{tuple(add.shape)} to {tuple(x_TK.shape)}"
    assert add.stride(1) == 1, add.stride()
    total_TK = x_TK if residual_TK is None else x_TK.new_empty((tokens, channels))
    results, adds = (out_TO, total_TK), residual_TK is not None
    _launch(chosen, x_TK, (add, norm_K), weight_OK, results, eps, NORM=True, ADD=adds)
    return results


def _launch(
    chosen: Way,
    x_TK: Tensor,
    before: tuple[Tensor, Tensor],
    weight_OK: Tensor,
    results: tuple[Tensor, Tensor],
    eps: float,
    **switches: bool,
) -> None:
    """`before`: what is added, and the norm; `results`: products and sums. Where `switches` leave
    something out, any tensor stands for it."""
    tokens, (outputs, channels) = len(x_TK), weight_OK.shape
    launch_early(
        rows_kernel,
        (-(-outputs // chosen.outputs),),
        x_TK.device,
        x_TK,
        *before,
        weight_OK,
        *results,
        tokens,
        x_TK.stride(0),
        before[0].stride(0),
        eps,
        TOKENS=1 << (tokens - 1).bit_length(),
        OUTPUTS=outputs,
        K=channels,
        K_BLOCK=chosen.channels,
        O_BLOCK=chosen.outputs,
        num_warps=chosen.warps,
        **switches,
    )


def _way(x_TK: Tensor, weight_OK: Tensor, normed: bool = False) -> Way | None:
    if x_TK.dtype != torch.bfloat16 or not may_start_early(x_TK.device):
        return None
    outputs, channels = weight_OK.shape
    return way(len(x_TK), outputs, channels, normed)


def _check(x_TK: Tensor, weight_OK: Tensor) -> tuple[int, int]:
    """Outputs and channels."""
    assert x_TK.shape[1] == weight_OK.shape[1], f"{tuple(x_TK.shape)}, {tuple(weight_OK.shape)}"
    assert weight_OK.is_contiguous(), weight_OK.stride()
    assert x_TK.stride(1) == 1, x_TK.stride()
    return weight_OK.shape[0], weight_OK.shape[1]
