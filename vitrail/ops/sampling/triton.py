"""Sampling in one or two passes over the logits. A row is cut in blocks of the vocabulary, each a
program's; what they found is joined by one program a row.

Legend: S rows of logits, R rows that draw, V vocabulary, N blocks of a row."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.ops.launch import launch, launch_early
from vitrail.ops.sampling.naive import Filters

BLOCK = 2048
NUM_WARPS = 4
FILTER_BLOCK, FILTER_WARPS = 512, 8


@triton.jit
def _best_of_block(
    logits, never, part, part_token, vocab, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """part: fp32 [S, N], the largest of a block, NaN where one of its logits is not finite;
    part_token: int32 [S, N], the first that is as large."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < vocab
    mask = tl.load(never + at, mask=there, other=float("-inf"))  # no kernel writes these
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row.to(tl.int64) * vocab + at, mask=there, other=0.0)
    faulty = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0)
    x += mask
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, at, vocab), 0)
    tl.store(part + row * blocks + block, tl.where(faulty > 0, float("nan"), top))
    tl.store(part_token + row * blocks + block, first)


@triton.jit
def _best_of_row(
    part, part_token, tokens, finite, last, slots, vocab, blocks,
    BLOCKS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row's first largest logit, and whether it is to be had. KEEP: -1 where it is not, and to
    `last` at the row's slot what is, else 0."""
    row, nth = tl.program_id(0), tl.arange(0, BLOCKS)
    there = nth < blocks
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(part + row * blocks + nth, mask=there, other=float("-inf"))
    token = tl.load(part_token + row * blocks + nth, mask=there, other=vocab)
    faulty = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, token, vocab), 0)
    best = tl.minimum(first, vocab - 1).to(tl.int64)
    well = (faulty == 0) & (top > float("-inf"))
    if KEEP:
        tl.store(tokens + row, tl.where(well, best, -1))
        tl.store(last + tl.load(slots + row), tl.where(well, best, 0))
    else:
        tl.store(tokens + row, best)
        tl.store(finite + row, well)


@triton.jit
def _scores(row, never, at, vocab):
    """Logits of a row, -inf where masked, beyond the row, or not a number."""
    x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
    x += tl.load(never + at, mask=at < vocab, other=0.0)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _weights(x, temperature, top):
    """exp((x - top) / temperature), 0 where all is masked."""
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / temperature)


@triton.jit
def _mass_of_block(
    logits, never, rows, temperatures, part, mass, vocab, blocks, BLOCK: tl.constexpr
):
    """part: fp32 [R, N], the largest of a block; mass: fp32 [R, N], its weights' sum beside it."""
    nth, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = _scores(logits + tl.load(rows + nth) * vocab, never, at, vocab)
    top = tl.max(x, 0)
    temperature = tl.load(temperatures + nth).to(tl.float32)
    tl.store(part + nth * blocks + block, top)
    tl.store(mass + nth * blocks + block, tl.sum(_weights(x, temperature, top), 0))


@triton.jit
def _draw_of_row(
    logits,
    never,
    rows,
    temperatures,
    draws,
    part,
    mass,
    tokens,
    vocab,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The block in which the cumulative weight exceeds u times the whole, then the place in it;
    sums over blocks are float64. Where rounding leaves none, the last that has a weight."""
    nth, each = tl.program_id(0), tl.arange(0, BLOCKS)
    there = each < blocks
    temperature = tl.load(temperatures + nth)
    tops = tl.load(part + nth * blocks + each, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    factor = tl.exp((tops - shift).to(tl.float64) / temperature)
    masses = tl.load(mass + nth * blocks + each, mask=there, other=0.0).to(tl.float64) * factor
    until = tl.cumsum(masses, 0)
    target = tl.load(draws + nth) * tl.sum(masses, 0)
    reached = (until > target) & (masses > 0)
    last = tl.max(tl.where(masses > 0, each, 0), 0)
    block = tl.minimum(tl.min(tl.where(reached, each, BLOCKS), 0), last)
    before = tl.sum(tl.where(each < block, masses, 0.0), 0)
    block_top = tl.max(tl.where(each == block, tops, float("-inf")), 0)
    scale = tl.sum(tl.where(each == block, factor, 0.0), 0)
    # a row without any weight gives some token: its logits were not finite
    rest = ((target - before) / tl.where(scale > 0, scale, 1.0)).to(tl.float32)
    inner = tl.arange(0, BLOCK)
    at = block * BLOCK + inner
    x = _scores(logits + tl.load(rows + nth) * vocab, never, at, vocab)
    w = _weights(x, temperature.to(tl.float32), block_top)
    found = tl.min(tl.where((tl.cumsum(w, 0) > rest) & (w > 0), inner, BLOCK), 0)
    found = tl.minimum(found, tl.max(tl.where(w > 0, inner, 0), 0))
    tl.store(tokens + nth, tl.minimum(block * BLOCK + found, vocab - 1).to(tl.int64))


@triton.jit
def _keys(x):
    """uint32 in the order of fp32 numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _measure(row, never, vocab, temperature, top, pivots, PIVOTS: tl.constexpr, WIDE: tl.constexpr):
    """float64 [PIVOTS] each: the weight, and the number, of a row's logits from each pivot on."""
    mass = tl.zeros([WIDE, PIVOTS], tl.float32)
    count = tl.zeros([WIDE, PIVOTS], tl.float32)
    for first in range(0, vocab, WIDE):
        at = first + tl.arange(0, WIDE)
        x = _scores(row, never, at, vocab)
        w = _weights(x, temperature, top)
        there = (_keys(x)[:, None] >= pivots[None, :]) & (at < vocab)[:, None]
        mass += tl.where(there, w[:, None], 0.0)
        count += tl.where(there, 1.0, 0.0)
    return tl.sum(mass.to(tl.float64), 0), tl.sum(count.to(tl.float64), 0)


@triton.jit
def _descend(
    row,
    never,
    vocab,
    temperature,
    top,
    goal,
    BY_COUNT: tl.constexpr,
    STRICT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The largest key from which on the weight (or number) of logits reaches `goal` (STRICT:
    exceeds it), with the weight and number of those above it. Three bits a pass."""
    nth = tl.arange(0, 8)
    key = tl.zeros([1], tl.uint32)
    above = tl.zeros([1], tl.float64)
    above_count = tl.zeros([1], tl.float64)
    for i in range(11):
        shift = 30 - 3 * i
        valid = nth < tl.where(i == 0, 4, 8)
        pivots = key + (tl.where(valid, nth, 0).to(tl.uint32) << shift)
        mass, count = _measure(row, never, vocab, temperature, top, pivots, 8, WIDE)
        have = count if BY_COUNT else mass
        reached = (have > goal) if STRICT else (have >= goal)
        best = tl.max(tl.where(reached & valid, nth, 0), 0)
        following = (nth == best + 1) & valid
        more = tl.sum(following.to(tl.int32), 0) > 0
        above = tl.where(more, tl.sum(tl.where(following, mass, 0.0), 0), above)
        above_count = tl.where(more, tl.sum(tl.where(following, count, 0.0), 0), above_count)
        key += best.to(tl.uint32) << shift
    return tl.max(key, 0), tl.max(above, 0), tl.max(above_count, 0)


@triton.jit
def _draw_filtered(
    logits,
    never,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    draws,
    tokens,
    vocab,
    WIDE: tl.constexpr,
):
    """A program a row. Likeliest first, each filter keeps a prefix: it ends within the logits of
    one key, of which so many stay (`ties`). Nothing is sorted: a prefix's end is found by weighing
    what lies above a key, bit by bit, and so is the place of the draw."""
    nth = tl.program_id(0)
    row = logits + tl.load(rows + nth) * vocab
    temperature = tl.load(temperatures + nth).to(tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    for first in range(0, vocab, WIDE):
        x = _scores(row, never, first + tl.arange(0, WIDE), vocab)
        top = tl.maximum(top, tl.max(x, 0))
    top = tl.max(top, 0)
    # min_p: weights are relative to the likeliest one's
    min_p = tl.load(min_ps + nth).to(tl.float32)
    # a constant below fp32's normal numbers would be a float64 to some releases
    least = tl.log(tl.maximum(min_p, 2e-38)) * temperature + top
    last = _keys(tl.where(min_p > 0, least, float("-inf")))
    ends = tl.zeros([2], tl.uint32) + last
    kept, _ = _measure(row, never, vocab, temperature, top, ends, 2, WIDE)
    whole, _ = _measure(row, never, vocab, temperature, top, tl.zeros([2], tl.uint32), 2, WIDE)
    total, whole = tl.max(kept, 0), tl.max(whole, 0)
    top_k = tl.load(top_ks + nth)
    ties = tl.maximum(top_k, vocab.to(tl.float64))
    if top_k < vocab:
        key, above, count = _descend(row, never, vocab, temperature, top, top_k, True, False, WIDE)
        each = _weight_of(key, temperature, top)
        whole = above + (top_k - count) * each
        total, last, ties = _shorter(total, last, ties, whole, key, top_k - count)
    top_p = tl.load(top_ps + nth)
    if top_p < 1:
        goal = top_p * whole
        key, above, count = _descend(row, never, vocab, temperature, top, goal, False, False, WIDE)
        each = _weight_of(key, temperature, top)
        some = tl.maximum(tl.ceil((goal - above) / tl.maximum(each, 1e-300)), 1.0)
        total, last, ties = _shorter(total, last, ties, above + some * each, key, some)
    goal = tl.load(draws + nth) * total
    key, above, count = _descend(row, never, vocab, temperature, top, goal, False, True, WIDE)
    each = _weight_of(key, temperature, top)
    place = tl.floor((goal - above) / tl.maximum(each, 1e-300))
    # where rounding leads past the end, the last that is kept
    place = tl.where(key < last, ties - 1, place)
    place = tl.where(key <= last, tl.minimum(place, ties - 1), place)
    key = tl.maximum(key, last)
    place = tl.maximum(place, 0.0)
    seen = tl.zeros([1], tl.float64)
    token = tl.full([1], -1, tl.int32)
    reserve = tl.zeros([1], tl.int32)
    for first in range(0, vocab, WIDE):
        at = first + tl.arange(0, WIDE)
        same = (_keys(_scores(row, never, at, vocab)) == key) & (at < vocab)
        until = seen + tl.cumsum(same.to(tl.int32), 0).to(tl.float64)
        token = tl.maximum(token, tl.max(tl.where(same & (until == place + 1), at, -1), 0))
        reserve = tl.maximum(reserve, tl.max(tl.where(same, at, 0), 0))
        seen += tl.sum(same.to(tl.int32), 0).to(tl.float64)
    token = tl.max(tl.where(token < 0, reserve, token), 0)
    tl.store(tokens + nth, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _weight_of(key, temperature, top):
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, ~key)
    return _weights(bits.to(tl.float32, bitcast=True), temperature, top).to(tl.float64)


@triton.jit
def _shorter(total, last, ties, other_total, other_last, other_ties):
    """Of two prefixes the one that ends first: its weight, its last key and how many of that."""
    both = tl.where(other_last == last, tl.minimum(ties, other_ties), other_ties)
    ties = tl.where(other_last >= last, both, ties)
    return tl.minimum(total, other_total), tl.maximum(last, other_last), ties


def best_tokens(
    logits_SV: Float[Tensor, "S V"], never_V: Float[Tensor, "V"]
) -> tuple[Int[Tensor, "S"], Bool[Tensor, "S"]]:
    """As `naive.best_tokens`, reading the logits once."""
    finite_S = torch.empty(len(logits_SV), dtype=torch.bool, device=logits_SV.device)
    return _best(logits_SV, never_V, finite_S, None), finite_S


def keep_best(
    logits_SV: Float[Tensor, "S V"],
    never_V: Float[Tensor, "V"],
    last_R: Int[Tensor, "R"],
    slots_S: Int[Tensor, "S"],
) -> Int[Tensor, "S"]:
    """As `naive.keep_best`, in two launches."""
    return _best(logits_SV, never_V, None, (last_R, slots_S))


def _best(
    logits_SV: Tensor,
    never_V: Tensor,
    finite_S: Tensor | None,
    kept: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Tokens, int64 [S]."""
    logits_SV = logits_SV.contiguous()
    rows, vocab = logits_SV.shape
    blocks, device = -(-vocab // BLOCK), logits_SV.device
    part = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    part_token = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    tokens_S = torch.empty(rows, dtype=torch.int64, device=device)
    last_R, slots_S = kept or (None, None)
    many = triton.next_power_of_2(blocks)
    row = (logits_SV, never_V, part, part_token, vocab, blocks, BLOCK)
    launch_early(_best_of_block, (rows, blocks), device, *row, num_warps=NUM_WARPS)
    found = (tokens_S, finite_S, last_R, slots_S, vocab, blocks, many, kept is not None)
    launch_early(_best_of_row, (rows,), device, part, part_token, *found, num_warps=1)
    return tokens_S


def draw_plain(
    x_SV: Float[Tensor, "S V"],
    rows_R: Int[Tensor, "R"],
    never_V: Float[Tensor, "V"],
    temperature_R: Float[Tensor, "R"],
    u_R: Float[Tensor, "R"],
) -> Int[Tensor, "R"]:
    """As `naive.draw_plain`, with weights in fp32 and their sums over blocks in float64."""
    x_SV = x_SV.contiguous()
    (count,), vocab = rows_R.shape, x_SV.shape[1]
    blocks, device = -(-vocab // BLOCK), x_SV.device
    part = torch.empty((count, blocks), dtype=torch.float32, device=device)
    mass = torch.empty_like(part)
    tokens_R = torch.empty(count, dtype=torch.int64, device=device)
    row = (x_SV, never_V, rows_R, temperature_R)
    block = (*row, part, mass, vocab, blocks, BLOCK)
    launch(_mass_of_block, (count, blocks), device, *block, num_warps=NUM_WARPS)
    many = triton.next_power_of_2(blocks)
    row = (*row, u_R, part, mass, tokens_R, vocab, blocks, BLOCK, many)
    launch(_draw_of_row, (count,), device, *row, num_warps=NUM_WARPS)
    return tokens_R


def draw_filtered(
    x_SV: Float[Tensor, "S V"],
    rows_R: Int[Tensor, "R"],
    never_V: Float[Tensor, "V"],
    temperature_R: Float[Tensor, "R"],
    filters: Filters,
    u_R: Float[Tensor, "R"],
) -> Int[Tensor, "R"]:
    """As `naive.draw_filtered`, with weights in fp32, without sorting."""
    x_SV = x_SV.contiguous()
    tokens_R = torch.empty_like(rows_R)
    columns = (rows_R, temperature_R, *filters, u_R)
    launch(
        _draw_filtered,
        (len(rows_R),),
        x_SV.device,
        x_SV,
        never_V,
        *(c.contiguous() for c in columns),
        tokens_R,
        x_SV.shape[1],
        FILTER_BLOCK,
        num_warps=FILTER_WARPS,
    )
    return tokens_R
