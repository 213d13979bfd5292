"""Device side of products of a few rows, and of those that are alike for any number. Channels past
K and outputs past O are neither read nor written. EARLY: launched while what is read, but for
weights, may still be written."""

# static_range is traced, never iterated
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens", "eps"])
def rows_kernel(
    x,
    residual,
    norm,
    weight,
    out,
    total,
    tokens,
    x_stride,
    residual_stride,
    eps,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    O_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: outputs [i * O_BLOCK, ...) of all tokens, at most TOKENS, one after another.
    NORM: of norm(x), or of norm(x + residual) where ADD; the first program writes that sum to
    `total`."""
    k = tl.arange(0, K_BLOCK)
    o = tl.program_id(0).to(tl.int64) * O_BLOCK + tl.arange(0, O_BLOCK)
    inside = (o < OUTPUTS)[:, None] & (k < K)[None, :]
    w = tl.load(
        weight + o[:, None] * K + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )
    if NORM:
        gain = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    wide = w.to(tl.float32)
    for t in tl.static_range(TOKENS):
        there = k < tl.where(t < tokens, K, 0)
        value = tl.load(x + t * x_stride + k, mask=there, other=0.0).to(tl.float32)
        if ADD:
            more = tl.load(residual + t * residual_stride + k, mask=there, other=0.0)
            value = (value + more.to(tl.float32)).to(total.dtype.element_ty).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total + t * K + k, value.to(total.dtype.element_ty), mask=there)
        if NORM:
            value = value * tl.rsqrt(tl.sum(value * value, 0) / K + eps) * gain
            value = value.to(x.dtype.element_ty).to(tl.float32)
        product = tl.sum(wide * value[None, :], 1).to(out.dtype.element_ty)
        tl.store(out + t * OUTPUTS + o, product, mask=o < tl.where(t < tokens, OUTPUTS, 0))


@triton.jit(do_not_specialize=["tokens"])
def fixed_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    x_stride,
    weight_stride,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    T_BLOCK: tl.constexpr,
    O_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A program: T_BLOCK tokens by O_BLOCK outputs, channels in their order in fp32. Programs next
    to each other share their outputs' rows of the matrix. Nothing but the grid and the masks
    depends on the number of tokens."""
    down = tl.cdiv(tokens, T_BLOCK)
    t = (tl.program_id(0) % down).to(tl.int64) * T_BLOCK + tl.arange(0, T_BLOCK)
    o = (tl.program_id(0) // down).to(tl.int64) * O_BLOCK + tl.arange(0, O_BLOCK)
    k = tl.arange(0, K_BLOCK)
    x_at = x + t[:, None] * x_stride + k[None, :]
    weight_at = weight + o[:, None] * weight_stride + k[None, :]
    t_in, o_in = (t < tokens)[:, None], (o < OUTPUTS)[:, None]
    acc = tl.zeros([T_BLOCK, O_BLOCK], tl.float32)
    for k0 in range(0, K, K_BLOCK):
        if K % K_BLOCK == 0:
            a = tl.load(x_at + k0, mask=t_in, other=0.0)
            b = tl.load(weight_at + k0, mask=o_in, other=0.0)
        else:
            k_in = (k0 + k < K)[None, :]
            a = tl.load(x_at + k0, mask=t_in & k_in, other=0.0)
            b = tl.load(weight_at + k0, mask=o_in & k_in, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + o, mask=o < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    at = out + t[:, None] * OUTPUTS + o[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=t_in & (o < OUTPUTS)[None, :])
