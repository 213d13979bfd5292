"""How a parameter is cut over the ranks of one axis: arithmetic on extents. Knows no names but
the one it is told to complain about, no files, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.config.finding import Finding

Shape = tuple[int, ...]
MAX_LISTED_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This process's place on the tensor-parallel axis: `rank` in [0, size)."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"


SINGLE = Layout(rank=0, size=1)


class Span(NamedTuple):
    """Whole coordinates [start, stop) along the cut dim lie at [at, at + stop - start) of the
    rank's."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`units` indivisible runs of `width` elements, cut by itself: the heads of q, of k, or of v
    in a fused product. `replicate` lets an axis larger than `units` repeat each unit (shared kv
    heads)."""

    units: int
    width: int = 1
    replicate: bool = False

    def owned(self, layout: Layout) -> tuple[int, int] | None:
        """First and last + 1 unit of this rank; None where the units do not divide."""
        if self.units % layout.size == 0:
            count = self.units // layout.size
            return layout.rank * count, (layout.rank + 1) * count
        if self.replicate and layout.size % self.units == 0:
            unit = layout.rank * self.units // layout.size
            return unit, unit + 1
        return None


class Cut(NamedTuple):
    """A rank's share: the `spans` of `dim` that it holds, in order, and the `shape` they make.
    `dim` is None where it holds everything."""

    dim: int | None
    spans: tuple[Span, ...]
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """Every rank holds the whole parameter."""

    @property
    def dim(self) -> int | None:
        return None

    def cut(self, name: str, shape: Shape, parts: Sequence[int], layout: Layout) -> Cut | Finding:
        """All of it."""
        return Cut(None, (), shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Each rank holds its share of `dim`. Without `segments`, the parts that the map fuses along
    `dim` (or the whole extent) are cut each by itself:

        whole  | q0 q1 | k0 k1 | v0 v1 |        rank 0  | q0 | k0 | v0 |
    """

    dim: int
    segments: tuple[Segment, ...] = ()

    def cut(self, name: str, shape: Shape, parts: Sequence[int], layout: Layout) -> Cut | Finding:
        """This rank's share of parameter `name` of whole `shape`, or why `layout` is illegal.
        `parts` are the extents fused along `dim`; empty: one. Modules size themselves with this,
        plans read by it."""
        dim = self.dim
        sizes = parts or (shape[dim],)
        segments = self.segments or tuple(Segment(units=size) for size in sizes)
        extent = sum(segment.units * segment.width for segment in segments)
        assert extent == shape[dim], f"{name}: segments of {extent} for dim {dim} of {list(shape)}"
        spans: list[Span] = []
        base, at = 0, 0
        for segment in segments:
            owned = segment.owned(layout)
            if owned is None:
                return _not_dividing(name, dim, segment, segments, layout)
            start, stop = (base + unit * segment.width for unit in owned)
            spans.append(Span(start, stop, at))
            at += stop - start
            base += segment.units * segment.width
        return Cut(dim, tuple(spans), (*shape[:dim], at, *shape[dim + 1 :]))


Rule = Replicate | Shard


def legal_sizes(segments: Sequence[Segment]) -> list[int]:
    """Axis sizes up to 64 that divide every segment."""
    return [
        size
        for size in range(1, MAX_LISTED_SIZE + 1)
        if all(segment.owned(Layout(rank=0, size=size)) is not None for segment in segments)
    ]


def _not_dividing(
    name: str, dim: int, segment: Segment, segments: Sequence[Segment], layout: Layout
) -> Finding:
    of = f" of {segment.width}" if segment.width > 1 else ""
    legal = ", ".join(str(size) for size in legal_sizes(segments))
    return Finding(
        where=name,
        saw=f"{segment.units} units{of} along dim {dim} over {layout.size} ranks",
        rule="the size of the tensor-parallel axis divides the units of every part",
        change=f"use a size of {legal}",
        code="illegal_sharding",
    )
