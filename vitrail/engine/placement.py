"""What a configuration, a model and a device decide together, each a small rule: where and in which
types it runs, and how much of a step. `build` asks in order; nothing here is kept."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Sequence

import torch

from vitrail.cache.spec import LayerSpec, stored_as
from vitrail.config.engine import DEFAULT_VIDEO_FRAMES, EngineConfig, plan_frames
from vitrail.config.finding import Finding, Refused, accept
from vitrail.config.hardware import CPU, Hardware, from_device
from vitrail.config.model import DType, KvDType, ModelConfig
from vitrail.models.interface import Model
from vitrail.vision.preprocess import ImageProcessor

# Tokens of a step where nobody says.
GPU_STEP_TOKENS, CPU_STEP_TOKENS = 8192, 2048
# Patches encoded in a step where no processor says how large an image can be.
DEFAULT_ENCODER_PATCHES = 16_384


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


def dtype_of(config: EngineConfig, model: ModelConfig, device: torch.device) -> DType:
    """Of weights and activations."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.type == "cpu" else model.dtype


def video_frames_of(config: EngineConfig, model: ModelConfig) -> int:
    """Without a tower no number is too large."""
    if model.vision is None:
        return config.video_frames or DEFAULT_VIDEO_FRAMES
    return accept(plan_frames(config, model.video_frames))


def kv_dtype_of(config: EngineConfig) -> KvDType | None:
    """What the cache keeps; None: what the model computes in."""
    return None if config.kv_cache_dtype == "auto" else "float8_e4m3fn"


def specs_of(config: EngineConfig, model: Model) -> Sequence[LayerSpec]:
    """What each layer keeps for a token, as it is stored."""
    kept, kv_dtype = model.cache_specs(), kv_dtype_of(config)
    return kept if kv_dtype is None else stored_as(kept, kv_dtype)


def encoder_patches_of(
    config: EngineConfig, model: ModelConfig, processor: ImageProcessor | None
) -> int:
    """The encoder's budget a step: asked for, or the largest picture the processor makes, so that
    no picture alone waits for a second step."""
    if model.vision is None:
        return 0
    if config.encoder_patches is not None:
        return config.encoder_patches
    return DEFAULT_ENCODER_PATCHES if processor is None else processor.max_patches


def step_tokens_of(config: EngineConfig, hardware: Hardware) -> int:
    """The user's choice, or as many as keep the device at its products rather than its launches."""
    if config.max_step_tokens is not None:
        return config.max_step_tokens
    return GPU_STEP_TOKENS if hardware.cc else CPU_STEP_TOKENS
