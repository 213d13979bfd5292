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
from functools import partial

import torch
from torch import Tensor

from vitrail.attention.plan import PlanTable
from vitrail.config.model import CHANNELS, VisionConfig
from vitrail.engine.graphs import Graph, Record
from vitrail.models.interface import ImageModel
from vitrail.ops.vision.naive import Grids
from vitrail.vision.rungs import MOST_PICTURES, Sizes, padded, rung_sizes


class EncodeGraphs:
    """Graphs of `encode_patches` of one model, one a rung. Owns their buffers and the pool of their
    memory. `most`: patches of the largest."""

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
        self._rungs, self.most = rungs, max(rungs, default=0)
        self._graphs: dict[int, Graph] = {}
        size = (self.most, CHANNELS * vision.patch_size**2)
        self._patches = torch.zeros(size, dtype=torch.uint8, device=device)
        self._grids: dict[int, Grids] = {}
        self._features: Tensor | None = None

    def __len__(self) -> int:
        return len(self._rungs)

    @torch.inference_mode()
    def capture(self, record: Record) -> None:
        """Every rung, the largest first. The largest is run before, so that whatever is made at a
        first call is made."""
        for patches in reversed(self._rungs):
            grids = Grids.of(rung_sizes(patches, self._tile), self._device)
            longest = patches if self._tile is None else self._tile**2
            self._grids[patches] = grids._replace(longest=longest)
            if self._features is None:
                self._features = torch.empty_like(self._encode(patches))
            fill = partial(self._fill, self._features[:patches])
            self._graphs[patches], _ = record(fill)

    def _fill(self, features_NM: Tensor) -> Tensor:
        return features_NM.copy_(self._encode(len(features_NM)))

    def _encode(self, patches: int) -> Tensor:
        return self._model.encode_patches(
            self._patches[:patches], self._grids[patches], self._plans
        )

    @torch.inference_mode()
    def run(self, patches_NF: Tensor, sizes: Sizes) -> Tensor | None:
        """Features of packed sequences, valid until the next run; None where no graph takes them:
        too many patches, or patches that are not raw samples. More pictures than a graph takes go
        through several."""
        if len(patches_NF) > self.most or patches_NF.dtype != torch.uint8:
            return None
        if self._tile is not None or len(sizes) <= MOST_PICTURES:
            return self._run(patches_NF, sizes)
        groups = [sizes[i : i + MOST_PICTURES] for i in range(0, len(sizes), MOST_PICTURES)]
        parts = patches_NF.split([sum(h * w for h, w in group) for group in groups])
        pairs = zip(parts, groups, strict=True)
        return torch.cat([self._run(part, group).clone() for part, group in pairs])

    def _run(self, patches_NF: Tensor, sizes: Sizes) -> Tensor:
        assert self._features is not None, "graphs are captured before they are run"
        count = len(patches_NF)
        rung = self._rungs[bisect_left(self._rungs, count)]
        self._patches[:count].copy_(patches_NF)
        if self._tile is None:
            self._grids[rung].ints.copy_(Grids.of(padded(sizes, rung), self._device).ints)
        self._graphs[rung].replay()
        return self._features[:count]
