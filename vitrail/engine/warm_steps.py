"""Kernels of a decode step's operations, compiled by processes of their own while an engine's own
process is busy with its tower and its weights. Each builds the model with as few layers as have one
of each kind, and runs some sizes of the ladder of decode graphs; Triton keeps what it compiled on
disk, where the engine finds it when it captures. They decide nothing: one that fails costs time."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import cast

import msgspec
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
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.floors import Shapes
from vitrail.engine.graphs import DecodeGraphs, Graph, GraphParts
from vitrail.engine.parcel import Door
from vitrail.engine.placement import placed
from vitrail.engine.sampler import Sampler
from vitrail.models.checkpoint import Checkpoint, open_checkpoint
from vitrail.models.registry import load_entry
from vitrail.weights import load

log = logging.getLogger("vitrail.engine")
MOST_PROCESSES = 8
MEMORY_SHARE = 0.3  # of a GPU, for all of them together
CONTEXT_BYTES = 2 << 30  # of each, beside its weights
LIMIT_SECONDS = 60.0


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """To a process: `EngineConfig`'s fields, and the batch sizes that it runs."""

    config: dict[str, str | int | float | bool | None]
    sizes: list[int]


class Ahead:
    """The processes at work, which end with the block that began them where that raises: a start
    that is refused leaves none behind. `name`: of what they compile, None where there is
    nothing."""

    def __init__(self, name: str | None = None, running: Sequence[subprocess.Popen[bytes]] = ()):
        self._name, self._running = name, list(running)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()

    def add(self, more: Sequence[subprocess.Popen[bytes]]) -> None:
        """Others, to be waited for as well."""
        self._running += more

    def finish(self, seconds: float = LIMIT_SECONDS) -> None:
        """Wait for them, so that the device's memory is the engine's alone; end those that take too
        long."""
        until = time.monotonic() + seconds
        for process in self._running:
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                log.warning(
                    "kernels are compiled by the engine: a process for them ended (%d)", code
                )

    def note(self) -> None:
        """All that they were for is compiled now, by whomever: the next start needs none."""
        if self._name is not None:
            from vitrail.attention.backends.kept import note

            note(self._name)


def begin(config: EngineConfig, checkpoint: Checkpoint) -> Ahead:
    """Start as many as the machine has room for: none on a CPU, where two would not fit, or where
    an earlier start has noted that nothing is missing."""
    shapes, hardware, device = placed(config, checkpoint)
    sizes = graph_sizes(config, device.type == "cpu")
    if not sizes:
        return Ahead()
    from vitrail.attention.backends.kept import noted  # Triton's disk, which a CPU has not

    name = f"decode steps {sizes} {shapes} {config.page_size} {config.deterministic}"
    if noted(name):
        return Ahead()
    with torch.device("meta"):
        model = cast(nn.Module, load_entry(checkpoint.architecture).build(*_small(shapes)))
    each = CONTEXT_BYTES + sum(p.numel() * p.element_size() for p in model.parameters())
    room = int(MEMORY_SHARE * hardware.hbm_bytes // each)
    most = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, room, len(sizes))
    if most < 2:
        return Ahead(name)
    return Ahead(name, [_start(config, sizes[number::most]) for number in range(most)])


def _start(config: EngineConfig, sizes: list[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vitrail.engine.warm_steps"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None, "asked for"
    # one that has ended already is told of when it is waited for
    with suppress(BrokenPipeError), process.stdin as asked:
        asked.write(msgspec.json.encode(Steps(config=asdict(config), sizes=sizes)))
    return process


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


def main() -> None:
    steps = msgspec.json.decode(sys.stdin.buffer.read(), type=Steps)
    config = EngineConfig(**steps.config)  # pyright: ignore[reportArgumentType]
    run_steps(config, open_checkpoint(config.model, config.revision), steps.sizes)


if __name__ == "__main__":
    main()
