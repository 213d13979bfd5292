"""Where an engine computes and in which types, from its configuration: the one statement of each
choice that "auto" leaves open."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from typing import NamedTuple

import torch

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused, accept
from vitrail.config.hardware import CPU, Hardware, from_device
from vitrail.config.model import DType, KvDType, ModelConfig
from vitrail.engine.checkpoint import Checkpoint
from vitrail.engine.floors import Shapes
from vitrail.models.registry import load_entry


class Placed(NamedTuple):
    """What a configuration computes, in which types, and where."""

    shapes: Shapes
    hardware: Hardware
    device: torch.device


def placed(config: EngineConfig, checkpoint: Checkpoint) -> Placed:
    """As `build_engine` decides. Raises `Refused`."""
    device, entry = device_of(config), load_entry(checkpoint.architecture)
    model = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype = dtype_of(config, model, device)
    shapes = Shapes(model=model, dtype=dtype, kv_dtype=kv_dtype_of(config) or dtype)
    return Placed(shapes, hardware_of(device), device)


def device_of(config: EngineConfig) -> torch.device:
    """Raises `Refused` for a device that is not there."""
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
    """The device's facts."""
    if device.type == "cpu":
        return CPU
    p = torch.cuda.get_device_properties(device)
    return from_device(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory)


def dtype_of(config: EngineConfig, model: ModelConfig, device: torch.device) -> DType:
    """Of weights and activations."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.type == "cpu" else model.dtype


def kv_dtype_of(config: EngineConfig) -> KvDType | None:
    """What the cache keeps; None: what the model computes in."""
    return None if config.kv_cache_dtype == "auto" else "float8_e4m3fn"
