"""The RMS norms in Triton: a program a row, read once where it fits.

Legend: T tokens, M channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.ops.launch import launch_early

WARP_CHANNELS = 512  # channels that a warp holds: two wide loads of bf16 a thread


def rms_norm(x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
    """`naive.rms_norm`. Rows of `x_TM` may be of any stride."""
    return _norm(x_TM, None, weight_M, eps)[0]


def add_rms_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`naive.add_rms_norm`."""
    if residual_TM is None:
        return rms_norm(x_TM, weight_M, eps), x_TM
    return _norm(x_TM, residual_TM, weight_M, eps)


def _norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    tokens, channels = x_TM.shape
    assert weight_M.shape == (channels,), f"{tuple(weight_M.shape)} for {channels} channels"
    assert x_TM.stride(1) == 1, x_TM.stride()
    out_TM = torch.empty_like(x_TM, memory_format=torch.contiguous_format)
    total_TM = out_TM if residual_TM is None else torch.empty_like(out_TM)
    add = x_TM if residual_TM is None else residual_TM
    assert add.shape == x_TM.shape, f"{tuple(add.shape)} to {tuple(x_TM.shape)}"
    assert add.stride(1) == 1, add.stride()
    if not tokens:
        return out_TM, total_TM
    block = triton.next_power_of_2(channels)
    launch_early(
        norm_kernel,
        (tokens,),
        x_TM.device,
        x_TM,
        add,
        weight_M,
        out_TM,
        total_TM,
        x_TM.stride(0),
        add.stride(0),
        eps,
        M=channels,
        M_BLOCK=block,
        ADD=residual_TM is not None,
        num_warps=max(1, min(16, block // WARP_CHANNELS)),
    )
    return out_TM, total_TM


@triton.jit(do_not_specialize=["eps"])
def norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    eps,
    M: tl.constexpr,
    M_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: row i. `total` is written where ADD. EARLY: launched while what is read may still
    be written."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, M_BLOCK)
    here = m < M
    w = tl.load(weight + m, mask=here, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + m, mask=here, other=0.0).to(tl.float32)
    if ADD:
        more = tl.load(residual + row * residual_stride + m, mask=here, other=0.0).to(tl.float32)
        rounded = (value + more).to(total.dtype.element_ty)
        tl.store(total + row * M + m, rounded, mask=here)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / M + eps)
    tl.store(out + row * M + m, (value * scale * w).to(out.dtype.element_ty), mask=here)
