"""From a StepPlan's ints to the tensors of one forward pass. Owns the runner's block tables (the
projection of the cache's page lists) and each row's last sampled token; all of a layout's ints
travel in one host-to-device copy.

Legend: T packed tokens, S sampled rows, B sequences, P pages of the longest sequence."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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
        for s in (*plan.prefills, *(d for d in plan.decodes if d.new_pages)):
            end = s.pages_before + len(s.new_pages)
            self._block_table[s.slot, s.pages_before : end] = s.new_pages
        rows = _Rows.of(plan.decodes)
        positions, cache_slots = self._token_layout(plan.prefills, rows)
        sample_rows, sample_slots = _sampled(plan.prefills, rows)
        sent = _Parcel()
        ids_at = sent.add(inputs.token_ids.astype(np.int32))
        positions_at = sent.add(positions)
        cache_slots_at = sent.add(cache_slots)
        sample_at = sent.add(sample_rows)
        decode_slots_at = sent.add(rows.slots)
        prefill = self._pack(_Rows.of(plan.prefills), sent)
        decode = self._pack(rows, sent)
        got = sent.send(self._device)
        last = self.last_tokens[got(decode_slots_at).long()]
        return Batch(
            token_ids=torch.cat([got(ids_at).long(), last]),
            sample_rows=got(sample_at).long(),
            sample_slots=sample_slots,
            context=ForwardContext(
                positions=got(positions_at).long(),
                cache_slots=got(cache_slots_at).long(),
                num_prefill=len(inputs.token_ids),
                prefill=prefill(got),
                decode=decode(got),
                plans=plans,
                pool=pool,
            ),
        )

    def _token_layout(
        self, prefills: Sequence[SequenceStep], decodes: "_Rows"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Absolute position and flat cache slot of every packed token."""
        chunks = [np.arange(s.start, s.start + s.length, dtype=np.int32) for s in prefills]
        owners = [np.full(s.length, s.slot, dtype=np.int32) for s in prefills]
        at = np.concatenate([*chunks, decodes.starts])
        page, offset = np.divmod(at, self._page_size)
        table = self._block_table[np.concatenate([*owners, decodes.slots]), page]
        return at, table * self._page_size + offset

    def _pack(self, rows: "_Rows", sent: "_Parcel") -> "_Metadata":
        kv_lens = rows.starts + rows.lengths
        pages = -(-int(kv_lens.max(initial=0)) // self._page_size)
        return _Metadata(
            page_size=self._page_size,
            q_lens=tuple(rows.lengths.tolist()),
            kv_lens=tuple(kv_lens.tolist()),
            cu_q=sent.add(np.concatenate([[0], rows.lengths.cumsum(dtype=np.int32)])),
            kv=sent.add(kv_lens),
            table=sent.add(self._block_table[rows.slots, :pages]),
        )


class _Rows(NamedTuple):
    """Sequences of one phase by column, int32 each."""

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[SequenceStep]) -> "_Rows":
        return cls(
            np.array([s.slot for s in steps], dtype=np.int32),
            np.array([s.start for s in steps], dtype=np.int32),
            np.array([s.length for s in steps], dtype=np.int32),
        )


def _sampled(prefills: Sequence[SequenceStep], decodes: _Rows) -> tuple[np.ndarray, list[int]]:
    """The packed index and the slot of every sampled token: of some chunks, and of all decodes."""
    ends = list(accumulate(s.length for s in prefills))
    rows = [end - 1 for s, end in zip(prefills, ends, strict=True) if s.sample]
    slots = [s.slot for s in prefills if s.sample]
    first = ends[-1] if ends else 0
    count = len(decodes.slots)
    all_rows = np.concatenate([rows, np.arange(first, first + count)])
    return all_rows.astype(np.int32), slots + decodes.slots.tolist()


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
