"""`resolve`: a map, a checkpoint's headers and a model's parameters into a `LoadPlan`, or every
reason why there is none. Pure: reads no file. Knows shapes and names, no tensor values.

Laws of a plan: every checkpoint tensor is consumed exactly once (by a row, a tie or an ignore),
every parameter is filled exactly once, each of its elements by one read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.config.finding import Finding
from vitrail.weights.headers import Headers, TensorHeader
from vitrail.weights.mapping import (
    Box,
    Copy,
    Holes,
    Match,
    Names,
    Piece,
    Row,
    Source,
    Tie,
    WeightMap,
    extents,
    filled,
    numel,
    whole,
    with_interval,
)
from vitrail.weights.problems import Neighbours, Problems
from vitrail.weights.sharding import SINGLE, Cut, Layout, Rule, Shape

FLOATS = ("float64", "float32", "bfloat16", "float16")


class ParameterSpec(NamedTuple):
    """A parameter's shape and dtype ("float32", "bfloat16", ...)."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Box `source` of `tensor` in `file` (all of it if `whole`), its dims permuted by `order` and
    reshaped to `target`'s extents, is box `target` of this rank's `parameter`. `view`: the shape
    that `source` is a box of; empty: the tensor's own. `num_bytes` are read."""

    file: str
    tensor: str
    view: Shape
    source: Box
    whole: bool
    order: tuple[int, ...]
    parameter: str
    target: Box
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What loading does, in the order of the files' bytes. `parameters` are this rank's shapes;
    `ties` are (parameter, the parameter it is); `checks` are reads that must find what is loaded
    already; `ignored` are tensors left out on purpose; `warnings` want to be seen."""

    layout: Layout
    parameters: Mapping[str, ParameterSpec]
    reads: tuple[Read, ...]
    ties: tuple[tuple[str, str], ...]
    checks: tuple[Read, ...]
    ignored: tuple[str, ...]
    warnings: tuple[Finding, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes that loading takes from files."""
        return sum(read.num_bytes for read in (*self.reads, *self.checks))


def resolve(
    weight_map: WeightMap,
    headers: Headers,
    parameters: Mapping[str, ParameterSpec],
    layout: Layout = SINGLE,
) -> LoadPlan | list[Finding]:
    """The plan for one rank. `parameters` are those of the whole model (as built for one rank): the
    plan says which shape each has on this one. Findings are errors, every one there is."""
    resolution = _Resolution(weight_map, headers, parameters, layout)
    resolution.fill_rows()
    for tie in weight_map.ties:
        resolution.tie(tie)
    resolution.leftovers()
    return resolution.problems.findings() or resolution.plan()


class _Resolution:
    """The bookkeeping of one `resolve`: names in, reads and problems out. `tensors` holds the
    checkpoint by the names that rows use; `unused` and `unfilled` shrink as rows are applied."""

    def __init__(
        self,
        weight_map: WeightMap,
        headers: Headers,
        parameters: Mapping[str, ParameterSpec],
        layout: Layout,
    ):
        self.map, self.specs, self.layout = weight_map, parameters, layout
        self.names = Names(weight_map)
        self.problems = Problems()
        self.warnings = list(headers.warnings)
        self.ignored: list[str] = []
        self.tensors = self._renamed(headers)
        self.match_of = {name: self.names.match_tensor(name) for name in self.tensors}
        strangers = [name for name, match in self.match_of.items() if match is None]
        self.tensors_near = Neighbours(strangers or self.tensors)
        unknown = [n for n in parameters if self.names.match_parameter(n) is None]
        self.parameters_near = Neighbours(unknown or parameters)
        self.unused = set(self.tensors)
        self.unfilled = set(parameters)
        self.cuts: dict[str, Cut] = {}
        self.reads: list[Read] = []
        self.checks: list[Read] = []
        self.ties: list[tuple[str, str]] = []

    def _renamed(self, headers: Headers) -> dict[str, TensorHeader]:
        tensors: dict[str, TensorHeader] = {}
        for stored, tensor in headers.tensors.items():
            name = self.names.canonical(stored)
            if self.names.ignores(name):
                self.ignored.append(stored)
            elif name in tensors:
                self.problems.add(
                    "duplicate_tensor",
                    tensor.name,
                    saw=f"means the same as {tensors[name].name}",
                    rule="a tensor is stored once",
                    change="remove one of them from the checkpoint",
                )
            else:
                tensors[name] = tensor
        return tensors

    def fill_rows(self) -> None:
        """Apply every row once for each set of indices seen in the checkpoint or in the model."""
        instances: dict[Match, list[str]] = {}
        for name in self.specs:
            match = self.names.match_parameter(name)
            if match is not None:
                instances.setdefault(match, [])
        for name, match in self.match_of.items():
            if match is not None:
                instances.setdefault(match, []).append(name)
        for (index, holes), found in instances.items():
            self._fill(self.map.rows[index], holes, found)

    def _fill(self, row: Row, holes: Holes, found: list[str]) -> None:
        target = filled(row.parameter, holes)
        if target not in self.specs:
            near = self.parameters_near.near(target)
            for name in found:
                self.unused.discard(name)
                self.problems.add(
                    "unexpected_tensor",
                    name,
                    saw=f"goes to parameter {row.parameter}, which the model lacks{near}",
                    rule="every tensor fills a parameter of the model",
                    change="use the checkpoint's own config.json, or correct the map's row",
                )
            return
        sources = row.sources(self.specs[target].shape)
        self._cut(target, row.shard, fused_parts(sources, row.shard))
        for source in sources:
            name = filled(source.checkpoint, holes)
            self.unused.discard(name)
            for piece in self._accepted(name, source, row.parameter, target):
                if target in self.cuts:
                    self.reads += _reads(
                        self.tensors[name], piece, self.cuts[target], target, source.view
                    )

    def _cut(self, name: str, rule: Rule, parts: tuple[int, ...]) -> None:
        """Find this rank's share of a parameter, which counts as filled from here on."""
        self.unfilled.discard(name)
        cut = rule.cut(name, self.specs[name].shape, parts, self.layout)
        if isinstance(cut, Finding):
            self.problems.add(cut.code, name, saw=cut.saw, rule=cut.rule, change=cut.change)
        else:
            self.cuts[name] = cut

    def _accepted(self, name: str, source: Source, pattern: str, target: str) -> tuple[Piece, ...]:
        """The source's pieces if the checkpoint's tensor is what the row of `target`, whose
        parameter is `pattern`, says."""
        spec, tensor = self.specs[target], self.tensors.get(name)
        if tensor is None:
            self.problems.add(
                "missing_tensor",
                name,
                saw=f"not in the checkpoint{self.tensors_near.near(name)}",
                rule=f"it fills parameter {pattern}",
                change="complete the checkpoint, or correct the map's row",
            )
            return ()
        if tensor.shape != source.shape:
            self.problems.add(
                "wrong_shape",
                tensor.name,
                saw=f"{list(tensor.shape)} in the checkpoint",
                rule=f"{list(source.shape)} fills parameter {pattern} {list(spec.shape)}",
                change="use the checkpoint's own config.json",
            )
            return ()
        if tensor.dtype != spec.dtype and not {tensor.dtype, spec.dtype} <= set(FLOATS):
            self.problems.add(
                "wrong_dtype",
                tensor.name,
                saw=f"{tensor.dtype} in the checkpoint for a {spec.dtype} parameter",
                rule=f"{', '.join(FLOATS)} are cast to each other, nothing else is",
                change="use a checkpoint that is not quantised",
            )
            return ()
        return source.pieces

    def tie(self, tie: Tie) -> None:
        """A tied parameter needs no tensor; one that comes all the same is compared."""
        self.unfilled.discard(tie.parameter)
        have, want = self.specs.get(tie.parameter), self.specs.get(tie.to)
        if have is None or want is None or have != want:
            self.problems.add(
                "wrong_tie",
                tie.parameter,
                saw=f"{have or 'not in the model'}, tied to {tie.to}: {want or 'not in the model'}",
                rule="a parameter and the one it is tied to have one shape and dtype",
                change="correct the map's tie, or the model",
            )
            return
        self.ties.append((tie.parameter, tie.to))
        if tie.checkpoint is None or tie.checkpoint not in self.unused or tie.to not in self.cuts:
            return
        self.unused.discard(tie.checkpoint)
        (source,) = Copy(tie.checkpoint, tie.to).sources(want.shape)
        tensor = self.tensors[tie.checkpoint]
        for piece in self._accepted(tie.checkpoint, source, tie.to, tie.to):
            self.checks += _reads(tensor, piece, self.cuts[tie.to], tie.to)
        self.warnings.append(
            Finding(
                where=tensor.name,
                saw=f"stored although {tie.parameter} is tied to {tie.to}",
                rule="a tied parameter is not loaded; what is stored must equal what it is tied to",
                change="nothing if they are equal: loading compares them",
                code="tied_tensor_present",
                severity="warning",
            )
        )

    def leftovers(self) -> None:
        """What no row, tie or ignore of the map speaks of, on either side."""
        patterns = Neighbours(p for row in self.map.rows for p in row.checkpoints)
        for name in (name for name in self.tensors if name in self.unused):
            self.problems.add(
                "unexpected_tensor",
                self.tensors[name].name,
                saw=f"no row of the map takes it{patterns.near(name)}",
                rule="every tensor is loaded, or ignored by a declared row",
                change="remove it from the checkpoint, or add a row to the map",
            )
        targets = Neighbours(row.parameter for row in self.map.rows)
        for name in (name for name in self.specs if name in self.unfilled):
            self.problems.add(
                "unfilled_parameter",
                name,
                saw=f"no row of the map fills it{targets.near(name)}",
                rule="every parameter of the model is filled by a row or tied",
                change="name it as its row does, or add a row to the map",
            )

    def plan(self) -> LoadPlan:
        """The plan, once there is no problem; asserts its second law."""
        count: Counter[str] = Counter()
        for read in self.reads:
            count[read.parameter] += numel(extents(read.target))
        local: dict[str, ParameterSpec] = {}
        for name, cut in self.cuts.items():
            assert count[name] == numel(cut.shape), f"{name}: {count[name]} of {cut.shape} filled"
            local[name] = ParameterSpec(cut.shape, self.specs[name].dtype)
        for parameter, to in self.ties:
            local[parameter] = local[to]
        start = {(tensor.file, tensor.name): tensor.start for tensor in self.tensors.values()}
        return LoadPlan(
            layout=self.layout,
            parameters=local,
            reads=tuple(sorted(self.reads, key=lambda read: _position(read, start))),
            ties=tuple(self.ties),
            checks=tuple(self.checks),
            ignored=tuple(sorted(self.ignored)),
            warnings=tuple(self.warnings),
        )


def _position(read: Read, start: Mapping[tuple[str, str], int]) -> tuple[str, int, Box]:
    """Files are read one after the other, each from its begin to its end."""
    return read.file, start[read.file, read.tensor], read.source


def fused_parts(sources: tuple[Source, ...], rule: Rule) -> tuple[int, ...]:
    """Extents that different tensors fill along the dim that `rule` cuts; empty where one tensor,
    or a stack of them, fills it."""
    dim = rule.dim
    if dim is None:
        return ()
    found: set[tuple[int, int]] = set()
    for source in sources:
        if any(piece.axes[dim] is None for piece in source.pieces):
            return ()
        starts, stops = zip(*(piece.place[dim] for piece in source.pieces), strict=True)
        found.add((min(starts), max(stops)))
    return tuple(stop - start for start, stop in sorted(found))


def _reads(
    tensor: TensorHeader, piece: Piece, cut: Cut, parameter: str, view: Shape = ()
) -> Iterator[Read]:
    """The piece's overlap with each span of this rank."""
    stored_bytes, elements = tensor.stop - tensor.start, max(1, numel(tensor.shape))
    for source, target in _overlaps(piece, cut):
        yield Read(
            file=tensor.file,
            tensor=tensor.name,
            view=view,
            source=source,
            whole=source == whole(tensor.shape),
            order=piece.order,
            parameter=parameter,
            target=target,
            num_bytes=numel(extents(source)) * stored_bytes // elements,
        )


def _overlaps(piece: Piece, cut: Cut) -> Iterator[tuple[Box, Box]]:
    """(box of the tensor, box of the rank's parameter) for each span that meets the piece."""
    if cut.dim is None:
        yield piece.source, piece.place
        return
    first, last = piece.place[cut.dim]
    axis = piece.axes[cut.dim]
    for span in cut.spans:
        start, stop = max(first, span.start), min(last, span.stop)
        if start >= stop:
            continue
        at = span.at - span.start
        target = with_interval(piece.place, cut.dim, (start + at, stop + at))
        if axis is None:
            assert (start, stop) == (first, last), "a stacked or flattened dim is not cut inside"
            yield piece.source, target
        else:
            shift = piece.source[axis][0] - first
            yield with_interval(piece.source, axis, (start + shift, stop + shift)), target
