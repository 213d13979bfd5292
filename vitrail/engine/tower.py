"""What a start-up makes of a vision tower: its budget, plans and graphs, the encoder, and what the
worst step takes. Knows no decoder."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import logging
from typing import NamedTuple

import torch

from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.attention.warm import warm
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.cache.spec import ITEM_BYTES
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType, ModelConfig, VisionConfig
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.encode_graphs import EncodeGraphs, ladder_of
from vitrail.engine.measure import run_worst_steps
from vitrail.layers.linear import torch_dtype
from vitrail.models.interface import ImageModel, Model
from vitrail.vision.preprocess import ImageProcessor

log = logging.getLogger("vitrail.engine")
# Patches encoded in a step where no processor says how large an image can be.
DEFAULT_ENCODER_PATCHES = 16_384
# Of a GPU's memory, a planned budget of patches takes at most one part in so many.
MEMORY_SHARE = 64


class TowerLimits(NamedTuple):
    """What the encoder's budget is planned from."""

    step_tokens: int
    hardware: Hardware
    dtype: DType


def encoder_patches(
    config: EngineConfig,
    vision: VisionConfig | None,
    processor: ImageProcessor | None,
    limits: TowerLimits,
) -> int:
    """The encoder's budget a step: asked for, or the largest picture the processor makes, so that
    no picture alone waits for a second step. On a GPU as many of the largest as a step's tokens
    come from, for more small steps are bound by the host; bounded by what they would take."""
    if vision is None:
        return 0
    if config.encoder_patches is not None:
        return config.encoder_patches
    largest = DEFAULT_ENCODER_PATCHES if processor is None else processor.max_patches
    if limits.hardware.cc == 0:
        return largest
    wanted = -(-limits.step_tokens * vision.rules.merge**2 // largest)
    room = limits.hardware.hbm_bytes // MEMORY_SHARE // patch_bytes(vision, limits.dtype)
    return largest * max(1, min(wanted, room // largest))


def patch_bytes(vision: VisionConfig, dtype: DType) -> int:
    """About what a patch takes at the peak of a tower: an up-projection, a fused qkv, the residual
    stream, a norm, what attention returns. What it takes is measured."""
    return ITEM_BYTES[dtype] * (vision.intermediate_size + 8 * vision.hidden_size)


def image_plans(
    config: EngineConfig,
    model: Model,
    vision: VisionConfig | None,
    dtype: DType,
    patches: int,
    hardware: Hardware,
) -> PlanTable:
    rules = None if vision is None else vision.rules
    longest = patches if rules is None or rules.tile is None else rules.tile**2
    if longest > patches:
        raise Refused(
            Finding(
                where="encoder_patches",
                saw=str(patches),
                rule=f"at least {longest}, the patches of one tile",
                change=f"pass --encoder-patches {longest} or more",
            )
        )
    limits = PlanLimits(
        dtype=dtype,
        page_size=None,
        max_batch=max(1, patches),
        max_q_len=max(1, longest),
        max_kv_len=max(1, longest),
    )
    sites = model.image_sites() if isinstance(model, ImageModel) else ()
    return ready(make_table(sites, limits, hardware, config.attention, releases()), hardware)


def ready(plans: PlanTable, hardware: Hardware) -> PlanTable:
    """Say why plans are not the best ones, and compile what they name. Raises `Refused`."""
    for warning in plans.warnings:
        log.warning("%s", warning)
    if found := warm(plans, hardware):
        raise Refused(found)
    return plans


class Images(NamedTuple):
    """What encodes pictures, None for a model without a tower, and the pool that it fills."""

    encoder: ImageEncoder | None
    pool: EncoderPool


def images(
    config: EngineConfig,
    model: Model,
    vision: VisionConfig | None,
    plans: PlanTable,
    patches: tuple[int, int | None],
    device: torch.device,
) -> Images:
    """The tower's graphs are captured here, on a GPU and unless none are wanted, so that what they
    hold is not given to the cache. `patches`: the budget, and of the largest picture if known.
    Raises `Refused` where one cannot be captured."""
    pool = EncoderPool()
    if vision is None or not isinstance(model, ImageModel):
        return Images(None, pool)
    graphs = None
    if device.type == "cuda" and config.cuda_graphs != 0:
        budget, largest = patches
        graphs = EncodeGraphs(model, plans, vision, ladder_of(vision, budget, largest), device)
        graphs.capture()
    return Images(ImageEncoder(model, plans, pool, device, vision.patch_size, graphs), pool)


def measured_peak(
    model: Model,
    plans: PlanTable,
    config: ModelConfig,
    dtype: DType,
    patches: int,
    largest: int | None,
    device: torch.device,
) -> int:
    """Bytes that encoding takes beyond weights and finished pictures in the worst step within the
    budget, features of a begun picture included. Not measured on a CPU, where the pages' size does
    not depend on it. `largest`: patches of the largest picture, None if no processor says."""
    if config.vision is None or device.type == "cpu":
        return 0
    assert isinstance(model, ImageModel), f"{config.architecture} with a tower"
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kind = torch_dtype(dtype)
    run_worst_steps(model, plans, config.vision, kind, patches, largest, device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
