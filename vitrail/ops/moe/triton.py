"""The mixture of experts on a GPU. `moe_score` and `moe_choose` are the router, which also puts
each (token, choice) slot in the rows of its expert; `moe_scatter` does so for choices that come
from elsewhere. `moe_lay` cuts the rows in blocks. `moe_up` and `moe_down` run a block and a tile of
channels a program; `moe_join` adds a token's choices in their order. Nothing is read back: grids
are bounds, and programs beyond the blocks end.

    slots  | t0k0 t0k1 | t1k0 t1k1 | ...               slot = token * K + choice
    rows   | expert 0: s3 s1 -  - | expert 1: s0 ...   CAP rows an expert, the first counts[e] set
    blocks | expert, first row, rows | ... | their number in the last record

The order of slots within an expert's rows is any: what comes of a row depends on that row alone.

Few tokens (at most BT) need no placing: a token's row is its number, and a block is an expert's
(DIRECT 1: as many blocks as experts) or a slot's (DIRECT 2: as many as slots; the first slot that
chose an expert runs it for all tokens; DIRECT 3: of one token, where every slot does).

Choices outside [0, X) are nobody's: a row of padding costs nothing.

Legend: T tokens, K choices a token, S = T * K slots, X experts, M hidden channels, I intermediate
channels; weights are [X, 2I, M] and [X, M, I], viewed as [X * 2I, M] and [X * M, I]."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Numbers that change with a batch: one kernel for all of them.
SIZES = ["tokens", "slots", "num_experts", "max_blocks", "cap"]
FIELDS = tl.constexpr(4)  # of a block's record, the last unused
LEAST = tl.constexpr(-(1 << 31))  # of int32


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Waits for what was launched before; lets the next launch start then, or (EARLY 2) now."""
    if EARLY == 2:
        gdc_launch_dependents()
    if EARLY:
        gdc_wait()
    if EARLY == 1:
        gdc_launch_dependents()


@triton.jit
def _add_exact(acc, w, x_KT, MULTIPLY: tl.constexpr):
    """acc + w x: an fp32 weight is the sum of three bf16, `x` is bf16, so products are exact."""
    high = w.to(tl.bfloat16)
    rest = w - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    acc = tl.dot(low.to(MULTIPLY), x_KT, acc)
    acc = tl.dot(middle.to(MULTIPLY), x_KT, acc)
    return tl.dot(high.to(MULTIPLY), x_KT, acc)


@triton.jit(do_not_specialize=SIZES)
def moe_score(
    part, counts, x, router, tokens, num_experts,
    M: tl.constexpr, BT: tl.constexpr, XP: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, MULTIPLY: tl.constexpr, COUNTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part[j, t, x] = router[x] . x[t] over the WIDTH channels from j * WIDTH on, summed in fp32
    over each SPAN, then over spans in their order, so that how many are summed here changes
    nothing. Program (i, j): BT tokens. MULTIPLY: the products' operands' type, fp32 where there is
    no device. Also sets COUNTS counts to 0, for `moe_choose`. WIDTH of one SPAN or all."""
    xs = tl.arange(0, XP)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    k = tl.program_id(1) * WIDTH + tl.arange(0, BK)
    known = (xs < num_experts)[:, None]
    live = (t < tokens)[:, None]
    w_at = router + xs[:, None] * M + k[None, :]
    x_at = x + t.to(tl.int64)[:, None] * M + k[None, :]
    total = tl.zeros([XP, BT], tl.float32)
    if WIDTH == SPAN and WIDTH <= 2 * BK:
        w = tl.load(w_at, mask=known & (k < M)[None, :], other=0.0)  # no kernel writes these
        if WIDTH > BK:
            w2 = tl.load(w_at + BK, mask=known & (BK + k < M)[None, :], other=0.0)
        _begin(EARLY)
        x_KT = tl.load(x_at, mask=live & (k < M)[None, :], other=0.0).T.to(MULTIPLY)
        if WIDTH > BK:
            x2_KT = tl.load(x_at + BK, mask=live & (BK + k < M)[None, :], other=0.0).T.to(MULTIPLY)
        total = _add_exact(total, w, x_KT, MULTIPLY)
        if WIDTH > BK:
            total = _add_exact(total, w2, x2_KT, MULTIPLY)
    else:
        _begin(EARLY)
        acc = tl.zeros([XP, BT], tl.float32)
        for k0 in range(0, WIDTH, BK):
            inside = (k0 + k < M)[None, :]
            w = tl.load(w_at + k0, mask=inside & known, other=0.0)
            x_KT = tl.load(x_at + k0, mask=inside & live, other=0.0).T.to(MULTIPLY)
            acc = _add_exact(acc, w, x_KT, MULTIPLY)
            if (k0 + BK) % SPAN == 0:
                total += acc
                acc = tl.zeros([XP, BT], tl.float32)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(counts + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.int32))
    at = part + ((tl.program_id(1) * tokens).to(tl.int64) + t)[:, None] * num_experts + xs[None, :]
    tl.store(at, total.T, mask=live & (xs < num_experts)[None, :])


@triton.jit(do_not_specialize=SIZES)
def moe_choose(
    ids, weights, rows, counts, part, bias, tokens, num_experts, cap, scaling,
    SPANS: tl.constexpr, ROUTED: tl.constexpr, SHARED: tl.constexpr, NORMALIZE: tl.constexpr,
    XP: tl.constexpr, KP: tl.constexpr, PLACE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For the program's token the ROUTED best of sigmoid(logits) + bias, the first of equals, then
    SHARED experts (they follow the routed ones) with weight 1. A score that is no number ranks
    last, and makes the weights what it is. PLACE: also takes a row of each expert."""
    K: tl.constexpr = ROUTED + SHARED
    x = tl.arange(0, XP)
    k = tl.arange(0, KP)
    t = tl.program_id(0)
    known = x < num_experts
    extra = tl.load(bias + x, mask=known, other=0.0)
    _begin(EARLY)
    logits = tl.zeros([XP], tl.float32)
    for j in tl.static_range(SPANS):
        at = part + (j * tokens + t).to(tl.int64) * num_experts + x
        logits += tl.load(at, mask=known, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = tl.where(scores == scores, scores + extra, -1e30)
    # In the order of numbers, as a warp finds the largest of ints in one instruction.
    bits = tl.where(known, ranked, float("-inf")).to(tl.int32, bitcast=True)
    ranked = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    spelled = scores.to(tl.int32, bitcast=True)
    total = 0.0
    chosen = tl.where(k < ROUTED, 0, num_experts + k - ROUTED)
    weight = tl.where(k < ROUTED, 0.0, 1.0)
    for i in tl.static_range(ROUTED):
        best = tl.min(tl.where(ranked == tl.max(ranked, 0), x, XP), 0)
        value = tl.max(tl.where(x == best, spelled, LEAST), 0).to(tl.float32, bitcast=True)
        ranked = tl.where(x == best, LEAST, ranked)
        total += value
        chosen = tl.where(k == i, best, chosen)
        weight = tl.where(k == i, value, weight)
    factor = scaling
    if NORMALIZE:
        factor = scaling / (total + 1e-20)
    weight = tl.where(k < ROUTED, weight * factor, weight)
    tl.store(ids + t.to(tl.int64) * K + k, chosen, mask=k < K)
    tl.store(weights + t.to(tl.int64) * K + k, weight, mask=k < K)
    if PLACE:
        taken = tl.atomic_add(counts + chosen, 1, mask=k < ROUTED, sem="relaxed")
        row = chosen * cap + tl.where(k < ROUTED, taken, t)
        tl.store(rows + row, t * K + k, mask=k < K)
        if t == 0:
            tl.store(counts + chosen, tokens + k * 0, mask=(k >= ROUTED) & (k < K))


@triton.jit
def _lay(
    blocks, counts, num_experts, max_blocks, cap, first,
    LAID: tl.constexpr, BT: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    """The records of LAID blocks from `first` on; with the first of all, the last record."""
    x = tl.arange(0, XP)
    count = tl.load(counts + x, mask=x < num_experts, other=0)
    stop = tl.cumsum((count + BT - 1) // BT, 0)
    b = first + tl.arange(0, LAID)
    beyond = (stop[None, :] <= b[:, None]).to(tl.int32)  # experts that end before the block
    expert = tl.sum(beyond, 1)
    begin = tl.max(beyond * stop[None, :], 1)
    rows = tl.sum(tl.where(expert[:, None] == x[None, :], count[None, :], 0), 1)
    done = (b - begin) * BT
    record = blocks + b * FIELDS
    tl.store(record, tl.where(expert < num_experts, expert, -1), mask=b < max_blocks)
    tl.store(record + 1, expert * cap + done, mask=b < max_blocks)
    tl.store(record + 2, tl.minimum(rows - done, BT), mask=b < max_blocks)
    if first == 0:
        tl.store(blocks + max_blocks * FIELDS, tl.max(stop, 0))


@triton.jit(do_not_specialize=SIZES)
def moe_lay(
    blocks, counts, num_experts, max_blocks, cap,
    LAID: tl.constexpr, BT: tl.constexpr, XP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Which rows are whose block: LAID blocks a program."""
    _begin(EARLY)
    _lay(blocks, counts, num_experts, max_blocks, cap, tl.program_id(0) * LAID, LAID, BT, XP)


@triton.jit(do_not_specialize=SIZES)
def moe_scatter(
    rows, blocks, counts, ids, slots, num_experts, max_blocks, cap,
    SHARE: tl.constexpr, CHUNK: tl.constexpr, LAID: tl.constexpr, BT: tl.constexpr,
    XP: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i gives its SHARE slots rows of their experts, CHUNK at once; `counts` are 0 before.
    ALONE: the one program sets them to 0 itself, and lays the blocks."""
    _begin(EARLY)
    if ALONE:
        tl.store(counts + tl.arange(0, XP), tl.zeros([XP], tl.int32))
        tl.debug_barrier()
    begin = tl.program_id(0) * SHARE
    for first in range(begin, begin + SHARE, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        expert = tl.load(ids + slot, mask=slot < slots, other=-1).to(tl.int32)
        known = (expert >= 0) & (expert < num_experts)
        taken = tl.atomic_add(counts + expert, 1, mask=known, sem="relaxed")
        tl.store(rows + expert * cap + taken, slot, mask=known & (taken < cap))
    if ALONE:
        tl.debug_barrier()
        for first in range(0, max_blocks, LAID):
            _lay(blocks, counts, num_experts, max_blocks, cap, first, LAID, BT, XP)


@triton.jit
def _owner(
    rows, blocks, ids, block, tokens, slots, num_experts,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """A block's expert, -1 for nobody; its rows' slots, S for nobody; its first row and their
    number (of use where blocks are laid)."""
    lane = tl.arange(0, BT)
    if DIRECT == 0:
        expert = tl.load(blocks + block * FIELDS)
        first = tl.load(blocks + block * FIELDS + 1)
        live = tl.where(expert >= 0, tl.load(blocks + block * FIELDS + 2), 0)
        slot = tl.load(rows + first + lane, mask=lane < live, other=slots)
    elif DIRECT == 3:
        expert = tl.load(ids + block).to(tl.int32)
        expert = tl.where(expert < num_experts, expert, -1)
        slot = tl.where(lane == 0, block, slots)
        first = 0
        live = BT
    else:
        if DIRECT == 1:
            expert = block
        else:
            expert = tl.load(ids + block).to(tl.int32)
        k = tl.arange(0, KP)
        at = lane[:, None] * K + k[None, :]
        there = (lane < tokens)[:, None] & (k < K)[None, :]
        chosen = tl.load(ids + at, mask=there, other=-1).to(tl.int32)
        slot = tl.min(tl.where(there & (chosen == expert), at, slots), 1)
        leader = tl.min(slot, 0)
        if DIRECT == 1:
            expert = tl.where(leader < slots, expert, -1)
        else:
            ours = (leader == block) & (expert >= 0) & (expert < num_experts)
            expert = tl.where(ours, expert, -1)
        first = 0
        live = BT
    return expert, slot, first, live


@triton.jit
def _up_tile(
    x, gate_up, act, slot, slots, row0, expert, tile,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """act[BT rows from row0 on, tile's channels] = silu(gate x) * up x. PAIRED: one product makes
    both."""
    live = slot < slots
    n0 = tile * BN
    k = tl.arange(0, BK)
    token = tl.where(live, slot // K, 0).to(tl.int64)
    x_at = x + token[:, None] * M + k[None, :]
    if PAIRED:
        both = tl.zeros([2 * BN, BT] if SWAP else [BT, 2 * BN], tl.float32)
    else:
        shape: tl.constexpr = [BN, BT] if SWAP else [BT, BN]
        gate = tl.zeros(shape, tl.float32)
        up = tl.zeros(shape, tl.float32)
    for k0 in range(0, M, BK):
        if M % BK == 0:
            x_TK = tl.load(x_at + k0, mask=live[:, None], other=0.0)
        else:
            x_TK = tl.load(x_at + k0, mask=live[:, None] & (k0 + k < M)[None, :], other=0.0)
        if PAIRED:
            both_NK = gate_up.load([expert, 0, n0, k0]).reshape(2 * BN, BK)
            if SWAP:
                both = tl.dot(both_NK, x_TK.T, both)
            else:
                both = tl.dot(x_TK, both_NK.T, both)
        else:
            gate_NK = gate_up.load([expert * (2 * INNER) + n0, k0])
            up_NK = gate_up.load([expert * (2 * INNER) + INNER + n0, k0])
            if SWAP:
                gate = tl.dot(gate_NK, x_TK.T, gate)
                up = tl.dot(up_NK, x_TK.T, up)
            else:
                gate = tl.dot(x_TK, gate_NK.T, gate)
                up = tl.dot(x_TK, up_NK.T, up)
    if PAIRED:
        if SWAP:
            gate, up = both.reshape(2, BN, BT).permute(1, 2, 0).split()
        else:
            gate, up = both.reshape(BT, 2, BN).permute(0, 2, 1).split()
    n = n0 + tl.arange(0, BN)
    row = row0 + tl.arange(0, BT)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(act.dtype.element_ty)
    at = act + row.to(tl.int64)[:, None] * INNER + n[None, :]
    if SWAP:
        value = value.T
    tl.store(at, value, mask=live[:, None] & (n < INNER)[None, :])


@triton.jit
def _down_tile(
    act, down, part, slot, slots, row0, expert, tile,
    M: tl.constexpr, INNER: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """part[slots of BT rows, tile's channels] = down act[BT rows from row0 on]."""
    n0 = tile * BN
    k = tl.arange(0, BK)
    row = row0 + tl.arange(0, BT)
    live = (slot < slots)[:, None]
    if not SORTED:
        act_at = act + row.to(tl.int64)[:, None] * INNER + k[None, :]
    acc = tl.zeros([BN, BT] if SWAP else [BT, BN], tl.float32)
    for k0 in range(0, INNER, BK):
        if SORTED:
            act_TK = act.load([row0, k0])
        elif INNER % BK == 0:
            act_TK = tl.load(act_at + k0, mask=live, other=0.0)
        else:
            act_TK = tl.load(act_at + k0, mask=live & (k0 + k < INNER)[None, :], other=0.0)
        down_NK = down.load([expert * M + n0, k0])
        if SWAP:
            acc = tl.dot(down_NK, act_TK.T, acc)
        else:
            acc = tl.dot(act_TK, down_NK.T, acc)
    value = acc.to(part.dtype.element_ty)
    if SWAP:
        value = value.T
    n = n0 + tl.arange(0, BN)
    at = part + slot.to(tl.int64)[:, None] * M + n[None, :]
    tl.store(at, value, mask=live & (n < M)[None, :])


@triton.jit(do_not_specialize=SIZES)
def moe_up(
    x, gate_up, act, rows, blocks, ids, tokens, slots, max_blocks, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, PAIRED: tl.constexpr, DIRECT: tl.constexpr, HALVES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """x [T, M] to act [blocks * BT, I]; `gate_up` is a descriptor of [BN, BK] boxes (PAIRED: of
    [1, 2, BN, BK] boxes of [X, 2, I, M]). Programs are numbered by block, then by channels. HALVES:
    a block that is at most half full takes half a tile."""
    _begin(EARLY)
    tiles: tl.constexpr = (INNER + BN - 1) // BN
    HALF: tl.constexpr = BT // 2
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert, slot, first, live = _owner(rows, blocks, ids, block, tokens, slots, num_experts,
                                K, KP, BT, DIRECT)  # fmt: skip
    if expert >= 0:
        if HALVES:
            if live <= HALF:
                lane = tl.arange(0, HALF)
                half = tl.load(rows + first + lane, mask=lane < live, other=slots)
                _up_tile(x, gate_up, act, half, slots, block * BT, expert, tile,
                         M, INNER, K, HALF, BN, BK, SWAP, PAIRED)  # fmt: skip
            else:
                _up_tile(x, gate_up, act, slot, slots, block * BT, expert, tile,
                         M, INNER, K, BT, BN, BK, SWAP, PAIRED)  # fmt: skip
        else:
            _up_tile(x, gate_up, act, slot, slots, block * BT, expert, tile,
                     M, INNER, K, BT, BN, BK, SWAP, PAIRED)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def moe_down(
    act, act_half, weights, part, rows, blocks, ids, tokens, slots, max_blocks, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SORTED: tl.constexpr, PROGRAMS: tl.constexpr, FLAT: tl.constexpr,
    DIRECT: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `moe_up`, from act [blocks * BT, I] to part [S, M]. SORTED: `act` and `act_half` are
    descriptors of whole and half blocks of rows. PROGRAMS 0: one tile a program, else so many
    programs share them, in one loop (FLAT) or two."""
    _begin(EARLY)
    tiles: tl.constexpr = (M + BN - 1) // BN
    HALF: tl.constexpr = BT // 2
    if PROGRAMS == 0:
        block = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
        expert, slot, first, live = _owner(rows, blocks, ids, block, tokens, slots, num_experts,
                                    K, KP, BT, DIRECT)  # fmt: skip
        if expert >= 0:
            if HALVES:
                if live <= HALF:
                    lane = tl.arange(0, HALF)
                    half = tl.load(rows + first + lane, mask=lane < live, other=slots)
                    _down_tile(act_half, weights, part, half, slots, block * BT, expert, tile,
                               M, INNER, HALF, BN, BK, SWAP, SORTED)  # fmt: skip
                else:
                    _down_tile(act, weights, part, slot, slots, block * BT, expert, tile,
                               M, INNER, BT, BN, BK, SWAP, SORTED)  # fmt: skip
            else:
                _down_tile(act, weights, part, slot, slots, block * BT, expert, tile,
                           M, INNER, BT, BN, BK, SWAP, SORTED)  # fmt: skip
    else:
        last = tl.load(blocks + max_blocks * FIELDS) * tiles
        for number in tl.range(tl.program_id(0), last, PROGRAMS, flatten=FLAT):
            block = number // tiles
            expert, slot, first, live = _owner(rows, blocks, ids, block, tokens, slots, num_experts,
                                        K, KP, BT, DIRECT)  # fmt: skip
            _down_tile(act, weights, part, slot, slots, block * BT, expert, number % tiles,
                       M, INNER, BT, BN, BK, SWAP, SORTED)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def moe_join(
    out, part, ids, weights, num_experts,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[t, n] = sum over k of weights[t, k] * part[t * K + k, n] for the BN channels of program
    (t, j); a choice that is nobody's adds nothing, whatever `part` holds there."""
    _begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    expert = tl.load(ids + token * K + k, mask=k < K, other=-1)
    chosen = (expert >= 0) & (expert < num_experts)
    weight = tl.load(weights + token * K + k, mask=chosen, other=0.0)
    at = part + (token * K + k)[:, None] * M + n[None, :]
    value = tl.load(at, mask=chosen[:, None] & (n < M)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(value * weight[:, None], 0)
    tl.store(out + token * M + n, total.to(out.dtype.element_ty), mask=n < M)


# One token: its experts are a read of the matrices that it chose. Each program holds a few rows of
# one expert, whole, in registers; programs are numbered by slot, the last slot first.
#
#     up    | known before the router: shared experts' rows | wait | ids, the others' rows, x, act
#     down  | ids, rows | wait | act, part
#
# So shared experts' rows are on their way while the router chooses, and `down`'s while the last
# programs of `up` work. `up` lets `down` start only once it has waited itself: what was chosen
# is there then. What is nobody's has rows of zeros, which are not stored.


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
def moe_up_rows(
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
        gdc_wait()
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
def moe_down_rows(
    act, down, part, ids, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part[slot] = down act[slot], ROWS channels of M a program. BLOCK and REST (or 0) channels
    cover INNER. EARLY: `ids` are there before the wait, as said."""
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
