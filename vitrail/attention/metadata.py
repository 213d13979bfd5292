"""What a batch brings to an attention call: lengths and tables, prepared once a step from host
ints.

Legend: B sequences, B1 = B + 1, T packed queries, S packed keys, W pages a row of the block table,
N pages, P page size, X the rest of a row, I and C records. Host tuples travel beside their device
tensors, so that no layer ever asks the device for a number."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from vitrail.attention.plan import AttentionPlan
from vitrail.attention.records import Lengths
from vitrail.config.finding import Finding, Refused

# Keys that a layer expands at once (expanded MLA prefill): bounds its workspace.
CHUNK_TOKENS = 8192
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the programs of one launch do (`records.Records`), on the device: `items` int32 [I, 9],
    `combines` int32 [C, 5], `slots` partial results."""

    items: Int[Tensor, "I 9"]
    combines: Int[Tensor, "C 5"]
    slots: int


class WorkCache:
    """The work of a batch's lengths by plan, made by a backend when its first layer runs and read
    by the others: `Work`, or what else the plan's backend makes of lengths. Owned by the metadata
    that holds it; an engine that replays graphs fills it with records of fixed addresses
    beforehand."""

    def __init__(self) -> None:
        self._by_plan: dict[int, tuple[AttentionPlan, Any]] = {}

    def get(self, plan: AttentionPlan, make: Callable[[], T]) -> T:
        if id(plan) not in self._by_plan:
            self.put(plan, make())
        return self._by_plan[id(plan)][1]

    def put(self, plan: AttentionPlan, work: object) -> None:
        self._by_plan[id(plan)] = (plan, work)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenMetadata:
    """Packed sequences without pages. `cu_q`, `cu_kv`: int32 [B+1] prefix sums of the lengths.
    `q_starts[i]`: where sequence i's first query stands among its keys, counted from its first key:
    kv_len - q_len where queries end with the keys; may be negative or past the keys. `mended`:
    rows of keys and values that are not finite are as `kernels/mend.py` makes them already.
    `longest`: 0, or self-attention that is captured, to serve whatever lengths `cu_q` has then, as
    many rows in all and none longer."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q_starts: tuple[int, ...]
    cu_q: Int[Tensor, "B1"]
    cu_kv: Int[Tensor, "B1"]
    mended: bool = False
    longest: int = 0
    work: WorkCache = field(default_factory=WorkCache, compare=False, repr=False)

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def max_q_len(self) -> int:
        return self.longest or max(self.q_lens, default=0)

    @property
    def max_kv_len(self) -> int:
        return self.longest or max(self.kv_lens, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChunk:
    """A bounded piece of a batch's packed keys [seq 0's keys | seq 1's keys | ...], cut every so
    many keys wherever that falls. `slots`: int64 [S], page * page_size + offset of each key of the
    piece. It touches neighbouring sequences; their queries are packed rows [q_start, q_stop), and
    `meta` describes these queries against these keys."""

    slots: Int[Tensor, "S"]
    q_start: int
    q_stop: int
    meta: VarlenMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMetadata:
    """Packed queries against keys in pages. A sequence's queries are its last `q_lens[i]` positions
    of `kv_lens[i]` keys (the keys of this step's tokens are already written).
    `block_table`: int32 [B, W], row i holds the page ids of sequence i; entries past its length are
    never read. `cu_q`: int32 [B+1]; `kv_lens_dev`: int32 [B]. `chunks`: the same keys in bounded
    pieces, for layers that expand them (`chunked.attend_chunks`); empty until `with_chunks`.
    Raises `Refused` where a row of the table cannot hold its keys."""

    page_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cu_q: Int[Tensor, "B1"]
    kv_lens_dev: Int[Tensor, "B"]
    block_table: Int[Tensor, "B W"]
    chunks: tuple[KvChunk, ...] = ()
    work: WorkCache = field(default_factory=WorkCache, compare=False, repr=False)

    def __post_init__(self) -> None:
        pages = self.block_table.shape[1]
        capacity = pages * self.page_size
        if self.max_kv_len > capacity:
            raise Refused(
                Finding(
                    where=f"block_table row {row}",
                    saw=f"{kv_len} keys in {pages} pages of {self.page_size}",
                    rule=f"a row holds at most {capacity} keys",
                    change="reserve pages before the step",
                    code="block_table_too_short",
                )
                for row, kv_len in enumerate(self.kv_lens)
                if kv_len > capacity
            )

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def max_q_len(self) -> int:
        return max(self.q_lens, default=0)

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_lens, default=0)


def lengths_of(meta: VarlenMetadata | PagedMetadata) -> Lengths:
    """What the host knows of it."""
    if isinstance(meta, VarlenMetadata):
        return Lengths(meta.q_lens, meta.kv_lens, meta.q_starts, False)
    starts = tuple(kv - q for q, kv in zip(meta.q_lens, meta.kv_lens, strict=True))
    return Lengths(meta.q_lens, meta.kv_lens, starts, True)


def paged_metadata(
    page_size: int,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_table: Int[Tensor, "B W"],
) -> PagedMetadata:
    """Metadata of packed queries against pages, on the block table's device."""
    device = block_table.device
    return PagedMetadata(
        page_size=page_size,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        cu_q=prefix_sums(q_lens, device),
        kv_lens_dev=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=block_table,
    )


def prefix_sums(lengths: Sequence[int], device: torch.device) -> Int[Tensor, "B1"]:
    """int32 [B+1]: 0, l0, l0 + l1, ..."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class ChunkCut(NamedTuple):
    """A `KvChunk` on the host: packed keys [start, stop), queries, and what its `meta` is of."""

    start: int
    stop: int
    q_start: int
    q_stop: int
    lengths: Lengths


def cut_chunks(
    q_lens: Sequence[int], kv_lens: Sequence[int], max_tokens: int = CHUNK_TOKENS
) -> list[ChunkCut]:
    """Packed keys cut every `max_tokens`."""
    assert max_tokens >= 1, max_tokens
    edges = list(accumulate(kv_lens, initial=0))
    rows = list(accumulate(q_lens, initial=0))
    cuts: list[ChunkCut] = []
    for start in range(0, edges[-1], max_tokens):
        stop = min(start + max_tokens, edges[-1])
        touched = range(bisect_right(edges, start) - 1, bisect_left(edges, stop))
        begins = [max(start, edges[i]) for i in touched]
        ends = [min(stop, edges[i + 1]) for i in touched]
        lengths = Lengths(
            q_lens=tuple(q_lens[i] for i in touched),
            kv_lens=tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
            q_starts=tuple(
                edges[i + 1] - q_lens[i] - begin for i, begin in zip(touched, begins, strict=True)
            ),
            paged=False,
        )
        cuts.append(ChunkCut(start, stop, rows[touched.start], rows[touched.stop], lengths))
    return cuts


def place_chunks(
    meta: PagedMetadata,
    cuts: Sequence[ChunkCut],
    slots_S: Int[Tensor, "S"],
    sums: Sequence[tuple[Tensor, Tensor]],
) -> PagedMetadata:
    """`meta` in the pieces of `cuts`. `slots`: int64, of all its keys, packed (`key_slots`);
    `sums`: prefix sums of each piece's queries and keys. Asks nothing of the device."""
    chunks = tuple(
        KvChunk(
            slots=slots_S[c.start : c.stop],
            q_start=c.q_start,
            q_stop=c.q_stop,
            meta=VarlenMetadata(
                q_lens=c.lengths.q_lens,
                kv_lens=c.lengths.kv_lens,
                q_starts=c.lengths.q_starts,
                cu_q=cu_q,
                cu_kv=cu_kv,
            ),
        )
        for c, (cu_q, cu_kv) in zip(cuts, sums, strict=True)
    )
    return replace(meta, chunks=chunks)


def with_chunks(meta: PagedMetadata, max_tokens: int = CHUNK_TOKENS) -> PagedMetadata:
    """`meta` with its packed keys cut every `max_tokens`, for whoever has no parcel to send their
    lengths by."""
    device, cuts = meta.block_table.device, cut_chunks(meta.q_lens, meta.kv_lens, max_tokens)
    lengths = [c.lengths for c in cuts]
    sums = [(prefix_sums(n.q_lens, device), prefix_sums(n.kv_lens, device)) for n in lengths]
    return place_chunks(meta, cuts, key_slots(meta), sums)


def key_slots(meta: PagedMetadata) -> Int[Tensor, "S"]:
    """int64 slots of all keys of all sequences, packed in order. Reads only live table entries."""
    device = meta.block_table.device
    total = sum(meta.kv_lens)
    edges_B1 = prefix_sums(meta.kv_lens, device).long()
    rows_S = torch.repeat_interleave(
        torch.arange(meta.batch, device=device), meta.kv_lens_dev.long(), output_size=total
    )
    positions_S = torch.arange(total, device=device) - edges_B1[rows_S]
    pages_S = meta.block_table[rows_S, positions_S // meta.page_size].long()
    return pages_S * meta.page_size + positions_S % meta.page_size


def gather_slots(
    cache_NPX: Shaped[Tensor, "N P *X"], slots_S: Int[Tensor, "S"]
) -> Shaped[Tensor, "S *X"]:
    """Rows of a paged cache of any strides, by slot. Reads no other row, never copies the pool."""
    if cache_NPX.element_size() == 1 and cache_NPX.dtype != torch.uint8:
        # Not every build of torch gathers e4m3.
        return gather_slots(cache_NPX.view(torch.uint8), slots_S).view(cache_NPX.dtype)
    page_size = cache_NPX.shape[1]
    if cache_NPX.stride(0) == page_size * cache_NPX.stride(1):
        return cache_NPX.flatten(0, 1).index_select(0, slots_S)
    return cache_NPX[slots_S // page_size, slots_S % page_size]
