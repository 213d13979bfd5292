"""Which implementation of an op runs: by device, dtype and shape, all known when a layer is called,
none read from a tensor's contents."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import vitrail.ops.activation.naive as naive_activation
import vitrail.ops.gqa.naive as naive_gqa
import vitrail.ops.linear.naive as naive_linear
import vitrail.ops.mla.naive as naive_mla
import vitrail.ops.norm.naive as naive_norm
import vitrail.ops.rope.naive as naive_rope
import vitrail.ops.sampling.naive as naive_sampling
from vitrail.config.model import RopeScaling
from vitrail.ops.moe.grouped import segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts, naive_route
from vitrail.ops.moe.plan import ALIGN_BYTES, Choice
from vitrail.ops.record import by_device, gpu_of, on_gpu
from vitrail.ops.resize import naive as naive_resize
from vitrail.ops.sampling.naive import Filters
from vitrail.ops.vision import naive as naive_vision

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


def select_mixture(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], fixed: bool = False
) -> Mixture:
    """Router and experts; `widths`: hidden and intermediate channels. Host memory: segments, whose
    ends are at hand. Elsewhere our kernels where they can run (bf16, aligned rows), else the
    definition, which reads nothing back. `fixed`: in tiles that the batch does not choose."""
    if device.type == "cpu":
        return partial(_mixture, segmented_experts)
    aligned = all(width * dtype.itemsize % ALIGN_BYTES == 0 for width in widths)
    if dtype != torch.bfloat16 or not aligned:
        assert not fixed, f"{dtype}, {widths} channels: refused at start-up"
        return partial(_mixture, naive_experts)
    from vitrail.ops.moe.fused import triton_mixture  # compiles, so only where there is a GPU

    return partial(triton_mixture, gpu_of(device), fixed=fixed)


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


class NormOps(NamedTuple):
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


class LinearOps(NamedTuple):
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    scores: Callable[[Tensor, Tensor], Tensor]
    add_norm_linear: Callable[[Tensor, Tensor | None, Tensor, float, Tensor], tuple[Tensor, Tensor]]


class MlaOps(NamedTuple):
    expanded_queries: Callable[..., Tensor]
    absorbed_queries: Callable[..., Tensor]
    values: Callable[[Tensor, Tensor], Tensor]
    expanded_keys: Callable[[Tensor, Tensor, naive_mla.MlaSizes, bool], tuple[Tensor, Tensor]]


@by_device
def select_norm(device: torch.device) -> NormOps:
    """Ours in Triton on a GPU, else the definitions."""
    if not on_gpu(device):
        return NormOps(naive_norm.rms_norm, naive_norm.add_rms_norm)
    from vitrail.ops.norm import triton

    return NormOps(triton.rms_norm, triton.add_rms_norm)


@by_device
def select_silu_mul(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Ours in Triton on a GPU, else the definition."""
    if not on_gpu(device):
        return naive_activation.silu_mul
    from vitrail.ops.activation import triton

    return triton.silu_mul


@by_device
def select_linear(device: torch.device, fixed: bool = False) -> LinearOps:
    """On a GPU what `linear.table` says of a shape, else the definitions. `fixed`: a row's product
    is the same whatever is beside it."""
    if not on_gpu(device):
        return LinearOps(naive_linear.linear, naive_linear.scores, naive_linear.add_norm_linear)
    if fixed:
        from vitrail.ops.linear import fixed as alike

        return LinearOps(alike.linear, alike.scores, alike.add_norm_linear)
    from vitrail.ops.linear import fused

    return LinearOps(fused.linear, fused.scores, fused.add_norm_linear)


@by_device
def select_mla(device: torch.device, fixed: bool = False) -> MlaOps:
    """Ours in Triton on a GPU, else the definitions. `fixed`: as in `select_linear`."""
    if not on_gpu(device):
        return MlaOps(
            naive_mla.expanded_queries,
            naive_mla.absorbed_queries,
            naive_mla.values,
            naive_mla.expanded_keys,
        )
    from vitrail.ops.mla import fused

    absorbed, values = fused.absorbed_queries, fused.values
    if fixed:
        absorbed, values = (partial(f, fixed=True) for f in (absorbed, values))
    return MlaOps(fused.expanded_queries, absorbed, values, fused.expanded_keys)


RopeTable = Callable[[Tensor, int, float, RopeScaling | None], tuple[Tensor, Tensor]]


@by_device
def select_rope_table(device: torch.device) -> RopeTable:
    """Ours in Triton on a GPU, else the definition."""
    if not on_gpu(device):
        return naive_rope.rope_table
    from vitrail.ops.rope import triton

    return triton.rope_table


class SamplingOps(NamedTuple):
    best_tokens: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    keep_best: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    draw_plain: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    draw_filtered: Callable[[Tensor, Tensor, Tensor, Tensor, Filters, Tensor], Tensor]


@by_device
def select_sampling(device: torch.device) -> SamplingOps:
    """Ours in Triton on a GPU, else the definitions."""
    ops = naive_sampling
    if on_gpu(device):
        from vitrail.ops.sampling import triton as ops
    return SamplingOps(ops.best_tokens, ops.keep_best, ops.draw_plain, ops.draw_filtered)


def select_vision(device: torch.device) -> ModuleType:
    """The towers' operations (the functions of `ops.vision.naive`, by their names): kernels on
    CUDA, which needs Triton, else the definitions."""
    if not on_gpu(device):
        return naive_vision
    from vitrail.ops.vision import triton

    return triton


def select_resize(device: torch.device) -> ModuleType:
    """The functions of `ops.resize.naive`, likewise."""
    if not on_gpu(device):
        return naive_resize
    from vitrail.ops.resize import triton

    return triton


@by_device
def select_paged_queries(device: torch.device) -> Callable[..., Tensor]:
    """Ours in Triton on a GPU, else the definition."""
    if not on_gpu(device):
        return naive_gqa.paged_queries
    from vitrail.ops.gqa import triton

    return triton.paged_queries
