"""Joins the partial results of split sequences: with w_i = 2^(lse_i), out = sum w_i out_i / sum w_i
and lse = log sum w_i. One program a row (query, head); the order of the sum is that of the splits.

Record, int32: [q_row, row, rows, slot, splits]: TILE_M rows of a sequence's queries from `row` on,
as in `attend`, in partial results slot, slot + 1, ..., slot + splits - 1. rows 0: nothing to do."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(
    do_not_specialize=["live_rows", "num_rows"],
    do_not_specialize_on_alignment=["lse", "part_lse", "records"],
)
def combine(
    out,
    lse,
    part,
    part_lse,
    records,
    live_rows,
    num_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_M: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, j): rows i, i + programs, ... of num_rows, up to the first record that is empty.
    Row r: record r // (KV_HEADS * live_rows), then key head, then row of the tile, of which only
    live_rows are ever used; channels from j * E_BLOCK on. SPLITS: read at once. EARLY: launched
    while the partial results are still being made."""
    if EARLY:
        gdc_launch_dependents()  # few programs, and what comes next loads weights meanwhile
        gdc_wait()  # also where there is nothing to do: what comes next waits for this launch alone
    at = tl.program_id(0)
    while at < num_rows:
        tile_row = at % live_rows
        kv_head = at // live_rows % KV_HEADS
        record = records + (at // live_rows // KV_HEADS) * 5
        q_row, rows = tl.load(record), tl.load(record + 2)
        slot, splits = tl.load(record + 3), tl.load(record + 4)
        flat = tl.load(record + 1) + tile_row
        if flat < rows:
            _combine_row(
                out, lse, part, part_lse, q_row, slot, splits, flat, kv_head, tile_row, HEADS,
                KV_HEADS, TILE_M, E, E_BLOCK, SPLITS,
            )  # fmt: skip
        at = tl.where(rows > 0, at + tl.num_programs(0), num_rows)


@triton.jit
def _combine_row(
    out,
    lse,
    part,
    part_lse,
    q_row,
    slot,
    splits,
    flat,
    kv_head,
    tile_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_M: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    group: tl.constexpr = HEADS // KV_HEADS
    e = tl.program_id(1) * E_BLOCK + tl.arange(0, E_BLOCK)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([E_BLOCK], tl.float32)
    for first in range(0, splits, SPLITS):
        i = first + tl.arange(0, SPLITS)
        cells = ((slot + i).to(tl.int64) * KV_HEADS + kv_head) * TILE_M + tile_row
        logs = tl.load(part_lse + cells, mask=i < splits, other=float("-inf"))
        there = (i < splits)[:, None] & (e < E)[None, :]
        values = tl.load(part + cells[:, None] * E + e[None, :], mask=there, other=0.0)
        new_top = tl.maximum(top, tl.max(logs, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        w = tl.exp2(logs - shift)
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(w, 0)
        acc = acc * kept + tl.sum(values * w[:, None], 0)
        top = new_top
    blind = total == 0.0
    one = tl.where(blind, 1.0, total)
    cell = (q_row + flat // group).to(tl.int64) * HEADS + kv_head * group + flat % group
    if tl.program_id(1) == 0:
        tl.store(lse + cell + tl.arange(0, 1), (top + tl.log2(one)) * 0.6931471805599453)
    tl.store(out + cell * E + e, (acc / one).to(out.dtype.element_ty), mask=e < E)
