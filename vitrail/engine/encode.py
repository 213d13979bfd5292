"""Encoding images: a plan's jobs -> the vision tower -> the encoder pool. One image's failure is
its own: a batch that fails is tried again image by image, and those that fail alone are
reported."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Sequence

import numpy as np
import torch

from vitrail.attention.plan import PlanTable
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.engine.step import EncodeJob
from vitrail.models.interface import Model


class ImageEncoder:
    """Runs the tower of `model` over packed patches. Owns nothing: entries live in the pool."""

    def __init__(self, model: Model, plans: PlanTable, pool: EncoderPool, device: torch.device):
        self._model = model
        self._plans = plans
        self._pool = pool
        self._device = device

    def run(self, jobs: Sequence[EncodeJob], pixels: Sequence[np.ndarray]) -> dict[int, str]:
        """Fill each job's entry; entry -> reason for those that could not be encoded."""
        failed: dict[int, str] = {}
        for dtype in sorted({p.dtype.str for p in pixels}):
            group = [i for i, p in enumerate(pixels) if p.dtype.str == dtype]
            failed |= self._group([jobs[i] for i in group], [pixels[i] for i in group])
        return failed

    def _group(self, jobs: list[EncodeJob], pixels: list[np.ndarray]) -> dict[int, str]:
        # An isolation boundary: whatever one picture makes the tower raise is that picture's.
        try:
            self._encode(jobs, pixels)
        except Exception as error:  # noqa: BLE001
            self._pool.drop([j.entry for j in jobs])
            if len(jobs) == 1:
                return {jobs[0].entry: f"{type(error).__name__}: {error}"}
            failed: dict[int, str] = {}
            for job, image in zip(jobs, pixels, strict=True):
                failed |= self._group([job], [image])
            return failed
        return {}

    def _encode(self, jobs: list[EncodeJob], pixels: list[np.ndarray]) -> None:
        patches = torch.from_numpy(np.concatenate(pixels)).to(self._device, non_blocking=True)
        grids = [(j.height, j.width) for j in jobs]
        rows = self._model.encode_images(patches, grids, self._plans)
        counts = [j.num_tokens for j in jobs]
        if rows.shape[0] != sum(counts):
            raise ValueError(f"the tower made {rows.shape[0]} tokens for slots of {counts}")
        for job, part in zip(jobs, rows.split(counts), strict=True):
            self._pool.put(job.entry, part)
