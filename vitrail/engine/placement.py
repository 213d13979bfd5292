"""Where a configuration runs, and what the device there is. In which types, and how much of a step,
`check.sizes` says."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import torch

from vitrail.config.engine import DEFAULT_VIDEO_FRAMES, EngineConfig, plan_frames
from vitrail.config.finding import Finding, Refused, accept
from vitrail.config.hardware import CPU, Hardware, from_device
from vitrail.config.model import ModelConfig


def device_of(config: EngineConfig) -> torch.device:
    """Where the model runs. Raises `Refused`."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise Refused(
            Finding(
                where="device",
                saw="cuda, and torch sees no CUDA device",
                rule="the device is there",
                change="pass --device cpu, or install a CUDA build of torch",
            )
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def hardware_of(device: torch.device) -> Hardware:
    """The device as planners know it."""
    if device.type == "cpu":
        return CPU
    p = torch.cuda.get_device_properties(device)
    return from_device(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory)


def video_frames_of(config: EngineConfig, model: ModelConfig) -> int:
    """Without a tower no number is too large."""
    if model.vision is None:
        return config.video_frames or DEFAULT_VIDEO_FRAMES
    return accept(plan_frames(config, model.video_frames))
