"""Which implementation of an op runs: by device, dtype and shape, all known when a layer is called,
none read from a tensor's contents."""

from collections.abc import Callable
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.config.hardware import Hardware, from_device
from vitrail.ops.moe.grouped import segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts, naive_route
from vitrail.ops.moe.plan import ALIGN_BYTES, Choice

Experts = Callable[
    [Float[Tensor, "T M"], Routing, Float[Tensor, "Y F M"], Float[Tensor, "Y M I"]],
    Float[Tensor, "T M"],
]
Mixture = Callable[
    [
        Float[Tensor, "T M"],
        Float[Tensor, "X M"],
        Float[Tensor, "X"],
        Choice,
        Float[Tensor, "Y F M"],
        Float[Tensor, "Y M I"],
    ],
    Float[Tensor, "T M"],
]


def select_mixture(device: torch.device, dtype: torch.dtype, widths: tuple[int, int]) -> Mixture:
    """Router and experts; `widths`: hidden and intermediate channels. Host memory: segments, whose
    ends are at hand. Elsewhere our kernels where they can run (bf16, aligned rows), else the
    definition, which reads nothing back."""
    if device.type == "cpu":
        return partial(_mixture, segmented_experts)
    aligned = all(width * dtype.itemsize % ALIGN_BYTES == 0 for width in widths)
    if dtype != torch.bfloat16 or not aligned:
        return partial(_mixture, naive_experts)
    from vitrail.ops.moe.fused import triton_mixture  # compiles, so only where there is a GPU

    return partial(triton_mixture, gpu_of(device))


def _mixture(
    experts: Experts,
    x_TM: Float[Tensor, "T M"],
    router_XM: Float[Tensor, "X M"],
    bias_X: Float[Tensor, "X"],
    choice: Choice,
    gate_up_YFM: Float[Tensor, "Y F M"],
    down_YMI: Float[Tensor, "Y M I"],
) -> Float[Tensor, "T M"]:
    return experts(x_TM, naive_route(x_TM, router_XM, bias_X, choice), gate_up_YFM, down_YMI)


@cache
def gpu_of(device: torch.device) -> Hardware:
    """The facts of the GPU that holds a tensor."""
    found = torch.cuda.get_device_properties(device)
    return from_device(
        found.name, found.major * 10 + found.minor, found.multi_processor_count, found.total_memory
    )
