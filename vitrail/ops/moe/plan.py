"""Which kernels a mixture of experts runs, and in which tiles: a pure function of the number of
tokens, the shape and the GPU. Knows no tensors.

Legend: T tokens, K choices a token, S = T * K slots, X experts."""

from dataclasses import dataclass
from typing import NamedTuple

from vitrail.config.hardware import Hardware

# Row strides that descriptors, and torch's grouped product, take.
ALIGN_BYTES = 16
ITEM_BYTES = 2  # bf16
# What a program needs of shared memory beside its stages.
SPARE_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One product's tiles: BN output channels (of gate and of up each), BK input channels a step.
    `swap`: weights are the left operand, for few tokens. `sorted`: rows come in blocks, by
    descriptor; else they are gathered. `programs`: 0, or how many share all tiles. `split`: warps of
    their own load (Hopper, with `sorted` and 4 warps, which become 12)."""

    bn: int
    bk: int
    stages: int
    warps: int
    swap: bool = True
    sorted: bool = False
    programs: int = 0
    flat: bool = False
    split: bool = False
    prefetch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """`bt`: rows of a block. `early`: each launch may start while the one before it runs."""

    bt: int
    up: Tile
    down: Tile
    early: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a router does with its scores, and how many shared experts every token has besides."""

    top_k: int
    num_shared: int
    normalize: bool
    scaling: float


class RouterTiles(NamedTuple):
    """`bt` tokens a program, `spans` parts of the hidden channels of `span` each; `choosers` tokens
    a program of the choice, which also `places` where there is only one."""

    bt: int
    spans: int
    span: int
    choosers: int
    places: bool


def router_plan(tokens: int, hidden: int) -> RouterTiles:
    """Few tokens: the router's weights are spread over programs."""
    if tokens > 1024:
        return RouterTiles(64, 1, hidden, 16, False)
    bt = 16 if tokens <= 16 else 32
    spans = 16 if tokens <= 64 else 4
    span = -(-hidden // spans // 64) * 64
    spans = -(-hidden // span)
    if tokens <= 32:
        return RouterTiles(bt, spans, span, max(1, 1 << (tokens - 1).bit_length()), True)
    return RouterTiles(bt, spans, span, 16, False)


def max_blocks(slots: int, num_experts: int, bt: int) -> int:
    """The most blocks of `bt` rows that `slots` choices can take."""
    owners = min(slots, num_experts)
    return (slots + owners * (bt - 1)) // bt


def share(slots: int) -> int:
    """Slots that one program of the sort takes."""
    return 256 if slots <= 8192 else 1024


class ExpertsShape(NamedTuple):
    """Channels and counts; shared experts are among both counts."""

    hidden: int
    inner: int
    experts: int
    top_k: int


def experts_plan(tokens: int, shape: ExpertsShape, gpu: Hardware) -> ExpertsPlan:
    """By the rows that an expert has on average: blocks that most experts fill at most once, the
    weights on the left until there are enough rows for a tile of their own; as many stages as two
    programs of an SM have room for."""
    rows = tokens * shape.top_k / shape.experts
    bt = next((bt for bt in (16, 32, 64) if rows <= bt * 3 / 4), 128)
    swap = bt < 128
    warps = 4 if swap else 8
    bn = 64
    early = gpu.cc >= 90
    room = (gpu.smem_per_block_bytes if not swap else gpu.smem_per_sm_bytes // 2) - SPARE_BYTES

    def tile(products: int) -> Tile:
        stage = (products * bn + bt) * 64 * ITEM_BYTES
        return Tile(bn=bn, bk=64, stages=max(2, min(6, room // stage)), warps=warps, swap=swap)

    return ExpertsPlan(bt=bt, up=tile(2), down=tile(1), early=early)
