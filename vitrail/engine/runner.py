"""One forward step on the device: drop and encode images, lay out the batch, run the model, sample.
Owns the model and the device memory; takes plans and gives results, decides nothing. A step of
decodes alone is a captured graph where there are any; every step's numbers go by one copy.

Legend: T packed tokens, S sampled rows, V vocabulary."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vitrail.attention.plan import PlanTable
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.cache.kv_pool import KvPool
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.graphs import DecodeGraphs
from vitrail.engine.parcel import Door, Fetching
from vitrail.engine.request import TokenLogprob
from vitrail.engine.sampler import NOTHING, Logprobs, Sampled, Sampler, row_logprobs
from vitrail.engine.step import (
    ImageSlice,
    PromptRows,
    SequenceStep,
    StepInputs,
    StepPlan,
    StepResult,
)
from vitrail.models.interface import Model

# Rows of prompt logits materialised at once: [256, V] in fp32.
PROMPT_ROWS = 256
NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner is assembled from; `engine/build.py` makes each. `encoder` is None for a model
    without a tower, `graphs` where decodes are launched kernel by kernel."""

    model: Model
    pool: KvPool
    encoder_pool: EncoderPool
    encoder: ImageEncoder | None
    builder: BatchBuilder
    sampler: Sampler
    plans: PlanTable
    door: Door
    graphs: DecodeGraphs | None


class Runner:
    """Launches steps in order. `launch` returns before the device is done; `Launched.read`
    waits."""

    def __init__(self, parts: RunnerParts):
        self._p = parts
        # rows that return more than a token: slot -> (top prompt logprobs or None, logits wanted)
        self._extras: dict[int, tuple[int | None, bool]] = {}
        # entries without rows, until a plan drops them: a step launched ahead may still read one
        self._failed_entries: set[int] = set()
        self._last = -1

    @property
    def parts(self) -> RunnerParts:
        return self._p

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: StepInputs) -> "Launched":
        """Run one step. The plan's sampled tokens stay on the device for the next step."""
        p = self._p
        self._last = plan.index
        p.sampler.setup(inputs.setups)
        for s in inputs.setups:
            self._extras[s.slot] = (s.params.prompt_logprobs, s.want_logits)
        p.encoder_pool.drop(plan.drop_entries)
        self._failed_entries -= set(plan.drop_entries)
        failed: dict[int, str] = {}
        if plan.encodes:
            assert p.encoder is not None, "images for a model without a tower"
            failed = p.encoder.run(plan.encodes, inputs.pixels, self._failed_entries, plan.index)
        self._failed_entries |= set(failed)
        if not plan.prefills and not plan.decodes:
            return Launched(plan, None, {}, failed, self._encoded)
        if p.graphs is not None and p.graphs.fits(plan):
            fetched = self._replay(p.graphs, plan, inputs)
            return Launched(plan, fetched, {}, failed, self._encoded)
        sent = p.door.parcel()
        packed = p.builder.pack(plan, inputs, p.plans, sent)
        asked = p.sampler.ask(packed.slots, lambda: inputs.draws, inputs.output_index, sent)
        got = sent.send()
        batch = p.builder.unpack(packed, got, p.plans, p.pool)
        hidden = p.model.embed(batch.token_ids)
        hidden = self._place_images(hidden, plan.slices)
        hidden = p.model.forward(hidden, batch.context)
        p.sampler.settle(asked, got)
        sampled = None
        if len(packed.slots):
            logits = p.model.logits(hidden.index_select(0, batch.sample_rows))
            sampled = self._keep(p.sampler.sample(logits, asked, got), batch.sample_slots)
        rows = self._prompt_rows(hidden, plan, inputs)
        return Launched(plan, sampled, rows, failed, self._encoded)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan, inputs: StepInputs) -> "Fetched":
        """A step of decodes alone."""
        p, sent = self._p, self._p.door.parcel()
        slots = graphs.pack(plan, sent)
        asked = p.sampler.ask(slots, lambda: inputs.draws, inputs.output_index, sent)
        got = sent.send(graphs.inputs)
        if asked is NOTHING:
            return Fetched.begin(Sampled(graphs.replay_greedy(len(slots)), None), p.door)
        p.sampler.settle(asked, got)
        hidden, slots_S = graphs.replay(len(slots))
        sampled = p.sampler.sample(p.model.logits(hidden), asked, got)
        return self._keep(sampled, slots_S)

    def _keep(self, sampled: Sampled, slots_S: Tensor) -> "Fetched":
        """The tokens where the next step finds them, and on their way to the host."""
        tokens = sampled.token_ids
        self._p.builder.last_tokens.index_copy_(0, slots_S, tokens.clamp(min=0))
        return Fetched.begin(sampled, self._p.door)

    def _place_images(self, hidden: Tensor, slices: tuple[ImageSlice, ...]) -> Tensor:
        """Image embeddings over their placeholders. A failed image's rows become NaN: the scheduler
        fails its requests once it has read the result, and nobody else reads them."""
        encoder = self._p.encoder
        if not slices or encoder is None:
            return hidden
        encoder.side.wait({s.entry for s in slices})
        for s in slices:
            at = slice(s.token_start, s.token_start + s.length)
            if s.entry in self._failed_entries:
                hidden[at] = torch.nan
            else:
                hidden[at] = self._p.encoder_pool.slice(s.entry, s.entry_start, s.length)
        encoder.side.follow()
        return hidden

    def _encoded(self) -> int:
        encoder = self._p.encoder
        return self._last if encoder is None else encoder.side.done(self._last)

    def _prompt_rows(
        self, hidden: Tensor, plan: StepPlan, inputs: StepInputs
    ) -> dict[int, PromptRows]:
        """Logprobs or logits of prefill positions, for the sequences that asked for them."""
        out: dict[int, PromptRows] = {}
        start = 0
        for s in plan.prefills:
            top, want_logits = self._extras[s.slot]
            if top is not None or want_logits:
                next_ids = inputs.next_ids[start : start + s.length].tolist()
                out[s.seq] = self._rows_of(hidden[start : start + s.length], s, next_ids)
            start += s.length
        return out

    def _rows_of(self, hidden: Tensor, s: SequenceStep, next_ids: list[int]) -> PromptRows:
        top, want_logits = self._extras[s.slot]
        logprobs: list[TokenLogprob] = []
        logits: list[Tensor] = []
        for i in range(0, s.length, PROMPT_ROWS):
            part = self._p.model.logits(hidden[i : i + PROMPT_ROWS])
            if want_logits:
                logits.append(part.cpu())
            if top is not None:
                logprobs += _prompt_logprobs(part, next_ids[i : i + PROMPT_ROWS], top)
        return PromptRows(
            start=s.start,
            logprobs=None if top is None else logprobs,
            logits=torch.cat(logits).numpy() if want_logits else None,
        )


def _prompt_logprobs(logits_TV: Tensor, next_ids: list[int], top: int) -> list[TokenLogprob]:
    """For each position whose next prompt token is known, its logprob and the likeliest."""
    known = [i for i, token in enumerate(next_ids) if token >= 0]
    if not known:
        return []
    vocab = logits_TV.shape[1]
    ids = torch.tensor(next_ids, device=logits_TV.device).clamp(0, vocab - 1)
    at = torch.tensor(known, device=logits_TV.device)
    rows = row_logprobs(logits_TV, ids, at, known, [top] * len(known))
    read = rows.read([next_ids[i] for i in known])
    return [row if row.token_id < vocab else replace(row, logprob=None) for row in read]


class Fetched:
    """A step's tokens on their way to the host, and what was asked of their logprobs."""

    def __init__(self, tokens: Fetching, logprobs: Logprobs | None):
        self._tokens = tokens
        self._logprobs = logprobs

    @classmethod
    def begin(cls, sampled: Sampled, door: Door) -> "Fetched":
        """Start the copies, before anything that overwrites what is copied."""
        found = sampled.logprobs
        if found is not None and found.own.device.type != "cpu":
            copies = (_to_host(t) for t in (found.own, found.top_ids, found.top_logprobs))
            found = Logprobs(found.rows, found.tops, *copies)
        return cls(door.fetch(sampled.token_ids), found)

    def read(self) -> tuple[np.ndarray, dict[int, TokenLogprob]]:
        """Wait for them and for nothing after them. int64 [S]; logprobs by index."""
        tokens, found = self._tokens.read(), self._logprobs
        if found is None:
            return tokens, {}
        ids = tokens.tolist()
        read = found.read([ids[i] for i in found.rows])
        return tokens, {i: row for i, row in zip(found.rows, read, strict=True) if ids[i] >= 0}


def _to_host(t: Tensor) -> Tensor:
    """Pinned memory, which torch keeps and hands out again."""
    return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True)


class Launched:
    """A step on its way."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Fetched | None,
        prompt_rows: dict[int, PromptRows],
        failed_entries: dict[int, str],
        encoded: Callable[[], int],
    ):
        self.plan = plan
        self._sampled = sampled
        self._prompt_rows = prompt_rows
        self._failed = failed_entries
        self._encoded = encoded

    def read(self) -> StepResult:
        """Wait for the step's tokens."""
        ids, logprobs = (NO_TOKENS, {}) if self._sampled is None else self._sampled.read()
        return StepResult(
            token_ids=ids,
            logprobs=logprobs,
            prompt_rows=self._prompt_rows,
            failed_entries=self._failed,
            encoded=self._encoded(),
        )
