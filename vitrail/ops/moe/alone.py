"""The experts of one token: a read of the matrices that it chose. Each program holds a few rows of
one expert, whole, in registers; programs are numbered by slot, the last slot first.

    up    | known before the router: shared experts' rows | wait | ids, the others' rows, x, act
    down  | ids, rows | wait | act, part

So shared experts' rows are on their way while the router chooses, and `down`'s while the last
programs of `up` work. `up` lets `down` start only once it has waited itself: what the router chose
is there then.

Legend: K slots, X experts (shared ones last), M hidden channels, I intermediate channels."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rows(matrix, n, most, first, WIDTH: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Channels [first, first + BLOCK), up to END, of rows `n` of a matrix of rows of WIDTH; rows
    from `most` on are zero."""
    k = first + tl.arange(0, BLOCK)
    at = matrix + n.to(tl.int64)[:, None] * WIDTH + k[None, :]
    inside = (n < most)[:, None] & (k < END)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(x, first, END: tl.constexpr, BLOCK: tl.constexpr):
    k = first + tl.arange(0, BLOCK)
    return tl.load(x + k, mask=k < END, other=0.0)


@triton.jit
def _product(w, x):
    return tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)


@triton.jit(do_not_specialize=["num_experts"])
def moe_up_alone(
    x, gate_up, act, ids, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """act[slot] = silu(gate x) * up x, ROWS channels a program, of x [M]. The last SHARED slots are
    the last experts'. BLOCK and REST (or 0) channels cover M."""
    tiles: tl.constexpr = (INNER + ROWS - 1) // ROWS
    slot = K - 1 - tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    if slot >= K - SHARED:
        expert = num_experts - K + slot
        most = INNER
        matrix = gate_up + expert.to(tl.int64) * (2 * INNER * M)
        gate = _rows(matrix, n, most, 0, M, M, BLOCK)
        up = _rows(matrix + INNER * M, n, most, 0, M, M, BLOCK)
        if REST:
            gate_rest = _rows(matrix, n, most, BLOCK, M, M, REST)
            up_rest = _rows(matrix + INNER * M, n, most, BLOCK, M, M, REST)
        if EARLY:
            gdc_wait()
    else:
        if EARLY:
            gdc_wait()
        expert = tl.load(ids + slot).to(tl.int32)
        most = tl.where((expert >= 0) & (expert < num_experts), INNER, 0)
        matrix = gate_up + expert.to(tl.int64) * (2 * INNER * M)
        gate = _rows(matrix, n, most, 0, M, M, BLOCK)
        up = _rows(matrix + INNER * M, n, most, 0, M, M, BLOCK)
        if REST:
            gate_rest = _rows(matrix, n, most, BLOCK, M, M, REST)
            up_rest = _rows(matrix + INNER * M, n, most, BLOCK, M, M, REST)
    if EARLY:
        gdc_launch_dependents()
    row = _vector(x, 0, M, BLOCK)
    if REST:
        row_rest = _vector(x, BLOCK, M, REST)
    a = _product(gate, row)
    b = _product(up, row)
    if REST:
        a += _product(gate_rest, row_rest)
        b += _product(up_rest, row_rest)
    value = (a / (1.0 + tl.exp(-a)) * b).to(act.dtype.element_ty)
    tl.store(act + slot * INNER + n, value, mask=n < most)


@triton.jit(do_not_specialize=["num_experts"])
def moe_down_alone(
    act, down, part, ids, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part[slot] = down act[slot], ROWS channels of M a program. BLOCK and REST (or 0) channels
    cover INNER. EARLY: `ids` are there before the wait, see above."""
    tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    slot = K - 1 - tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    if EARLY:
        gdc_launch_dependents()
    # Past the SM's own cache, which only a wait makes anew.
    expert = tl.load(ids + slot, cache_modifier=".cg").to(tl.int32)
    most = tl.where((expert >= 0) & (expert < num_experts), M, 0)
    matrix = down + expert.to(tl.int64) * (M * INNER)
    w = _rows(matrix, n, most, 0, INNER, INNER, BLOCK)
    if REST:
        w_rest = _rows(matrix, n, most, BLOCK, INNER, INNER, REST)
    if EARLY:
        gdc_wait()
    row = _vector(act + slot * INNER, 0, INNER, BLOCK)
    if REST:
        row_rest = _vector(act + slot * INNER, BLOCK, INNER, REST)
    total = _product(w, row)
    if REST:
        total += _product(w_rest, row_rest)
    tl.store(part + slot * M + n, total.to(part.dtype.element_ty), mask=n < most)
