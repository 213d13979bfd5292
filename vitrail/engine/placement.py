"""Where a configuration runs, and what the device there is. In which types, and how much of a step,
`check.sizes` says."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from typing import NamedTuple

import torch

from vitrail.check.sizes import kv_dtype, served_dtype
from vitrail.config.engine import DEFAULT_VIDEO_FRAMES, EngineConfig, plan_frames
from vitrail.config.finding import Refused, accept
from vitrail.config.hardware import CPU, Hardware
from vitrail.config.model import ModelConfig
from vitrail.engine.floors import Shapes
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.registry import load_entry
from vitrail.ops.record import gpu_of


class Placed(NamedTuple):
    """What a configuration computes, in which types, and where."""

    shapes: Shapes
    hardware: Hardware
    device: torch.device


def placed(config: EngineConfig, checkpoint: Checkpoint) -> Placed:
    """As `build_engine` decides. Raises `Refused`."""
    device, entry = device_of(config), load_entry(checkpoint.architecture)
    model = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype = served_dtype(config, model, device.type == "cpu")
    shapes = Shapes(model=model, dtype=dtype, kv_dtype=kv_dtype(config) or dtype)
    return Placed(shapes, hardware_of(device), device)


def device_of(config: EngineConfig) -> torch.device:
    """Where the model runs. Raises `Refused`."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise Refused.because(
            where="device",
            saw="cuda, and torch sees no CUDA device",
            rule="the device is there",
            change="pass --device cpu, or install a CUDA build of torch",
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def hardware_of(device: torch.device) -> Hardware:
    """The device as planners know it."""
    return CPU if device.type == "cpu" else gpu_of(device)


def video_frames_of(config: EngineConfig, model: ModelConfig) -> int:
    """Without a tower no number is too large."""
    if model.vision is None:
        return config.video_frames or DEFAULT_VIDEO_FRAMES
    return accept(plan_frames(config, model.video_frames))
