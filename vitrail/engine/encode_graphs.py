"""The tower in CUDA graphs: a ladder of patch counts, captured at start-up. What a layer costs the
host to launch is more than a picture's layer costs the device, so up to some thousands of patches
a graph is what keeps the device busy.

A batch runs in the smallest rung that holds it. Padding is a picture of its own behind the others
(or whole tiles, where the tower takes tiles), which nobody reads; unused sequences are empty. Owns
the buffers that the graphs read and write; the features it returns lie there until the next run."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import Phase
from vitrail.check.encoder_peak import MOST_GRAPH_PATCHES as MOST_PATCHES
from vitrail.config.model import VisionConfig
from vitrail.models.interface import ImageModel
from vitrail.ops.vision.naive import Grids, grid_ints
from vitrail.vision.moonvit import CHANNELS

Sizes = Sequence[tuple[int, int]]

MOST_PICTURES = 8  # of a graph of pictures; with more the host has less to hide
UNIT, FIRST = 64, 256  # patches between rungs at the least, and in the first
APART = 128  # patches between rungs of small pictures
# Backends that read lengths on the device alone, so that a graph serves any.
DEVICE_LENGTHS = ("fa4",)


def ladder_of(vision: VisionConfig, budget: int, largest: int | None) -> list[int]:
    """Of a tower, under a budget of patches a step; `largest`: of a picture, None if unknown."""
    tile = vision.rules.tile
    return ladder(budget, UNIT, largest or budget) if tile is None else ladder(budget, tile**2, 0)


def ladder(budget: int, unit: int, largest: int) -> list[int]:
    """Patch counts: multiples of `unit` a sixth apart, then the budget itself or the last within
    `MOST_PATCHES`. Closer from 3/4 to 27/32 of the largest picture, where those lie that were
    scaled to a limit and padded: the largest is that much above the limit."""
    top = min(budget, MOST_PATCHES) // unit * unit
    rungs: list[int] = []
    rung = min(FIRST, top) // unit * unit or unit
    while rung < top:
        rungs.append(rung)
        if 24 * largest <= 32 * rung <= 27 * largest:
            rung += unit
        else:
            rung += max(1, rung // 6 // unit) * unit if rung >= 1024 else max(unit, APART)
    last = budget if unit == UNIT and budget <= MOST_PATCHES else top
    return [*rungs, last] if last >= unit else []


def rung_sizes(patches: int, tile: int | None) -> Sizes:
    """The sequences that a rung is captured with: none is empty, and the launch is as for any."""
    if tile is not None:
        return [(tile, tile)] * (patches // tile**2)
    return [(1, patches - MOST_PICTURES), *[(1, 1)] * MOST_PICTURES]


def padded(sizes: Sizes, patches: int) -> Sizes:
    """`sizes` and what fills a rung of pictures: the padding, then nothing."""
    rest = patches - sum(height * width for height, width in sizes)
    empty = [(0, 0)] * (MOST_PICTURES - len(sizes))
    return [*sizes, (1, rest) if rest else (0, 0), *empty]


class EncodeGraphs:
    """Graphs of `encode_patches` of one model. Owns their buffers and the pool of their memory."""

    def __init__(
        self,
        model: ImageModel,
        plans: PlanTable,
        vision: VisionConfig,
        rungs: list[int],
        device: torch.device,
    ):
        self._model, self._plans, self._device = model, plans, device
        self._tile = vision.rules.tile
        self._rungs = rungs if self._any_lengths() else []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        most = max(self._rungs, default=0)
        features = CHANNELS * vision.patch_size**2
        self._patches = torch.zeros((most, features), dtype=torch.uint8, device=device)
        self._grids: dict[int, Grids] = {}
        self._features: Tensor | None = None

    def _any_lengths(self) -> bool:
        """Whether every call of the tower reads its lengths on the device."""
        return self._device.type == "cuda" and all(
            plan.backend in DEVICE_LENGTHS
            for plan in self._plans
            if plan.shape.phase is Phase.ENCODE
        )

    def __len__(self) -> int:
        return len(self._rungs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Every rung, the largest first, in one pool. The largest is run before, so that whatever
        is made at a first call is made."""
        pool = torch.cuda.graph_pool_handle()
        for patches in reversed(self._rungs):
            grids = Grids.of(rung_sizes(patches, self._tile), self._device)
            self._grids[patches] = grids
            if self._features is None:
                self._features = torch.empty_like(self._encode(patches))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._features[:patches].copy_(self._encode(patches))
            self._graphs[patches] = graph

    def _encode(self, patches: int) -> Tensor:
        return self._model.encode_patches(
            self._patches[:patches], self._grids[patches], self._plans
        )

    def run(self, patches_NF: Tensor, sizes: Sizes) -> Tensor | None:
        """Features of packed sequences, valid until the next run; None where no graph takes them:
        too many patches or pictures, or patches that are not raw samples."""
        count = len(patches_NF)
        at = bisect_left(self._rungs, count)
        fits = at < len(self._rungs) and (self._tile is not None or len(sizes) <= MOST_PICTURES)
        if not fits or patches_NF.dtype != torch.uint8 or self._features is None:
            return None
        rung = self._rungs[at]
        self._patches[:count].copy_(patches_NF)
        if self._tile is None:
            ints = torch.tensor(grid_ints(padded(sizes, rung)), dtype=torch.int32, pin_memory=True)
            self._grids[rung].ints.copy_(ints, non_blocking=True)
        self._graphs[rung].replay()
        return self._features[:count]
