"""One Triton program attends to one work item for one key head: TILE_M rows of a sequence's queries
against its keys [lo, hi).

    rows         (query, head of the group), flat: row = query * group + head
    scores       s = (q . k) * QK_SCALE, through tanh where there is a soft cap
    softmax      base 2: p = 2^(s * EXP_SCALE - m); lse = (m + log2 l) * ln 2
    stored       keys and values may be e4m3: the scale of the keys is part of QK_SCALE or, without
                 a cap, of EXP_SCALE; that of the values, V_SCALE, is applied to every result
    head_dim     D1 + D2 channels (powers of two, D2 may be 0) cover D; likewise E1 + E2 for values

What lies outside [lo, hi) is never loaded, so it may hold anything. All addresses are 64-bit.
Strides come in units of UNIT (keys and values: KV_UNIT) elements: 16 bytes where every stride
allows it, which is how the compiler learns that rows can be copied 16 bytes at a time.

Item record, int32: [q_row, row, rows, q_pos, kv_base, lo, hi, slot, has_sink]
    q_row     packed query row of the sequence's first query
    row       first of the item's rows; rows: how many the sequence has, 0: nothing to do
    q_pos     key position of the sequence's first query
    kv_base   paged: row of the block table; packed: row of the sequence's first key
    slot      -1: the result is final; else the partial result to write, fp32 and base-2 lse
    has_sink  whether this item counts the sink"""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false

import triton
import triton.language as tl


@triton.jit
def _row_offsets(
    table,
    kv_base,
    n0,
    live,
    stride_page,
    stride_key,
    TILE_N: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """int64 element offsets [TILE_N] of keys n0, n0 + 1, ...: one page lookup where the tile lies
    within a page, one a key else. What does not change with n0 stands apart, to be hoisted; a
    32-bit page is widened before it is multiplied, so that the product is one instruction."""
    nth = tl.arange(0, TILE_N)
    by_key = stride_key.to(tl.int64)
    if PAGE == 0:
        return (kv_base + n0).to(tl.int64) * (by_key * UNIT) + nth.to(tl.int64) * (by_key * UNIT)
    by_page = stride_page.to(tl.int64)
    if PAGE % TILE_N == 0:
        first = tl.load(table + n0 // PAGE).to(tl.int64) * (by_page * UNIT)
        if PAGE > TILE_N:
            first += (n0 % PAGE) * (by_key * UNIT)  # 64-bit, as by_key is
        return first + nth.to(tl.int64) * (by_key * UNIT)
    n = (n0 + nth).to(tl.uint32)  # unsigned: divided by a shift
    if MASKED:
        pages = tl.load(table + n // PAGE, mask=live, other=0).to(tl.int64)
    else:
        pages = tl.load(table + n // PAGE).to(tl.int64)
    if PAGE == 1:
        return pages * by_page * UNIT
    return (pages * by_page + (n % PAGE).to(tl.int64) * by_key) * UNIT


@triton.jit
def _load_rows(
    base,
    offsets,
    live,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Channels [FIRST, FIRST + BLOCK) of rows; those from WIDTH on are zero, as are dead rows."""
    d = FIRST + tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + d[None, :]
    if FIRST + BLOCK > WIDTH:
        if MASKED:
            return tl.load(pointers, mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)
        return tl.load(pointers, mask=(d < WIDTH)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _store_rows(
    base, cells, values, alive, FIRST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Channels [FIRST, FIRST + BLOCK) of contiguous rows of WIDTH."""
    e = FIRST + tl.arange(0, BLOCK)
    mask = alive[:, None] & (e < WIDTH)[None, :]
    pointers = base + cells[:, None] * WIDTH + e[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    state,
    queries,
    memory,
    strides,
    item,
    n0,
    pos,
    scales,
    window,
    TILE_N: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    SHARED: tl.constexpr,
    FROM_LO: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys into the running maximum, denominator and numerator."""
    top, total, acc1, acc2 = state
    q1, q2 = queries
    k, v, table = memory
    k_page, k_key, v_page, v_key = strides
    kv_base, lo, hi = item
    qk_scale, exp_scale = scales
    n = n0 + tl.arange(0, TILE_N)
    live = n < hi
    if FROM_LO:
        live = live & (n >= lo)
    rows = _row_offsets(table, kv_base, n0, live, k_page, k_key, TILE_N, PAGE, UNIT, MASKED)
    k1 = _load_rows(k, rows, live, 0, D1, D, MASKED).to(q1.dtype)
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
        k2 = _load_rows(k, rows, live, D1, D2, D, MASKED).to(q1.dtype)
        s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
    if SHARED:
        v1 = k1
    else:
        rows = _row_offsets(table, kv_base, n0, live, v_page, v_key, TILE_N, PAGE, UNIT, MASKED)
        v1 = _load_rows(v, rows, live, 0, E1, E, MASKED).to(q1.dtype)
    if SOFTCAP:
        # tanh x = 2 / (1 + e^(-2 x)) - 1; far below, e^60 is as good as infinity. A NaN stays one.
        s *= qk_scale
        s = 2.0 / (1.0 + tl.exp2(tl.where(s < -30.0, -30.0, s) * -2.8853900817779268)) - 1.0
    if MASKED:
        seen = live[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= pos[:, None])
        if WINDOW:
            seen = seen & (n[None, :] >= pos[:, None] - window)
            if not CAUSAL:
                seen = seen & (n[None, :] <= pos[:, None] + window)
        s = tl.where(seen, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * exp_scale)
    shift = new_top
    if MASKED:
        # a row that has seen no key yet: -inf minus -inf would be nan
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s * exp_scale - shift[:, None])
    kept = tl.exp2(top - shift)
    total = total * kept + tl.sum(p, 1)
    p = p.to(v1.dtype)
    acc1 = tl.dot(p, v1, acc1 * kept[:, None], input_precision="ieee")
    if E2 > 0:
        v2 = _load_rows(v, rows, live, E1, E2, E, MASKED).to(q1.dtype)
        acc2 = tl.dot(p, v2, acc2 * kept[:, None], input_precision="ieee")
    return new_top, total, acc1, acc2


@triton.jit(
    do_not_specialize=[
        "q_token",
        "q_head",
        "k_page",
        "k_key",
        "k_head",
        "v_page",
        "v_key",
        "v_head",
        "table_row",
        "window",
        "qk_scale",
        "exp_scale",
        "v_scale",
    ],
    do_not_specialize_on_alignment=["sink", "lse", "part_lse", "table", "items"],
)
def attend(
    q,
    k,
    v,
    sink,
    out,
    lse,
    part,
    part_lse,
    table,
    items,
    q_token,
    q_head,
    k_page,
    k_key,
    k_head,
    v_page,
    v_key,
    v_head,
    table_row,
    window,
    qk_scale,
    exp_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    SHARED: tl.constexpr,
    FROM_LO: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    UNIT: tl.constexpr,
    KV_UNIT: tl.constexpr,
    PEELED: tl.constexpr,
):
    """Programs: an item times a key head. FROM_LO: keys below `lo` may share its tile. CAUSAL,
    WINDOW: rows of a tile see different keys. PEELED, for many queries: tiles that every row sees
    whole run in a loop without masks."""
    group: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    if PEELED:
        # head by head: programs that run together read the same keys
        num_items = tl.num_programs(0) // KV_HEADS
        kv_head = program // num_items
        record = items + (program % num_items) * 9
    else:
        # item by item: programs that run together read neighbouring memory
        kv_head = program % KV_HEADS
        record = items + (program // KV_HEADS) * 9
    q_row = tl.load(record)
    row = tl.load(record + 1)
    rows = tl.load(record + 2)
    if rows == 0:
        return
    q_pos = tl.load(record + 3)
    kv_base = tl.load(record + 4)
    lo = tl.load(record + 5)
    hi = tl.load(record + 6)
    slot = tl.load(record + 7)

    flat = row + tl.arange(0, TILE_M)
    alive = flat < rows
    query = flat // group
    head = kv_head * group + flat % group
    pos = q_pos + query

    q_rows = (q_row + query).to(tl.int64) * q_token.to(tl.int64) * UNIT
    q_rows += head.to(tl.int64) * q_head.to(tl.int64) * UNIT
    q1 = _load_rows(q, q_rows, alive, 0, D1, D, True)
    q2 = q1
    if D2 > 0:
        q2 = _load_rows(q, q_rows, alive, D1, D2, D, True)
    k += kv_head.to(tl.int64) * k_head.to(tl.int64) * KV_UNIT
    v += kv_head.to(tl.int64) * v_head.to(tl.int64) * KV_UNIT
    if PAGE > 0:
        table += kv_base.to(tl.int64) * table_row

    top = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    if SINK:
        logit = tl.load(sink + head, mask=alive, other=0.0) * 1.4426950408889634
        counts = tl.load(record + 8) > 0
        top = tl.where(counts, logit, top)
        total = tl.where(counts, 1.0, total)
    acc1 = tl.zeros([TILE_M, E1], tl.float32)
    acc2 = tl.zeros([TILE_M, E2 if E2 > 0 else 1], tl.float32)

    state = (top, total, acc1, acc2)
    queries = (q1, q2)
    memory = (k, v, table)
    strides = (k_page, k_key, v_page, v_key)
    item = (kv_base, lo, hi)
    scales = (qk_scale, exp_scale)
    start = lo
    if PAGE > 0 and PAGE % TILE_N == 0:
        start = lo // TILE_N * TILE_N  # a tile lies within one page
    end = hi
    if PEELED:
        first = start
        last = hi
        first_pos = q_pos + row // group
        if CAUSAL:
            last = tl.minimum(last, first_pos + 1)
        if WINDOW:
            last_pos = q_pos + (tl.minimum(row + TILE_M, rows) - 1) // group
            first_seen = tl.maximum(lo, last_pos - window)
            first = start + tl.cdiv(tl.maximum(first_seen - start, 0), TILE_N) * TILE_N
            if not CAUSAL:
                last = tl.minimum(last, first_pos + window + 1)
            first = tl.minimum(first, start + tl.cdiv(hi - start, TILE_N) * TILE_N)
            for n0 in range(start, first, TILE_N):
                state = _step(
                    state, queries, memory, strides, item, n0, pos, scales, window,
                    TILE_N, PAGE, D, D1, D2, E, E1, E2, SHARED, FROM_LO,
                    CAUSAL, WINDOW, SOFTCAP, KV_UNIT, True,
                )  # fmt: skip
        end = first + tl.maximum(last - first, 0) // TILE_N * TILE_N
        for n0 in range(first, end, TILE_N):
            state = _step(
                state, queries, memory, strides, item, n0, pos, scales, window,
                TILE_N, PAGE, D, D1, D2, E, E1, E2, SHARED, FROM_LO,
                CAUSAL, WINDOW, SOFTCAP, KV_UNIT, False,
            )  # fmt: skip
        start = end
    for n0 in range(start, hi, TILE_N):
        state = _step(
            state, queries, memory, strides, item, n0, pos, scales, window,
            TILE_N, PAGE, D, D1, D2, E, E1, E2, SHARED, FROM_LO,
                    CAUSAL, WINDOW, SOFTCAP, KV_UNIT, True,
        )  # fmt: skip

    top, total, acc1, acc2 = state
    blind = total == 0.0
    scale = tl.where(blind, 0.0, v_scale / tl.where(blind, 1.0, total))
    log = top + tl.log2(tl.where(blind, 1.0, total))
    if slot < 0:
        cells = (q_row + query).to(tl.int64) * HEADS + head
        tl.store(lse + cells, log * 0.6931471805599453, mask=alive)
        _store_rows(out, cells, acc1 * scale[:, None], alive, 0, E1, E)
        if E2 > 0:
            _store_rows(out, cells, acc2 * scale[:, None], alive, E1, E2, E)
    else:
        slots = (slot.to(tl.int64) * KV_HEADS + kv_head) * TILE_M + tl.arange(0, TILE_M)
        tl.store(part_lse + slots, log)
        _store_rows(part, slots, acc1 * scale[:, None], alive, 0, E1, E)
        if E2 > 0:
            _store_rows(part, slots, acc2 * scale[:, None], alive, E1, E2, E)
