"""Tiles that `bench/moe.py --tune` found quickest: by GPU, hidden and intermediate channels, for up
to so many tokens (None: any number)."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from vitrail.ops.moe.tile import ExpertsPlan, Rows, Tile

# Kimi-VL-A3B: 64 experts, 6 a token, and 2 shared ones.
_LARGE = Tile(bn=256, bk=64, stages=4, warps=8, swap=False, sorted=True, programs=132, flat=True)
_FEW = ExpertsPlan(
    bt=16,
    up=Tile(bn=64, bk=128, stages=3, warps=4),
    down=Tile(bn=64, bk=128, stages=3, warps=4),
    early=2,
)
_H200_KIMI: tuple[tuple[int | None, ExpertsPlan], ...] = (
    (1, replace(_FEW, rows=Rows(up=2, up_warps=8, down=8, down_warps=8))),
    (16, _FEW),
    (
        32,
        ExpertsPlan(
            bt=32,
            up=Tile(bn=64, bk=64, stages=3, warps=4),
            down=Tile(bn=64, bk=128, stages=3, warps=4),
        ),
    ),
    (
        192,
        ExpertsPlan(
            bt=32,
            up=Tile(bn=64, bk=64, stages=3, warps=4),
            down=Tile(bn=64, bk=64, stages=3, warps=4),
        ),
    ),
    (
        768,
        ExpertsPlan(
            bt=64,
            up=Tile(bn=64, bk=64, stages=3, warps=4, halves=True),
            down=Tile(bn=128, bk=64, stages=3, warps=8, halves=True),
        ),
    ),
    (
        1536,
        ExpertsPlan(
            bt=128,
            up=Tile(bn=128, bk=64, stages=4, warps=8, swap=False, halves=True, paired=True),
            down=Tile(bn=256, bk=64, stages=4, warps=8, swap=False, halves=True),
        ),
    ),
    (
        None,
        ExpertsPlan(
            bt=128,
            up=Tile(bn=128, bk=64, stages=4, warps=8, swap=False, halves=True, paired=True),
            down=_LARGE,
            early=0,
        ),
    ),
)

MEASURED: Mapping[tuple[str, int, int], tuple[tuple[int | None, ExpertsPlan], ...]] = (
    MappingProxyType({("H200", 2048, 1408): _H200_KIMI})
)
