"""Rotary tables in Triton, one launch a step, and the rotation as a part of other kernels.

Legend: T tokens, F pairs of channels."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.config.model import RopeScaling
from vitrail.ops.launch import launch_early
from vitrail.ops.rope.naive import Turning, turning

TOKENS = 16  # of a program
E4M3_MAX = tl.constexpr(448.0)


def rope_table(
    positions_T: Tensor, dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """`naive.rope_table`. The frequencies are computed once for a device: by an engine's first
    steps, before any graph is captured."""
    tokens, half = len(positions_T), dim // 2
    turns = _turning(dim, theta, scaling, positions_T.device)
    tables = torch.empty((2, tokens, half), dtype=torch.float32, device=positions_T.device)
    if tokens:
        launch_early(
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


@triton.jit(do_not_specialize=["tokens", "length"], do_not_specialize_on_alignment=["positions"])
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


@triton.jit
def turn(
    at,
    to,
    live,
    c,
    s,
    unscale,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    F_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E4M3: tl.constexpr,
):
    """The 2 F channels at each of `at` [ROWS], turned by cosines and sines [ROWS or 1, F_BLOCK], to
    `to` [ROWS]. Channels are read and written side by side, whatever makes a pair."""
    dtype = at.dtype.element_ty
    if INTERLEAVED:
        p = tl.arange(0, 2 * F_BLOCK)[None, :]
        there = live[:, None] & (p < 2 * F)
        x = tl.load(at[:, None] + p, mask=there, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [ROWS, F_BLOCK, 2]))
        both = tl.join((a * c - b * s).to(dtype), (a * s + b * c).to(dtype))
        turned = tl.reshape(both, [ROWS, 2 * F_BLOCK])
        tl.store(to[:, None] + p, stored(turned, to, unscale, E4M3), mask=there)
    else:
        f = tl.arange(0, F_BLOCK)[None, :]
        there = live[:, None] & (f < F)
        a = tl.load(at[:, None] + f, mask=there, other=0.0).to(tl.float32)
        b = tl.load(at[:, None] + F + f, mask=there, other=0.0).to(tl.float32)
        one, two = (a * c - b * s).to(dtype), (a * s + b * c).to(dtype)
        tl.store(to[:, None] + f, stored(one, to, unscale, E4M3), mask=there)
        tl.store(to[:, None] + F + f, stored(two, to, unscale, E4M3), mask=there)


@triton.jit
def stored(x, to, unscale, E4M3: tl.constexpr):
    """What memory of e4m3 holds of x: saturated where finite, else NaN."""
    if E4M3:
        wide = x.to(tl.float32)
        near = tl.minimum(tl.maximum(wide * unscale, -E4M3_MAX), E4M3_MAX)
        near = tl.where(tl.abs(wide) < float("inf"), near, float("nan"))
        return near.to(to.dtype.element_ty)
    return x.to(to.dtype.element_ty)
