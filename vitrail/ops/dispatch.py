"""Which implementation of an op runs: by device, dtype and shape, all known when a layer is called,
none read from a tensor's contents."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import vitrail.ops.sampling.naive as naive_sampling
from vitrail.ops.moe.grouped import GROUPED_ALIGN_BYTES, grouped_experts, segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts
from vitrail.ops.sampling.naive import Filters

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


class SamplingOps(NamedTuple):
    best_tokens: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    draw_plain: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    draw_filtered: Callable[[Tensor, Tensor, Tensor, Tensor, Filters, Tensor], Tensor]


@cache
def select_sampling(device: torch.device) -> SamplingOps:
    """Ours in Triton on a GPU, else the definitions."""
    if device.type != "cuda":
        return SamplingOps(
            naive_sampling.best_tokens, naive_sampling.draw_plain, naive_sampling.draw_filtered
        )
    from vitrail.ops.sampling import triton

    return SamplingOps(triton.best_tokens, triton.draw_plain, triton.draw_filtered)
