"""A vision tower that is ready alone, for measurements: made as `build_engine` makes it, without an
engine around it."""

from typing import NamedTuple

import torch

from vitrail.cache.encoder_pool import EncoderPool
from vitrail.check.fixed import model_of
from vitrail.check.sizes import encoder_budget, served_dtype
from vitrail.config.engine import EngineConfig, validate
from vitrail.config.finding import Finding, Refused, accept, errors
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType, VisionConfig
from vitrail.engine.build import (
    capture_tower,
    image_encoder,
    image_plans,
    load_weights,
    ready,
)
from vitrail.engine.deterministic import computed_as_asked
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.placement import device_of, hardware_of
from vitrail.engine.side import SideStream
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.registry import load_entry
from vitrail.vision.preprocess import ImageProcessor


class Tower(NamedTuple):
    """`encoder` fills `pool`."""

    encoder: ImageEncoder
    pool: EncoderPool
    vision: VisionConfig
    hardware: Hardware
    device: torch.device
    dtype: DType


def build_tower(
    config: EngineConfig, checkpoint: Checkpoint, processor: ImageProcessor | None
) -> Tower:
    """Raises `Refused`, for a model without a tower too."""
    found = errors(validate(config))
    if found:
        raise Refused(found)
    device = device_of(config)
    hardware = hardware_of(device)
    entry = load_entry(checkpoint.architecture)
    model_config = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype, vision = served_dtype(config, model_config, device.type == "cpu"), model_config.vision
    model = model_of(config, entry, model_config, dtype, device)
    if vision is None:
        raise Refused(_no_tower(checkpoint.architecture))
    patches = encoder_budget(config, model_config, processor, hardware)
    plans = ready(image_plans(config, model, vision, dtype, patches, hardware), hardware)
    load_weights(config, entry, model_config, model, checkpoint, device, None)
    model = computed_as_asked(config, model, vision, device)
    budget = (patches, None if processor is None else processor.max_patches)
    graphs = capture_tower(config, model, plans, vision, budget, device)
    pool = EncoderPool()
    encoder = image_encoder(model, vision, plans, pool, SideStream(device), graphs)
    assert encoder is not None, f"{checkpoint.architecture} with a tower"
    return Tower(encoder, pool, vision, hardware, device, dtype)


def _no_tower(architecture: str) -> Finding:
    return Finding(
        where="model",
        saw=f"{architecture}, which takes text alone",
        rule="a model with a vision tower",
        change="give a vision model",
    )
