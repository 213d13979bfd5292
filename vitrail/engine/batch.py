"""From a StepPlan's ints to the tensors of one forward pass. Owns the runner's block tables (the
projection of the cache's page lists) and each row's last sampled token; all of a step's ints travel
in one host-to-device copy.

Legend: T packed tokens, S sampled rows, B sequences, P pages of the longest sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from vitrail.attention.metadata import PagedMetadata
from vitrail.attention.plan import PlanTable
from vitrail.cache.kv_pool import KvPool
from vitrail.engine.step import SequenceStep, StepInputs, StepPlan
from vitrail.layers.context import ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`token_ids`: int64 [T], prefill ids then each decode's last sampled token. `sample_rows`:
    int64 [S], the packed index whose hidden state gives each sampled token; `sample_slots` the rows
    of the sampler's tables."""

    token_ids: Int[Tensor, "T"]
    sample_rows: Int[Tensor, "S"]
    sample_slots: list[int]
    context: ForwardContext


class BatchBuilder:
    """Owns `block_table` (host, one row a slot) and `last_tokens` (device, one a slot)."""

    def __init__(self, *, max_running: int, max_pages: int, page_size: int, device: torch.device):
        self._block_table = np.zeros((max_running, max_pages), dtype=np.int32)
        self._page_size = page_size
        self._device = device
        self.last_tokens = torch.zeros(max_running, dtype=torch.int64, device=device)

    def build(self, plan: StepPlan, inputs: StepInputs, plans: PlanTable, pool: KvPool) -> Batch:
        """Apply the plan's new pages to the tables and lay the step out."""
        for s in (*plan.prefills, *plan.decodes):
            end = s.pages_before + len(s.new_pages)
            self._block_table[s.slot, s.pages_before : end] = s.new_pages
        positions, slots = self._token_layout(plan)
        rows, sample_slots = _sampled_rows(plan)
        decode_slots = np.fromiter((s.slot for s in plan.decodes), np.int32, len(plan.decodes))
        sent = _Parcel()
        ids = sent.add(inputs.token_ids.astype(np.int32))
        pos = sent.add(positions)
        cache_slots = sent.add(slots)
        sample = sent.add(rows)
        decode_rows = sent.add(decode_slots)
        prefill = self._pack(plan.prefills, sent)
        decode = self._pack(plan.decodes, sent)
        got = sent.send(self._device)
        token_ids = torch.cat([got(ids).long(), self.last_tokens[got(decode_rows).long()]])
        return Batch(
            token_ids=token_ids,
            sample_rows=got(sample).long(),
            sample_slots=sample_slots,
            context=ForwardContext(
                positions=got(pos).long(),
                cache_slots=got(cache_slots).long(),
                num_prefill=len(inputs.token_ids),
                prefill=prefill(got),
                decode=decode(got),
                plans=plans,
                pool=pool,
            ),
        )

    def _token_layout(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Absolute position and flat cache slot of every packed token."""
        page = self._page_size
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        for s in plan.prefills:
            at = np.arange(s.start, s.start + s.length, dtype=np.int32)
            positions.append(at)
            slots.append(self._block_table[s.slot, at // page] * page + at % page)
        if plan.decodes:
            at = np.fromiter((s.start for s in plan.decodes), np.int32, len(plan.decodes))
            row = np.fromiter((s.slot for s in plan.decodes), np.int32, len(plan.decodes))
            positions.append(at)
            slots.append(self._block_table[row, at // page] * page + at % page)
        empty = np.zeros(0, dtype=np.int32)
        return np.concatenate([empty, *positions]), np.concatenate([empty, *slots])

    def _pack(self, steps: Sequence[SequenceStep], sent: "_Parcel") -> "_Metadata":
        q_lens = tuple(s.length for s in steps)
        kv_lens = tuple(s.start + s.length for s in steps)
        pages = -(-max(kv_lens, default=0) // self._page_size)
        rows = np.fromiter((s.slot for s in steps), np.int64, len(steps))
        table = self._block_table[rows, :pages]
        return _Metadata(
            page_size=self._page_size,
            q_lens=q_lens,
            kv_lens=kv_lens,
            cu_q=sent.add(np.cumsum((0, *q_lens), dtype=np.int32)),
            kv=sent.add(np.asarray(kv_lens, dtype=np.int32)),
            table=sent.add(table),
        )


def _sampled_rows(plan: StepPlan) -> tuple[np.ndarray, list[int]]:
    rows: list[int] = []
    slots: list[int] = []
    end = 0
    for s in (*plan.prefills, *plan.decodes):
        end += s.length
        if s.sample:
            rows.append(end - 1)
            slots.append(s.slot)
    return np.asarray(rows, dtype=np.int32), slots


class _Parcel:
    """int32 arrays joined into one buffer, so that a step has one host-to-device copy."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """The ticket with which the array is fetched after `send`."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> "_Received":
        flat = np.concatenate([a.ravel() for a in self._arrays]).astype(np.int32, copy=False)
        host = torch.from_numpy(flat)
        if device.type == "cuda":
            host = host.pin_memory()
        return _Received(host.to(device, non_blocking=True), [a.shape for a in self._arrays])


class _Received:
    def __init__(self, flat: Tensor, shapes: list[tuple[int, ...]]):
        sizes = [int(np.prod(s)) for s in shapes]
        parts = flat.split(sizes)
        self._parts = [p.view(s) for p, s in zip(parts, shapes, strict=True)]

    def __call__(self, ticket: int) -> Tensor:
        return self._parts[ticket]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    """A phase's metadata between packing (tickets) and arrival (tensors)."""

    page_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cu_q: int
    kv: int
    table: int

    def __call__(self, got: _Received) -> PagedMetadata | None:
        if not self.q_lens:
            return None
        return PagedMetadata(
            page_size=self.page_size,
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            cu_q=got(self.cu_q),
            kv_lens_dev=got(self.kv),
            block_table=got(self.table),
        )
