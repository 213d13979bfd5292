"""Writes checkpoints through the map that reads them: a module's weights under published names, or
tiny random ones for tests. Whole parameters only, one process."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Shaped
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from vitrail.config.finding import Refused
from vitrail.weights.headers import INDEX_FILE, SINGLE_FILE
from vitrail.weights.load import draw, initial, torch_dtype
from vitrail.weights.mapping import Match, Names, Piece, WeightMap, filled
from vitrail.weights.plan import ParameterSpec


def write_checkpoint(
    weight_map: WeightMap,
    parameters: Mapping[str, ParameterSpec],
    folder: Path,
    seed: int,
    num_shards: int = 1,
    std: float = 0.02,
    dtype: str | None = None,
) -> None:
    """A random checkpoint that `resolve` and `load` turn into parameters of these specs. Values
    depend on seed and parameter names only. `dtype` is the files'; None: each parameter's own."""
    made: dict[str, Tensor] = {}
    for name, init in initial(weight_map, parameters).items():
        shape, own = parameters[name]
        made[name] = torch.empty(shape, dtype=torch_dtype(dtype or own))
        draw(made[name], name, init, seed, std)
    write_parameters(weight_map, made, folder, num_shards)


def write_parameters(
    weight_map: WeightMap,
    parameters: Mapping[str, Shaped[Tensor, "..."]],
    folder: Path,
    num_shards: int = 1,
) -> None:
    """Store parameters under the checkpoint's names and in its layout, each with its own dtype.
    Tied parameters may be given or not; they are not stored. Writes `model.safetensors`, or
    `num_shards` files and their index, into a folder without weights."""
    tensors = tensors_of(weight_map, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in folder.glob("*.safetensors*"))
    if present:
        raise Refused.because(
            where=folder.name,
            saw=f"it holds {', '.join(present)}",
            rule="a checkpoint is written into a folder without weights",
            change="give another folder or remove them",
        )
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, names in enumerate(_shards(tensors, num_shards), 1):
        file = f"model-{number:05}-of-{num_shards:05}.safetensors"
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
    (folder / INDEX_FILE).write_text(text, encoding="utf-8")


def tensors_of(
    weight_map: WeightMap, parameters: Mapping[str, Shaped[Tensor, "..."]]
) -> dict[str, Tensor]:
    """The checkpoint's tensors that these parameters are made of, by checkpoint name."""
    lookup = Names(weight_map)
    instances: dict[Match, None] = {}
    for name in parameters:
        match = lookup.match_parameter(name)
        if match is not None:
            instances[match] = None
        else:
            assert any(tie.parameter == name for tie in weight_map.ties), f"no row fills {name}"
    tensors: dict[str, Tensor] = {}
    for index, holes in instances:
        row = weight_map.rows[index]
        parameter = parameters[filled(row.parameter, holes)]
        for source in row.sources(tuple(parameter.shape)):
            stored = torch.empty(source.shape, dtype=parameter.dtype)
            viewed = stored.view(source.view or source.shape)
            for piece in source.pieces:
                _store(viewed, piece, parameter)
            tensors[filled(source.checkpoint, holes)] = stored
    return tensors


def _store(stored: Shaped[Tensor, "..."], piece: Piece, parameter: Shaped[Tensor, "..."]) -> None:
    box = stored[tuple(slice(start, stop) for start, stop in piece.source)]
    box = box.permute(piece.order)
    value = parameter[tuple(slice(start, stop) for start, stop in piece.place)]
    box.copy_(value.reshape(box.shape))


def _shards(tensors: Mapping[str, Shaped[Tensor, "..."]], count: int) -> list[list[str]]:
    """Names in order, cut into `count` non-empty runs of about equal bytes."""
    names = list(tensors)
    assert 1 <= count <= len(names), f"{len(names)} tensors do not fill {count} files"
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    shards: list[list[str]] = [[]]
    for position, name in enumerate(names):
        left = count - len(shards)
        full = done * count >= total * len(shards)
        if left and shards[-1] and (full or len(names) - position == left):
            shards.append([])
        shards[-1].append(name)
        done += tensors[name].nbytes
    return shards
