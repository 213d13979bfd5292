"""The definition of rotary position embeddings. A table says by which angle each pair of channels
of each token turns; the rotation only differs in which channels form a pair.

Legend: T tokens (or patches), H heads, D rotated channels, F = D / 2 pairs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.config.model import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


def rope_table(
    positions_T: Int[Tensor, "T"], dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]]:
    """fp32 cos and sin of position * theta^(-2i / dim), i = 0 .. dim/2 - 1, the frequencies bent by
    `scaling` and the result multiplied by yarn's attention factor."""
    frequencies_F, length = turning(dim, theta, scaling, positions_T.device)
    angles_TF = positions_T.float()[:, None] * frequencies_F
    return angles_TF.cos() * length, angles_TF.sin() * length


class Turning(NamedTuple):
    """What pairs turn by from one position to the next, fp32, and by what cosines and sines are
    multiplied: yarn's attention factor, else 1."""

    frequencies_F: Float[Tensor, "F"]
    length: float


def turning(dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Turning:
    """theta^(-2i / dim), bent by `scaling`."""
    frequencies_F = _frequencies(dim, theta, device)
    match scaling:
        case LinearScaling(factor=factor):
            return Turning(frequencies_F / factor, 1.0)
        case Llama3Scaling():
            return Turning(_llama3(frequencies_F, scaling), 1.0)
        case YarnScaling():
            return Turning(_yarn(frequencies_F, theta, scaling), scaling.attention_factor)
        case None:
            return Turning(frequencies_F, 1.0)


class Turns(NamedTuple):
    """By which angle each pair of the tokens' rotary channels turns, and which are pairs."""

    cos_TF: Float[Tensor, "T F"]
    sin_TF: Float[Tensor, "T F"]
    interleaved: bool


def rope_table_2d(
    grids: Sequence[tuple[int, int]], dim: int, theta: float, device: torch.device
) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T F"]]:
    """fp32 cos and sin for the patches of grids (height, width), row-major, one grid after another:
    with w_i = theta^(-4i / dim), pair 2i turns by column * w_i and pair 2i + 1 by row * w_i."""
    assert dim % 4 == 0, f"{dim} channels have no pairs for rows and columns alike"
    made = {grid: _angles_2d(*grid, dim, theta, device) for grid in dict.fromkeys(grids)}
    none = torch.empty((0, dim // 2), device=device)
    angles_TF = torch.cat([none, *(made[grid] for grid in grids)])
    return angles_TF.cos(), angles_TF.sin()


def rotate(
    x_THD: Float[Tensor, "T H D"],
    cos_TF: Float[Tensor, "T F"],
    sin_TF: Float[Tensor, "T F"],
    interleaved: bool,
) -> Float[Tensor, "T H D"]:
    """(a, b) -> (a cos - b sin, a sin + b cos) in fp32, rounded once to x's dtype. Pair i is
    channels (2i, 2i + 1) if `interleaved`, else (i, i + D/2)."""
    pair_dim = -1 if interleaved else -2
    sizes = (-1, 2) if interleaved else (2, -1)
    a_THF, b_THF = x_THD.float().unflatten(-1, sizes).unbind(pair_dim)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    turned = (a_THF * cos_T1F - b_THF * sin_T1F, a_THF * sin_T1F + b_THF * cos_T1F)
    return torch.stack(turned, pair_dim).flatten(-2).to(x_THD.dtype)


def _frequencies(dim: int, theta: float, device: torch.device) -> Float[Tensor, "F"]:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / theta**exponents


def _llama3(frequencies_F: Float[Tensor, "F"], s: Llama3Scaling) -> Float[Tensor, "F"]:
    """Turns over the original context, n = original w / 2 pi, decide: w / factor up to the low
    bound, w from the high bound on, between them the mean weighted by where n stands."""
    turns_F = s.original_max_position * frequencies_F / (2 * math.pi)
    kept_F = (turns_F - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    kept_F = kept_F.clamp(0, 1)
    return frequencies_F / s.factor * (1 - kept_F) + frequencies_F * kept_F


def _yarn(frequencies_F: Float[Tensor, "F"], theta: float, s: YarnScaling) -> Float[Tensor, "F"]:
    """Pair i turns n times over the original context where i = F log_theta(original / 2 pi n). The
    share of w / factor rises linearly from that of beta_fast to that of beta_slow."""
    half = len(frequencies_F)

    def pair(turns: float) -> float:
        return half * math.log(s.original_max_position / (2 * math.pi * turns)) / math.log(theta)

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    # the published bounds are of channels: 0 and 2 F - 1
    low, high = max(low, 0), min(high, 2 * half - 1)
    pairs_F = torch.arange(half, dtype=torch.float32, device=frequencies_F.device)
    scaled_F = ((pairs_F - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies_F / s.factor * scaled_F + frequencies_F * (1 - scaled_F)


def _angles_2d(
    height: int, width: int, dim: int, theta: float, device: torch.device
) -> Float[Tensor, "T F"]:
    frequencies = _frequencies(dim // 2, theta, device)
    rows = torch.arange(height, device=device)[:, None, None] * frequencies
    columns = torch.arange(width, device=device)[None, :, None] * frequencies
    pairs = torch.broadcast_tensors(columns, rows)
    return torch.stack(pairs, -1).flatten(2).flatten(0, 1)
