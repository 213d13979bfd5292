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
# Slots that a program of the sort counts at once; above so many, a launch of its own counts.
SORT_CHUNK, SORT_WHOLE = 1024, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One product's tiles: BN output channels (of gate and of up each), BK input channels a step.
    `swap`: weights are the left operand, for few tokens. `sorted`: rows come in blocks, by
    descriptor; else they are gathered. `programs`: 0, or how many share all tiles, in one loop
    (`flat`) or two. `split`: warps of their own load (Hopper, with `sorted` and 4 warps, which
    become 12). `halves`: blocks that are at most half full take half a tile. `ahead` (down, not
    `sorted`): first weights are loaded before the rows are there."""

    bn: int
    bk: int
    stages: int
    warps: int
    swap: bool = True
    sorted: bool = False
    programs: int = 0
    flat: bool = False
    split: bool = False
    halves: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        assert not self.ahead or not (self.sorted or self.programs), self
        assert not self.halves or not self.programs, self


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


class ExpertsShape(NamedTuple):
    """Channels and counts; shared experts are among both counts."""

    hidden: int
    inner: int
    experts: int
    top_k: int


class RouterTiles(NamedTuple):
    """`bt` tokens a program, `spans` parts of the hidden channels of `span` each."""

    bt: int
    spans: int
    span: int


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


def router_tiles(tokens: int, hidden: int) -> RouterTiles:
    """As many spans of whole 64 channels as give about 256 programs, at most 16."""
    bt = 16 if tokens <= 16 else 32 if tokens <= 1024 else 64
    spans = max(1, min(16, power_of_2(256 * bt // max(tokens, bt))))
    span = -(-hidden // (spans * 64)) * 64
    return RouterTiles(bt, -(-hidden // span), span)


def direct(tokens: int, slots: int, num_experts: int, plan: ExpertsPlan) -> int:
    """0: slots are placed. Where all tokens fit in one block they need not be; then blocks are
    experts (1), or slots (2) where there are fewer."""
    tiles = (plan.up, plan.down)
    if tokens > plan.bt or any(tile.sorted or tile.programs for tile in tiles):
        return 0
    return 1 if slots > num_experts else 2


def max_blocks(slots: int, num_experts: int, bt: int) -> int:
    """The most blocks of `bt` rows that `slots` choices can take."""
    owners = min(slots, num_experts)
    return (slots + owners * (bt - 1)) // bt


def sort_share(slots: int) -> tuple[int, bool]:
    """Slots that one program of the sort takes, and whether they are counted by a launch before."""
    if slots <= SORT_WHOLE:
        return 128, False
    return (128 if slots <= 16384 else 256), True


def power_of_2(n: int) -> int:
    """The power of two from `n` on."""
    return 1 << (n - 1).bit_length()
