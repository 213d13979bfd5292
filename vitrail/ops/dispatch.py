"""Which implementation of an op runs: by device, dtype and shape, all known when a layer is called,
none read from a tensor's contents."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import vitrail.ops.activation.naive as naive_activation
import vitrail.ops.linear.naive as naive_linear
import vitrail.ops.mla.naive as naive_mla
import vitrail.ops.norm.naive as naive_norm
import vitrail.ops.rope.naive as naive_rope
from vitrail.config.model import RopeScaling
from vitrail.ops.moe.grouped import GROUPED_ALIGN_BYTES, grouped_experts, segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts

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


class NormOps(NamedTuple):
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class LinearOps(NamedTuple):
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    scores: Callable[[Tensor, Tensor], Tensor]
    add_norm_linear: Callable[[Tensor, Tensor | None, Tensor, float, Tensor], tuple[Tensor, Tensor]]


class MlaOps(NamedTuple):
    expanded_queries: Callable[..., Tensor]
    absorbed_queries: Callable[..., Tensor]
    values: Callable[[Tensor, Tensor], Tensor]
    expanded_keys: Callable[[Tensor, Tensor, naive_mla.MlaSizes], tuple[Tensor, Tensor]]


@cache
def select_norm(device: torch.device) -> NormOps:
    """Ours in Triton on a GPU, else the definitions."""
    if device.type != "cuda":
        return NormOps(naive_norm.rms_norm, naive_norm.add_rms_norm)
    from vitrail.ops.norm import triton

    return NormOps(triton.rms_norm, triton.add_rms_norm)


@cache
def select_silu_mul(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Ours in Triton on a GPU, else the definition."""
    if device.type != "cuda":
        return naive_activation.silu_mul
    from vitrail.ops.activation import triton

    return triton.silu_mul


@cache
def select_linear(device: torch.device) -> LinearOps:
    """On a GPU what `linear.table` says of a shape, else the definitions."""
    if device.type != "cuda":
        return LinearOps(naive_linear.linear, naive_linear.scores, naive_linear.add_norm_linear)
    from vitrail.ops.linear import fused

    return LinearOps(fused.linear, fused.scores, fused.add_norm_linear)


@cache
def select_mla(device: torch.device) -> MlaOps:
    """Ours in Triton on a GPU, else the definitions."""
    if device.type != "cuda":
        return MlaOps(
            naive_mla.expanded_queries,
            naive_mla.absorbed_queries,
            naive_mla.values,
            naive_mla.expanded_keys,
        )
    from vitrail.ops.mla import fused

    return MlaOps(fused.expanded_queries, fused.absorbed_queries, fused.values, fused.expanded_keys)


RopeTable = Callable[[Tensor, int, float, RopeScaling | None], tuple[Tensor, Tensor]]


@cache
def select_rope_table(device: torch.device) -> RopeTable:
    """Ours in Triton on a GPU, else the definition."""
    if device.type != "cuda":
        return naive_rope.rope_table
    from vitrail.ops.rope import triton

    return triton.rope_table
