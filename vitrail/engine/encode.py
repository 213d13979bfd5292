"""Encoding images: a plan's jobs -> the vision tower -> the encoder pool. Sequences of all jobs are
packed into one pass; an image's rows are made when its last sequence is there. One image's failure
is its own: a batch that fails is tried again job by job, and those that fail alone are reported."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.attention.plan import PlanTable
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.engine.step import EncodeJob
from vitrail.models.interface import ImageModel, ImageShape


class ImageEncoder:
    """Runs the tower of `model` over packed patches. Owns nothing: entries and the features of
    unfinished ones live in the pool."""

    def __init__(
        self, model: ImageModel, plans: PlanTable, pool: EncoderPool, device: torch.device
    ):
        self._model = model
        self._plans = plans
        self._pool = pool
        self._device = device

    def run(
        self, jobs: Sequence[EncodeJob], pixels: Sequence[np.ndarray], failed: Collection[int] = ()
    ) -> dict[int, str]:
        """Fill each job's entry, or its part of it; entry -> reason for those that could not be
        encoded. `failed`: entries whose earlier parts could not."""
        found = {j.entry: "an earlier part of it failed" for j in jobs if j.entry in failed}
        for dtype in sorted({p.dtype.str for p in pixels}):
            group = [
                i
                for i, p in enumerate(pixels)
                if p.dtype.str == dtype and jobs[i].entry not in found
            ]
            found |= self._group([jobs[i] for i in group], [pixels[i] for i in group])
        return found

    def _group(self, jobs: list[EncodeJob], pixels: list[np.ndarray]) -> dict[int, str]:
        # An isolation boundary: whatever one picture makes the tower raise is that picture's.
        if not jobs:
            return {}
        try:
            made = self._encode(jobs, pixels)
        except Exception as error:  # noqa: BLE001
            if len(jobs) == 1:
                self._pool.drop([jobs[0].entry])
                return {jobs[0].entry: f"{type(error).__name__}: {error}"}
            failed: dict[int, str] = {}
            for job, image in zip(jobs, pixels, strict=True):
                failed |= self._group([job], [image])
            return failed
        for job, rows in zip(jobs, made, strict=True):
            keep = self._pool.put if job.is_last else self._pool.add_part
            keep(job.entry, rows)
        return {}

    def _encode(self, jobs: list[EncodeJob], pixels: list[np.ndarray]) -> list[Tensor]:
        """Each job's result: an image's rows with its last part, features of patches before. The
        pool is only read, so that a failure leaves nothing half done."""
        patches = torch.from_numpy(np.concatenate(pixels)).to(self._device, non_blocking=True)
        grids = [(j.height, j.width) for j in jobs for _ in range(j.count)]
        features = self._model.encode_patches(patches, grids, self._plans)
        sizes = [j.num_patches for j in jobs]
        if features.shape[0] != sum(sizes):
            held = f"features of {features.shape[0]} patches"
            raise ValueError(f"{held} for {len(jobs)} images of {sum(sizes)} patches")
        made = list(features.split(sizes))
        last = [i for i, job in enumerate(jobs) if job.is_last]
        if not last:
            return made
        for i in last:
            made[i] = torch.cat([*self._earlier(jobs[i]), made[i]]) if jobs[i].first else made[i]
        whole = made[0] if len(last) == len(jobs) == 1 else torch.cat([made[i] for i in last])
        shapes = [ImageShape(jobs[i].height, jobs[i].width, jobs[i].block) for i in last]
        rows = self._model.project_images(whole, shapes)
        counts = [jobs[i].num_tokens for i in last]
        if rows.shape[0] != sum(counts):
            held = f"rows of {rows.shape[0]} tokens"
            raise ValueError(f"{held} for {len(last)} images of {sum(counts)} tokens")
        for i, part in zip(last, rows.split(counts), strict=True):
            made[i] = part
        return made

    def _earlier(self, job: EncodeJob) -> list[Tensor]:
        parts = self._pool.parts(job.entry)
        held, wanted = sum(map(len, parts)), job.first * job.height * job.width
        if held != wanted:
            raise ValueError(f"{held} patches of its earlier parts are here, of {wanted}")
        return parts
