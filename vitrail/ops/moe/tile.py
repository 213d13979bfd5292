"""What a plan of a mixture of experts says: tiles. Knows no GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One product's tiles: BN output channels (of gate and of up each), BK input channels a step.
    `swap`: weights are the left operand, for few tokens. `halves`: blocks that are at most half
    full take half a tile. Of up alone: `paired`, gate and up are one product (not with `swap`,
    where they would pass through registers). Of down alone: `sorted`, rows come by descriptor;
    `programs`, 0 or how many share all tiles, in one loop (`flat`) or two."""

    bn: int
    bk: int
    stages: int
    warps: int
    swap: bool = True
    sorted: bool = False
    programs: int = 0
    flat: bool = False
    halves: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        assert not self.halves or not self.programs, self
        assert not self.paired or not self.swap, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One token's products, rows of the matrices in registers: so many output channels a program
    (of gate and of up each), and its warps."""

    up: int
    up_warps: int
    down: int
    down_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """`bt`: rows of a block. `early`: each launch may start while the one before it works (1), or
    while that waits as well (2), which takes room; 0: not. `fixed`: neither the router's tiles nor
    how rows are placed depend on how many there are. `rows`: how a mixture of one token runs, if
    not in tiles."""

    bt: int
    up: Tile
    down: Tile
    early: int = 1
    fixed: bool = False
    rows: Rows | None = None
