"""`WeightMap`: a model's declaration of which checkpoint tensor fills which parameter, and where.

A row states, for the *whole* shape of its parameter, which tensors the checkpoint must hold,
their shapes, and which box of each goes to which box of the parameter. Reading a checkpoint and
writing one are the same statement in two directions, so there is only one method per row. Knows
no files, no dtypes, no tensors; how a parameter is cut over ranks is `sharding`'s.

Names are patterns with holes: `blocks.{block}.wo.weight` matches any decimal index. Both sides of a
row have the same holes, except that an `Experts` row numbers its `{expert}` itself.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from vitrail.weights.sharding import Replicate, Rule, Shape

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dim
Init = Literal["normal", "ones", "zeros"]
Holes = tuple[tuple[str, str], ...]  # (hole, index), sorted by hole

_HOLE = re.compile(r"\{(\w+)\}")
_INDEX = re.compile(r"\{\w+\}|[0-9]+")


class Piece(NamedTuple):
    """Box `source` of a checkpoint tensor fills box `place` of the row's parameter. `axes[d]` is
    the source dim that `place`'s dim d walks along; None where there is none: a stacked dim (extent
    1) or the flattening of several."""

    source: Box
    place: Box
    axes: tuple[int | None, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The source's dims in the order in which `place` walks them, flattened ones last."""
        listed = [axis for axis in self.axes if axis is not None]
        return (*listed, *(axis for axis in range(len(self.source)) if axis not in listed))


class Source(NamedTuple):
    """A tensor the checkpoint must hold: name pattern, shape, and where its elements go. Pieces'
    source boxes are of the tensor viewed (row-major) as `view`; empty: as its own shape."""

    checkpoint: str
    shape: Shape
    pieces: tuple[Piece, ...]
    view: Shape = ()


@dataclass(frozen=True, slots=True)
class _OneToOne:
    checkpoint: str
    parameter: str
    shard: Rule = Replicate()
    init: Init = "normal"

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return (self.checkpoint,)


@dataclass(frozen=True, slots=True)
class Copy(_OneToOne):
    """The tensor is the parameter."""

    def sources(self, shape: Shape) -> tuple[Source, ...]:
        piece = Piece(whole(shape), whole(shape), tuple(range(len(shape))))
        return (Source(self.checkpoint, shape, (piece,)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flatten(_OneToOne):
    """A convolution over whole patches as a linear layer: the tensor [out, *inner] in row-major
    order is the parameter [out, prod(inner)]. It can be sharded along dim 0 only."""

    inner: Shape

    def sources(self, shape: Shape) -> tuple[Source, ...]:
        flat = numel(self.inner)
        assert shape[1:] == (flat,), f"{self.parameter}: {list(shape)} is not [out, {flat}]"
        stored = (shape[0], *self.inner)
        return (Source(self.checkpoint, stored, (Piece(whole(stored), whole(shape), (0, None)),)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ManyToOne:
    checkpoints: tuple[str, ...]
    parameter: str
    dim: int = 0
    sizes: tuple[int, ...] = ()
    shard: Rule = Replicate()
    init: Init = "normal"

    @property
    def fused(self) -> tuple[str, ...]:
        """The tensors that lie along the fused dim."""
        return self.checkpoints

    def parts(self, extent: int) -> tuple[tuple[int, int], ...]:
        """The interval of each of `fused` along the fused dim of `extent`."""
        count = len(self.fused)
        sizes = self.sizes or (extent // count,) * count
        fits = len(sizes) == count and sum(sizes) == extent
        assert fits, f"{self.parameter}: {extent} along dim {self.dim} is not parts of {sizes}"
        return intervals(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuse(_ManyToOne):
    """The tensors concatenated along `dim` are the parameter. `sizes` are their extents along
    `dim`; empty: they are equal. `pairs`, one for each tensor where given: 0, or the width D of
    heads whose rows (`dim` is 0) are stored as rotary pairs (2i, 2i + 1) and become halves
    (i, i + D/2):

        tensor | a0 b0 a1 b1 |  ->  parameter | a0 a1 b0 b1 |
    """

    pairs: tuple[int, ...] = ()

    def sources(self, shape: Shape) -> tuple[Source, ...]:
        found: list[Source] = []
        widths = self.pairs or (0,) * len(self.checkpoints)
        parts = self.parts(shape[self.dim])
        for checkpoint, part, width in zip(self.checkpoints, parts, widths, strict=True):
            place = with_interval(whole(shape), self.dim, part)
            stored = extents(place)
            if width:
                assert self.dim == 0, f"{self.parameter}: pairs are of rows"
                found.append(_paired(checkpoint, stored, part[0], width))
            else:
                piece = Piece(whole(stored), place, tuple(range(len(shape))))
                found.append(Source(checkpoint, stored, (piece,)))
        return tuple(found)


def _paired(checkpoint: str, stored: Shape, start: int, width: int) -> Source:
    """`stored` viewed as [rows / 2, 2, ...]: each head's first, then second members of pairs."""
    rows, *rest = stored
    assert width % 2 == rows % width == 0, f"{checkpoint}: {rows} rows in heads of {width}"
    half, view = width // 2, (rows // 2, 2, *rest)
    axes = (0, *range(2, len(view)))
    pieces: list[Piece] = []
    for pair in range(0, rows // 2, half):
        for member in (0, 1):
            taken = with_interval(whole(view), 0, (pair, pair + half))
            taken = with_interval(taken, 1, (member, member + 1))
            at = start + 2 * pair + member * half
            place = with_interval(whole(stored), 0, (at, at + half))
            pieces.append(Piece(taken, place, axes))
    return Source(checkpoint, stored, tuple(pieces), view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(_ManyToOne):
    """Tensors of `num_experts` experts stacked on a new dim 0; where several are named they are
    first fused along `dim` *of one expert's tensor*: gate [I, H] and up [I, H] -> [E, 2 I, H].
    With `num_shared`, the second half of `checkpoints` are the tensors of so many more experts,
    each tensor side by side along `dim`, and stacked after the others:

        gate, up of e0, ... | gate of s0 s1 | up of s0 s1 |  ->  e0 | ... | s0 | s1 |
    """

    num_experts: int
    num_shared: int = 0

    @property
    def fused(self) -> tuple[str, ...]:
        return self.checkpoints[: len(self.checkpoints) // 2 if self.num_shared else None]

    def sources(self, shape: Shape) -> tuple[Source, ...]:
        assert shape[0] == self.num_experts + self.num_shared, (
            f"{self.parameter}: {list(shape)} for {self.num_experts} + {self.num_shared} experts"
        )
        axes = (None, *range(len(shape) - 1))
        parts = self.parts(shape[self.dim + 1])
        found: list[Source] = []
        for expert in range(self.num_experts):
            for checkpoint, part in zip(self.fused, parts, strict=True):
                place = self._place(shape, expert, part)
                stored = extents(place)[1:]
                name = checkpoint.replace("{expert}", str(expert))
                found.append(Source(name, stored, (Piece(whole(stored), place, axes),)))
        shared = self.checkpoints[len(self.fused) :]
        for checkpoint, part in zip(shared, parts, strict=True) if shared else ():
            pieces: list[Piece] = []
            width = part[1] - part[0]
            stored = with_extent(shape[1:], self.dim, width * self.num_shared)
            for i in range(self.num_shared):
                taken = with_interval(whole(stored), self.dim, (i * width, (i + 1) * width))
                pieces.append(Piece(taken, self._place(shape, self.num_experts + i, part), axes))
            found.append(Source(checkpoint, stored, tuple(pieces)))
        return tuple(found)

    def _place(self, shape: Shape, expert: int, part: tuple[int, int]) -> Box:
        row = with_interval(whole(shape), 0, (expert, expert + 1))
        return with_interval(row, self.dim + 1, part)


Row = Copy | Flatten | Fuse | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """`parameter` is the very tensor of parameter `to`. Where the checkpoint holds `checkpoint`
    all the same, loading compares it with `to`: equal is a warning, different is refused."""

    parameter: str
    to: str
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Ignore:
    """Checkpoint tensors that are not loaded on purpose. A trailing `*` matches any rest of a name.
    Wins over every row."""

    checkpoint: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Another writer's naming: names that no row knows and that start with `prefix` are read as
    if they started with `means`. The longest prefix wins."""

    prefix: str
    means: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """The whole declaration. Every row has `checkpoints` and a `parameter` (patterns), `shard` (how
    ranks share it), `init` (how random weights are drawn) and `sources(shape)`: the tensors that
    fill a parameter of this whole shape. Asserts that it is well formed; whether a
    checkpoint and a model agree with it is `plan.resolve`'s to find."""

    rows: tuple[Row, ...]
    ties: tuple[Tie, ...] = ()
    ignored: tuple[Ignore, ...] = ()
    aliases: tuple[Alias, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            holes = holes_of(row.parameter)
            for pattern in row.checkpoints:
                assert holes_of(pattern) - {"expert"} == holes - {"expert"}, (
                    f"{pattern}: holes are not those of {row.parameter}"
                )
        for side in (
            [each.parameter for each in (*self.rows, *self.ties)],
            [c for row in self.rows for c in row.checkpoints],
        ):
            twice = sorted({p for p in side if side.count(p) > 1})
            assert not twice, f"in two rows: {twice}"


class Match(NamedTuple):
    """A name matched row number `row` with these indices in the holes of the row's parameter."""

    row: int
    holes: Holes


class Names:
    """Looks names up in a map. Built once for each resolution; a lookup costs one dictionary
    access."""

    def __init__(self, weight_map: WeightMap):
        self._map = weight_map
        self._tensors = _index([row.checkpoints for row in weight_map.rows])
        self._parameters = _index([(row.parameter,) for row in weight_map.rows])
        self._tied = {tie.checkpoint for tie in weight_map.ties}
        self._aliases = sorted(weight_map.aliases, key=lambda alias: -len(alias.prefix))

    def match_parameter(self, name: str) -> Match | None:
        """The row that fills parameter `name`."""
        return self._match(name, self._parameters)

    def match_tensor(self, name: str) -> Match | None:
        """The row that consumes checkpoint tensor `name`, unless it is ignored."""
        return self._match(name, self._tensors)

    def ignores(self, name: str) -> bool:
        return any(_matcher(rule.checkpoint).fullmatch(name) for rule in self._map.ignored)

    def canonical(self, name: str) -> str:
        """The name as the rows spell it."""
        if name in self._tied or self.match_tensor(name) is not None or self.ignores(name):
            return name
        for alias in self._aliases:
            if name.startswith(alias.prefix):
                return alias.means + name.removeprefix(alias.prefix)
        return name

    def _match(self, name: str, index: dict[str, list[tuple[int, str]]]) -> Match | None:
        found: list[Match] = []
        for row, pattern in index.get(template(name), ()):
            match = _matcher(pattern).fullmatch(name)
            if match is not None:
                kept = holes_of(self._map.rows[row].parameter)
                holes = sorted((k, v) for k, v in match.groupdict().items() if k in kept)
                found.append(Match(row, tuple(holes)))
        assert len(found) <= 1, f"{name} matches {len(found)} rows of the map"
        return found[0] if found else None


def template(name: str) -> str:
    """A name or pattern with every index and hole as `#`."""
    return _INDEX.sub("#", name)


def filled(pattern: str, holes: Holes) -> str:
    """`pattern` with its holes filled."""
    for hole, index in holes:
        pattern = pattern.replace("{" + hole + "}", index)
    return pattern


@lru_cache(maxsize=4096)
def holes_of(pattern: str) -> frozenset[str]:
    return frozenset(_HOLE.findall(pattern))


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> re.Pattern[str]:
    """A hole is a decimal index without leading zeros, a trailing `*` anything."""
    stem = pattern.removesuffix("*")
    parts = _HOLE.split(stem)  # literal, hole, literal, ...
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [f"(?P<{hole}>0|[1-9][0-9]*)" for hole in parts[1::2]]
    return re.compile("".join(parts) + (".*" if stem != pattern else ""))


def _index(sides: Sequence[tuple[str, ...]]) -> dict[str, list[tuple[int, str]]]:
    """Template -> (row number, pattern)s that may match."""
    index: dict[str, list[tuple[int, str]]] = {}
    for row, patterns in enumerate(sides):
        for pattern in patterns:
            index.setdefault(template(pattern), []).append((row, pattern))
    return index


def whole(shape: Shape) -> Box:
    return tuple((0, extent) for extent in shape)


def extents(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def with_interval(box: Box, dim: int, interval: tuple[int, int]) -> Box:
    return (*box[:dim], interval, *box[dim + 1 :])


def with_extent(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def intervals(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive intervals of `sizes` from 0."""
    found: list[tuple[int, int]] = []
    start = 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return tuple(found)


def numel(shape: Iterable[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
