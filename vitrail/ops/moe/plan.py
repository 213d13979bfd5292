"""Which kernels a mixture of experts runs, and in which tiles: a pure function of the number of
tokens, the shape and the GPU. Knows no tensors.

Legend: T tokens, K choices a token, S = T * K slots, X experts."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from vitrail.config.hardware import Hardware
from vitrail.ops.moe.table import MEASURED
from vitrail.ops.moe.tile import ExpertsPlan, Tile

# Row strides that descriptors, and torch's grouped product, take.
ALIGN_BYTES = 16
ITEM_BYTES = 2  # bf16
# What a program needs of shared memory beside its stages.
SPARE_BYTES = 2048
# Slots that a program of the sort takes at once; how many it takes alone.
SORT_CHUNK, SORT_ALONE = 512, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a router does with its scores, and how many shared experts every token has besides."""

    top_k: int
    num_shared: int
    normalize: bool
    scaling: float


class ExpertsShape(NamedTuple):
    """Channels and counts; shared experts are among both counts."""

    hidden: int
    inner: int
    experts: int
    top_k: int


class RouterTiles(NamedTuple):
    """`bt` tokens a program; channels are summed by spans of `span`, of which `parts` programs take
    `width` channels each: one span, or all."""

    bt: int
    span: int
    parts: int
    width: int


def experts_plan(tokens: int, shape: ExpertsShape, gpu: Hardware) -> ExpertsPlan:
    """What was measured to be quickest on this GPU for these channels, else the rule."""
    for (name, hidden, inner), rows in MEASURED.items():
        if name in gpu.name and (hidden, inner) == (shape.hidden, shape.inner):
            return next(plan for most, plan in rows if most is None or tokens <= most)
    return default_plan(tokens, shape, gpu)


def fixed_plan(shape: ExpertsShape, gpu: Hardware) -> ExpertsPlan:
    """One for any number of tokens, so that a token's sums do not depend on it: the rule's for the
    most rows for which weights are the left operand."""
    plan = replace(default_plan(48 * shape.experts // shape.top_k, shape, gpu), fixed=True)
    assert plan.bt == 64, plan
    return plan


def default_plan(tokens: int, shape: ExpertsShape, gpu: Hardware) -> ExpertsPlan:
    """One block for all while that costs little; then by the rows that an expert has on average,
    so that most experts fill a block at most once; the weights on the left until there are enough
    rows for a tile of their own; as many stages as there is room for, two programs on an SM."""
    rows = tokens * shape.top_k / shape.experts
    enough = tokens if tokens <= 32 else rows * 4 / 3
    bt = next((bt for bt in (16, 32, 64) if enough <= bt), 128)
    swap = bt < 128
    room = min(gpu.smem_per_block_bytes, gpu.smem_per_sm_bytes // 2) - SPARE_BYTES

    def tile(products: int) -> Tile:
        stage = (products * 64 + bt) * 64 * ITEM_BYTES
        stages = max(2, min(4, room // stage))
        return Tile(bn=64, bk=64, stages=stages, warps=4 if swap else 8, swap=swap)

    return ExpertsPlan(bt=bt, up=tile(2), down=tile(1), early=int(gpu.cc >= 90))


def router_tiles(tokens: int, hidden: int, fixed: bool = False) -> RouterTiles:
    """Sixteen spans of whole 64 channels (fewer of few channels) whatever the batch, so that a
    token's scores do not depend on it: apart for few tokens, in turn for many."""
    span = -(-hidden // (16 * 64)) * 64
    spans = -(-hidden // span)
    if fixed:  # the same tile as well
        return RouterTiles(32, span, spans, span)
    if tokens <= 4096:
        bt = 16 if tokens <= 16 else 32 if tokens <= 1024 else 64
        return RouterTiles(bt, span, spans, span)
    return RouterTiles(64, span, 1, spans * span)


def direct(tokens: int, slots: int, num_experts: int, plan: ExpertsPlan) -> int:
    """0: slots are placed. Where all tokens fit in one block they need not be; then blocks are
    experts (1), or slots (2; of one token 3) where there are fewer."""
    if plan.fixed or tokens > plan.bt or plan.down.sorted or plan.down.programs:
        return 0
    return 1 if slots > num_experts else 3 if tokens == 1 else 2


def max_blocks(slots: int, num_experts: int, bt: int) -> int:
    """The most blocks of `bt` rows that `slots` choices can take."""
    owners = min(slots, num_experts)
    return (slots + owners * (bt - 1)) // bt


def power_of_2(n: int) -> int:
    """The power of two from `n` on."""
    return 1 << (n - 1).bit_length()
