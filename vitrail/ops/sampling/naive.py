"""The definition of sampling, row by row: nothing of a row depends on another.

Legend: S rows, R rows that draw, V vocabulary. Logits are fp32, probabilities float64; a draw u is
in [0, 1)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Rows of probabilities held at once: float64 [32, V], and what sorting them takes.
BLOCK_ROWS = 32


class Filters(NamedTuple):
    """Of each row, float64: how many of the likeliest ids stay (V: all), the mass that they reach
    (1: all), the share of the likeliest one's probability that an id has at least (0: any)."""

    top_k: Float[Tensor, "R"]
    top_p: Float[Tensor, "R"]
    min_p: Float[Tensor, "R"]


def best_tokens(
    logits_SV: Float[Tensor, "S V"], never_V: Float[Tensor, "V"]
) -> tuple[Int[Tensor, "S"], Bool[Tensor, "S"]]:
    """The first of the largest logits + never (0, or -inf for an id that is never sampled), and
    whether the row's logits are all finite and it is."""
    best_S, tokens_S = (logits_SV + never_V).max(-1)
    return tokens_S, torch.isfinite(logits_SV).all(-1) & torch.isfinite(best_S)


def keep_best(
    logits_SV: Float[Tensor, "S V"],
    never_V: Float[Tensor, "V"],
    last_R: Int[Tensor, "R"],
    slots_S: Int[Tensor, "S"],
) -> Int[Tensor, "S"]:
    """`best_tokens`, -1 where it is not: what the next step reads of it (0 then) is written to
    `last_R` at `slots_S`, int64 all."""
    tokens_S, finite_S = best_tokens(logits_SV, never_V)
    tokens_S = torch.where(finite_S, tokens_S, -1)
    last_R.index_copy_(0, slots_S, tokens_S.clamp(min=0))
    return tokens_S


def draw_plain(
    x_SV: Float[Tensor, "S V"],
    rows_R: Int[Tensor, "R"],
    never_V: Float[Tensor, "V"],
    temperature_R: Float[Tensor, "R"],
    u_R: Float[Tensor, "R"],
) -> Int[Tensor, "R"]:
    """For each of `rows`, inverse CDF in vocabulary order."""
    parts: list[Tensor] = []
    for rows_B, t_B, u_B in _blocks(rows_R, temperature_R, u_R):
        parts.append(_invert(_probabilities(x_SV[rows_B] + never_V, t_B), u_B))
    return torch.cat(parts)


def draw_filtered(
    x_SV: Float[Tensor, "S V"],
    rows_R: Int[Tensor, "R"],
    never_V: Float[Tensor, "V"],
    temperature_R: Float[Tensor, "R"],
    filters: Filters,
    u_R: Float[Tensor, "R"],
) -> Int[Tensor, "R"]:
    """For each of `rows`, inverse CDF over the kept part of the distribution, likeliest first. Ties
    keep the lower id."""
    parts: list[Tensor] = []
    for rows_B, t_B, u_B, *kept in _blocks(rows_R, temperature_R, u_R, *filters):
        parts.append(_filtered(_probabilities(x_SV[rows_B] + never_V, t_B), u_B, *kept))
    return torch.cat(parts)


def _blocks(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(c.split(BLOCK_ROWS) for c in columns), strict=True)


def _probabilities(
    x_SV: Float[Tensor, "S V"], temperature_S: Float[Tensor, "S"]
) -> Float[Tensor, "S V"]:
    return torch.softmax(x_SV.double() / temperature_S[:, None], dim=-1)


def _filtered(
    p_SV: Float[Tensor, "S V"],
    u_S: Float[Tensor, "S"],
    top_k_S: Float[Tensor, "S"],
    top_p_S: Float[Tensor, "S"],
    min_p_S: Float[Tensor, "S"],
) -> Int[Tensor, "S"]:
    p_SV, ids_SV = p_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(p_SV.shape[1], device=p_SV.device)
    p_SV = torch.where(rank_V < top_k_S[:, None], p_SV, 0)
    p_SV = p_SV / p_SV.sum(-1, keepdim=True)
    before_SV = p_SV.cumsum(-1) - p_SV
    p_SV = torch.where(before_SV < top_p_S[:, None], p_SV, 0)
    p_SV = torch.where(p_SV >= p_SV[:, :1] * min_p_S[:, None], p_SV, 0)
    return ids_SV.gather(1, _invert(p_SV, u_S).unsqueeze(1)).squeeze(1)


def _invert(p_SV: Float[Tensor, "S V"], u_S: Float[Tensor, "S"]) -> Int[Tensor, "S"]:
    """The first index whose cumulative weight exceeds u times the total: never one of weight 0."""
    cdf_SV = p_SV.cumsum(-1)
    target_S1 = u_S.unsqueeze(1) * cdf_SV[:, -1:]
    found_S = torch.searchsorted(cdf_SV, target_S1, right=True).squeeze(1)
    last_SV = (p_SV > 0).long().mul(torch.arange(1, p_SV.shape[1] + 1, device=p_SV.device))
    return torch.minimum(found_S, last_SV.argmax(-1))
