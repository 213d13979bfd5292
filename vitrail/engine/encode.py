"""Encoding images: a plan's jobs -> the vision tower -> the encoder pool. Sequences of all jobs are
packed into one pass; an image's rows are made when its last sequence is there. A picture that comes
as it is becomes patches on the device. One image's failure
is its own: a batch that fails is tried again job by job, and those that fail alone are reported."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from vitrail.attention.plan import PlanTable
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.engine.encode_graphs import EncodeGraphs
from vitrail.engine.kernel_groups import ENCODE
from vitrail.engine.side import SideStream
from vitrail.engine.step import EncodeJob
from vitrail.models.interface import ImageModel, ImageShape
from vitrail.ops.dispatch import select_resize
from vitrail.ops.resize.naive import Resample
from vitrail.ops.resize.taps import taps

ALIGN_BYTES = 16  # of each array of a copy
DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "float32": torch.float32}


class ImageEncoder:
    """Runs the tower of `model` over packed patches, on `side`. Owns nothing: entries and the
    features of unfinished ones live in the pool."""

    def __init__(
        self,
        model: ImageModel,
        plans: PlanTable,
        pool: EncoderPool,
        device: torch.device,
        patch_size: int,
        side: SideStream,
        graphs: EncodeGraphs | None = None,
    ):
        self._patch_size, self._graphs, self.side = patch_size, graphs, side
        self._model = model
        self._plans = plans
        self._pool = pool
        self._device = device
        # hears why a picture could not be encoded
        self.told: Callable[[Exception], None] = lambda error: None

    def run(
        self,
        jobs: Sequence[EncodeJob],
        pixels: Sequence[np.ndarray],
        failed: Collection[int] = (),
        step: int = 0,
    ) -> dict[int, str]:
        """Fill each job's entry, or its part of it; entry -> reason for those that could not be
        encoded. `failed`: entries whose earlier parts could not."""
        # the range is seen by a profiler alone
        with record_function(ENCODE), self.side.encoding(step, [job.entry for job in jobs]):
            return self._run(jobs, pixels, failed)

    def _run(
        self, jobs: Sequence[EncodeJob], pixels: Sequence[np.ndarray], failed: Collection[int]
    ) -> dict[int, str]:
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
                self.told(error)
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
        patches = patches_of(jobs, pixels, self._device, self._patch_size)
        grids = [(j.height, j.width) for j in jobs for _ in range(j.count)]
        features = None if self._graphs is None else self._graphs.run(patches, grids)
        if features is None:
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


def patches_of(
    jobs: Sequence[EncodeJob], pixels: Sequence[np.ndarray], device: torch.device, patch_size: int
) -> Tensor:
    """All jobs' patches on the device, of one dtype; pictures that come as they are become patches
    there. One copy, which the host does not wait for."""
    if all(job.resized is None for job in jobs):
        return send_rows(pixels, device)
    tables = [_tables(job, image) for job, image in zip(jobs, pixels, strict=True)]
    sent = iter(send([*pixels, *chain.from_iterable(tables)], device))
    made = [next(sent) for _ in jobs]
    resized_patches = select_resize(device).resized_patches
    for i, job in enumerate(jobs):
        if job.resized is not None:
            down, across = (Resample(next(sent), next(sent)) for _ in range(2))
            made[i] = resized_patches(made[i], down, across, (job.height, job.width), patch_size)
    return torch.cat(made)


def _tables(job: EncodeJob, image: np.ndarray) -> list[np.ndarray]:
    """What resizes the picture: starts and weights of its rows, then of its columns."""
    if job.resized is None:
        return []
    if image.ndim != 3 or job.sequences != 1:
        raise ValueError(f"{image.ndim} axes and {job.sequences} sequences of a picture to resize")
    axes = zip(image.shape[:2], job.resized, strict=True)
    return [table for size, new in axes for table in taps(size, new)]


def send_rows(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """The arrays' rows, of one dtype and width, joined on the device, as `send` does it."""
    if device.type != "cuda":
        return torch.from_numpy(np.concatenate(arrays)).to(device)
    rows, dtype = sum(map(len, arrays)), DTYPES[arrays[0].dtype.name]
    host = torch.empty((rows, arrays[0].shape[1]), dtype=dtype, pin_memory=True)
    np.concatenate(arrays, out=host.numpy())
    return host.to(device, non_blocking=True)


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in one copy from memory that the driver may read by itself."""
    if device.type != "cuda":
        return [torch.from_numpy(np.array(array)).to(device) for array in arrays]
    sizes = [-(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES for array in arrays]
    edges = [0, *accumulate(sizes)]
    host = torch.empty(edges[-1], dtype=torch.uint8, pin_memory=True)
    for array, start in zip(arrays, edges, strict=False):
        place = host[start : start + array.nbytes].numpy().view(array.dtype)
        np.copyto(place.reshape(array.shape), array)
    flat = host.to(device, non_blocking=True)
    return [
        flat[start : start + array.nbytes].view(DTYPES[array.dtype.name]).view(array.shape)
        for array, start in zip(arrays, edges, strict=False)
    ]
