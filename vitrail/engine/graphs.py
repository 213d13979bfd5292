"""Decode steps as CUDA graphs, two a batch size of a ladder: from the last tokens to hidden states,
or on to the likeliest tokens, for batches that ask for nothing else. Owns the graphs and the memory
at fixed addresses that they read.

A step packs its rows at the head of its parcel, which lands in `inputs`; kernels and addresses
stay, numbers change. The attention's plan is that of the longest context, whatever the rows'
lengths: its work is data too, up to the plan's bound of items, and what is not used exits at once.

A batch between two sizes is padded with its row of the fewest keys, once more: the same token, the
same keys, the same experts, so nothing is infinite and nothing is read that was not read anyway. A
padded row writes its key to a page that nobody reads, and nobody reads its result.

Legend: B rows of a graph, M hidden channels."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.attention.metadata import PagedMetadata, Work
from vitrail.attention.plan import AttentionPlan, PlanTable
from vitrail.attention.records import (
    COMBINE_FIELDS,
    ITEM_FIELDS,
    RECORDED,
    DecodeRecords,
    room,
)
from vitrail.attention.shape import Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.check.sizes import graph_bytes, graph_findings, graph_sizes
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.parcel import Door, Parcel, Received, aligned
from vitrail.engine.sampler import Sampler
from vitrail.engine.step import StepPlan
from vitrail.layers.context import ForwardContext
from vitrail.models.interface import Model

log = logging.getLogger("vitrail.engine")
# Priority of decodes, before what is encoded beside them: it takes what they leave.
AHEAD = -1
# Bytes of a parcel behind a graph's own: parameters of the sampled rows, as most batches have them.
TAIL_BYTES = 1 << 16
# The parts of a head, in order; behind them items and combines of each plan.
SLOTS, KEPT_SLOTS, POSITIONS, CACHE_SLOTS, PLACES, KV_LENS, PAGES, WORK = range(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParts:
    """What graphs are captured over. `scratch_page`: the page that nobody reads; `max_len`: keys of
    the longest sequence."""

    model: Model
    pool: KvPool
    plans: PlanTable
    builder: BatchBuilder
    sampler: Sampler
    scratch_page: int
    max_len: int


class _Head:
    """A size's numbers on the host, laid out as they lie in `DecodeGraphs.inputs`. `kept_slots`:
    where rows' tokens go, for padded ones the row that is nobody's; `places`, `pages`: changes of
    the block tables, the first `num_pages` of them a step's."""

    def __init__(self, size: int, plans: Sequence[AttentionPlan]):
        self.plans = plans
        columns = [(np.dtype(np.int64), (size,))] * 5 + [(np.dtype(np.int32), (size,))] * 2
        for plan in plans:
            items, combines = room(plan, size)
            columns += [(np.dtype(np.int32), (items, ITEM_FIELDS))]
            columns += [(np.dtype(np.int32), (combines, COMBINE_FIELDS))]
        self.shapes: list[tuple[int, np.dtype, tuple[int, ...]]] = []
        end = 0
        for dtype, shape in columns:
            self.shapes.append((end, dtype, shape))
            end += aligned(dtype.itemsize * int(np.prod(shape)))
        self.buffer = np.zeros(end, dtype=np.uint8)
        views = [
            self.buffer[at : at + dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)
            for at, dtype, shape in self.shapes
        ]
        self.slots, self.kept_slots, self.positions, self.cache_slots, self.places = views[:5]
        self.kv_lens, self.pages = views[5:7]
        self.num_pages = size  # of the last step; at first all are to be written
        self._records = [
            DecodeRecords(plan, items, combines)
            for plan, items, combines in zip(plans, views[7::2], views[8::2], strict=True)
        ]

    def update_work(self) -> None:
        """The attention's, from `kv_lens`."""
        kv_lens = self.kv_lens.astype(np.int64)
        for records in self._records:
            records.update(kv_lens)


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None: ...


# Runs what it is given, records it, and returns the graph with what a replay overwrites.
Record = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """`hidden`: [B, M], `tokens`: int64 [B], `slots`: int64 [B], overwritten by the next replay.
    `heads`: of the three, by number of rows, made when first asked for."""

    forward: Graph
    hidden: Tensor
    greedy: Graph
    tokens: Tensor
    slots: Tensor
    heads: dict[int, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor, Tensor]]
    )

    def head(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, tokens and slots of the first `count` rows."""
        if count not in self.heads:
            whole = self.hidden, self.tokens, self.slots
            self.heads[count] = whole[0][:count], whole[1][:count], whole[2][:count]
        return self.heads[count]


class Recorder:
    """Captures CUDA graphs that share one pool of memory, on a stream of their own, whose priority
    (lower is first) their kernels keep. `first`: what is captured is run before, for whatever is
    made at a first call."""

    def __init__(self, device: torch.device, priority: int = 0, first: bool = True):
        self._first = first
        self._device, self._stream = device, torch.cuda.Stream(device, priority=priority)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        if self._first:
            run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = run()
            except Exception:
                # it failed; so does ending it, or what little there is warns
                with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize(self._device)
        return graph, made


class DecodeGraphs:
    """`pack`, then send the parcel to `inputs`, then replay."""

    def __init__(self, parts: GraphParts, sizes: Iterable[int], device: torch.device):
        self._p = parts
        self._sizes = sorted(sizes)
        self._scratch = parts.scratch_page * parts.builder.page_size
        parts.builder.table[-1] = parts.scratch_page
        self._heads = {size: _Head(size, self._plans(size)) for size in self._sizes}
        bytes_needed = len(self._heads[self._sizes[-1]].buffer) + TAIL_BYTES
        self.inputs = torch.zeros(bytes_needed, dtype=torch.uint8, device=device)
        self._cu_q = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}

    def fits(self, plan: StepPlan) -> bool:
        """Whether it is of decodes alone, and not more than were captured."""
        return not plan.prefills and len(plan.decodes) <= self._sizes[-1]

    @torch.inference_mode()
    def capture(self, door: Door, record: Record) -> None:
        """All sizes, the largest first. Raises `Refused`, naming the size that failed."""
        for size in reversed(self._sizes):
            head, sent = self._heads[size], door.parcel()
            self._pack_nothing(head)
            sent.add(head.buffer)
            sent.send(self.inputs)
            try:
                self._captured[size] = self._capture(
                    Received(self.inputs, head.shapes), size, record
                )
            except Exception as error:
                raise Refused(_failed(size, error)) from error

    def _capture(self, got: Received, size: int, record: Record) -> _Captured:
        forward, hidden = record(lambda: self._forward(got, size))
        greedy, tokens = record(lambda: self._greedy(got, size))
        return _Captured(
            forward=forward,
            hidden=hidden,
            greedy=greedy,
            tokens=tokens,
            slots=got(SLOTS),
        )

    def pack(self, plan: StepPlan, sent: Parcel) -> np.ndarray:
        """Lay out a plan of decodes alone at the head of `sent`: the slots of its rows, int64."""
        builder = self._p.builder
        places, pages = builder.turn_pages(plan)
        slots, starts = plan.decodes.slots, plan.decodes.starts
        count = len(slots)
        head = self._heads[self._size(count)]
        head.slots[:count] = head.kept_slots[:count] = slots
        head.positions[:count] = starts
        head.cache_slots[:count] = builder.cache_slots(slots, starts)
        if count < len(head.slots):
            fewest = starts.argmin()
            head.slots[count:], head.positions[count:] = slots[fewest], starts[fewest]
            self._pad(head, count)
        head.kv_lens[:] = head.positions + 1
        # A row takes one page a step at most; the rest write the last row of the table as it is.
        if head.num_pages:
            self._no_pages(head)
        head.num_pages = new = len(places)
        if new:
            head.places[:new], head.pages[:new] = places, pages
        head.update_work()
        sent.add(head.buffer)
        return slots

    def _pack_nothing(self, head: _Head) -> None:
        """Rows of nobody: one key each, in the scratch page."""
        head.slots[:], head.positions[:], head.kv_lens[:] = self._p.builder.max_running, 0, 1
        self._pad(head, 0)
        self._no_pages(head)
        head.update_work()

    def _pad(self, head: _Head, count: int) -> None:
        """What rows from `count` on write is nobody's."""
        head.kept_slots[count:] = self._p.builder.max_running
        rows = np.arange(count, len(head.slots))
        head.cache_slots[count:] = self._scratch + rows % self._p.builder.page_size

    def _no_pages(self, head: _Head) -> None:
        builder = self._p.builder
        head.places[:] = builder.max_running * builder.max_pages
        head.pages[:] = self._p.scratch_page
        head.num_pages = 0

    def replay(self, count: int) -> tuple[Tensor, Tensor]:
        """Hidden states [count, M] of the rows packed last, and their slots, int64: both until the
        next replay."""
        captured = self._captured[self._size(count)]
        captured.forward.replay()
        hidden, _, slots = captured.head(count)
        return hidden, slots

    def replay_greedy(self, count: int) -> Tensor:
        """The likeliest tokens of the rows packed last, as `Sampler.greedy` gives them, int64
        [count] until the next replay; they are the rows' last tokens now."""
        captured = self._captured[self._size(count)]
        captured.greedy.replay()
        return captured.head(count)[1]

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _plans(self, size: int) -> list[AttentionPlan]:
        """Of the sites whose launches follow records, at the longest context."""
        p = self._p
        sites = [site for site, phase in p.model.text_sites() if phase is Phase.DECODE]
        plans = [p.plans.select(site, Phase.DECODE, size, p.max_len) for site in sites]
        return [plan for plan in dict.fromkeys(plans) if plan.backend in RECORDED]

    def _forward(self, got: Received, size: int) -> Tensor:
        p, builder = self._p, self._p.builder
        slots = got(SLOTS)
        builder.table.view(-1).index_copy_(0, got(PLACES), got(PAGES))
        meta = PagedMetadata(
            page_size=builder.page_size,
            q_lens=(1,) * size,
            kv_lens=(p.max_len,) * size,
            cu_q=self._cu_q[: size + 1],
            kv_lens_dev=got(KV_LENS),
            block_table=builder.table.index_select(0, slots),
        )
        for i, plan in enumerate(self._heads[size].plans):
            items, combines = got(WORK + 2 * i), got(WORK + 2 * i + 1)
            meta.work.put(plan, Work(items=items, combines=combines, slots=len(items)))
        context = ForwardContext(
            positions=got(POSITIONS),
            cache_slots=got(CACHE_SLOTS),
            num_prefill=0,
            prefill=None,
            decode=meta,
            plans=p.plans,
            pool=p.pool,
        )
        hidden = p.model.embed(builder.last_tokens.index_select(0, slots))
        return p.model.forward(hidden, context)

    def _greedy(self, got: Received, size: int) -> Tensor:
        """In one graph: the head's weights are on their way before the last norm ends."""
        p = self._p
        logits = p.model.logits(self._forward(got, size))
        return p.sampler.greedy(logits, p.builder.last_tokens, got(KEPT_SLOTS))


def capture_graphs(parts: GraphParts, config: EngineConfig, door: Door) -> DecodeGraphs | None:
    """The decode graphs. Raises `Refused` where one cannot be captured, or where all of them take
    more than was planned. Attention that cannot be captured is refused where graphs were asked for,
    else a warning."""
    sizes = graph_sizes(config, door.device.type == "cpu")
    if not sizes:
        return None
    if found := graph_findings(p for p in parts.plans if p.shape.phase is Phase.DECODE):
        if config.cuda_graphs is not None:
            raise Refused(found)
        log.warning("%s", replace(found[0], severity="warning"))
        return None
    torch.cuda.empty_cache()
    # of this process: the device's free memory is moved by others too
    before = torch.cuda.memory_reserved(door.device)
    graphs = DecodeGraphs(parts, sizes, door.device)
    graphs.capture(door, Recorder(door.device, AHEAD))
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved(door.device) - before
    planned = graph_bytes(sizes, parts.sampler.vocab_size)
    log.info("%d decode graphs: %d MiB of %d planned", len(sizes), taken >> 20, planned >> 20)
    if taken > planned:
        raise Refused(
            Finding(
                where="cuda_graphs",
                saw=f"{len(sizes)} graphs of up to {sizes[-1]} decodes take {taken} bytes",
                rule=f"at most the {planned} bytes that were planned for them",
                change=f"pass --cuda-graphs {sizes[-1] // 2}, or 0 for none",
                code="graphs_too_large",
            )
        )
    return graphs


def _failed(size: int, error: Exception) -> Finding:
    return Finding(
        where=f"cuda_graphs: a graph of {size} decodes",
        saw=f"{type(error).__name__}: {error}",
        rule="every size of the ladder is captured before anything is served",
        change="pass --cuda-graphs 0, or a smaller size",
        code="graph_not_captured",
    )
