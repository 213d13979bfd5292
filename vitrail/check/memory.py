"""Memory of one rank: weights, encoding, what the forward pass works in, and the pages that are
left, in the terms in which start-up counts. A prediction: start-up measures the same."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from vitrail.attention.plan import make_table
from vitrail.check.checks import Share
from vitrail.check.encoder_peak import encoder_peak, product_bytes, tower_graph_bytes
from vitrail.check.report import Row, gib
from vitrail.check.sizes import (
    CONTEXT_BYTES,
    CPU_KV_BYTES,
    WORKSPACE_BYTES,
    Sizes,
    graph_bytes,
    graph_sizes,
    image_limits,
    plan_sizes,
    predicted_left,
    stored_specs,
)
from vitrail.check.subject import Subject
from vitrail.config.finding import Finding, Refused
from vitrail.config.model import VisionConfig
from vitrail.models.interface import ImageModel
from vitrail.vision.rungs import rungs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank. `left`: for pages where the user does not say; may be below 0."""

    total: int = 0
    context: int = 0
    weights: int
    encoder_peak: int = 0
    encoder_cache: int
    graphs: int = 0
    tower_graphs: int = 0
    workspace: int = 0
    kept: int = 0
    left: int


def predict(subject: Subject, share: Share) -> Memory:
    """Of a GPU as its data sheet has it; of a CPU, whose memory nobody asks for, the default."""
    config, total = subject.choices, subject.gpu.hbm_bytes
    weights = share.bytes
    if not subject.gpu.cc:
        return Memory(weights=weights, encoder_cache=config.encoder_cache_bytes, left=CPU_KV_BYTES)
    peak, kept, vision, text = 0, 0, subject.config.vision, subject.config.text
    refused = isinstance(image_limits(vision, subject.dtype, subject.patches), list)
    if vision is not None and not refused:  # what is refused, the attention's row says
        largest = None if subject.processor is None else subject.processor.max_patches
        peak = encoder_peak(
            vision,
            text.hidden_size,
            subject.dtype,
            subject.patches,
            largest,
        ) + product_bytes(subject.gpu.cc)
        if config.cuda_graphs != 0:
            rungs = _tower_rungs(subject, share, vision, largest)
            kept = tower_graph_bytes(vision, subject.dtype, rungs)
    return Memory(
        total=total,
        context=CONTEXT_BYTES,
        weights=weights,
        encoder_peak=peak,
        encoder_cache=config.encoder_cache_bytes,
        graphs=graph_bytes(graph_sizes(config, on_cpu=False), text.vocab_size),
        tower_graphs=kept,
        workspace=WORKSPACE_BYTES,
        kept=total - int(total * config.memory_fraction),
        left=predicted_left(config, text, total, (weights, kept), peak),
    )


def _tower_rungs(
    subject: Subject, share: Share, vision: VisionConfig, largest: int | None
) -> list[int]:
    """Patches of each graph that start-up would capture; none where attention has no plan."""
    model = subject.model
    limits = image_limits(vision, subject.dtype, subject.patches)
    if not isinstance(model, ImageModel) or isinstance(limits, list):
        return []
    sites = [(share.image_site(site), phase) for site, phase in model.image_sites()]
    prefer, installed = subject.choices.attention, subject.question.installed
    try:
        plans = make_table(sites, limits, subject.gpu, prefer, installed)
    except Refused:  # the attention's row says why
        return []
    return rungs_of(vision, subject.patches, largest, sites, plans)


def sizes_of(subject: Subject, share: Share, memory: Memory) -> Sizes | list[Finding]:
    """What start-up would plan from this memory."""
    specs = stored_specs(subject.choices, share.specs())
    text = subject.config.text
    made = plan_sizes(subject.choices, text, specs, subject.patches, memory.left)
    asked = subject.choices.kv_cache_bytes
    if isinstance(made, list) or asked is None or not memory.total:
        return made
    room = memory.left + memory.kept + memory.workspace
    if asked <= room:
        return made
    return [
        Finding(
            where="kv_cache_bytes",
            saw=f"{asked} bytes where at most {max(0, room)} are left: {asked - room} too many",
            rule=f"weights, encoder and cache fit in the GPU's {memory.total} bytes",
            change=f"pass --kv-cache-bytes {max(1, memory.left)} or leave it out",
            code="out_of_memory",
        )
    ]


def memory_row(subject: Subject, share: Share, memory: Memory, sizes: Sizes | list[Finding]) -> Row:
    """Where the bytes go, and how many tokens and requests fit."""
    name = f"memory tp={share.size}"
    details = _lines(subject, share, memory)
    findings: Sequence[Finding] = sizes if isinstance(sizes, list) else sizes.warnings
    facts: dict[str, int] = asdict(memory)
    if isinstance(sizes, Sizes):
        cache = sizes.cache
        details.append(
            f"KV cache {gib(cache.total_bytes)}: {cache.num_tokens:,} tokens in {cache.num_pages:,}"
            f" pages of {cache.page_size}, {cache.full_requests} requests of "
            f"{sizes.max_model_len:,} tokens at once"
        )
        facts |= {
            "kv_bytes": cache.total_bytes,
            "kv_tokens": cache.num_tokens,
            "kv_pages": cache.num_pages,
            "max_model_len": sizes.max_model_len,
            "full_requests": cache.full_requests,
        }
    return Row(name=name, details=tuple(details), findings=tuple(findings), facts=facts)


def _lines(subject: Subject, share: Share, memory: Memory) -> list[str]:
    if not memory.total:
        return [f"weights {gib(memory.weights)}; pages on a CPU as the user says, or 1 GiB"]
    fraction = subject.choices.memory_fraction
    lines = [
        f"{gib(memory.total)} on {subject.gpu.name}; weights {gib(memory.weights)}, driver "
        f"{gib(memory.context)}, forward pass {gib(memory.workspace)}, decode graphs "
        f"{gib(memory.graphs)}, not used "
        f"{gib(memory.kept)} (--memory-fraction {fraction})"
    ]
    if subject.config.vision is not None:
        bound = (
            " (of all heads: no more than that)" if share.tower == "cut" and share.size > 1 else ""
        )
        lines.append(
            f"encoder {gib(memory.encoder_peak)} at {subject.patches:,} patches a step{bound}, "
            f"its graphs {gib(memory.tower_graphs)}, its cache {gib(memory.encoder_cache)}"
        )
    lines.append(f"left for pages {gib(memory.left)}")
    return lines


class Seen(NamedTuple):
    """What running the tower on no device showed: of its memory, and of its path."""

    memory: list[Finding]
    path: list[Finding]


def image_findings(subject: Subject) -> Seen:
    """Of the whole tower, however it is shared out. Nothing where its attention has no plan: that
    is another row's."""
    vision, model = subject.config.vision, subject.model
    limits = image_limits(vision, subject.dtype, subject.patches)
    if vision is None or not isinstance(model, ImageModel) or isinstance(limits, list):
        return Seen([], [])
    try:
        table = make_table(model.image_sites(), limits, subject.gpu, None)
    except Refused:
        return Seen([], [])
    from vitrail.check.trace import growth_findings, image_path_findings, unread_findings

    found, read = image_path_findings(model, table, vision)
    if found:
        return Seen([], found)
    growth = growth_findings(model, table, vision, subject.patches)
    return Seen(growth, unread_findings(subject.module, read))
