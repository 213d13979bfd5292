"""The work of one attention launch, from host lengths: which program attends to which queries and
keys. Knows plans and lengths; no torch, no device. `kernels/attend.py` and `kernels/combine.py` say
what the fields of a record mean; a record of zeros is nothing to do, so that a launch of a fixed
number of records serves any batch that needs no more."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.attention.plan import AttentionPlan

Ints = NDArray[np.int64]

# Backends whose launches follow records.
RECORDED = ("triton", "cute")

ITEM_FIELDS = 9
COMBINE_FIELDS = 5
# Lengths that an item may have are tried on a geometric scale of so many steps.
CANDIDATES = 24
# What starting a program costs, in tiles; partial results that cost a combining program a tile, and
# those that it reads at once.
START_TILES = 2
TILE_SPLITS = 16
COMBINE_SPLITS = 32
NO_COMBINES = np.zeros((0, COMBINE_FIELDS), np.int32)


class Lengths(NamedTuple):
    """A batch as the host knows it. `q_starts[i]`: the position of sequence i's first query
    among its keys; `paged`: keys in pages."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q_starts: tuple[int, ...]
    paged: bool


class Records(NamedTuple):
    """`items` int32 [I, 9], longest first; `combines` int32 [C, 5]; `slots`: partial results."""

    items: NDArray[np.int32]
    combines: NDArray[np.int32]
    slots: int


def make_records(
    plan: AttentionPlan,
    q_lens: Sequence[int] | Ints,
    kv_lens: Sequence[int] | Ints,
    q_starts: Sequence[int] | Ints,
    kv_bases: Sequence[int] | Ints,
) -> Records:
    """Every row of every sequence in one block of `tile_m` rows, every key that a row of the block
    sees in one item of the block; `kv_bases`: block table rows, or first packed key rows."""
    site = plan.shape.site
    group = site.num_q_heads // site.num_kv_heads
    lens, keys, starts, bases = (
        np.asarray(x, np.int64).reshape(-1) for x in (q_lens, kv_lens, q_starts, kv_bases)
    )
    firsts = np.cumsum(lens) - lens
    seq, nth = _repeated(-(-lens * group // plan.tile_m))
    row = nth * plan.tile_m
    rows = lens[seq] * group
    first_pos = starts[seq] + row // group
    last_pos = starts[seq] + (np.minimum(row + plan.tile_m, rows) - 1) // group
    lo, hi = np.zeros_like(seq), keys[seq]
    if site.causal:
        hi = np.minimum(hi, last_pos + 1)
    elif site.window is not None:
        hi = np.minimum(hi, last_pos + site.window + 1)
    hi = np.maximum(hi, 0)
    if site.window is not None:
        lo = np.clip(first_pos - site.window, 0, hi)
    page = plan.shape.page_size or 1
    first_page = lo // page
    pieces, size = cut(plan, -(-hi // page) - first_page)
    block, nth = _repeated(pieces)
    begin = (first_page[block] + nth * size[block]) * page
    split = pieces > 1
    slot = np.where(split, np.cumsum(pieces * split) - pieces * split, -1)
    items = np.stack(
        [
            firsts[seq[block]],
            row[block],
            rows[block],
            starts[seq[block]],
            bases[seq[block]],
            np.maximum(begin, lo[block]),
            np.minimum(begin + size[block] * page, hi[block]),
            np.where(split[block], slot[block] + nth, -1),
            (nth == 0) & site.sink,
        ],
        axis=1,
    )
    items = items[np.argsort(items[:, 5] - items[:, 6], kind="stable")]
    combines = np.stack([firsts[seq], row, rows, slot, pieces], axis=1)[split]
    return Records(items.astype(np.int32), combines.astype(np.int32), int((pieces * split).sum()))


def records_of(plan: AttentionPlan, lengths: Lengths) -> Records:
    """Of a batch whose sequences are the rows of a block table, or whose keys are packed."""
    q_lens, kv_lens, starts = (np.asarray(x, np.int64).reshape(-1) for x in lengths[:3])
    if lengths.paged and plan.shape.max_q_len == 1 and q_lens.all():
        return decode_records(plan, kv_lens, np.arange(len(kv_lens)))
    bases = np.arange(len(kv_lens)) if lengths.paged else np.cumsum(kv_lens) - kv_lens
    return make_records(plan, q_lens, kv_lens, starts, bases)


def decode_records(plan: AttentionPlan, kv_lens: Ints, kv_bases: Ints) -> Records:
    """`make_records` of one query a sequence, the last of its keys, in a fraction of its time: what
    a step of decodes waits for."""
    site = plan.shape.site
    group = site.num_q_heads // site.num_kv_heads
    if group > plan.tile_m or not site.causal:
        return make_records(plan, np.ones_like(kv_lens), kv_lens, kv_lens - 1, kv_bases)
    page = plan.shape.page_size or 1
    lo = np.zeros_like(kv_lens)
    if site.window is not None:
        lo = np.maximum(kv_lens - 1 - site.window, 0)
    first_page = lo // page
    pieces, size = cut(plan, -(-kv_lens // page) - first_page)
    split = pieces > 1
    if not split.any():
        return Records(_whole_items(kv_lens, kv_bases, lo, group, site.sink), NO_COMBINES, 0)
    block, nth = _repeated(pieces)
    begin = (first_page[block] + nth * size[block]) * page
    low = np.maximum(begin, lo[block])
    high = np.minimum(begin + size[block] * page, kv_lens[block])
    slot = np.where(split, np.cumsum(pieces * split) - pieces * split, -1)
    order = np.argsort(low - high, kind="stable")
    block, nth = block[order], nth[order]
    items = np.zeros((len(block), ITEM_FIELDS), np.int32)
    items[:, 0] = block
    items[:, 2] = group
    items[:, 3] = kv_lens[block] - 1
    items[:, 4] = kv_bases[block]
    items[:, 5] = low[order]
    items[:, 6] = high[order]
    items[:, 7] = np.where(split[block], slot[block] + nth, -1)
    items[:, 8] = (nth == 0) & site.sink
    rows = np.flatnonzero(split)
    combines = np.zeros((len(rows), COMBINE_FIELDS), np.int32)
    combines[:, 0], combines[:, 2] = rows, group
    combines[:, 3], combines[:, 4] = slot[rows], pieces[rows]
    return Records(items, combines, int(pieces[rows].sum()))


def _whole_items(
    kv_lens: Ints, kv_bases: Ints, lo: Ints, group: int, sink: bool
) -> NDArray[np.int32]:
    """An item a sequence."""
    order = np.argsort(lo - kv_lens, kind="stable")
    items = np.zeros((len(order), ITEM_FIELDS), np.int32)
    keys = kv_lens[order]
    items[:, 0], items[:, 2], items[:, 3] = order, group, keys - 1
    items[:, 4], items[:, 5], items[:, 6] = kv_bases[order], lo[order], keys
    items[:, 7], items[:, 8] = -1, sink
    return items


class DecodeRecords:
    """The records of a decode in arrays of fixed size, zeros behind them, as step follows step:
    where each of the same sequences has one key more and is cut as before, lengths alone move on.
    What is written is `decode_records` of block table rows in order, the items maybe in another
    order."""

    def __init__(self, plan: AttentionPlan, items: NDArray[np.int32], combines: NDArray[np.int32]):
        self._plan, self._items, self._combines = plan, items, combines
        self._page = plan.shape.page_size or 1
        self._next = np.zeros(0, np.int64)  # lengths that go on from the last ones
        self._steps = 0  # before one of them begins a page
        self._last: Ints | slice = slice(0)  # items that end with their sequence
        self._used = (0, 0)

    def update(self, kv_lens: Ints) -> None:
        """Keys of each sequence now."""
        same = len(kv_lens) == len(self._next) and (kv_lens == self._next).all()
        if same and (self._steps or self._stays_whole(kv_lens)):
            self._items[: self._used[0], 3] += 1
            self._items[self._last, 6] += 1
            self._steps -= 1
        else:
            self._begin(kv_lens)
        self._next = kv_lens + 1

    def _stays_whole(self, kv_lens: Ints) -> bool:
        """Whether each sequence was one item, and is, now that some have a page more."""
        plan = self._plan
        if self._used[1] or plan.shape.site.window is not None:
            return False
        if (cut(plan, -(-kv_lens // self._page))[0] > 1).any():
            return False
        self._steps = 1 + self._room(kv_lens)
        return True

    def _room(self, kv_lens: Ints) -> int:
        """Steps of which none begins a page."""
        return int((-kv_lens % self._page).min())

    def _begin(self, kv_lens: Ints) -> None:
        plan = self._plan
        self._steps = 0 if plan.shape.site.window is not None else self._room(kv_lens)
        made = decode_records(plan, kv_lens, np.arange(len(kv_lens)))
        arrays = (self._items, self._combines)
        for into, new, before in zip(arrays, made[:2], self._used, strict=True):
            into[: len(new)] = new
            into[len(new) : before] = 0
        self._used = (len(made.items), len(made.combines))
        ends = made.items[:, 6] == kv_lens[made.items[:, 0]]
        self._last = slice(len(ends)) if ends.all() else np.flatnonzero(ends)


def room(plan: AttentionPlan, batch: int) -> tuple[int, int]:
    """The most items and combines of `batch` sequences of one query, whatever their lengths."""
    group = plan.shape.site.num_q_heads // plan.shape.site.num_kv_heads
    blocks = batch * -(-group // plan.tile_m)
    return (blocks, 0) if plan.max_splits == 1 else (plan.max_items, blocks)


def cut(plan: AttentionPlan, pages: Ints) -> tuple[Ints, Ints]:
    """How many items each row block's `pages` become, at least one, and pages an item (its last
    may have fewer). Within the plan's bounds the size is taken for which a launch's rounds times
    their length are least; blocks are then cut evenly. Where the plan fixes the size
    (batch-invariant), nothing but a block's own length matters."""
    if plan.max_splits == 1 or not len(pages):
        return np.ones_like(pages), np.maximum(pages, 1)
    page = plan.shape.page_size or 1
    whole = max(plan.tile_n // page, 1)
    if plan.item_pages:
        size = np.full_like(pages, plan.item_pages)
        return np.maximum(-(-pages // size), 1), size
    longest, total = int(pages.max()), int(pages.sum())
    room = max(plan.max_items - len(pages), 1)
    smallest = max(plan.min_item_pages, -(-longest // plan.max_splits), -(-total // room))
    smallest = -(-smallest // whole) * whole
    if smallest >= longest:
        return np.ones_like(pages), np.maximum(pages, 1)
    sizes = _candidates(smallest, longest, whole)
    # Exact: a quotient of such ints is rounded to a whole number only where it is one.
    counts = np.maximum(np.ceil(pages[None] / sizes[:, None]), 1)
    rounds = np.ceil(counts.sum(1) / max(plan.wave_items, 1))
    # In tiles: a round's longest item and its start; the combine's start and passes.
    tiles = sizes // whole if whole > 1 else sizes * page / plan.tile_n
    most = counts.max(1)
    cost = rounds * (tiles + START_TILES) + (most > 1) * START_TILES + most / TILE_SPLITS
    size = np.ceil(pages / counts[int(np.argmin(cost))]).astype(np.int64)
    size = np.maximum(-(-size // whole) * whole, 1)
    return np.maximum(-(-pages // size), 1), size


@lru_cache(maxsize=1024)
def _candidates(smallest: int, longest: int, whole: int) -> Ints:
    sizes = np.unique(np.geomspace(smallest, longest, CANDIDATES).astype(np.int64) // whole) * whole
    return sizes[sizes >= smallest]


def _repeated(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2], each the nth [0, 1, 0, 1, 2] of its own."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
