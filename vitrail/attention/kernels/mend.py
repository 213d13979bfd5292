"""Makes rows of packed keys and values safe to lie beside other sequences' in a tile of a kernel
that masks scores alone: a weight of zero does not silence a NaN of values. A row of values with
anything that is not finite becomes zeros, and its keys NaN: whoever sees it still gets NaN."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "k_row", "k_head", "v_row", "v_head"])
def mend(
    k,
    v,
    num_rows,
    k_row,
    k_head,
    v_row,
    v_head,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program: ROWS rows of a head each, head by head, in place. Strides in elements."""
    nth = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, head = nth // KV_HEADS, nth % KV_HEADS
    there = row < num_rows
    e = tl.arange(0, E_BLOCK)
    cells = v + (row * v_row + head * v_head)[:, None] + e[None, :]
    live = there[:, None] & (e < E)[None, :]
    values = tl.load(cells, mask=live, other=0.0).to(tl.float32)
    # False of NaN as well.
    whole = tl.min((tl.abs(values) < float("inf")).to(tl.int32), 1)
    faulty = there & (whole == 0)
    zeros = tl.zeros([ROWS, E_BLOCK], tl.float32)
    tl.store(cells, zeros.to(v.dtype.element_ty), mask=faulty[:, None] & live)
    d = tl.arange(0, D_BLOCK)
    cells = k + (row * k_row + head * k_head)[:, None] + d[None, :]
    nothing = tl.full([ROWS, D_BLOCK], float("nan"), tl.float32)
    tl.store(cells, nothing.to(k.dtype.element_ty), mask=faulty[:, None] & (d < D)[None, :])
