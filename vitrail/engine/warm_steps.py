"""Kernels of a decode step's operations, compiled by processes of their own while an engine's own
process is busy with its tower and its weights. Each builds the model with as few layers as have one
of each kind, and runs some sizes of the ladder of decode graphs; Triton keeps what it compiled on
disk, where the engine finds it when it captures. They decide nothing: one that fails costs time."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import cast

import torch
from torch import Tensor, nn

from vitrail.attention.plan import PlanLimits, make_table
from vitrail.attention.shape import Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.check.fixed import model_of
from vitrail.check.sizes import graph_sizes, stored_specs
from vitrail.check.steps import shortened
from vitrail.config.engine import EngineConfig
from vitrail.config.model import DType, ModelConfig
from vitrail.engine.ahead import Steps
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.floors import Shapes
from vitrail.engine.graphs import DecodeGraphs, Graph, GraphParts
from vitrail.engine.parcel import Door
from vitrail.engine.placement import placed
from vitrail.engine.sampler import Sampler
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.registry import load_entry
from vitrail.weights import load

MOST_PROCESSES = 8
MEMORY_SHARE = 0.3  # of what the weights, which load meanwhile, leave of a GPU: for all of them
CONTEXT_BYTES = 2 << 30  # of each, beside its weights


def missing_steps(config: EngineConfig, checkpoint: Checkpoint) -> tuple[str | None, list[Steps]]:
    """What to `note` when all is compiled, None where nothing is missing (on a CPU, or where an
    earlier start noted it); and parts for as many processes as the machine has room for."""
    shapes, hardware, device = placed(config, checkpoint)
    sizes = graph_sizes(config, device.type == "cpu")
    if not sizes:
        return None, []
    from vitrail.attention.backends.kept import noted  # Triton's disk, which a CPU has not

    name = f"decode steps {sizes} {shapes} {config.page_size} {config.deterministic}"
    if noted(name):
        return None, []
    build = load_entry(checkpoint.architecture).build
    with torch.device("meta"):
        models = [build(shapes.model, shapes.dtype), build(*_small(shapes))]
    whole, small = (
        sum(p.numel() * p.element_size() for p in cast(nn.Module, m).parameters()) for m in models
    )
    room = max(0, int(MEMORY_SHARE * (hardware.hbm_bytes - whole) // (CONTEXT_BYTES + small)))
    most = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, room, len(sizes))
    fields = asdict(config)
    parts = [Steps(config=fields, sizes=sizes[n::most]) for n in range(most if most > 1 else 0)]
    return name, parts


def note_steps(name: str) -> None:
    """All of `name` is compiled now, by whomever: the next start needs no processes for it."""
    from vitrail.attention.backends.kept import note

    note(name)


def _small(shapes: Shapes) -> tuple[ModelConfig, DType]:
    return shortened(shapes.model), shapes.dtype


@torch.inference_mode()
def run_steps(config: EngineConfig, checkpoint: Checkpoint, sizes: Sequence[int]) -> None:
    """A decode step of each size, with random weights and one key a row, whose attention is the
    reference's: nothing of it is compiled. Raises whatever a kernel's compiler raises."""
    shapes, hardware, device = placed(config, checkpoint)
    entry = load_entry(checkpoint.architecture)
    small, dtype = _small(shapes)
    model = model_of(config, entry, small, dtype, device)
    load.randomize(entry.weight_map(small), cast(nn.Module, model), device, config.seed)
    limits = PlanLimits(
        dtype=dtype,
        page_size=config.page_size,
        max_batch=max(sizes),
        max_q_len=1,
        max_kv_len=1,
        kv_dtype=None if shapes.kv_dtype == dtype else shapes.kv_dtype,
    )
    sites = [(site, phase) for site, phase in model.text_sites() if phase is Phase.DECODE]
    plans = make_table(sites, limits, hardware, "reference", {})
    door = Door(device)
    builder = BatchBuilder(
        max_running=max(sizes), max_pages=1, page_size=config.page_size, device=device, sites=sites
    )
    parts = GraphParts(
        model=model,
        pool=KvPool(
            stored_specs(config, model.cache_specs()), max(sizes) + 1, config.page_size, device
        ),
        plans=plans,
        builder=builder,
        sampler=Sampler(max(sizes), small.text.vocab_size, [], device),
        scratch_page=max(sizes),
        max_len=1,
    )
    DecodeGraphs(parts, sizes, device).capture(door, _run)


class _Nothing:
    """What was run and not recorded."""

    def replay(self) -> None:
        raise AssertionError("nothing was recorded")


def _run(step: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
    return _Nothing(), step()
