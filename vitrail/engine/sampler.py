"""Sampling of a whole batch on the device. Owns the sampling state of every row of the runner's
tables.

Rows are handled in three kinds (greedy, plain, filtered), each by the same arithmetic whoever
shares the batch: a request's tokens never depend on its neighbours' parameters. One uniform draw a
row comes from the scheduler, so this file holds no random state.

Legend: S sampled rows, P rows with penalties, V vocabulary."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.engine.request import SamplingParams, TokenLogprob
from vitrail.engine.step import SlotSetup

# Rows of probabilities held at once: float64 [32, V], and what sorting them takes.
BLOCK_ROWS = 32


class Logprobs(NamedTuple):
    """Of some rows, still on the device: the logprob of each row's own token, and its `width`
    likeliest ids and logprobs, of which row i was asked for `tops[i]`. `rows`: their indices in the
    batch."""

    rows: list[int]
    tops: list[int]
    own: Float[Tensor, "R"]
    top_ids: Int[Tensor, "R width"]
    top_logprobs: Float[Tensor, "R width"]

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """The host's copy (waits for the device once); `token_ids`: each row's own token."""
        own, ids = self.own.tolist(), self.top_ids.tolist()
        values = self.top_logprobs.tolist()
        return [
            TokenLogprob(
                token_id=token,
                logprob=own[i],
                top=list(zip(ids[i][:top], values[i][:top], strict=True)),
            )
            for i, (token, top) in enumerate(zip(token_ids, self.tops, strict=True))
        ]


class Sampled(NamedTuple):
    """`token_ids`: int64 [S] on the device, -1 where a row's logits were not finite or nothing
    could be sampled. `logprobs`: of the rows that asked, None if no row did."""

    token_ids: Int[Tensor, "S"]
    logprobs: Logprobs | None


class _Row(NamedTuple):
    params: SamplingParams
    stop_token_ids: list[int]
    bias_ids: list[int]
    bias_values: list[float]
    penalty_row: int  # row of the penalty tables, -1 without penalties


class Sampler:
    """State a slot: its parameters (host), and for rows with penalties, token counts (device)."""

    def __init__(
        self, max_running: int, vocab_size: int, never_sampled: Sequence[int], device: torch.device
    ):
        self._rows: list[_Row | None] = [None] * max_running
        self._device = device
        self._penalties = _PenaltyTable(vocab_size, device)
        mask = torch.zeros(vocab_size, dtype=torch.float32)
        mask[list(never_sampled)] = -torch.inf
        self._mask_V = mask.to(device)

    def setup(self, setups: Sequence[SlotSetup]) -> None:
        """A new sequence enters each slot."""
        for s in setups:
            old = self._rows[s.slot]
            if old is not None and old.penalty_row >= 0:
                self._penalties.free(old.penalty_row)
            p = s.params
            penalised = (
                p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
            )
            row = -1
            if penalised:
                row = self._penalties.add(s.prompt_token_ids, s.output_token_ids)
            self._rows[s.slot] = _Row(
                p,
                sorted(s.stop_token_ids),
                list(p.logit_bias),
                list(p.logit_bias.values()),
                row,
            )

    def sample(
        self,
        logits_SV: Float[Tensor, "S V"],
        slots: Sequence[int],
        draws: np.ndarray,
        output_index: np.ndarray,
    ) -> Sampled:
        """One token a row. `draws` float64 [S]; `output_index` int64 [S], tokens sampled before."""
        rows: list[_Row] = []
        for slot in slots:
            row = self._rows[slot]
            assert row is not None, f"slot {slot} was never set up"
            rows.append(row)
        finite_S = torch.isfinite(logits_SV.sum(-1))
        x_SV = self._adjusted(logits_SV, rows, output_index)
        best_S, tokens_S = x_SV.max(-1)
        finite_S &= torch.isfinite(best_S)
        plain = [i for i, r in enumerate(rows) if _kind(r.params) == "plain"]
        filtered = [i for i, r in enumerate(rows) if _kind(r.params) == "filtered"]
        for kind, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
            for first in range(0, len(kind), BLOCK_ROWS):
                members = kind[first : first + BLOCK_ROWS]
                index = torch.tensor(members, device=self._device)
                u = torch.from_numpy(draws[members]).to(self._device)
                params = [rows[i].params for i in members]
                tokens_S[index] = draw(x_SV[index], params, u)
        self._penalties.count(
            [r.penalty_row for r in rows if r.penalty_row >= 0],
            tokens_S[[i for i, r in enumerate(rows) if r.penalty_row >= 0]],
        )
        tokens_S = torch.where(finite_S, tokens_S, -1)
        asked = {i: r.params.logprobs for i, r in enumerate(rows) if r.params.logprobs is not None}
        if not asked:
            return Sampled(tokens_S, None)
        own_S = tokens_S.clamp(min=0)
        return Sampled(tokens_S, row_logprobs(logits_SV, own_S, list(asked), list(asked.values())))

    def _adjusted(
        self, logits_SV: Float[Tensor, "S V"], rows: list[_Row], output_index: np.ndarray
    ) -> Float[Tensor, "S V"]:
        """Penalties, biases and masks, in the order that `SamplingParams` documents."""
        x_SV = logits_SV + self._mask_V
        penalised = [i for i, r in enumerate(rows) if r.penalty_row >= 0]
        if penalised:
            x_SV[penalised] = self._penalties.apply(x_SV[penalised], [rows[i] for i in penalised])
        at: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for i, row in enumerate(rows):
            extra = list(zip(row.bias_ids, row.bias_values, strict=True))
            if output_index[i] < row.params.min_tokens:
                extra += [(t, -np.inf) for t in row.stop_token_ids]
            at += [i] * len(extra)
            ids += [t for t, _ in extra]
            values += [v for _, v in extra]
        if at:
            pair = torch.tensor([at, ids], device=self._device)
            bias = torch.tensor(values, dtype=torch.float32, device=self._device)
            x_SV.index_put_((pair[0], pair[1]), bias, accumulate=True)
        return x_SV


def _kind(p: SamplingParams) -> str:
    if p.temperature == 0:
        return "greedy"
    return "filtered" if p.top_k or p.top_p < 1 or p.min_p > 0 else "plain"


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _probabilities(x_SV: Tensor, params: list[SamplingParams]) -> Tensor:
    """float64 softmax at each row's temperature."""
    x_SV = x_SV.double()
    return torch.softmax(x_SV / _column([p.temperature for p in params], x_SV), dim=-1)


def _draw_plain(
    x_SV: Float[Tensor, "S V"], params: list[SamplingParams], u_S: Float[Tensor, "S"]
) -> Int[Tensor, "S"]:
    """Inverse CDF in vocabulary order."""
    return _invert(_probabilities(x_SV, params), u_S)


def _draw_filtered(
    x_SV: Float[Tensor, "S V"], params: list[SamplingParams], u_S: Float[Tensor, "S"]
) -> Int[Tensor, "S"]:
    """Inverse CDF over the kept part of the distribution, likeliest first. Ties keep the lower
    id."""
    p_SV, ids_SV = _probabilities(x_SV, params).sort(dim=-1, descending=True, stable=True)
    vocab = p_SV.shape[1]
    k = _column([float(p.top_k or vocab) for p in params], p_SV)
    rank_V = torch.arange(vocab, device=p_SV.device)
    p_SV = torch.where(rank_V < k, p_SV, 0)
    p_SV = p_SV / p_SV.sum(-1, keepdim=True)
    before_SV = p_SV.cumsum(-1) - p_SV
    p_SV = torch.where(before_SV < _column([p.top_p for p in params], p_SV), p_SV, 0)
    floor = p_SV[:, :1] * _column([p.min_p for p in params], p_SV)
    p_SV = torch.where(p_SV >= floor, p_SV, 0)
    return ids_SV.gather(1, _invert(p_SV, u_S).unsqueeze(1)).squeeze(1)


def _invert(p_SV: Float[Tensor, "S V"], u_S: Float[Tensor, "S"]) -> Int[Tensor, "S"]:
    """The first index whose cumulative weight exceeds u times the total: never one of weight 0."""
    cdf_SV = p_SV.cumsum(-1)
    target = u_S.unsqueeze(1) * cdf_SV[:, -1:]
    found = torch.searchsorted(cdf_SV, target, right=True).squeeze(1)
    last = (p_SV > 0).long().mul(torch.arange(1, p_SV.shape[1] + 1, device=p_SV.device))
    return torch.minimum(found, last.argmax(-1))


def row_logprobs(
    logits_SV: Float[Tensor, "S V"],
    tokens_S: Int[Tensor, "S"],
    rows: list[int],
    tops: list[int],
) -> Logprobs:
    """Natural-log probabilities of `rows`' own tokens and their likeliest, of the logits as they
    are."""
    index = torch.tensor(rows, device=logits_SV.device)
    logprobs_RV = torch.log_softmax(logits_SV[index], dim=-1)
    own = logprobs_RV.gather(1, tokens_S[index].unsqueeze(1)).squeeze(1)
    best = logprobs_RV.topk(max(tops), dim=-1)
    return Logprobs(rows, tops, own, best.indices, best.values)


class _PenaltyTable:
    """Counts of prompt and output tokens for the rows that have penalties; grows by doubling."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        if not self._free:
            old = self._prompt.shape[0]
            more = max(4, old)
            self._prompt = torch.cat([self._prompt, self._prompt.new_zeros(more, self.vocab)])
            self._output = torch.cat([self._output, self._output.new_zeros(more, self.vocab)])
            self._free = list(range(old, old + more))
        row = self._free.pop()
        device = self._prompt.device
        self._prompt[row] = False
        named = [token for token in prompt if token < self.vocab]  # an image token may lie beyond
        self._prompt[row, torch.tensor(named, dtype=torch.long, device=device)] = True
        seen = torch.tensor(output, dtype=torch.long, device=device)
        self._output[row] = torch.bincount(seen, minlength=self.vocab).int()
        return row

    def free(self, row: int) -> None:
        self._free.append(row)

    @property
    def vocab(self) -> int:
        return self._prompt.shape[1]

    def count(self, rows: list[int], tokens: Tensor) -> None:
        if rows:
            at = torch.tensor(rows, device=tokens.device)
            one = torch.ones_like(tokens, dtype=torch.int32)
            self._output.index_put_((at, tokens), one, accumulate=True)

    def apply(self, x_PV: Float[Tensor, "P V"], rows: list[_Row]) -> Float[Tensor, "P V"]:
        """Repetition: seen logits divided (positive) or multiplied (negative). Presence and
        frequency: of the output alone, as OpenAI defines them."""
        index = torch.tensor([r.penalty_row for r in rows], device=x_PV.device)
        output = self._output[index]
        seen = self._prompt[index] | (output > 0)
        r = _column([row.params.repetition_penalty for row in rows], x_PV)
        x_PV = torch.where(seen, torch.where(x_PV > 0, x_PV / r, x_PV * r), x_PV)
        presence = _column([row.params.presence_penalty for row in rows], x_PV)
        frequency = _column([row.params.frequency_penalty for row in rows], x_PV)
        return x_PV - presence * (output > 0) - frequency * output
