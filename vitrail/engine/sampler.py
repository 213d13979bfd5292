"""Sampling of a whole batch on the device. Owns the sampling state of every row of the runner's
tables.

Parameters are columns by slot on the host; what a step needs of them travels in the step's parcel.
Rows are handled in three kinds (greedy, plain, filtered), each by the same arithmetic whoever
shares the batch: a request's tokens never depend on its neighbours' parameters. One uniform draw a
row comes from the scheduler, so this file holds no random state.

Legend: S sampled rows, R rows that asked, P rows with penalties, V vocabulary."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.engine.parcel import Parcel, Received
from vitrail.engine.request import SamplingParams, TokenLogprob
from vitrail.engine.step import SlotSetup
from vitrail.ops.dispatch import select_sampling
from vitrail.ops.sampling.naive import Filters

GREEDY, PLAIN, FILTERED = range(3)
UNKNOWN, LIKELIEST, MORE = range(3)
NO_BIAS = (np.zeros(0, np.int64), np.zeros(0, np.float32))


class Logprobs(NamedTuple):
    """Of some rows: the logprob of each row's own token, and its `width` likeliest ids and
    logprobs, of which row i was asked for `tops[i]`. `rows`: their indices in the batch."""

    rows: list[int]
    tops: list[int]
    own: Float[Tensor, "R"]
    top_ids: Int[Tensor, "R width"]
    top_logprobs: Float[Tensor, "R width"]

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """The host's copy (waits for the device, once, where that holds them); `token_ids`: each
        row's own token."""
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
    """`token_ids`: int64 [S], -1 where a row's logits were not finite or nothing could be sampled.
    `logprobs`: of the rows that asked, None if no row did."""

    token_ids: Int[Tensor, "S"]
    logprobs: Logprobs | None


class _Drawn(NamedTuple):
    """Tickets of rows of one kind: their indices, int64; draws, temperatures and (filtered) top_k,
    top_p and min_p, float64 [2 or 5, R]."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a step's rows want, on its way: tickets. `settled`: of new rows of the penalty tables.
    `penalised`: rows, their table rows, and columns [3, P]. `biases`: row, id and value of each.
    `logprobs`: rows' indices; with `rows` and `tops` on the host."""

    settled: tuple[int, int, int] | None
    penalised: tuple[int, int, int] | None
    biases: tuple[int, int, int] | None
    plain: _Drawn | None
    filtered: _Drawn | None
    logprobs: int | None
    rows: list[int]
    tops: list[int]


# Each row's likeliest token, and nothing else.
NOTHING = Asked(
    settled=None,
    penalised=None,
    biases=None,
    plain=None,
    filtered=None,
    logprobs=None,
    rows=[],
    tops=[],
)


class Sampler:
    """State a slot: its parameters (host), and for rows with penalties, token counts (device)."""

    def __init__(
        self, max_running: int, vocab_size: int, never_sampled: Sequence[int], device: torch.device
    ):
        self._penalties = _PenaltyTable(vocab_size, device)
        mask = torch.zeros(vocab_size, dtype=torch.float32)
        mask[list(never_sampled)] = -torch.inf
        self._never_V = mask.to(device)
        self.vocab_size, self._ops = vocab_size, select_sampling(device)
        self._wants = np.full(max_running, UNKNOWN, dtype=np.int8)
        self._kind = np.zeros(max_running, dtype=np.int8)
        # temperature, top_k (V: all), top_p, min_p
        self._columns = np.ones((4, max_running))
        self._factors = np.zeros((3, max_running), dtype=np.float32)
        self._penalty_row = np.full(max_running, -1, dtype=np.int64)
        self._min_tokens = np.zeros(max_running, dtype=np.int64)
        self._biased = np.zeros(max_running, dtype=np.bool_)
        self._tops = np.full(max_running, -1, dtype=np.int32)
        # ids, int64, and values, float32: from min_tokens on, and before, where end ids are masked
        self._biases = [(NO_BIAS, NO_BIAS)] * max_running

    def setup(self, setups: Sequence[SlotSetup]) -> None:
        """A new sequence enters each slot."""
        for s in setups:
            slot, p = s.slot, s.params
            if self._penalty_row[slot] >= 0:
                self._penalties.free(int(self._penalty_row[slot]))
            factors = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            self._penalty_row[slot] = (
                -1
                if factors == (1, 0, 0)
                else self._penalties.add(s.prompt_token_ids, s.output_token_ids)
            )
            self._factors[:, slot] = factors
            self._kind[slot] = _kind(p)
            self._columns[:, slot] = (
                p.temperature,
                p.top_k or self.vocab_size,
                p.top_p,
                p.min_p,
            )
            self._min_tokens[slot] = p.min_tokens
            self._biased[slot] = bool(p.logit_bias)
            masked = dict.fromkeys(sorted(s.stop_token_ids), -np.inf)
            self._biases[slot] = _bias(p.logit_bias), _bias(p.logit_bias | masked)
            self._tops[slot] = -1 if p.logprobs is None else p.logprobs
            plain = factors == (1, 0, 0) and not p.logit_bias and not p.min_tokens
            greedy = plain and p.temperature == 0 and p.logprobs is None
            self._wants[slot] = LIKELIEST if greedy else MORE

    def ask(
        self,
        slots: np.ndarray,
        draws: Callable[[], np.ndarray],
        output_index: np.ndarray,
        sent: Parcel,
    ) -> Asked:
        """Pack what the rows of `slots` want. `draws`: float64 [S], where a row draws;
        `output_index` int64 [S], tokens sampled before."""
        wants = self._wants[slots].tobytes()
        assert UNKNOWN not in wants, f"a slot of {slots} was never set up"
        if MORE not in wants and not self._penalties.has_new:
            return NOTHING
        kind = self._kind[slots]
        u_S = draws() if kind.any() else np.zeros(0)
        logged = np.flatnonzero(self._tops[slots] >= 0)
        tables = self._penalty_row[slots]
        penalised = np.flatnonzero(tables >= 0)
        return Asked(
            settled=self._penalties.pack(sent),
            penalised=None
            if not len(penalised)
            else (
                sent.add(penalised),
                sent.add(tables[penalised]),
                sent.add(self._factors[:, slots[penalised]]),
            ),
            biases=self._pack_biases(slots, output_index, sent),
            plain=self._pack(kind == PLAIN, slots, u_S, sent, 1),
            filtered=self._pack(kind == FILTERED, slots, u_S, sent, 4),
            logprobs=sent.add(logged) if len(logged) else None,
            rows=logged.tolist(),
            tops=self._tops[slots[logged]].tolist(),
        )

    def _pack(
        self, wanted: np.ndarray, slots: np.ndarray, u_S: np.ndarray, sent: Parcel, columns: int
    ) -> _Drawn | None:
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return None
        of_rows = self._columns[:columns, slots[rows]]
        return _Drawn(sent.add(rows), sent.add(np.concatenate([u_S[rows][None], of_rows])))

    def _pack_biases(
        self, slots: np.ndarray, output_index: np.ndarray, sent: Parcel
    ) -> tuple[int, int, int] | None:
        early = self._min_tokens[slots] > output_index
        rows = np.flatnonzero(early | self._biased[slots])
        owners = zip(slots[rows].tolist(), early[rows].tolist(), strict=True)
        picked = [self._biases[slot][before] for slot, before in owners]
        at = np.repeat(rows, [len(ids) for ids, _ in picked]) if picked else rows
        if not len(at):
            return None
        ids, values = (np.concatenate(column) for column in zip(*picked, strict=True))
        return sent.add(at), sent.add(ids), sent.add(values)

    def settle(self, asked: Asked, got: Received) -> None:
        """Rows that entered the penalty tables with this step; before anything is sampled."""
        if asked.settled is not None:
            self._penalties.settle(*(got(ticket) for ticket in asked.settled))

    def greedy(
        self,
        logits_SV: Float[Tensor, "S V"],
        last_R: Int[Tensor, "R"],
        slots_S: Int[Tensor, "S"],
    ) -> Int[Tensor, "S"]:
        """What `sample` gives rows that ask for nothing else, kept in `last_R` at their slots. Asks
        for no numbers of the step."""
        return self._ops.keep_best(logits_SV, self._never_V, last_R, slots_S)

    def sample(self, logits_SV: Float[Tensor, "S V"], asked: Asked, got: Received) -> Sampled:
        """One token a row, as `asked` when the rows were settled."""
        tokens_S, finite_S = self._ops.best_tokens(logits_SV, self._never_V)
        x_SV = logits_SV
        if asked.penalised is not None or asked.biases is not None:
            x_SV = self._adjusted(logits_SV, asked, got)
            best_S, tokens_S = (x_SV + self._never_V).max(-1)
            finite_S = finite_S & torch.isfinite(best_S)
        if asked.plain is not None:
            rows, (u, temperature) = got(asked.plain.rows), got(asked.plain.columns)
            drawn = self._ops.draw_plain(x_SV, rows, self._never_V, temperature, u)
            tokens_S.index_copy_(0, rows, drawn)
        if asked.filtered is not None:
            rows, (u, temperature, *kept) = got(asked.filtered.rows), got(asked.filtered.columns)
            filters = Filters(*kept)
            drawn = self._ops.draw_filtered(x_SV, rows, self._never_V, temperature, filters, u)
            tokens_S.index_copy_(0, rows, drawn)
        if asked.penalised is not None:
            rows, tables, _ = (got(ticket) for ticket in asked.penalised)
            self._penalties.count(tables, tokens_S[rows])
        tokens_S = torch.where(finite_S, tokens_S, -1)
        if asked.logprobs is None:
            return Sampled(tokens_S, None)
        index, own_S = got(asked.logprobs), tokens_S.clamp(min=0)
        return Sampled(tokens_S, row_logprobs(logits_SV, own_S, index, asked.rows, asked.tops))

    def _adjusted(
        self, logits_SV: Float[Tensor, "S V"], asked: Asked, got: Received
    ) -> Float[Tensor, "S V"]:
        """Penalties and biases, in the order that `SamplingParams` documents."""
        x_SV = logits_SV.clone()
        if asked.penalised is not None:
            rows, tables, factors = (got(ticket) for ticket in asked.penalised)
            x_SV.index_copy_(0, rows, self._penalties.apply(x_SV[rows], tables, factors))
        if asked.biases is not None:
            at, ids, values = (got(ticket) for ticket in asked.biases)
            x_SV.index_put_((at, ids), values, accumulate=True)
        return x_SV


def _bias(by_id: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    count = len(by_id)
    return np.fromiter(by_id, np.int64, count), np.fromiter(by_id.values(), np.float32, count)


def _kind(p: SamplingParams) -> int:
    if p.temperature == 0:
        return GREEDY
    return FILTERED if p.top_k or p.top_p < 1 or p.min_p > 0 else PLAIN


def row_logprobs(
    logits_SV: Float[Tensor, "S V"],
    tokens_S: Int[Tensor, "S"],
    index_R: Int[Tensor, "R"],
    rows: list[int],
    tops: list[int],
) -> Logprobs:
    """Natural-log probabilities of the own tokens of `rows` (`index_R` on the device) and their
    likeliest, of the logits as they are."""
    logprobs_RV = torch.log_softmax(logits_SV[index_R], dim=-1)
    own = logprobs_RV.gather(1, tokens_S[index_R].unsqueeze(1)).squeeze(1)
    best = logprobs_RV.topk(max(tops), dim=-1)
    return Logprobs(rows, tops, own, best.indices, best.values)


class _PenaltyTable:
    """Counts of prompt and output tokens for the rows that have penalties; grows by doubling."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._vocab = vocab_size
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []
        # rows that are new, with the tokens of their prompts and outputs
        self._new: list[tuple[int, Sequence[int], Sequence[int]]] = []

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        if not self._free:
            old = self._prompt.shape[0]
            more = max(4, old)
            self._prompt = torch.cat([self._prompt, self._prompt.new_zeros(more, self._vocab)])
            self._output = torch.cat([self._output, self._output.new_zeros(more, self._vocab)])
            self._free = list(range(old, old + more))
        row = self._free.pop()
        self._new.append((row, prompt, output))
        return row

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def free(self, row: int) -> None:
        self._free.append(row)
        # of a step that failed before it was laid out: nothing of it is another sequence's
        self._new = [each for each in self._new if each[0] != row]

    def pack(self, sent: Parcel) -> tuple[int, int, int] | None:
        """Tickets of new rows and of the flat places of their prompts' and outputs' tokens."""
        if not self._new:
            return None
        prompts: list[int] = []
        outputs: list[int] = []
        for row, prompt, output in self._new:
            first = row * self._vocab
            prompts += [first + t for t in prompt if t < self._vocab]  # an image's may lie beyond
            outputs += [first + t for t in output]
        rows = [row for row, _, _ in self._new]
        self._new = []
        first, *rest = (sent.add(np.array(x, dtype=np.int64)) for x in (rows, prompts, outputs))
        return first, rest[0], rest[1]

    def settle(self, rows: Tensor, prompts: Tensor, outputs: Tensor) -> None:
        """What `pack` sent."""
        self._prompt.index_fill_(0, rows, False)
        self._output.index_fill_(0, rows, 0)
        self._prompt.view(-1).index_fill_(0, prompts, True)
        ones = torch.ones_like(outputs, dtype=torch.int32)
        self._output.view(-1).index_put_((outputs,), ones, accumulate=True)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self._output.index_put_((rows, tokens), ones, accumulate=True)

    def apply(
        self, x_PV: Float[Tensor, "P V"], rows: Int[Tensor, "P"], factors: Float[Tensor, "three P"]
    ) -> Float[Tensor, "P V"]:
        """Repetition: seen logits divided (positive) or multiplied (negative). Presence and
        frequency: of the output alone, as OpenAI defines them."""
        output = self._output[rows]
        seen = self._prompt[rows] | (output > 0)
        r, presence, frequency = factors[:, :, None]
        x_PV = torch.where(seen, torch.where(x_PV > 0, x_PV / r, x_PV * r), x_PV)
        return x_PV - presence * (output > 0) - frequency * output
