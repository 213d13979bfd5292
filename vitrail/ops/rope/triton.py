"""Rotary tables in Triton: one launch a step.

Legend: T tokens, F pairs of channels."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.config.model import RopeScaling
from vitrail.ops.launch import launch
from vitrail.ops.rope.naive import Turning, turning

TOKENS = 16  # of a program


def rope_table(
    positions_T: Tensor, dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """`naive.rope_table`. The frequencies are computed once for a device: by an engine's first
    steps, before any graph is captured."""
    tokens, half = len(positions_T), dim // 2
    turns = _turning(dim, theta, scaling, positions_T.device)
    tables = torch.empty((2, tokens, half), dtype=torch.float32, device=positions_T.device)
    if tokens:
        launch(
            table_kernel,
            (triton.cdiv(tokens, TOKENS),),
            positions_T.device,
            positions_T,
            turns.frequencies_F,
            tables,
            tokens,
            turns.length,
            F=half,
            T_BLOCK=TOKENS,
            F_BLOCK=triton.next_power_of_2(half),
            num_warps=4,
        )
    return tables[0], tables[1]


@cache
def _turning(dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Turning:
    return turning(dim, theta, scaling, device)


@triton.jit(do_not_specialize=["tokens", "length"])
def table_kernel(
    positions,
    frequencies,
    tables,
    tokens,
    length,
    F: tl.constexpr,
    T_BLOCK: tl.constexpr,
    F_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i: T_BLOCK tokens; `tables` [2, tokens, F] are cosines, then sines."""
    t = tl.program_id(0).to(tl.int64) * T_BLOCK + tl.arange(0, T_BLOCK)
    f = tl.arange(0, F_BLOCK)
    turn = tl.load(frequencies + f, mask=f < F, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.load(positions + t, mask=t < tokens, other=0).to(tl.float32)
    angle = at[:, None] * turn[None, :]
    there = (t < tokens)[:, None] & (f < F)[None, :]
    cells = tables + t[:, None] * F + f[None, :]
    tl.store(cells, tl.cos(angle) * length, mask=there)
    tl.store(cells + tl.cast(tokens, tl.int64) * F, tl.sin(angle) * length, mask=there)
