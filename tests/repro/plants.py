"""Faults of a running engine, planted in this process by patching the package. Each raises where a
step's sizes meet a condition, so that what is shrunk shows the condition."""

import os
import time
from typing import Any

import torch


def rows() -> None:
    """A layout that refuses two decodes or more where one is at position 30 or later."""
    from vitrail.engine.batch import BatchBuilder

    turn_pages = BatchBuilder.turn_pages

    def faulty(self: Any, plan: Any) -> Any:
        if len(plan.decodes) >= 2 and max(s.start for s in plan.decodes) >= 30:
            raise ValueError(f"no kernel for {len(plan.decodes)} rows of {plan.decodes[0].start}")
        return turn_pages(self, plan)

    BatchBuilder.turn_pages = faulty


def address() -> None:
    """Pages far beyond the pool for whatever decodes get new ones: what reads them on a GPU ends
    there."""
    from vitrail.engine.batch import BatchBuilder

    turn_pages = BatchBuilder.turn_pages

    def faulty(self: Any, plan: Any) -> Any:
        places, pages = turn_pages(self, plan)
        return places, pages + (1 << 28) if plan.decodes else pages

    BatchBuilder.turn_pages = faulty


def norm() -> None:
    """A norm that refuses more than 20 rows at once, in a model of two layers or more."""
    from vitrail.engine.runner import Runner
    from vitrail.layers.norm import RmsNorm

    add = RmsNorm.add
    deep: list[bool] = []
    made = Runner.__init__

    def watched(self: Any, parts: Any) -> None:
        made(self, parts)
        deep[:] = [len(parts.model.cache_specs()) >= 2]

    def faulty(self: Any, x: Any, residual: Any) -> Any:
        if x.shape[0] > 20 and deep == [True]:
            raise RuntimeError(f"a tile of {x.shape[0]} rows")
        return add(self, x, residual)

    Runner.__init__ = watched
    RmsNorm.add = faulty


def picture() -> None:
    """A tower that refuses a packed batch of more than 40 patches."""
    from vitrail.models.kimi_vl.model import KimiVL

    encode = KimiVL.encode_patches

    def faulty(self: Any, patches: Any, grids: Any, plans: Any) -> Any:
        if patches.shape[0] > 40:
            raise IndexError(f"patch {patches.shape[0]}")
        return encode(self, patches, grids, plans)

    KimiVL.encode_patches = faulty


def device() -> None:
    """A fault of the device, found when a step of decodes is read."""
    from vitrail.engine.runner import Fetched

    read = Fetched.read

    def faulty(self: Any) -> Any:
        if len(self._tokens) >= 2:
            raise torch.AcceleratorError("CUDA error: an illegal memory access", 700)
        return read(self)

    Fetched.read = faulty


class _Last:
    """What ends the process when it is freed, as pinned memory of a device that is lost does."""

    def __del__(self) -> None:
        os._exit(86)


def freed() -> None:
    """As `device`, and who lets go of what the step held does so no more."""
    from vitrail.engine.runner import Fetched

    read = Fetched.read

    def faulty(self: Any) -> Any:
        if len(self._tokens) >= 2:
            self.last = _Last()
            raise torch.AcceleratorError("CUDA error: an illegal memory access", 700)
        return read(self)

    Fetched.read = faulty


def start() -> None:
    """Start-up raises."""
    from vitrail.engine import build

    def broken(*args: Any, **names: Any) -> Any:
        raise RuntimeError("no graph of 8 rows")

    build.capture_graphs = broken


def hang() -> None:
    """A step that never ends."""
    from vitrail.engine.batch import BatchBuilder

    def forever(*args: Any) -> Any:
        time.sleep(1e6)

    BatchBuilder.turn_pages = forever


def nothing() -> None:
    """The fault removed."""


ALL = (rows, address, norm, picture, device, freed, start, hang, nothing)
PLANTS = {f.__name__: f for f in ALL}
