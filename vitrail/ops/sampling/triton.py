"""Sampling in one or two passes over the logits. A row is cut in blocks of the vocabulary, each a
program's; what they found is joined by one program a row.

Legend: S rows of logits, R rows that draw, V vocabulary, N blocks of a row."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 2048
NUM_WARPS = 4


@triton.jit
def _best_of_block(logits, never, part, part_token, vocab, blocks, BLOCK: tl.constexpr):
    """part: fp32 [S, N], the largest of a block, NaN where one of its logits is not finite;
    part_token: int32 [S, N], the first that is as large."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < vocab
    x = tl.load(logits + row.to(tl.int64) * vocab + at, mask=there, other=0.0)
    faulty = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0)
    x += tl.load(never + at, mask=there, other=float("-inf"))
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, at, vocab), 0)
    tl.store(part + row * blocks + block, tl.where(faulty > 0, float("nan"), top))
    tl.store(part_token + row * blocks + block, first)


@triton.jit
def _best_of_row(part, part_token, tokens, finite, vocab, blocks, BLOCKS: tl.constexpr):
    row, nth = tl.program_id(0), tl.arange(0, BLOCKS)
    there = nth < blocks
    x = tl.load(part + row * blocks + nth, mask=there, other=float("-inf"))
    token = tl.load(part_token + row * blocks + nth, mask=there, other=vocab)
    faulty = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, token, vocab), 0)
    tl.store(tokens + row, tl.minimum(first, vocab - 1).to(tl.int64))
    tl.store(finite + row, (faulty == 0) & (top > float("-inf")))


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


def best_tokens(
    logits_SV: Float[Tensor, "S V"], never_V: Float[Tensor, "V"]
) -> tuple[Int[Tensor, "S"], Bool[Tensor, "S"]]:
    """As `naive.best_tokens`, reading the logits once."""
    logits_SV = logits_SV.contiguous()
    rows, vocab = logits_SV.shape
    blocks, device = -(-vocab // BLOCK), logits_SV.device
    part = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    part_token = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    tokens_S = torch.empty(rows, dtype=torch.int64, device=device)
    finite_S = torch.empty(rows, dtype=torch.bool, device=device)
    many = triton.next_power_of_2(blocks)
    _best_of_block[(rows, blocks)](
        logits_SV, never_V, part, part_token, vocab, blocks, BLOCK, num_warps=NUM_WARPS
    )
    _best_of_row[(rows,)](part, part_token, tokens_S, finite_S, vocab, blocks, many, num_warps=1)
    return tokens_S, finite_S


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
    _mass_of_block[(count, blocks)](*row, part, mass, vocab, blocks, BLOCK, num_warps=NUM_WARPS)
    many = triton.next_power_of_2(blocks)
    _draw_of_row[(count,)](
        *row, u_R, part, mass, tokens_R, vocab, blocks, BLOCK, many, num_warps=NUM_WARPS
    )
    return tokens_R
