"""What encoding takes on a device beyond weights: the worst steps that a budget allows, run through
the encoder that serves. Owns which steps those are; knows no cache and no requests.

A step encodes sequences within the budget. One picture at most was begun before (the scheduler's
rule), so at most one brings features from earlier steps: all but one of the largest picture's. The
projection then runs over these and the step's own."""

import numpy as np
import torch
from msgspec.structs import replace

from vitrail.attention.plan import PlanTable
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.config.model import PatchRules, VisionConfig
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.step import EncodeJob
from vitrail.models.interface import ImageModel
from vitrail.vision.moonvit import CHANNELS

# A picture of all scales where no processor says how large one can be: NVILA's 12 tiles.
DEFAULT_BLOCK_TILES = 12


def worst_steps(rules: PatchRules, budget: int, largest: int | None) -> list[list[EncodeJob]]:
    """The jobs of each. A job that does not begin with its picture's first sequence finds those
    before it in the pool. `budget`: patches a step; `largest`: patches of the largest picture, None
    if no processor says. Which mix of the rest takes most depends on the projector, so there are
    two: pictures of one tile, and as many of the largest as there is room for. Where pictures are
    not tiles it comes as it is, of the most pixels that are sent so: once it has become patches, it
    is as one that came as patches."""
    if rules.tile is None:
        side = rules.merge
        columns = max(side, budget // side // side * side)
        job = _job(rules, 0, (side, columns), None, 0)
        resized = (side * rules.patch_size, columns * rules.patch_size)
        return [[replace(job, resized=resized)]]
    tile = (rules.tile, rules.tile)
    room = budget // rules.tile**2
    assert room >= 1, f"a budget of {budget} patches for tiles of {rules.tile**2}"
    block = _largest_block(rules, largest)
    if block is None:
        return [[_job(rules, i, tile, None, 0) for i in range(room)]]
    total = rules.num_sequences(block)
    last = _job(rules, 0, tile, block, total - 1)
    steps: list[list[EncodeJob]] = []
    for whole in {0, (room - 1) // total}:
        jobs = [last, *(_job(rules, 1 + i, tile, block, 0) for i in range(whole))]
        singles = room - 1 - whole * total
        jobs += [_job(rules, len(jobs) + i, tile, None, 0) for i in range(singles)]
        steps.append(jobs)
    return steps


def _largest_block(rules: PatchRules, largest: int | None) -> tuple[int, int] | None:
    """Of the largest picture; None where every picture is one tile."""
    if not rules.scales or rules.tile is None:
        return None
    tiles = DEFAULT_BLOCK_TILES
    if largest is not None:
        tiles = largest // rules.tile**2 - rules.num_sequences((0, 0))
    return (1, max(1, tiles))


def _job(
    rules: PatchRules,
    entry: int,
    grid: tuple[int, int],
    block: tuple[int, int] | None,
    first: int,
) -> EncodeJob:
    """The picture's sequences from `first` on, which are its last."""
    total = rules.num_sequences(block)
    return EncodeJob(
        entry=entry,
        height=grid[0],
        width=grid[1],
        num_tokens=rules.num_tokens(*grid, block),
        first=first,
        count=total - first,
        sequences=total,
        block=block,
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
    device: torch.device,
) -> None:
    """Run each of `worst_steps` on black, by the encoder that serves, with all that the pool holds
    of its pictures. Raises `RuntimeError` where one fails."""
    pool = EncoderPool()
    encoder = ImageEncoder(model, plans, pool, device, vision.patch_size)
    features = CHANNELS * vision.patch_size**2
    for step in worst_steps(vision.rules, budget, largest):
        for job in step:
            for _ in range(job.first):
                size = (job.height * job.width, vision.hidden_size)
                pool.add_part(job.entry, torch.zeros(size, dtype=dtype, device=device))
        failed = encoder.run(step, [np.zeros(_size(job, features), np.uint8) for job in step])
        pool.drop(job.entry for job in step)
        if failed:
            reason = next(iter(failed.values()))
            raise RuntimeError(f"a step of {budget} patches cannot be encoded: {reason}")
