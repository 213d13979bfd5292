"""What encoding takes on a device beyond weights: the worst steps that a budget allows, run through
the encoder that serves (`check.encoder_peak` says which those are, and predicts the same). Knows no
cache and no requests.

A step encodes sequences within the budget. One picture at most was begun before (the scheduler's
rule), so at most one brings features from earlier steps: all but one of the largest picture's. The
projection then runs over these and the step's own."""

import numpy as np
import torch
from msgspec.structs import replace

from vitrail.attention.plan import PlanTable
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.check.encoder_peak import Part, worst_steps
from vitrail.config.model import CHANNELS, PatchRules, VisionConfig
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.side import SideStream
from vitrail.engine.step import EncodeJob
from vitrail.models.interface import ImageModel


def worst_jobs(rules: PatchRules, budget: int, largest: int | None) -> list[list[EncodeJob]]:
    """The jobs of each of `worst_steps`. One that does not begin with its picture's first sequence
    finds those before it in the pool. Where pictures are not tiles it comes as it is, of the most
    pixels that are sent so: from then on it is as one that came as patches."""
    steps = [
        [_job(rules, entry, part) for entry, part in enumerate(step)]
        for step in worst_steps(rules, budget, largest)
    ]
    if rules.tile is not None:
        return steps
    ((job,),) = steps
    resized = (job.height * rules.patch_size, job.width * rules.patch_size)
    return [[replace(job, resized=resized)]]


def _job(rules: PatchRules, entry: int, part: Part) -> EncodeJob:
    return EncodeJob(
        entry=entry,
        height=part.height,
        width=part.width,
        num_tokens=rules.num_tokens(part.height, part.width, part.block),
        first=part.first,
        count=part.count,
        sequences=part.sequences,
        block=part.block,
    )


def _size(job: EncodeJob, features: int) -> tuple[int, ...]:
    """Of the job's patches, or of the picture that they are made from."""
    if job.resized is None:
        return (job.num_patches, features)
    return (2 * job.resized[0], 2 * job.resized[1], CHANNELS)


@torch.inference_mode()
def run_worst_steps(
    model: ImageModel,
    plans: PlanTable,
    vision: VisionConfig,
    dtype: torch.dtype,
    budget: int,
    largest: int | None,
    side: SideStream,
) -> None:
    """Run each of `worst_jobs` on black, by the encoder that serves, with all that the pool holds
    of its pictures. Raises `RuntimeError` where one fails."""
    pool, device = EncoderPool(), side.device
    encoder = ImageEncoder(model, plans, pool, device, vision.patch_size, side)
    features = CHANNELS * vision.patch_size**2
    for step in worst_jobs(vision.rules, budget, largest):
        for job in step:
            for _ in range(job.first):
                size = (job.height * job.width, vision.hidden_size)
                pool.add_part(job.entry, torch.zeros(size, dtype=dtype, device=device))
        side.follow()
        failed = encoder.run(step, [np.zeros(_size(job, features), np.uint8) for job in step])
        pool.drop(job.entry for job in step)
        if failed:
            reason = next(iter(failed.values()))
            raise RuntimeError(f"a step of {budget} patches cannot be encoded: {reason}")
