"""Which implementation of an op runs: by device, dtype and shape, all known when a layer is called,
none read from a tensor's contents."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitrail.ops.moe.grouped import GROUPED_ALIGN_BYTES, grouped_experts, segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts
from vitrail.ops.sampling import naive as sampling

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


def best_tokens(
    logits_SV: Float[Tensor, "S V"], never_V: Float[Tensor, "V"]
) -> tuple[Int[Tensor, "S"], Bool[Tensor, "S"]]:
    """`sampling.naive.best_tokens`: on a GPU in one pass over the logits."""
    return sampling.best_tokens(logits_SV, never_V)


def draw_plain(
    x_SV: Float[Tensor, "S V"],
    never_V: Float[Tensor, "V"],
    temperature_S: Float[Tensor, "S"],
    u_S: Float[Tensor, "S"],
) -> Int[Tensor, "S"]:
    """`sampling.naive.draw_plain`."""
    return sampling.draw_plain(x_SV, never_V, temperature_S, u_S)
