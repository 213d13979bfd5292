"""Does what a replay holds fit here? Asked before anything is made: a capsule's sizes are
anybody's, and a machine without memory ends more than the replay."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false

import gc
import os
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from vitrail.cache.spec import stored_as
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine.capsule import Capsule, Setup
from vitrail.engine.placement import Placed, placed
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.interface import Model
from vitrail.models.registry import load_entry

MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
FLOAT32, PENALTY_BYTES = 4, 1 + 4  # the latter of a row and an id of the vocabulary


class Need(NamedTuple):
    """Bytes that a replay holds at once; the least, without what kernels work in. `pages`: on a CPU
    those that the plans name, since no others are touched. `rows`: tables of pages and penalties;
    `images`: those that were encoded before; `logits`: of the step that samples most."""

    weights: int
    pages: int
    rows: int
    images: int
    logits: int


def check_room(capsule: Capsule, config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises `Refused` where the least that it needs is more than what is free. Of a GPU that had
    too little when it failed, to have too little again is the failure."""
    place = placed(config, checkpoint)
    on_gpu = place.device.type == "cuda"
    if on_gpu and capsule.signature.startswith("memory "):
        return
    need, free = need_of(capsule, config, checkpoint, place), free_bytes(place.device)
    if sum(need) <= free:
        return
    parts = ", ".join(f"{name} {size}" for name, size in need._asdict().items())
    raise Refused(
        Finding(
            where="capsule: config and flags",
            saw=f"{sum(need)} bytes ({parts}), where {free} are free",
            rule=f"a replay fits in the memory of the {'GPU' if on_gpu else 'machine'}",
            change="replay it where more is free, or a capsule that was shrunk there (--shrink)",
            code="out_of_memory",
        )
    )


def need_of(capsule: Capsule, config: EngineConfig, checkpoint: Checkpoint, place: Placed) -> Need:
    """From shapes alone: the module is built of them. Raises `Refused` for what no model is."""
    shapes, held = place.shapes, capsule.held
    entry, vocab_size = load_entry(checkpoint.architecture), shapes.model.text.vocab_size
    with torch.device("meta"):
        model: Model = entry.build(shapes.model, shapes.dtype)
    ties = {tie.parameter for tie in entry.weight_map(shapes.model).ties}
    parameters = cast(nn.Module, model).named_parameters()
    token = sum(s.bytes_per_token() for s in stored_as(model.cache_specs(), shapes.kv_dtype))
    named = {page for step in capsule.steps for s in step.plan.rows for page in s.new_pages}
    pages = len(named) * config.page_size * token
    if place.device.type == "cuda":
        pages = config.kv_cache_bytes or pages
    penalised = {s.slot for step in capsule.steps for s in step.setups if _is_penalised(s)}
    sampled = max((len(step.plan.sampled) for step in capsule.steps), default=0)
    row_pages = -(-held.max_model_len // config.page_size)
    return Need(
        weights=sum(p.numel() * p.element_size() for name, p in parameters if name not in ties),
        pages=pages,
        rows=8 * config.max_running * row_pages + PENALTY_BYTES * len(penalised) * vocab_size,
        images=FLOAT32 * shapes.model.text.hidden_size * sum(rows for _, rows in capsule.entries),
        logits=FLOAT32 * vocab_size * sampled,
    )


def _is_penalised(s: Setup) -> bool:
    return (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1, 0, 0)


def free_bytes(device: torch.device) -> int:
    """What may be allocated on `device` now: of a GPU, with what torch keeps of it for itself; of a
    machine, no more than its control group leaves."""
    gc.collect()  # engines of earlier replays
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except OSError:  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, _left_to_group(CGROUPS))


def _left_to_group(root: Path) -> int:
    """Of version 2's limit on the group that a container has as its root; caches of files are
    given back. Without a limit, all there is."""
    try:
        most = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    return (1 << 62) if most == "max" else int(most) - used + int(stat["file"])
