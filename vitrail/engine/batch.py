"""From a StepPlan's ints to the tensors of one forward pass. Owns the runner's block tables (the
projection of the cache's page lists, on the host and on the device) and each row's last sampled
token. A step's ints are packed in a parcel first and found in it on the device afterwards.

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

from vitrail.attention.backend import Sent, load_backend
from vitrail.attention.metadata import (
    ChunkCut,
    PagedMetadata,
    VarlenMetadata,
    cut_chunks,
    place_chunks,
)
from vitrail.attention.plan import AttentionPlan, PlanTable
from vitrail.attention.records import Lengths
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.engine.parcel import Parcel, Received
from vitrail.engine.step import SequenceStep, StepInputs, StepPlan
from vitrail.layers.context import ForwardContext

Sites = Sequence[tuple[AttentionSite, Phase]]
NO_PAGES = (np.zeros(0, np.int64), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`token_ids`: int64 [T], prefill ids then each decode's last sampled token. `sample_rows`:
    int64 [S], the packed index whose hidden state gives each sampled token; `sample_slots`: int64
    [S], its row of the tables."""

    token_ids: Int[Tensor, "T"]
    sample_rows: Int[Tensor, "S"]
    sample_slots: Int[Tensor, "S"]
    context: ForwardContext


class Rows(NamedTuple):
    """Sequences of one phase by column, int64 each."""

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[SequenceStep]) -> "Rows":
        return cls(
            np.array([s.slot for s in steps], dtype=np.int64),
            np.array([s.start for s in steps], dtype=np.int64),
            np.array([s.length for s in steps], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A step's layout on its way: tickets, and what stays on the host. `slots`: of the sampled
    rows."""

    slots: np.ndarray
    num_prefill: int
    pages: tuple[int, int]
    token_ids: int
    positions: int
    cache_slots: int
    sample_rows: int
    sample_slots: int
    prefill: "_Phase | None"
    decode: "_Phase | None"


class _Work(NamedTuple):
    """Of a plan, on its way: tickets, and what makes it of them."""

    plan: AttentionPlan
    sent: Sent
    tickets: tuple[int, ...]


class _Chunk(NamedTuple):
    """A piece of the keys on its way: prefix sums, int32 [2, B + 1]."""

    cut: ChunkCut
    sums: int
    work: tuple[_Work, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """A phase's sequences on their way; `key_slots`: of all keys, where they are cut."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_pages: int
    slots: int
    cu_q: int
    kv: int
    work: tuple[_Work, ...]
    chunks: tuple[_Chunk, ...]
    key_slots: int


class BatchBuilder:
    """Owns `table` and `last_tokens` (device, one row a slot and one of nobody's, the last), and
    the table's copy on the host. `sites`: what the model's layers attend by."""

    def __init__(
        self,
        *,
        max_running: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        sites: Sites = (),
    ):
        self.page_size, self.max_pages, self.max_running = page_size, max_pages, max_running
        self.table = torch.zeros((max_running + 1, max_pages), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=device)
        self._table = np.zeros((max_running, max_pages), dtype=np.int32)
        self.sites = tuple(sites)

    def pack(self, plan: StepPlan, inputs: StepInputs, plans: PlanTable, sent: Parcel) -> Packed:
        """Apply the plan's new pages to the host's table and lay the step out."""
        pages = self.turn_pages(plan)
        decodes = plan.decodes
        chunks = Rows.of(plan.prefills)
        rows = Rows(decodes.slots, decodes.starts, np.ones_like(decodes.starts))
        positions, cache_slots = self._token_layout(chunks, rows)
        sample_rows, slots = _sampled(plan.prefills, rows)
        return Packed(
            slots=slots,
            num_prefill=len(inputs.token_ids),
            pages=(sent.add(pages[0]), sent.add(pages[1])),
            token_ids=sent.add(inputs.token_ids),
            positions=sent.add(positions),
            cache_slots=sent.add(cache_slots),
            sample_rows=sent.add(sample_rows),
            sample_slots=sent.add(slots),
            prefill=self._pack(chunks, Phase.EXTEND, plans, sent),
            decode=self._pack(rows, Phase.DECODE, plans, sent),
        )

    def unpack(self, packed: Packed, got: Received, plans: PlanTable, pool: KvPool) -> Batch:
        """The device's half, once the parcel is there."""
        at, pages = (got(ticket) for ticket in packed.pages)
        self.table.view(-1).index_copy_(0, at, pages)
        token_ids = got(packed.token_ids)
        if packed.decode is not None:
            last = self.last_tokens.index_select(0, got(packed.decode.slots))
            token_ids = torch.cat([token_ids, last])
        return Batch(
            token_ids=token_ids,
            sample_rows=got(packed.sample_rows),
            sample_slots=got(packed.sample_slots),
            context=ForwardContext(
                positions=got(packed.positions),
                cache_slots=got(packed.cache_slots),
                num_prefill=packed.num_prefill,
                prefill=self._unpack(packed.prefill, got),
                decode=self._unpack(packed.decode, got),
                plans=plans,
                pool=pool,
            ),
        )

    def turn_pages(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Write the plan's new pages to the host's table: flat places in the table, int64, and
        pages, int32, for the device's."""
        if not plan.prefills and not plan.decodes.grown:
            return NO_PAGES
        at: list[int] = []
        pages: list[int] = []
        new = [(s.slot, (s.pages_before, s.new_pages)) for s in plan.prefills]
        for slot, (before, more) in (*new, *plan.decodes.grown.items()):
            first = slot * self.max_pages + before
            at += range(first, first + len(more))
            pages += more
        where, new = np.array(at, dtype=np.int64), np.array(pages, dtype=np.int32)
        self._table.reshape(-1)[where] = new
        return where, new

    def pages_of(self, slot: int, count: int) -> tuple[int, ...]:
        """The first `count` pages of a row of the host's table."""
        return tuple(self._table[slot, :count].tolist())

    def cache_slots(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64: page * page_size + offset of each position of a row of the tables."""
        page = positions // self.page_size
        found = self._table.reshape(-1)[slots * self.max_pages + page]  # flat: half the time
        return positions + (found.astype(np.int64) - page) * self.page_size

    def _token_layout(self, chunks: Rows, decodes: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Absolute position and flat cache slot of every packed token, int64."""
        if not len(chunks.slots):
            return decodes.starts, self.cache_slots(decodes.slots, decodes.starts)
        owners = np.repeat(chunks.slots, chunks.lengths)
        at = _ranges(chunks.starts, chunks.lengths)
        if len(decodes.slots):
            owners = np.concatenate([owners, decodes.slots])
            at = np.concatenate([at, decodes.starts])
        return at, self.cache_slots(owners, at)

    def _key_slots(self, rows: Rows, kv_lens: np.ndarray) -> np.ndarray:
        """int64, of every key of every sequence, packed."""
        owners = np.repeat(rows.slots, kv_lens)
        return self.cache_slots(owners, _ranges(np.zeros_like(kv_lens), kv_lens))

    def _pack(self, rows: Rows, phase: Phase, plans: PlanTable, sent: Parcel) -> _Phase | None:
        if not len(rows.slots):
            return None
        kv_lens = rows.starts + rows.lengths
        longest = int(kv_lens.max())
        q_lens, keys = tuple(rows.lengths.tolist()), tuple(kv_lens.tolist())
        lengths = Lengths(q_lens, keys, tuple(rows.starts.tolist()), True)

        def select(of: Phase) -> list[AttentionPlan]:
            sites = (site for site, each in self.sites if each is of)
            return [plans.select(site, of, len(keys), longest) for site in sites]

        expanded = select(Phase.PREFILL) if phase is Phase.EXTEND else []
        cuts = cut_chunks(q_lens, keys) if expanded else []
        return _Phase(
            q_lens=q_lens,
            kv_lens=keys,
            num_pages=-(-longest // self.page_size),
            slots=sent.add(rows.slots),
            cu_q=sent.add(_prefix_sums(q_lens)),
            kv=sent.add(kv_lens.astype(np.int32)),
            work=_pack_work(select(phase), lengths, sent),
            chunks=tuple(_pack_chunk(c, expanded, sent) for c in cuts),
            key_slots=sent.add(self._key_slots(rows, kv_lens)) if cuts else -1,
        )

    def _unpack(self, phase: _Phase | None, got: Received) -> PagedMetadata | None:
        if phase is None:
            return None
        meta = PagedMetadata(
            page_size=self.page_size,
            q_lens=phase.q_lens,
            kv_lens=phase.kv_lens,
            cu_q=got(phase.cu_q),
            kv_lens_dev=got(phase.kv),
            block_table=self.table[:, : phase.num_pages].index_select(0, got(phase.slots)),
        )
        if phase.chunks:
            sums = [(pair[0], pair[1]) for pair in (got(c.sums) for c in phase.chunks)]
            meta = place_chunks(meta, [c.cut for c in phase.chunks], got(phase.key_slots), sums)
            for sent, placed in zip(phase.chunks, meta.chunks, strict=True):
                _place_work(sent.work, placed.meta, got)
        _place_work(phase.work, meta, got)
        return meta


def _pack_work(plans: list[AttentionPlan], lengths: Lengths, sent: Parcel) -> tuple[_Work, ...]:
    packed = [(plan, load_backend(plan.backend).pack(plan, lengths)) for plan in plans]
    return tuple(
        _Work(plan, work, tuple(sent.add(a) for a in work.arrays))
        for plan, work in packed
        if work is not None
    )


def _pack_chunk(piece: ChunkCut, plans: list[AttentionPlan], sent: Parcel) -> _Chunk:
    lengths = piece.lengths
    sums = np.stack([_prefix_sums(lengths.q_lens), _prefix_sums(lengths.kv_lens)])
    return _Chunk(piece, sent.add(sums), _pack_work(plans, lengths, sent))


def _place_work(
    packed: tuple[_Work, ...], meta: PagedMetadata | VarlenMetadata, got: Received
) -> None:
    for plan, sent, tickets in packed:
        meta.work.put(plan, sent.place(meta, [got(ticket) for ticket in tickets]))


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... as many as lengths[0]; then of the next."""
    firsts = lengths.cumsum() - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)


def _prefix_sums(lengths: Sequence[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], dtype=np.int32)


def _sampled(prefills: Sequence[SequenceStep], decodes: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The packed index and the slot of every sampled token, int64: of some chunks, and of all
    decodes."""
    count = len(decodes.slots)
    if not prefills:
        return np.arange(count), decodes.slots
    ends = list(accumulate(s.length for s in prefills))
    rows = [end - 1 for s, end in zip(prefills, ends, strict=True) if s.sample]
    slots = [s.slot for s in prefills if s.sample]
    after = np.arange(ends[-1], ends[-1] + count)
    return (
        np.concatenate([np.array(rows, dtype=np.int64), after]),
        np.concatenate([np.array(slots, dtype=np.int64), decodes.slots]),
    )
