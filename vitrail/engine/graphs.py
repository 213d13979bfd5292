"""Decode steps as CUDA graphs, one a batch size of a ladder: from the last tokens to hidden states.
Owns the graphs and the memory at fixed addresses that they read.

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
from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from vitrail.attention.metadata import PagedMetadata, Work
from vitrail.attention.plan import AttentionPlan, PlanTable
from vitrail.attention.records import RECORDED, Records, decode_records, padded, room
from vitrail.attention.shape import Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine.batch import BatchBuilder, Rows
from vitrail.engine.parcel import Door, Parcel, Received
from vitrail.engine.step import StepPlan
from vitrail.layers.context import ForwardContext
from vitrail.models.interface import Model

log = logging.getLogger("vitrail.engine")
# Planned: for each graph of its own, and for what the largest keeps between its kernels.
GRAPH_BYTES, WORKSPACE_BYTES = 16 << 20, 512 << 20
# Bytes of a parcel behind a graph's own: parameters of the sampled rows, as most batches have them.
TAIL_BYTES = 1 << 16


def ladder(largest: int) -> list[int]:
    """Sizes up to `largest`: 1, 2, 4, then by eights to 64, sixteens to 256, thirty-twos."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return [*(s for s in sizes if s < largest), largest] if largest else []


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParts:
    """What graphs are captured over. `scratch_page`: the page that nobody reads; `max_len`: keys of
    the longest sequence."""

    model: Model
    pool: KvPool
    plans: PlanTable
    builder: BatchBuilder
    scratch_page: int
    max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tickets:
    slots: int
    positions: int
    cache_slots: int
    kv_lens: int
    page_places: int
    pages: int
    work: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """`hidden`: [B, M], `slots`: int64 [B], both overwritten by the next replay."""

    graph: CUDAGraph
    hidden: Tensor
    slots: Tensor


class DecodeGraphs:
    """`pack`, then send the parcel to `inputs`, then `replay`."""

    def __init__(self, parts: GraphParts, sizes: Iterable[int], door: Door):
        self._p = parts
        self._sizes = sorted(sizes)
        self._scratch = parts.scratch_page * parts.builder.page_size
        parts.builder.table[-1] = parts.scratch_page
        largest = door.parcel()
        self._pack(self._nothing(self._sizes[-1]), self._sizes[-1], largest)
        self.inputs = torch.zeros(largest.size + TAIL_BYTES, dtype=torch.uint8, device=door.device)
        self._cu_q = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=door.device)
        self._captured: dict[int, _Captured] = {}

    def fits(self, plan: StepPlan) -> bool:
        """Whether it is of decodes alone, and not more than were captured."""
        return not plan.prefills and len(plan.decodes) <= self._sizes[-1]

    @torch.inference_mode()
    def capture(self, door: Door) -> None:
        """All sizes, the largest first, in one pool of memory. Raises `Refused`, naming the size
        that failed."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(door.device)
        for size in reversed(self._sizes):
            sent = door.parcel()
            tickets = self._pack(self._nothing(size), size, sent)
            got = sent.send(self.inputs)
            try:
                self._forward(got, tickets, size)  # whatever is made at a first call
                torch.cuda.synchronize(door.device)
                graph = CUDAGraph()
                with torch.cuda.stream(stream):
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    with _ended(graph):
                        hidden = self._forward(got, tickets, size)
            except Exception as error:
                raise Refused(_failed(size, error)) from error
            slots = got(tickets.slots)
            self._captured[size] = _Captured(graph=graph, hidden=hidden, slots=slots)
        torch.cuda.synchronize(door.device)

    def rehearse(self, size: int, door: Door) -> Tensor:
        """Hidden states [size, M] of a step of nobody's rows, launched kernel by kernel."""
        sent = door.parcel()
        tickets = self._pack(self._nothing(size), size, sent)
        return self._forward(sent.send(self.inputs), tickets, size)

    def pack(self, plan: StepPlan, sent: Parcel) -> np.ndarray:
        """Lay out a plan of decodes alone at the head of `sent`: the slots of its rows."""
        builder = self._p.builder
        places, pages = builder.turn_pages(plan)
        rows = Rows.of_decodes(plan.decodes)
        count = len(rows.slots)
        size = self._size(count)
        cache_slots = builder.cache_slots(rows.slots, rows.starts)
        at = np.arange(size)
        at[count:] = rows.starts.argmin()
        padded_slots = cache_slots[at]
        padded_slots[count:] = self._scratch + at[count:] % builder.page_size
        head = _Head(rows.slots[at], rows.starts[at], padded_slots, places, pages)
        self._pack(head, size, sent)
        return rows.slots

    def replay(self, count: int) -> tuple[Tensor, Tensor]:
        """Hidden states [count, M] of the rows packed last, and their slots, int64: both until the
        next replay."""
        captured = self._captured[self._size(count)]
        captured.graph.replay()
        return captured.hidden[:count], captured.slots[:count]

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _nothing(self, size: int) -> "_Head":
        """Rows of nobody: one key each, in the scratch page."""
        nobody = np.full(size, self._p.builder.max_running)
        none = np.zeros(0, dtype=np.int64)
        slots = self._scratch + np.arange(size) % self._p.builder.page_size
        return _Head(nobody, np.zeros_like(nobody), slots, none, none.astype(np.int32))

    def _pack(self, head: "_Head", size: int, sent: Parcel) -> _Tickets:
        builder, kv_lens = self._p.builder, head.starts + 1
        # A row takes one page a step at most; the rest write the last row of the table as it is.
        places = np.full(size, builder.max_running * builder.max_pages)
        pages = np.full(size, self._p.scratch_page, dtype=np.int32)
        places[: len(head.places)], pages[: len(head.pages)] = head.places, head.pages
        return _Tickets(
            slots=sent.add(head.slots),
            positions=sent.add(head.starts),
            cache_slots=sent.add(head.cache_slots),
            kv_lens=sent.add(kv_lens.astype(np.int32)),
            page_places=sent.add(places),
            pages=sent.add(pages),
            work=tuple(self._pack_work(plan, kv_lens, sent) for plan in self._plans(size)),
        )

    def _pack_work(self, plan: AttentionPlan, kv_lens: np.ndarray, sent: Parcel) -> tuple[int, int]:
        records: Records = decode_records(plan, kv_lens, np.arange(len(kv_lens)))
        records = padded(records, *room(plan, len(kv_lens)))
        return sent.add(records.items), sent.add(records.combines)

    def _plans(self, size: int) -> list[AttentionPlan]:
        """Of the sites whose launches follow records, at the longest context."""
        p = self._p
        sites = [site for site, phase in p.model.text_sites() if phase is Phase.DECODE]
        plans = [p.plans.select(site, Phase.DECODE, size, p.max_len) for site in sites]
        return [plan for plan in dict.fromkeys(plans) if plan.backend in RECORDED]

    def _forward(self, got: Received, tickets: _Tickets, size: int) -> Tensor:
        p, builder = self._p, self._p.builder
        slots = got(tickets.slots)
        builder.table.view(-1).index_copy_(0, got(tickets.page_places), got(tickets.pages))
        meta = PagedMetadata(
            page_size=builder.page_size,
            q_lens=(1,) * size,
            kv_lens=(p.max_len,) * size,
            cu_q=self._cu_q[: size + 1],
            kv_lens_dev=got(tickets.kv_lens),
            block_table=builder.table.index_select(0, slots),
        )
        for plan, (items, combines) in zip(self._plans(size), tickets.work, strict=True):
            most = room(plan, size)[0]
            meta.work.put(plan, Work(items=got(items), combines=got(combines), slots=most))
        context = ForwardContext(
            positions=got(tickets.positions),
            cache_slots=got(tickets.cache_slots),
            num_prefill=0,
            prefill=None,
            decode=meta,
            plans=p.plans,
            pool=p.pool,
        )
        hidden = p.model.embed(builder.last_tokens.index_select(0, slots))
        return p.model.forward(hidden, context)


@contextmanager
def _ended(graph: CUDAGraph) -> Generator[None]:
    """The capture ends with the block, also where that raises, so that the stream is as it was."""
    try:
        yield
    except Exception:
        with suppress(RuntimeError):  # it failed; so does ending it
            graph.capture_end()
        raise
    graph.capture_end()


@dataclass(frozen=True, slots=True)
class _Head:
    """Rows of a graph by column, int64, and new pages with their places in the table."""

    slots: np.ndarray
    starts: np.ndarray
    cache_slots: np.ndarray
    places: np.ndarray
    pages: np.ndarray


def graph_sizes(config: EngineConfig, device: torch.device) -> list[int]:
    """Batch sizes of the decode graphs, none on a CPU."""
    if device.type == "cpu":
        return []
    asked = config.max_running if config.cuda_graphs is None else config.cuda_graphs
    return ladder(min(asked, config.max_running))


def graph_bytes(sizes: Sequence[int]) -> int:
    """Device memory that so many graphs may take."""
    return len(sizes) * GRAPH_BYTES + WORKSPACE_BYTES if sizes else 0


def capture_graphs(parts: GraphParts, config: EngineConfig, door: Door) -> DecodeGraphs | None:
    """The decode graphs. Raises `Refused` where one cannot be captured, or where all of them take
    more than was planned. Attention that cannot be captured is refused where graphs were asked for,
    else a warning."""
    sizes = graph_sizes(config, door.device)
    if not sizes:
        return None
    if found := graph_findings(p for p in parts.plans if p.shape.phase is Phase.DECODE):
        if config.cuda_graphs is not None:
            raise Refused(found)
        log.warning("%s", replace(found[0], severity="warning"))
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(door.device)[0]
    graphs = DecodeGraphs(parts, sizes, door)
    graphs.capture(door)
    torch.cuda.empty_cache()
    taken, planned = before - torch.cuda.mem_get_info(door.device)[0], graph_bytes(sizes)
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


def graph_findings(plans: Iterable[AttentionPlan]) -> list[Finding]:
    """Why decodes cannot be captured over these plans: the reference asks the host for lengths."""
    return [
        Finding(
            where="cuda_graphs",
            saw=f"attention decode on backend {plan.backend}",
            rule="work of captured decodes is data on the device",
            change="pass --cuda-graphs 0, or leave the attention's choice to the plan",
            code="decode_not_capturable",
        )
        for plan in plans
        if plan.backend == "reference"
    ][:1]


def _failed(size: int, error: Exception) -> Finding:
    return Finding(
        where=f"cuda_graphs: a graph of {size} decodes",
        saw=f"{type(error).__name__}: {error}",
        rule="every size of the ladder is captured before anything is served",
        change="pass --cuda-graphs 0, or a smaller size",
        code="graph_not_captured",
    )
