"""A picture's patches by two kernels: columns, then rows with the padding and the cut. As
`naive.resized_patches`, bit for bit.

Legend: H W a picture's sides, h w those it is resized to, N patches, F = 3 * P * P samples of a
patch."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl
from torch import Tensor

from vitrail.ops.launch import launch
from vitrail.ops.resize.naive import Resample
from vitrail.ops.resize.taps import FRACTION_BITS

SAMPLES = 512  # of a program of the first pass


def resized_patches(
    pixels_HW3: Tensor,
    down: Resample,
    across: Resample,
    grid: tuple[int, int],
    patch_size: int,
) -> Tensor:
    height, width, _ = pixels_HW3.shape
    rows, columns = len(down.starts), len(across.starts)
    assert all(t.is_contiguous() for t in (pixels_HW3, *down, *across)), "samples are dense"
    assert grid[0] * patch_size >= rows, f"{rows} rows in {grid[0]} patches"
    assert grid[1] * patch_size >= columns, f"{columns} columns in {grid[1]} patches"
    narrow = pixels_HW3.new_empty((height, columns, 3))
    launch(
        columns_kernel,
        (height, triton.cdiv(3 * columns, SAMPLES)),
        narrow.device,
        pixels_HW3,
        narrow,
        *across,
        width,
        columns,
        across.weights.shape[1],
        BITS=FRACTION_BITS,
        BLOCK=SAMPLES,
    )
    features = 3 * patch_size**2
    out = pixels_HW3.new_empty((grid[0] * grid[1], features))
    launch(
        rows_kernel,
        (len(out),),
        narrow.device,
        narrow,
        out,
        *down,
        height,
        rows,
        columns,
        down.weights.shape[1],
        grid[1],
        PATCH=patch_size,
        BITS=FRACTION_BITS,
        BLOCK=triton.next_power_of_2(features),
    )
    return out


@triton.jit(do_not_specialize=["width", "columns", "taps"])
def columns_kernel(
    pixels,
    out,
    starts,
    weights,
    width,
    columns,
    taps,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: BLOCK samples of one row of `out` [H, columns, 3]."""
    row = tl.program_id(0).to(tl.int64)
    nth = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column, channel = nth // 3, nth % 3
    live = column < columns
    start = tl.load(starts + column, mask=live, other=0)
    total = tl.full([BLOCK], 1 << (BITS - 1), tl.int32)
    for j in range(taps):
        at = tl.minimum(start + j, width - 1)
        sample = tl.load(pixels + (row * width + at) * 3 + channel, mask=live, other=0)
        total += sample.to(tl.int32) * tl.load(weights + column * taps + j, mask=live, other=0)
    value = tl.minimum(tl.maximum(total >> BITS, 0), 255)
    tl.store(out + row * columns * 3 + nth, value.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["height", "rows", "columns", "taps", "across"])
def rows_kernel(
    narrow,
    out,
    starts,
    weights,
    height,
    rows,
    columns,
    taps,
    across,
    PATCH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: one patch of `across` in a row, channels first, black outside the picture."""
    patch = tl.program_id(0)
    nth = tl.arange(0, BLOCK)
    inside = nth < 3 * PATCH * PATCH
    channel, place = nth // (PATCH * PATCH), nth % (PATCH * PATCH)
    row = (patch // across) * PATCH + place // PATCH
    column = (patch % across) * PATCH + place % PATCH
    live = inside & (row < rows) & (column < columns)
    start = tl.load(starts + row, mask=live, other=0)
    total = tl.full([BLOCK], 1 << (BITS - 1), tl.int32)
    for j in range(taps):
        at = tl.minimum(start + j, height - 1).to(tl.int64)
        sample = tl.load(narrow + (at * columns + column) * 3 + channel, mask=live, other=0)
        total += sample.to(tl.int32) * tl.load(weights + row * taps + j, mask=live, other=0)
    value = tl.where(live, tl.minimum(tl.maximum(total >> BITS, 0), 255), 0)
    cells = out + patch.to(tl.int64) * (3 * PATCH * PATCH) + nth
    tl.store(cells, value.to(tl.uint8), mask=inside)
