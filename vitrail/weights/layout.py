"""What each rank of a tensor-parallel axis would hold of a model's parameters: the same cuts that
a `LoadPlan` reads by, before a checkpoint is looked at. Pure arithmetic on names and shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vitrail.config.finding import Finding
from vitrail.weights.mapping import Names, WeightMap
from vitrail.weights.plan import ParameterSpec, fused_parts
from vitrail.weights.problems import Problems
from vitrail.weights.sharding import MAX_LISTED_SIZE, SINGLE, Cut, Layout, Replicate, Rule, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """How a parameter is cut: its rule, its whole shape and what is fused along the cut dim."""

    rule: Rule
    shape: Shape
    parts: tuple[int, ...]


def pieces(
    weight_map: WeightMap,
    parameters: Mapping[str, ParameterSpec],
    whole: Callable[[str], bool] = lambda _: False,
) -> dict[str, Piece]:
    """Of each parameter that a row of the map fills. `whole`: parameters that every rank holds all
    of, whatever their row says."""
    names, made = Names(weight_map), dict[tuple[int, Shape], Piece]()
    found: dict[str, Piece] = {}
    for name, spec in parameters.items():
        match = names.match_parameter(name)
        if match is None:
            continue
        row = weight_map.rows[match.row]
        key = (match.row, spec.shape)
        if key not in made:
            parts = fused_parts(row.sources(spec.shape), row.shard)
            made[key] = Piece(rule=row.shard, shape=spec.shape, parts=parts)
        cut = made[key]
        found[name] = Piece(rule=Replicate(), shape=cut.shape, parts=()) if whole(name) else cut
    return found


def cut_parameters(
    cut: Mapping[str, Piece], parameters: Mapping[str, ParameterSpec], layout: Layout
) -> dict[str, ParameterSpec] | list[Finding]:
    """This rank's shapes, a tied parameter left out, or why the layout is illegal."""
    problems, made = Problems(), dict[str, ParameterSpec]()
    for name, piece in cut.items():
        share = piece.rule.cut(name, piece.shape, piece.parts, layout)
        if isinstance(share, Cut):
            made[name] = ParameterSpec(share.shape, parameters[name].dtype)
        else:
            problems.add(share.code, name, saw=share.saw, rule=share.rule, change=share.change)
    return problems.findings() or made


def legal_sizes(cut: Mapping[str, Piece]) -> list[int]:
    """Sizes of the axis, from 1 on, that divide every parameter."""
    kinds = {(piece.rule, piece.shape, piece.parts) for piece in cut.values()}
    return [
        size
        for size in range(SINGLE.size, MAX_LISTED_SIZE + 1)
        if all(
            isinstance(rule.cut("", shape, parts, Layout(rank=0, size=size)), Cut)
            for rule, shape, parts in kinds
        )
    ]
