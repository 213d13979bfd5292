"""Which implementation of an op runs: by device, dtype and shape, all known when a layer is called,
none read from a tensor's contents."""

from collections.abc import Callable
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.ops.moe.grouped import GROUPED_ALIGN_BYTES, grouped_experts, segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts
from vitrail.ops.resize import naive as naive_resize
from vitrail.ops.vision import naive as naive_vision

Experts = Callable[
    [Float[Tensor, "T M"], Routing, Float[Tensor, "X F M"], Float[Tensor, "X M I"]],
    Float[Tensor, "T M"],
]


def select_experts(device: torch.device, dtype: torch.dtype, widths: tuple[int, int]) -> Experts:
    """`widths`: hidden and intermediate channels. Host memory: segments, whose ends are at hand.
    Elsewhere torch's grouped product where it has a kernel that never reads its segments back
    (bf16, aligned rows), else the definition, which has none to read."""
    if device.type == "cpu":
        return segmented_experts
    aligned = all(width * dtype.itemsize % GROUPED_ALIGN_BYTES == 0 for width in widths)
    return grouped_experts if dtype == torch.bfloat16 and aligned else naive_experts


def select_vision(device: torch.device) -> ModuleType:
    """The towers' operations (the functions of `ops.vision.naive`, by their names): kernels on
    CUDA, which needs Triton, else the definitions."""
    if device.type != "cuda":
        return naive_vision
    from vitrail.ops.vision import triton

    return triton


def select_resize(device: torch.device) -> ModuleType:
    """The functions of `ops.resize.naive`, likewise."""
    if device.type != "cuda":
        return naive_resize
    from vitrail.ops.resize import triton

    return triton
