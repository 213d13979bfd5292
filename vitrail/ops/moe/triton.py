"""The mixture of experts on a GPU. `score` and `choose` are the router. `place` lays a batch's
(token, choice) slots out in blocks of one expert each; `up` and `down` run a block and a tile of
channels a program; `join` adds a token's choices in their order. Nothing is read back: grids are
bounds, and programs beyond the blocks end.

    slots  | t0k0 t0k1 | t1k0 t1k1 | ...                  slot = token * K + choice
    rows   | expert 3: s1 s4 -  -  | expert 7: s0 ...     blocks of BT rows; `-` is S: nobody
    blocks | 3 | 7 | ... | -1 | the number of blocks

Few tokens (at most BT) need no placing: a token's row is its number, and a block is an expert's
(DIRECT 1: as many blocks as experts) or a slot's (DIRECT 2: as many as slots; the first slot that
chose an expert runs it for all tokens).

Choices outside [0, X) are nobody's: a row of padding costs nothing.

Legend: T tokens, K choices a token, S = T * K slots, X experts, M hidden channels, I intermediate
channels; weights are [X, 2I, M] and [X, M, INNER], viewed as [X * 2I, M] and [X * M, INNER]."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Numbers that change with a batch: one kernel for all of them.
SIZES = ["tokens", "slots", "num_experts", "max_blocks", "shares"]


@triton.jit(do_not_specialize=SIZES)
def score(
    part, x, router, tokens, num_experts,
    M: tl.constexpr, BT: tl.constexpr, XP: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, MULTIPLY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """part[j, t, x] = router[x] . x[t] over the WIDTH channels from j * WIDTH on: exact products
    (an fp32 weight is the sum of three bf16, x is bf16), summed in fp32 over each SPAN, then over
    spans in their order, so that how many are summed here changes nothing. Program (i, j): BT
    tokens. MULTIPLY: the products' operands' type, fp32 where there is no device."""
    xs = tl.arange(0, XP)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    k = tl.program_id(1) * WIDTH + tl.arange(0, BK)
    w_at = router + xs[:, None] * M + k[None, :]
    x_at = x + t.to(tl.int64)[:, None] * M + k[None, :]
    acc = tl.zeros([XP, BT], tl.float32)
    total = tl.zeros([XP, BT], tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for k0 in range(0, WIDTH, BK):
        inside = (k0 + k < M)[None, :]
        w = tl.load(w_at + k0, mask=inside & (xs < num_experts)[:, None], other=0.0)
        x_KT = tl.load(x_at + k0, mask=inside & (t < tokens)[:, None], other=0.0).T.to(MULTIPLY)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low.to(MULTIPLY), x_KT, acc)
        acc = tl.dot(middle.to(MULTIPLY), x_KT, acc)
        acc = tl.dot(high.to(MULTIPLY), x_KT, acc)
        if (k0 + BK) % SPAN == 0:
            total += acc
            acc = tl.zeros([XP, BT], tl.float32)
    at = part + ((tl.program_id(1) * tokens).to(tl.int64) + t)[:, None] * num_experts + xs[None, :]
    tl.store(at, total.T, mask=(t < tokens)[:, None] & (xs < num_experts)[None, :])


@triton.jit(do_not_specialize=SIZES)
def choose(
    ids, weights, part, bias, tokens, num_experts, scaling,
    SPANS: tl.constexpr, ROUTED: tl.constexpr, SHARED: tl.constexpr, NORMALIZE: tl.constexpr,
    XP: tl.constexpr, KP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For the program's token the ROUTED best of sigmoid(logits) + bias, the first of equals, then
    SHARED experts (they follow the routed ones) with weight 1."""
    K: tl.constexpr = ROUTED + SHARED
    x = tl.arange(0, XP)
    k = tl.arange(0, KP)
    t = tl.program_id(0)
    known = x < num_experts
    extra = tl.load(bias + x, mask=known, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    logits = tl.zeros([XP], tl.float32)
    for j in tl.static_range(SPANS):
        at = part + (j * tokens + t).to(tl.int64) * num_experts + x
        logits += tl.load(at, mask=known, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = tl.where(known, scores + extra, float("-inf"))
    total = 0.0
    chosen = tl.where(k < ROUTED, 0, num_experts + k - ROUTED)
    weight = tl.where(k < ROUTED, 0.0, 1.0)
    for i in tl.static_range(ROUTED):
        best = tl.argmax(ranked, 0)
        value = tl.sum(tl.where(x == best, scores, 0.0), 0)
        ranked = tl.where(x == best, float("-inf"), ranked)
        total += value
        chosen = tl.where(k == i, best, chosen)
        weight = tl.where(k == i, value, weight)
    factor = scaling
    if NORMALIZE:
        factor = scaling / (total + 1e-20)
    weight = tl.where(k < ROUTED, weight * factor, weight)
    tl.store(ids + t.to(tl.int64) * K + k, chosen, mask=k < K)
    tl.store(weights + t.to(tl.int64) * K + k, weight, mask=k < K)


@triton.jit
def _expert(ids, slot, end, num_experts, XP: tl.constexpr):
    """Of slots before `end`; XP - 1 where it is nobody's."""
    expert = tl.load(ids + slot, mask=slot < end, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < num_experts), expert, XP - 1)


@triton.jit(do_not_specialize=SIZES)
def count(
    counts, ids, slots, num_experts,
    SHARE: tl.constexpr, XP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i: how many of the SHARE slots from i * SHARE on chose each expert, [i, XP]."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    total = tl.histogram(_expert(ids, slot, slots, num_experts, XP), XP)
    tl.store(counts + tl.program_id(0) * XP + tl.arange(0, XP), total)


@triton.jit(do_not_specialize=SIZES)
def place(
    rows, blocks, counts, ids, slots, num_experts, max_blocks, shares,
    SHARE: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr, XP: tl.constexpr,
    BT: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i puts its SHARE slots in their rows, PIECE at once, in order; the first writes
    nobody in the rows that experts' last blocks have left, the last who owns each block. COUNTED:
    `count` has run, else each program counts all slots, CHUNK at once."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.arange(0, XP)
    share = tl.program_id(0)
    if COUNTED:
        befores = tl.zeros([32, XP], tl.int32)
        totals = tl.zeros([32, XP], tl.int32)
        for first in range(0, shares, 32):
            i = first + tl.arange(0, 32)
            some = tl.load(
                counts + i[:, None] * XP + x[None, :], mask=(i < shares)[:, None], other=0
            )
            totals += some
            befores += tl.where((i < share)[:, None], some, 0)
        before = tl.sum(befores, 0)
        total = tl.sum(totals, 0)
    else:
        before = tl.zeros([XP], tl.int32)
        total = tl.zeros([XP], tl.int32)
        for first in range(0, slots, CHUNK):
            slot = first + tl.arange(0, CHUNK)
            expert = _expert(ids, slot, slots, num_experts, XP)
            total += tl.histogram(expert, XP)
            before += tl.histogram(tl.where(slot < share * SHARE, expert, XP - 1), XP)
    total = tl.where(x < num_experts, total, 0)
    room = (total + BT - 1) // BT * BT
    stop = tl.cumsum(room, 0)
    start = stop - room
    lane = tl.arange(0, PIECE)
    other_lane = tl.arange(0, PIECE)
    for piece in range(share * SHARE, (share + 1) * SHARE, PIECE):
        expert = _expert(ids, piece + lane, slots, num_experts, XP)
        other = _expert(ids, piece + other_lane, slots, num_experts, XP)
        same = (other[None, :] == expert[:, None]) & (other_lane[None, :] < lane[:, None])
        at = tl.gather(start + before, expert, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(rows + at, piece + lane, mask=expert < num_experts)
        before += tl.histogram(expert, XP)
    if share == 0:
        for first in range(0, BT, 16):
            left = (start + total + first)[:, None] + tl.arange(0, 16)[None, :]
            tl.store(rows + left, tl.zeros([XP, 16], tl.int32) + slots, mask=left < stop[:, None])
    if share == shares - 1:
        num_blocks = tl.max(stop, 0) // BT
        for first in range(0, max_blocks, 128):
            b = first + tl.arange(0, 128)
            owner = tl.sum((stop[None, :] <= (b * BT)[:, None]).to(tl.int32), 1)
            owner = tl.where(b < num_blocks, owner, -1)
            tl.store(blocks + b, owner, mask=b < max_blocks)
        tl.store(blocks + max_blocks, num_blocks)


@triton.jit(do_not_specialize=SIZES)
def gather(
    out, x, rows, blocks, slots,
    M: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[r] = x[token of row r], zero for nobody, for blocks that have an owner."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    if tl.load(blocks + row // BT) < 0:
        return
    slot = tl.load(rows + row)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    token = (slot // K).to(tl.int64)
    value = tl.load(x + token * M + n, mask=n < tl.where(slot < slots, M, 0), other=0.0)
    tl.store(out + row.to(tl.int64) * M + n, value, mask=n < M)


@triton.jit
def _owner(
    rows, blocks, ids, block, tokens, slots, num_experts,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """A block's expert, -1 for nobody, and its rows' slots, S for nobody."""
    lane = tl.arange(0, BT)
    if DIRECT == 0:
        expert = tl.load(blocks + block)
        slot = tl.load(rows + block * BT + lane)
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
        first = tl.min(slot, 0)
        if DIRECT == 1:
            expert = tl.where(first < slots, expert, -1)
        else:
            ours = (first == block) & (expert >= 0) & (expert < num_experts)
            expert = tl.where(ours, expert, -1)
    return expert, slot


@triton.jit
def _up_tile(
    x, gate_up, act, slot, slots, row0, expert, tile,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SORTED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """act[BT rows from row0 on, tile's channels] = silu(gate x) * up x."""
    live = slot < slots
    n0 = tile * BN
    k = tl.arange(0, BK)
    if not SORTED:
        token = tl.where(live, slot // K, 0).to(tl.int64)
        x_at = x + token[:, None] * M + k[None, :]
    shape: tl.constexpr = [BN, BT] if SWAP else [BT, BN]
    gate = tl.zeros(shape, tl.float32)
    up = tl.zeros(shape, tl.float32)
    for k0 in tl.range(0, M, BK, warp_specialize=SPLIT):
        if SORTED:
            x_TK = x.load([row0, k0])
        elif M % BK == 0:
            x_TK = tl.load(x_at + k0, mask=live[:, None], other=0.0)
        else:
            x_TK = tl.load(x_at + k0, mask=live[:, None] & (k0 + k < M)[None, :], other=0.0)
        gate_NK = gate_up.load([expert * (2 * INNER) + n0, k0])
        up_NK = gate_up.load([expert * (2 * INNER) + INNER + n0, k0])
        if SWAP:
            gate = tl.dot(gate_NK, x_TK.T, gate)
            up = tl.dot(up_NK, x_TK.T, up)
        else:
            gate = tl.dot(x_TK, gate_NK.T, gate)
            up = tl.dot(x_TK, up_NK.T, up)
    n = n0 + tl.arange(0, BN)
    row = row0 + tl.arange(0, BT)
    value = (gate / (1.0 + tl.exp(-gate)) * up).to(act.dtype.element_ty)
    at = act + row.to(tl.int64)[:, None] * INNER + n[None, :]
    if SWAP:
        value = value.T
    if INNER % BN == 0:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=(n < INNER)[None, :])


@triton.jit
def _down_tile(
    act, down, part, slot, slots, row0, expert, tile,
    M: tl.constexpr, INNER: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SORTED: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """part[slots of BT rows, tile's channels] = down act[BT rows from row0 on]. AHEAD: the first
    weights are loaded before what makes `act` is waited for."""
    n0 = tile * BN
    k = tl.arange(0, BK)
    row = row0 + tl.arange(0, BT)
    if not SORTED:
        act_at = act + row.to(tl.int64)[:, None] * INNER + k[None, :]
    acc = tl.zeros([BN, BT] if SWAP else [BT, BN], tl.float32)
    if AHEAD:
        down_NK = down.load([expert * M + n0, 0])
        gdc_wait()
        gdc_launch_dependents()
        act_TK = tl.load(act_at)
        acc = tl.dot(down_NK, act_TK.T, acc)
    for k0 in tl.range(BK if AHEAD else 0, INNER, BK, warp_specialize=SPLIT):
        if SORTED:
            act_TK = act.load([row0, k0])
        elif INNER % BK == 0:
            act_TK = tl.load(act_at + k0)
        else:
            act_TK = tl.load(act_at + k0, mask=(k0 + k < INNER)[None, :], other=0.0)
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
    tl.store(at, value, mask=(slot < slots)[:, None] & (n < M)[None, :])


@triton.jit(do_not_specialize=SIZES)
def up(
    x, x_half, gate_up, act, rows, blocks, ids, tokens, slots, max_blocks, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SORTED: tl.constexpr, PROGRAMS: tl.constexpr, FLAT: tl.constexpr,
    SPLIT: tl.constexpr, DIRECT: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles are numbered by block, then by channels. PROGRAMS 0: one tile a program, else so many
    programs share them. x [T, M], act [rows, I], `gate_up` a descriptor of [BN, BK] boxes. HALVES:
    a block that is at most half full takes half a tile. SORTED: `x` and `x_half` are descriptors of
    gathered rows."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tiles: tl.constexpr = (INNER + BN - 1) // BN
    HALF: tl.constexpr = BT // 2
    if PROGRAMS == 0:
        block = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
        expert, slot = _owner(rows, blocks, ids, block, tokens, slots, num_experts,
                              K, KP, BT, DIRECT)  # fmt: skip
        if expert >= 0:
            if HALVES:
                if tl.load(rows + block * BT + HALF) >= slots:
                    half = tl.load(rows + block * BT + tl.arange(0, HALF))
                    _up_tile(x_half, gate_up, act, half, slots, block * BT, expert, tile,
                             M, INNER, K, HALF, BN, BK, SWAP, SORTED, SPLIT)  # fmt: skip
                else:
                    _up_tile(x, gate_up, act, slot, slots, block * BT, expert, tile,
                             M, INNER, K, BT, BN, BK, SWAP, SORTED, SPLIT)  # fmt: skip
            else:
                _up_tile(x, gate_up, act, slot, slots, block * BT, expert, tile,
                         M, INNER, K, BT, BN, BK, SWAP, SORTED, SPLIT)  # fmt: skip
    else:
        last = tl.load(blocks + max_blocks) * tiles
        for number in tl.range(tl.program_id(0), last, PROGRAMS, flatten=FLAT):
            block = number // tiles
            expert = tl.load(blocks + block)
            slot = tl.load(rows + block * BT + tl.arange(0, BT))
            _up_tile(x, gate_up, act, slot, slots, block * BT, expert, number % tiles,
                     M, INNER, K, BT, BN, BK, SWAP, SORTED, SPLIT)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def down(
    act, act_half, weights, part, rows, blocks, ids, tokens, slots, max_blocks, num_experts,
    M: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, SORTED: tl.constexpr, PROGRAMS: tl.constexpr, FLAT: tl.constexpr,
    SPLIT: tl.constexpr, DIRECT: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """As `up`, from act [rows, I] to part [S, M]. AHEAD (with EARLY): who owns a block was known
    before `up` began, which asked for this launch after its own wait."""
    if EARLY and not AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    tiles: tl.constexpr = (M + BN - 1) // BN
    HALF: tl.constexpr = BT // 2
    if PROGRAMS == 0:
        block = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
        expert, slot = _owner(rows, blocks, ids, block, tokens, slots, num_experts,
                              K, KP, BT, DIRECT)  # fmt: skip
        if expert >= 0:
            if HALVES:
                if tl.load(rows + block * BT + HALF) >= slots:
                    half = tl.load(rows + block * BT + tl.arange(0, HALF))
                    _down_tile(act_half, weights, part, half, slots, block * BT, expert, tile,
                               M, INNER, HALF, BN, BK, SWAP, SORTED, SPLIT, AHEAD)  # fmt: skip
                else:
                    _down_tile(act, weights, part, slot, slots, block * BT, expert, tile,
                               M, INNER, BT, BN, BK, SWAP, SORTED, SPLIT, AHEAD)  # fmt: skip
            else:
                _down_tile(act, weights, part, slot, slots, block * BT, expert, tile,
                           M, INNER, BT, BN, BK, SWAP, SORTED, SPLIT, AHEAD)  # fmt: skip
        elif AHEAD:
            gdc_wait()  # what comes next waits for this launch alone
    else:
        last = tl.load(blocks + max_blocks) * tiles
        for number in tl.range(tl.program_id(0), last, PROGRAMS, flatten=FLAT):
            block = number // tiles
            expert = tl.load(blocks + block)
            slot = tl.load(rows + block * BT + tl.arange(0, BT))
            _down_tile(act, weights, part, slot, slots, block * BT, expert, number % tiles,
                       M, INNER, BT, BN, BK, SWAP, SORTED, SPLIT, AHEAD)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def join(
    out, part, ids, weights, num_experts,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[t, n] = sum over k of weights[t, k] * part[t * K + k, n] for the BN channels of program
    (t, j); a choice that is nobody's adds nothing, whatever `part` holds there."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
