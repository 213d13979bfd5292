"""The towers' operations on a GPU. Each is its namesake of `naive.py`; nothing asks the device for
a number, and every kernel's work follows from host ints alone.

Legend: N packed patches, M channels, F features in or rotary pairs, H heads, D head_dim, h w the
sides of a learned table, G grids."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitrail.ops.vision import naive
from vitrail.ops.vision.naive import Grids

WIDE = 8  # channels of 16 bytes in half precision: rows of a product that start there are quicker
SAMPLES = 1024  # of a program that normalises
LANES = 128  # pairs, or pairs of angles, of a program at once
ROWS = 8  # patches of a program that makes angles


def normalise(patches_NF: Tensor, dtype: torch.dtype) -> Tensor:
    if patches_NF.dtype != torch.uint8:
        return patches_NF.to(dtype)
    return _normalised(patches_NF, dtype, patches_NF.shape[1])


def embed(patches_NF: Tensor, weight_MF: Tensor, bias_M: Tensor) -> Tensor:
    features = patches_NF.shape[1]
    more = -features % WIDE
    if patches_NF.dtype != torch.uint8 or not more:
        return F.linear(normalise(patches_NF, weight_MF.dtype), weight_MF, bias_M)
    wide_NF = _normalised(patches_NF, weight_MF.dtype, features + more)
    return F.linear(wide_NF, F.pad(weight_MF, (0, more)), bias_M)


def _normalised(patches_NF: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """[N, width], zeros after the features."""
    rows, features = patches_NF.shape
    patches_NF = patches_NF.contiguous()
    out = torch.empty((rows, width), dtype=dtype, device=patches_NF.device)
    if rows:
        grid = (triton.cdiv(rows * width, SAMPLES),)
        normalise_kernel[grid](
            patches_NF, out, rows * width, FEATURES=features, WIDTH=width, BLOCK=SAMPLES
        )
    return out


@triton.jit(do_not_specialize=["total"])
def normalise_kernel(
    patches, out, total, FEATURES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A program: BLOCK samples of the output."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // WIDTH, at % WIDTH
    live = (at < total) & (column < FEATURES)
    raw = tl.load(patches + row * FEATURES + column, mask=live, other=0).to(tl.float32)
    value = (tl.div_rn(raw, 255.0) - 0.5) * 2.0
    value = tl.where(live, value, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < total)


def add_positions(x_NM: Tensor, table_hwM: Tensor, grids: Grids) -> Tensor:
    assert all(t.is_contiguous() for t in (x_NM, table_hwM)), "rows are dense"
    assert x_NM.shape[0] == grids.num_patches, f"{x_NM.shape[0]} rows of {grids.num_patches}"
    height, width, channels = table_hwM.shape
    longest = max((h * w for h, w in grids.sizes), default=0)
    if longest:
        positions_kernel[(longest, len(grids.sizes))](
            x_NM,
            table_hwM,
            grids.edges,
            grids.sides,
            HEIGHT=height,
            WIDTH=width,
            CHANNELS=channels,
            BLOCK=triton.next_power_of_2(channels),
            num_warps=4,
        )
    return x_NM


@triton.jit
def cubic_weight(distance):
    """Of a sample so far away, as torch's bicubic has it (a = -0.75)."""
    d = tl.abs(distance)
    near = ((-0.75 + 2.0) * d - (-0.75 + 3.0)) * d * d + 1.0
    far = ((-0.75 * d - 5.0 * -0.75) * d + 8.0 * -0.75) * d - 4.0 * -0.75
    return tl.where(d <= 1.0, near, far)


@triton.jit(do_not_specialize_on_alignment=["edges", "sides"])
def positions_kernel(
    x,
    table,
    edges,
    sides,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: one patch of one grid, in place. The table is read at 4 x 4 places, clamped to its
    border, rows inside."""
    nth, grid = tl.program_id(0), tl.program_id(1)
    start = tl.load(edges + grid)
    rows, columns = tl.load(sides + 2 * grid), tl.load(sides + 2 * grid + 1)
    if nth < rows * columns:
        row, column = nth // columns, nth % columns
        y = (row + 0.5) * tl.div_rn(HEIGHT * 1.0, rows.to(tl.float32)) - 0.5
        x_at = (column + 0.5) * tl.div_rn(WIDTH * 1.0, columns.to(tl.float32)) - 0.5
        y0, x0 = tl.floor(y), tl.floor(x_at)
        ty, tx = y - y0, x_at - x0
        m = tl.arange(0, BLOCK)
        live = m < CHANNELS
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(4):
            yi = tl.minimum(tl.maximum(y0.to(tl.int32) + i - 1, 0), HEIGHT - 1)
            across = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(4):
                xj = tl.minimum(tl.maximum(x0.to(tl.int32) + j - 1, 0), WIDTH - 1)
                at = table + (yi * WIDTH + xj).to(tl.int64) * CHANNELS + m
                across += tl.load(at, mask=live, other=0.0).to(tl.float32) * cubic_weight(
                    tx - (j - 1.0)
                )
            total += across * cubic_weight(ty - (i - 1.0))
        cells = x + (start + nth).to(tl.int64) * CHANNELS + m
        before = tl.load(cells, mask=live, other=0.0).to(tl.float32)
        # the table's dtype rounds what it holds before it is added
        added = total.to(table.dtype.element_ty).to(tl.float32)
        tl.store(cells, (before + added).to(x.dtype.element_ty), mask=live)


def rope_tables(
    grids: Grids, dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    assert dim % 4 == 0, f"{dim} channels have no pairs for rows and columns alike"
    cos_NF = torch.empty((grids.num_patches, dim // 2), dtype=torch.float32, device=device)
    sin_NF = torch.empty_like(cos_NF)
    longest = max((h * w for h, w in grids.sizes), default=0)
    if longest:
        angles_kernel[(triton.cdiv(longest, ROWS), len(grids.sizes))](
            cos_NF,
            sin_NF,
            grids.edges,
            grids.sides,
            THETA=theta,
            PAIRS=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2),
            ROWS=ROWS,
        )
    return cos_NF, sin_NF


@triton.jit(do_not_specialize_on_alignment=["edges", "sides"])
def angles_kernel(
    cos,
    sin,
    edges,
    sides,
    THETA: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program: ROWS patches of one grid. Pair 2i turns by column * THETA^(-2i / PAIRS), pair
    2i + 1 by row * the same."""
    grid = tl.program_id(1)
    start = tl.load(edges + grid)
    rows, columns = tl.load(sides + 2 * grid), tl.load(sides + 2 * grid + 1)
    nth = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)
    # in double precision, for it is multiplied by up to 511
    power = (pair // 2).to(tl.float64) * (-2.0 / PAIRS)
    frequency = tl.exp2(power * tl.log2(tl.full([BLOCK], THETA, tl.float64))).to(tl.float32)
    row, column = nth // columns, nth % columns
    at = tl.where((pair % 2 == 0)[None, :], column[:, None], row[:, None]).to(tl.float32)
    angle = at * frequency[None, :]
    live = (nth < rows * columns)[:, None] & (pair < PAIRS)[None, :]
    cells = (start + nth).to(tl.int64)[:, None] * PAIRS + pair[None, :]
    tl.store(cos + cells, tl.cos(angle), mask=live)
    tl.store(sin + cells, tl.sin(angle), mask=live)


def rotate_heads(
    qkv_NHD: Tensor,
    heads: tuple[int, int, int],
    cos_NF: Tensor,
    sin_NF: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, dim = qkv_NHD.shape
    assert qkv_NHD.stride()[1:] == (dim, 1), qkv_NHD.stride()
    assert all(t.is_contiguous() for t in (cos_NF, sin_NF)), "rows are dense"
    if rows:
        rotate_kernel[(rows,)](
            qkv_NHD,
            cos_NF,
            sin_NF,
            qkv_NHD.stride(0),
            HEADS=heads[0] + heads[1],
            PAIRS=dim // 2,
            INTERLEAVED=interleaved,
            LANES=LANES,
            num_warps=LANES // 32,
        )
    q_NHD, k_NHD, v_NHD = qkv_NHD.split(heads, dim=1)
    return q_NHD, k_NHD, v_NHD


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    row_stride,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LANES: tl.constexpr,
):
    """A program: the heads of one patch, in place."""
    row = tl.program_id(0).to(tl.int64)
    for step in tl.static_range((HEADS * PAIRS + LANES - 1) // LANES):
        nth = step * LANES + tl.arange(0, LANES)
        head, pair = nth // PAIRS, nth % PAIRS
        live = head < HEADS
        first = head * 2 * PAIRS + (2 * pair if INTERLEAVED else pair)
        second = first + (1 if INTERLEAVED else PAIRS)
        a = tl.load(x + row * row_stride + first, mask=live, other=0.0).to(tl.float32)
        b = tl.load(x + row * row_stride + second, mask=live, other=0.0).to(tl.float32)
        c = tl.load(cos + row * PAIRS + pair, mask=live, other=0.0)
        s = tl.load(sin + row * PAIRS + pair, mask=live, other=0.0)
        kind = x.dtype.element_ty
        tl.store(x + row * row_stride + first, (a * c - b * s).to(kind), mask=live)
        tl.store(x + row * row_stride + second, (a * s + b * c).to(kind), mask=live)


def layer_norm(x_NM: Tensor, weight_M: Tensor, bias_M: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x_NM)
    _norm(x_NM, None, weight_M, bias_M, out, eps)
    return out


def add_layer_norm(
    x_NM: Tensor, delta_NM: Tensor, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x_NM)
    _norm(x_NM, (delta_NM, total), weight_M, bias_M, delta_NM, eps)
    return delta_NM, total


def _norm(
    x_NM: Tensor,
    added: tuple[Tensor, Tensor] | None,
    weight_M: Tensor,
    bias_M: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    """Into `out`; `added`: what is added first, and where the sum goes. A program reads its row of
    either before it writes one, so `out` may be what is added."""
    rows, channels = x_NM.shape
    delta, total = added or (x_NM, x_NM)
    assert all(t.is_contiguous() for t in (x_NM, delta, total, out)), "rows are dense"
    if rows:
        norm_kernel[(rows,)](
            x_NM,
            delta,
            total,
            weight_M,
            bias_M,
            out,
            EPS=eps,
            ADDED=added is not None,
            CHANNELS=channels,
            BLOCK=triton.next_power_of_2(channels),
            num_warps=4,
        )


@triton.jit
def norm_kernel(
    x,
    delta,
    total,
    weight,
    bias,
    out,
    EPS: tl.constexpr,
    ADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: one row."""
    row = tl.program_id(0).to(tl.int64) * CHANNELS
    m = tl.arange(0, BLOCK)
    live = m < CHANNELS
    value = tl.load(x + row + m, mask=live, other=0.0)
    if ADDED:
        more = tl.load(delta + row + m, mask=live, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(total + row + m, value, mask=live)
    value = value.to(tl.float32)
    centred = tl.where(live, value - tl.sum(value, 0) / CHANNELS, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / CHANNELS + EPS)
    w = tl.load(weight + m, mask=live, other=0.0).to(tl.float32)
    b = tl.load(bias + m, mask=live, other=0.0).to(tl.float32)
    result = centred * scale * w + b
    tl.store(out + row + m, result.to(out.dtype.element_ty), mask=live)


def linear_gelu(x_NM: Tensor, weight_FM: Tensor, bias_F: Tensor, approximate: str) -> Tensor:
    """The tanh form in half precision is the product's own epilogue."""
    if approximate != "tanh" or x_NM.dtype == torch.float32:
        return naive.linear_gelu(x_NM, weight_FM, bias_F, approximate)
    return torch.ops.aten._addmm_activation(bias_F, x_NM, weight_FM.t(), use_gelu=True)
