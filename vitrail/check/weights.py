"""A checkpoint's tensors against a model's parameters: the `LoadPlan` of one rank, or why there is
none. Start-up loads by it; `check` reads it. Headers only; no torch."""

from collections.abc import Mapping

from vitrail.config.finding import Finding
from vitrail.config.model import ModelConfig
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.registry import find, load_entry, load_gguf_entry
from vitrail.weights import headers
from vitrail.weights.headers import NOWHERE, Elsewhere, Headers
from vitrail.weights.mapping import WeightMap
from vitrail.weights.plan import LoadPlan, ParameterSpec, resolve


def read_headers(checkpoint: Checkpoint, elsewhere: Elsewhere = NOWHERE) -> Headers | list[Finding]:
    """Of every tensor, in a folder, its sub-folders or a GGUF file; `elsewhere`: of files that a
    hub has and the folder has not."""
    if checkpoint.gguf is not None:
        return checkpoint.gguf.headers
    folders = find(checkpoint.architecture).folders
    return headers.read(checkpoint.folder, folders, elsewhere)


def map_of(checkpoint: Checkpoint, config: ModelConfig) -> WeightMap:
    """The names that this kind of checkpoint uses."""
    if checkpoint.gguf is None:
        return load_entry(checkpoint.architecture).weight_map(config)
    return load_gguf_entry(checkpoint.architecture).gguf_map(config)


def plan_load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    parameters: Mapping[str, ParameterSpec],
    found: Headers | list[Finding],
) -> LoadPlan | list[Finding]:
    """`found`: of `read_headers`; `parameters`: of the whole model."""
    if isinstance(found, list):
        return found
    return resolve(map_of(checkpoint, config), found, parameters)
