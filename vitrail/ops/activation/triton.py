"""The gated activation in Triton.

Legend: T tokens, I intermediate channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.ops.launch import launch_early

CHANNELS = 1024  # a program's
WARPS = 4


def silu_mul(gate_up: Tensor) -> Tensor:
    """`naive.silu_mul`. Rows of `gate_up` [T, 2 I] may be of any stride."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * inner, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    out_TI = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if not tokens:
        return out_TI
    launch_early(
        silu_mul_kernel,
        (tokens, triton.cdiv(inner, CHANNELS)),
        gate_up.device,
        gate_up,
        out_TI,
        gate_up.stride(0),
        inner,
        BLOCK=CHANNELS,
        num_warps=WARPS,
    )
    return out_TI


@triton.jit
def silu_mul_kernel(gate_up, out, stride, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (i, j): channels of block j of row i. The gate is rounded once more after silu, as
    the definition rounds it."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * stride + i, mask=i < inner, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + i, mask=i < inner, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32)
    product = silu * up.to(tl.float32)
    tl.store(out + row * inner + i, product.to(out.dtype.element_ty), mask=i < inner)
