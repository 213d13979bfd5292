"""The patch counts that a tower is captured at (`engine/encode_graphs`), and which of them a GPU's
plans allow. What start-up captures and what `check` predicts are these. No torch."""

from collections.abc import Iterable, Sequence

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.model import VisionConfig

Sizes = Sequence[tuple[int, int]]

MOST_PATCHES = 18_432  # of a graph: with more the device takes longer than the host's launches
MOST_PICTURES = 8  # of a graph of pictures: it has as many sequences, however small
UNIT = 66  # patches between rungs at the least: a square picture at Kimi's limit is 66 x 66
FIRST, APART = 264, 132  # patches of the first rung, and between those of small pictures
# Backends that can read lengths on the device alone, so that a graph serves any.
DEVICE_LENGTHS = ("fa4", "triton")


def rungs_of(
    vision: VisionConfig,
    budget: int,
    largest: int | None,
    sites: Iterable[tuple[AttentionSite, Phase]],
    plans: PlanTable,
) -> list[int]:
    """Of a tower that attends by `sites`, under a budget of patches a step; `largest`: of a
    picture, None if unknown. A rung whose own plans take lengths from the host is left out."""
    tile, sites = vision.rules.tile, tuple(sites)
    unit, largest = (UNIT, largest or budget) if tile is None else (tile**2, 0)
    return [
        rung
        for rung in ladder(budget, unit, largest)
        if all(_any_lengths(plans, site, rung, tile) for site, _ in sites)
    ]


def _any_lengths(plans: PlanTable, site: AttentionSite, rung: int, tile: int | None) -> bool:
    """Whether the call that a rung is captured with serves any lengths."""
    longest = rung if tile is None else tile**2
    plan = plans.select(site, Phase.ENCODE, len(rung_sizes(rung, tile)), longest)
    return plan.backend in DEVICE_LENGTHS and site.window is None and not site.causal


def ladder(budget: int, unit: int, largest: int) -> list[int]:
    """Patch counts: multiples of `unit` a sixth apart, then the budget itself or the last within
    `MOST_PATCHES`. Closer from 3/4 to 27/32 of the largest picture, where those lie that were
    scaled to a limit and padded: the largest is that much above the limit."""
    top = min(budget, MOST_PATCHES) // unit * unit
    near = -(-3 * largest // 4 // unit) * unit
    least = -(-APART // unit) * unit
    rungs: list[int] = []
    rung = min(FIRST, top) // unit * unit or unit
    while rung < top:
        rungs.append(rung)
        if near <= rung <= 27 * largest // 32:
            rung += unit
        else:
            apart = max(1, rung // 6 // unit) * unit if rung >= 1024 else least
            rung = near if rung < near < rung + apart else rung + apart
    last = budget if unit == UNIT and budget <= MOST_PATCHES else top
    return [*rungs, last] if last >= unit else []


def rung_sizes(patches: int, tile: int | None) -> Sizes:
    """The sequences that a rung is captured with: none is empty, and the launch is as for any."""
    if tile is not None:
        assert patches % tile**2 == 0, f"{patches} patches are not whole tiles of {tile**2}"
        return [(tile, tile)] * (patches // tile**2)
    return [(1, patches - MOST_PICTURES), *[(1, 1)] * MOST_PICTURES]


def padded(sizes: Sizes, patches: int) -> Sizes:
    """`sizes` and what fills a rung of pictures: the padding, then nothing."""
    rest = patches - sum(height * width for height, width in sizes)
    empty = [(0, 0)] * (MOST_PICTURES - len(sizes))
    return [*sizes, (1, rest) if rest else (0, 0), *empty]
