"""Device side of products of a few rows. Channels past K and outputs past O are neither read nor
written. EARLY: launched while what is read, but for weights, may still be written."""

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
