"""The towers' operations on a GPU. Each is its namesake of `naive.py`; nothing asks the device for
a number, and every kernel's work follows from host ints alone.

Legend: N packed patches, M channels, F features in or rotary pairs, H heads, D head_dim, h w the
sides of a learned table, G grids."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitrail.ops.launch import launch
from vitrail.ops.vision import naive
from vitrail.ops.vision.naive import Grids

WIDE = 8  # channels of 16 bytes in half precision: rows of a product that start there are quicker
SAMPLES = 1024  # of a program that normalises
# What `rotate_heads` makes safe: see `VarlenMetadata.mended`.
MENDS = True
LANES = 128  # pairs of a program at once
GRIDS = 16  # edges that a program looks at together


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
        launch(
            normalise_kernel,
            grid,
            out.device,
            patches_NF,
            out,
            rows * width,
            FEATURES=features,
            WIDTH=width,
            BLOCK=SAMPLES,
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
    if grids.num_patches:
        launch(
            positions_kernel,
            (grids.num_patches,),
            x_NM.device,
            x_NM,
            table_hwM,
            grids.edges,
            grids.sides,
            len(grids.sizes),
            HEIGHT=height,
            WIDTH=width,
            CHANNELS=channels,
            BLOCK=triton.next_power_of_2(channels),
            GRIDS=GRIDS,
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


@triton.jit
def grid_of(patch, edges, count, GRIDS: tl.constexpr):
    """Index of the last grid that begins at or before `patch`, GRIDS edges at a time. Empty grids
    before it are passed over."""
    found = -1
    for first in range(0, count, GRIDS):
        nth = first + tl.arange(0, GRIDS)
        begins = tl.load(edges + nth, mask=nth < count, other=2147483647)
        found += tl.sum((begins <= patch).to(tl.int32), 0)
    return found


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["edges", "sides"])
def positions_kernel(
    x,
    table,
    edges,
    sides,
    count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    GRIDS: tl.constexpr,
):
    """A program: one patch, in place. The table is read at 4 x 4 places, clamped to its border,
    rows inside. A patch beyond all grids is left as it is."""
    patch = tl.program_id(0)
    grid = grid_of(patch, edges, count, GRIDS)
    nth = patch - tl.load(edges + grid)
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
        cells = x + patch.to(tl.int64) * CHANNELS + m
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
    if grids.num_patches:
        launch(
            angles_kernel,
            (grids.num_patches,),
            cos_NF.device,
            cos_NF,
            sin_NF,
            grids.edges,
            grids.sides,
            len(grids.sizes),
            THETA=theta,
            PAIRS=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2),
            GRIDS=GRIDS,
            num_warps=1,
        )
    return cos_NF, sin_NF


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["edges", "sides"])
def angles_kernel(
    cos,
    sin,
    edges,
    sides,
    count,
    THETA: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    GRIDS: tl.constexpr,
):
    """A program: one patch. Pair 2i turns by column * THETA^(-2i / PAIRS), pair 2i + 1 by row * the
    same. A patch beyond all grids turns by nothing."""
    patch = tl.program_id(0)
    grid = grid_of(patch, edges, count, GRIDS)
    nth = patch - tl.load(edges + grid)
    rows, columns = tl.load(sides + 2 * grid), tl.load(sides + 2 * grid + 1)
    nth = tl.where(nth < rows * columns, nth, 0)
    columns = tl.maximum(columns, 1)
    row, column = nth // columns, nth % columns
    pair = tl.arange(0, BLOCK)
    # in double precision, for it is multiplied by up to 511
    power = (pair // 2).to(tl.float64) * (-2.0 / PAIRS)
    frequency = tl.exp2(power * tl.log2(tl.full([BLOCK], THETA, tl.float64))).to(tl.float32)
    angle = tl.where(pair % 2 == 0, column, row).to(tl.float32) * frequency
    cells = patch.to(tl.int64) * PAIRS + pair
    tl.store(cos + cells, tl.cos(angle), mask=pair < PAIRS)
    tl.store(sin + cells, tl.sin(angle), mask=pair < PAIRS)


def rotate_heads(
    qkv_NHD: Tensor,
    heads: tuple[int, int, int],
    cos_NF: Tensor,
    sin_NF: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place. A pair of neighbours in bfloat16 is read and written as one word."""
    rows, _, dim = qkv_NHD.shape
    assert heads[1] == heads[2], heads
    assert qkv_NHD.stride()[1:] == (dim, 1), qkv_NHD.stride()
    assert all(t.is_contiguous() for t in (cos_NF, sin_NF)), "rows are dense"
    packed = interleaved and qkv_NHD.dtype == torch.bfloat16
    if rows:
        launch(
            rotate_kernel,
            (rows,),
            qkv_NHD.device,
            qkv_NHD,
            qkv_NHD.view(torch.int32) if packed else qkv_NHD,
            cos_NF,
            sin_NF,
            qkv_NHD.stride(0),
            Q_HEADS=heads[0],
            KV_HEADS=heads[1],
            HEADS_BLOCK=triton.next_power_of_2(heads[1]),
            PAIRS=dim // 2,
            DIM_BLOCK=triton.next_power_of_2(dim),
            INTERLEAVED=interleaved,
            PACKED=packed,
            LANES=LANES,
            num_warps=LANES // 32,
        )
    q_NHD, k_NHD, v_NHD = qkv_NHD.split(heads, dim=1)
    return q_NHD, k_NHD, v_NHD


@triton.jit
def rotate_kernel(
    x,
    words,
    cos,
    sin,
    row_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PACKED: tl.constexpr,
    LANES: tl.constexpr,
):
    """A program: one patch. `words`: x as pairs, where PACKED. Then its values are looked at: of a
    head that has any which is not finite they become zeros, and its keys NaN."""
    row = tl.program_id(0).to(tl.int64)
    row_x = x + row * row_stride
    kind = x.dtype.element_ty
    for step in tl.static_range(((Q_HEADS + KV_HEADS) * PAIRS + LANES - 1) // LANES):
        nth = step * LANES + tl.arange(0, LANES)
        head, pair = nth // PAIRS, nth % PAIRS
        live = head < Q_HEADS + KV_HEADS
        c = tl.load(cos + row * PAIRS + pair, mask=live, other=0.0)
        s = tl.load(sin + row * PAIRS + pair, mask=live, other=0.0)
        if PACKED:
            word = tl.load(words + row * (row_stride // 2) + nth, mask=live, other=0)
            a = (word << 16).to(tl.float32, bitcast=True)
            b = (word & -65536).to(tl.float32, bitcast=True)
            first = (a * c - b * s).to(kind).to(tl.int16, bitcast=True).to(tl.int32)
            second = (a * s + b * c).to(kind).to(tl.int16, bitcast=True).to(tl.int32)
            word = (first & 65535) | (second << 16)
            tl.store(words + row * (row_stride // 2) + nth, word, mask=live)
        else:
            at = row_x + head * 2 * PAIRS + (2 * pair if INTERLEAVED else pair)
            other = at + (1 if INTERLEAVED else PAIRS)
            a = tl.load(at, mask=live, other=0.0).to(tl.float32)
            b = tl.load(other, mask=live, other=0.0).to(tl.float32)
            tl.store(at, (a * c - b * s).to(kind), mask=live)
            tl.store(other, (a * s + b * c).to(kind), mask=live)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    d = tl.arange(0, DIM_BLOCK)[None, :]
    there = (head < KV_HEADS) & (d < 2 * PAIRS)
    keys = row_x + (Q_HEADS + head) * 2 * PAIRS + d
    values = keys + KV_HEADS * 2 * PAIRS
    value = tl.load(values, mask=there, other=0.0).to(tl.float32)
    # False of NaN as well.
    faulty = tl.min((tl.abs(value) < float("inf")).to(tl.int32), 1)[:, None] == 0
    nothing = tl.full([HEADS_BLOCK, DIM_BLOCK], float("nan"), tl.float32)
    tl.debug_barrier()  # the turned keys are written
    tl.store(values, tl.zeros_like(value).to(kind), mask=there & faulty)
    tl.store(keys, nothing.to(kind), mask=there & faulty)


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
        launch(
            norm_kernel,
            (rows,),
            x_NM.device,
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
