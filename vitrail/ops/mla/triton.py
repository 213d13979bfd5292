"""Device side of the steps around latent attention.

What lies in a projected row is in `naive`. All addresses of rows are in int64; channels past a size
are neither read nor written; a token past `tokens` neither."""

# static_range is traced, never iterated; a constant given to a jitted function is a constexpr in it
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.ops.rope.triton import stored, turn


@triton.jit
def _write_row(
    latent,
    norm,
    cos,
    sin,
    slot,
    cache,
    page_stride,
    slot_stride,
    page_size,
    eps,
    unscale,
    R: tl.constexpr,
    R_ALL: tl.constexpr,
    F: tl.constexpr,
    F_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E4M3: tl.constexpr,
):
    """One token's cache row: `latent` points at its C projected channels."""
    r = tl.arange(0, R_ALL)
    f = tl.arange(0, F_BLOCK)
    x = tl.load(latent + r, mask=r < R, other=0.0).to(tl.float32)
    weight = tl.load(norm + r, mask=r < R, other=0.0).to(tl.float32)
    c = tl.load(cos + f, mask=f < F, other=0.0)[None, :]
    s = tl.load(sin + f, mask=f < F, other=0.0)[None, :]
    at = cache + slot // page_size * page_stride + slot % page_size * slot_stride
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / R + eps) * weight
    kept = stored(normed.to(latent.dtype.element_ty), cache, unscale, E4M3)
    tl.store(at + r, kept, mask=r < R)
    one = tl.arange(0, 1)
    turn(latent + R + one, at + R + one, one == 0, c, s, unscale, F, 1, F_BLOCK, INTERLEAVED, E4M3)


@triton.jit(
    do_not_specialize=["eps", "unscale", "page_size"],
    do_not_specialize_on_alignment=["slots"],
)
def expanded_kernel(
    row,
    norm,
    cos,
    sin,
    slots,
    cache,
    row_stride,
    page_stride,
    slot_stride,
    page_size,
    eps,
    unscale,
    H: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    H_BLOCK: tl.constexpr,
    F_BLOCK: tl.constexpr,
    R_ALL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E4M3: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: token i's rotary query channels, turned where they are, and its cache row."""
    token = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = N + 2 * F
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = row + token * row_stride
    cos_at, sin_at = cos + token * F, sin + token * F
    f = tl.arange(0, F_BLOCK)
    h = tl.arange(0, H_BLOCK)
    c = tl.load(cos_at + f, mask=f < F, other=0.0)[None, :]
    s = tl.load(sin_at + f, mask=f < F, other=0.0)[None, :]
    heads = at + h * D + N
    turn(heads, heads, h < H, c, s, unscale, F, H_BLOCK, F_BLOCK, INTERLEAVED, False)
    _write_row(
        at + H * D, norm, cos_at, sin_at, tl.load(slots + token).to(tl.int64), cache, page_stride,
        slot_stride, page_size, eps, unscale, R, R_ALL, F, F_BLOCK, INTERLEAVED, E4M3,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["eps", "unscale", "page_size", "tokens"],
    do_not_specialize_on_alignment=["slots"],
)
def absorbed_kernel(
    row,
    k_b,
    norm,
    cos,
    sin,
    slots,
    cache,
    out,
    tokens,
    row_stride,
    k_b_head,
    page_stride,
    slot_stride,
    page_size,
    eps,
    unscale,
    H: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    TILE_T: tl.constexpr,
    N_BLOCK: tl.constexpr,
    R_BLOCK: tl.constexpr,
    F_BLOCK: tl.constexpr,
    R_ALL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOT: tl.constexpr,
    E4M3: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs from 0 on: (tile of tokens, head, block of R) of the product; the head's first block
    turns its rotary channels too. Then a program a token for its cache row. Without DOT there is
    one tile of all tokens."""
    blocks: tl.constexpr = (R + R_BLOCK - 1) // R_BLOCK
    D: tl.constexpr = N + 2 * F
    program = tl.program_id(0)
    products = tl.cdiv(tokens, TILE_T) * H * blocks
    if EARLY:
        gdc_launch_dependents()
    if program >= products:
        token = (program - products).to(tl.int64)
        if EARLY:
            gdc_wait()
        _write_row(
            row + token * row_stride + H * D, norm, cos + token * F, sin + token * F,
            tl.load(slots + token).to(tl.int64), cache, page_stride, slot_stride, page_size, eps,
            unscale, R, R_ALL, F, F_BLOCK, INTERLEAVED, E4M3,
        )  # fmt: skip
    else:
        block = program % blocks
        head = program // blocks % H
        first = (program // blocks // H).to(tl.int64) * TILE_T
        n = tl.arange(0, N_BLOCK)
        r = block * R_BLOCK + tl.arange(0, R_BLOCK)
        inside = (n < N)[:, None] & (r < R)[None, :]
        matrix = k_b + head.to(tl.int64) * k_b_head + n[:, None] * R + r[None, :]
        weight = tl.load(matrix, mask=inside, other=0.0)
        if EARLY:
            gdc_wait()
        dtype = out.dtype.element_ty
        if DOT:
            t = first + tl.arange(0, TILE_T)
            queries = row + t[:, None] * row_stride + head * D + n[None, :]
            q = tl.load(queries, mask=(t < tokens)[:, None] & (n < N)[None, :], other=0.0)
            product = tl.dot(q, weight, input_precision="ieee").to(dtype)
            to = out + (t[:, None] * H + head) * (R + 2 * F) + r[None, :]
            tl.store(to, product, mask=(t < tokens)[:, None] & (r < R)[None, :])
        else:
            wide = weight.to(tl.float32)
            for i in tl.static_range(TILE_T):
                token = first + i
                lives = token < tokens
                at = row + token * row_stride + head * D + n
                q = tl.load(at, mask=n < tl.where(lives, N, 0), other=0.0)
                product = tl.sum(q.to(tl.float32)[:, None] * wide, 0).to(dtype)
                to = out + (token * H + head) * (R + 2 * F) + r
                tl.store(to, product, mask=r < tl.where(lives, R, 0))
        if block == 0:
            _turn_head(
                row + head * D, cos, sin, out + head * (R + 2 * F), first, tokens, row_stride, H,
                N, F, R, TILE_T, F_BLOCK, INTERLEAVED,
            )  # fmt: skip


@triton.jit
def _turn_head(
    row,
    cos,
    sin,
    out,
    first,
    tokens,
    row_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    TILE_T: tl.constexpr,
    F_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotary channels of a head's queries from token `first` on, behind their R absorbed ones."""
    f = tl.arange(0, F_BLOCK)[None, :]
    t = first + tl.arange(0, TILE_T)
    live = t < tokens
    there = live[:, None] & (f < F)
    c = tl.load(cos + t[:, None] * F + f, mask=there, other=0.0)
    s = tl.load(sin + t[:, None] * F + f, mask=there, other=0.0)
    to = out + t * (H * (R + 2 * F)) + R
    at = row + t * row_stride + N
    turn(at, to, live, c, s, 1.0, F, TILE_T, F_BLOCK, INTERLEAVED, False)


@triton.jit(do_not_specialize=["tokens"])
def values_kernel(
    x,
    v_b,
    out,
    tokens,
    x_token,
    x_head,
    v_b_head,
    H: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    TILE_T: tl.constexpr,
    E_BLOCK: tl.constexpr,
    R_BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program: (tile of tokens, head, block of E). R_BLOCK covers R. Without DOT there is one tile
    of all tokens."""
    blocks: tl.constexpr = (E + E_BLOCK - 1) // E_BLOCK
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % H
    first = (program // blocks // H).to(tl.int64) * TILE_T
    e = block * E_BLOCK + tl.arange(0, E_BLOCK)
    r = tl.arange(0, R_BLOCK)
    matrix = v_b + head.to(tl.int64) * v_b_head + e[:, None] * R + r[None, :]
    weight = tl.load(matrix, mask=(e < E)[:, None] & (r < R)[None, :], other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dtype = out.dtype.element_ty
    if DOT:
        t = first + tl.arange(0, TILE_T)
        rows = x + t[:, None] * x_token + head * x_head + r[None, :]
        part = tl.load(rows, mask=(t < tokens)[:, None] & (r < R)[None, :], other=0.0)
        product = tl.dot(part, tl.trans(weight), input_precision="ieee")
        to = out + t[:, None] * (H * E) + head * E + e[None, :]
        tl.store(to, product.to(dtype), mask=(t < tokens)[:, None] & (e < E)[None, :])
    else:
        wide = weight.to(tl.float32)
        for i in tl.static_range(TILE_T):
            token = first + i
            lives = token < tokens
            at = x + token * x_token + head * x_head + r
            part = tl.load(at, mask=r < tl.where(lives, R, 0), other=0.0)
            product = tl.sum(wide * part.to(tl.float32)[None, :], 1).to(dtype)
            to = out + token * (H * E) + head * E + e
            tl.store(to, product, mask=e < tl.where(lives, E, 0))


@triton.jit
def keys_kernel(
    kv,
    row,
    out,
    row_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    KV_HEAD: tl.constexpr,
    R: tl.constexpr,
    H_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
    E_BLOCK: tl.constexpr,
    MEND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: token i's keys [H, N + P]; `kv` [T, H, KV_HEAD], of which each head's first N are
    its key's, the others its value; `row` [T, R + P]. MEND: a value with anything that is not
    finite becomes zeros, and its key NaN."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H_BLOCK)[:, None]
    n = tl.arange(0, N_BLOCK)[None, :]
    p = tl.arange(0, P_BLOCK)
    there = (h < H) & (n < N)
    at = kv + token * (H * KV_HEAD) + h * KV_HEAD
    nope = tl.load(at + n, mask=there, other=0.0)
    rope = tl.load(row + token * row_stride + R + p, mask=p < P, other=0.0)
    to = out + token * (H * (N + P)) + h * (N + P)
    spread = rope[None, :] + tl.zeros([H_BLOCK, P_BLOCK], rope.dtype)
    if MEND:
        e = tl.arange(0, E_BLOCK)[None, :]
        value = (h < H) & (e < KV_HEAD - N)
        x = tl.load(at + N + e, mask=value, other=0.0).to(tl.float32)
        # False of NaN as well
        whole = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1, keep_dims=True)
        zeros = tl.zeros([H_BLOCK, E_BLOCK], kv.dtype.element_ty)
        tl.store(at + N + e, zeros, mask=value & (whole == 0))
        nope = tl.where(whole == 0, float("nan"), nope)
        spread = tl.where(whole == 0, float("nan"), spread)
    tl.store(to + n, nope, mask=there)
    tl.store(to + N + p[None, :], spread, mask=(h < H) & (p < P)[None, :])
