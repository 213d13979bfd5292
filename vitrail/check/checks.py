"""The rows about files, weights and kernels: configuration, tensors, parallel layout, attention.
What each of them asks is asked by start-up too, of the same functions."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

import torch

from vitrail.attention.plan import AttentionPlan, PlanLimits, PlanTable, make_table
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.spec import LatentKv, LayerSpec, PagedKv
from vitrail.check.compiled import prove, prove_steps
from vitrail.check.fixed import attention_of, model_of, text_sites_of
from vitrail.check.report import Row, gib
from vitrail.check.sizes import graph_findings, graph_sizes, image_limits, text_limits
from vitrail.check.steps import shortened, step_launches
from vitrail.check.subject import Subject
from vitrail.check.weights import map_of, plan_load
from vitrail.config.finding import Finding, Refused, errors
from vitrail.config.model import ITEM_BYTES, TextConfig
from vitrail.models.bookkeeping import GENERATION, TRAINING, TRANSFORMERS
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.interface import ImageModel
from vitrail.weights.headers import Headers
from vitrail.weights.layout import Piece, cut_parameters, legal_sizes, pieces
from vitrail.weights.mapping import numel
from vitrail.weights.plan import ParameterSpec
from vitrail.weights.problems import labels
from vitrail.weights.sharding import Layout

# What `vitrail serve` takes today.
SERVED_SIZE = 1


def config_row(checkpoint: Checkpoint, findings: Iterable[Finding]) -> Row:
    """`findings`: of the strict reading, by more than one reader; each is said once, as is what is
    ignored on purpose."""
    known = {*TRANSFORMERS, *TRAINING, *GENERATION}
    ignored = sorted(k for k in {*checkpoint.config, *checkpoint.generation} if k in known)
    found, details = tuple(dict.fromkeys(findings)), [checkpoint.architecture]
    if not errors(found):
        details = [f"{details[0]}: every key is read, asserted or ignored on purpose"]
    if ignored:
        details.append(f"ignored: {', '.join(ignored)}")
    return Row(
        name="config",
        details=tuple(details),
        findings=found,
        facts={"architecture": checkpoint.architecture, "ignored": ignored},
    )


def weights_row(subject: Subject, found: Headers | list[Finding]) -> Row:
    """Every tensor against every parameter."""
    if subject.choices.weights == "random":
        return Row(name="weights", details=("random weights: no file is read",))
    made = plan_load(subject.checkpoint, subject.config, subject.parameters, found)
    if isinstance(made, list):
        return Row(name="weights", findings=tuple(made))
    assert not isinstance(found, list)
    tensors = found.tensors.values()
    num_bytes = sum(t.stop - t.start for t in tensors)
    kinds = Counter(t.dtype for t in tensors)
    files = len({t.file for t in tensors})
    spelled = ", ".join(f"{count} {dtype}" for dtype, count in kinds.most_common())
    details = [f"{len(tensors)} tensors ({spelled}) in {files} files, {gib(num_bytes)}"]
    details.append(f"fill {len(made.parameters)} parameters of {subject.dtype}")
    if made.ignored:
        details.append(f"{len(made.ignored)} tensors ignored on purpose")
    return Row(
        name="weights",
        details=tuple(details),
        findings=made.warnings,
        facts={
            "tensors": len(tensors),
            "files": files,
            "bytes": num_bytes,
            "read_bytes": made.read_bytes,
            "ignored": list(made.ignored[:100]),
            "dtypes": dict(kinds),
        },
    )


def parameter_bytes(parameters: Mapping[str, ParameterSpec]) -> int:
    """Of a rank's parameters."""
    return sum(numel(p.shape) * ITEM_BYTES[_kept(p.dtype)] for p in parameters.values())


def _kept(dtype: str):
    assert dtype in ("float32", "bfloat16", "float16"), dtype
    return dtype


class Share:
    """A rank's part of the model on an axis of `size`: `parameters` are its shapes, a tied one left
    out. `tower`: "whole" where every rank holds the picture path and encodes pictures of its own,
    "cut" where its heads are shared out, "none"."""

    def __init__(self, subject: Subject, size: int):
        self.size, self.subject = size, subject
        weight_map = map_of(subject.checkpoint, subject.config)
        cut = pieces(weight_map, subject.parameters)
        layout = Layout(rank=0, size=size)
        self.tower = "none"
        if subject.config.vision is not None:
            tower = {name: piece for name, piece in cut.items() if is_tower(name)}
            divides = not isinstance(cut_parameters(tower, subject.parameters, layout), list)
            self.tower = "cut" if divides else "whole"
        if self.tower == "whole":
            cut = pieces(weight_map, subject.parameters, whole=is_tower)
        made = cut_parameters(cut, subject.parameters, layout)
        self.findings = made if isinstance(made, list) else []
        self.parameters = {} if isinstance(made, list) else made
        self.pieces: Mapping[str, Piece] = cut

    @property
    def bytes(self) -> int:
        return parameter_bytes(self.parameters)

    def copies(self) -> tuple[int, list[str]]:
        """Bytes that all ranks together hold beyond one of each, and of which parameters, the
        largest first; a part of one may be cut (heads beside a latent)."""
        once = {name: self.subject.parameters[name] for name in self.parameters}
        several = ((n, self.size * numel(p.shape)) for n, p in self.parameters.items())
        names = [name for name, count in several if count > numel(once[name].shape)]
        names.sort(key=lambda name: -numel(self.parameters[name].shape))
        return self.size * self.bytes - parameter_bytes(once), names

    def specs(self) -> list[LayerSpec]:
        """What a rank's layers keep a token: its heads, or the one latent row of all heads."""
        return [_spec(spec, self.size) for spec in self.subject.model.cache_specs()]

    def site(self, site: AttentionSite) -> AttentionSite:
        """A text site as a rank has it."""
        return replace(
            site,
            num_q_heads=site.num_q_heads // self.size,
            num_kv_heads=max(1, site.num_kv_heads // self.size),
        )

    def image_site(self, site: AttentionSite) -> AttentionSite:
        return self.site(site) if self.tower == "cut" else site


def is_tower(name: str) -> bool:
    """Whether a parameter of a model with a tower is of its picture path."""
    return not name.startswith("decoder.")


def _spec(spec: LayerSpec, size: int) -> LayerSpec:
    match spec:
        case PagedKv():
            return replace(spec, num_kv_heads=max(1, spec.num_kv_heads // size))
        case LatentKv():
            return spec


def layout_row(subject: Subject, share: Share) -> Row:
    """What divides over the axis, what every rank holds, how the tower runs."""
    text, size = subject.config.text, share.size
    name = f"layout tp={size}"
    if share.findings:
        legal = legal_sizes(share.pieces)
        return Row(
            name=name,
            findings=(_not_dividing(text, size, legal), *share.findings),
            facts={"size": size, "divides": False, "legal_sizes": legal},
        )
    copied, shared = share.copies()
    details = [f"{gib(share.bytes)} of weights a rank"]
    if size > 1:
        details.append(_cut_alike(text, size))
        details.append(f"{gib(copied)} over all ranks are copies: of {_grouped(shared)}")
    if size > text.num_kv_heads and text.mla is None:
        copies = size // text.num_kv_heads
        details.append(f"{text.num_kv_heads} key heads over {size} ranks: {copies} hold each")
    if text.mla is not None and size > 1:
        details.append("the latent cache is one row for all heads: every rank holds all of it")
    if subject.config.vision is not None and size > 1:
        heads = subject.config.vision.num_heads
        details.append(
            f"vision tower cut: {heads // size} of {heads} heads a rank"
            if share.tower == "cut"
            else f"vision tower whole on every rank ({heads} heads do not divide): pictures are "
            "shared out, not heads"
        )
    return Row(
        name=name,
        details=tuple(details),
        findings=() if size == SERVED_SIZE else (_not_served(size),),
        facts={
            "size": size,
            "divides": True,
            "weight_bytes": share.bytes,
            "copied_bytes": copied,
            "tower": share.tower,
        },
    )


def _cut_alike(text: TextConfig, size: int) -> str:
    """What every rank has an equal part of. The axis divides all of it."""
    parts = [(text.num_heads, "heads"), (text.vocab_size, "rows of the vocabulary")]
    if text.moe is not None:
        experts = text.moe.num_experts + text.moe.num_shared
        width = text.moe.intermediate_size
        parts.append((width, f"channels of each of {experts} experts"))
    return "a rank has " + ", ".join(f"{n // size:,} of {n:,} {what}" for n, what in parts)


def _not_served(size: int) -> Finding:
    """An error, and so exit code 1: that this does not run is known. What it would hold is in the
    other rows."""
    return Finding(
        where="tp",
        saw=f"{size} ranks, whose layout divides",
        rule=f"`vitrail serve` runs on {SERVED_SIZE} GPU today",
        change=f"serve with {SERVED_SIZE}; the rows of this size say what each rank would hold",
        code="one_gpu",
    )


def _not_dividing(text: TextConfig, size: int, legal: list[int]) -> Finding:
    return Finding(
        where="tp",
        saw=f"{size} ranks for {text.num_heads} heads, {text.num_kv_heads} key heads",
        rule="every part of the decoder divides over the ranks",
        change=f"pass --tp {' or '.join(map(str, legal))}",
        code="illegal_sharding",
    )


def _grouped(names: list[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault("".join("#" if c.isdigit() else c for c in name), []).append(name)
    shown = [labels(group) for group in list(kinds.values())[:6]]
    return ", ".join(shown) + (f" and {len(kinds) - 6} more" if len(kinds) > 6 else "")


def attention_tables(
    subject: Subject, share: Share, max_model_len: int
) -> tuple[PlanTable | None, PlanTable] | list[Finding]:
    """Of pictures (None without a tower) and of text, as start-up makes them."""
    question, found = subject.question, list[Finding]()
    tables: list[PlanTable | None] = [None, None]
    jobs: list[tuple[int, list[tuple[AttentionSite, Phase]], PlanLimits]] = []
    if isinstance(subject.model, ImageModel):
        fixed = subject.choices.deterministic
        limits = image_limits(subject.config.vision, subject.dtype, subject.patches, fixed)
        if isinstance(limits, list):
            found += limits
        else:
            sites = [(share.image_site(s), p) for s, p in subject.model.image_sites()]
            jobs.append((0, sites, limits))
    choices, on_cpu = subject.choices, not subject.gpu.cc
    declared = text_sites_of(choices, subject.model, on_cpu)
    sites = [(share.site(s), p) for s, p in declared]
    jobs.append((1, sites, text_limits(choices, subject.dtype, max_model_len, on_cpu)))
    prefer = attention_of(choices, subject.gpu)
    for number, sites, limits in jobs:
        try:
            tables[number] = make_table(sites, limits, subject.gpu, prefer, question.installed)
        except Refused as refused:
            found += refused.findings
    text = tables[1]
    return found if found or text is None else (tables[0], text)


def attention_row(
    subject: Subject, share: Share, tables: tuple[PlanTable | None, PlanTable] | list[Finding]
) -> Row:
    """The plan of every layer and phase, and why it is not the device's best."""
    name = f"attention tp={share.size}"
    if isinstance(tables, list):
        return Row(name=name, findings=tuple(tables))
    made = [plan for table in tables if table is not None for plan in table]
    warnings = [w for table in tables if table is not None for w in table.warnings]
    found = [*_window_findings(subject, tables[1]), *_graph_findings(subject, tables[1])]
    details = [*_layers(subject.config.text), *_spelled(made)]
    unknown = None
    if subject.question.compile:
        proof = prove(made, subject.gpu, subject.question.cache)
        details += proof.lines
        found += proof.findings
        unknown = proof.unknown
    return Row(
        name=name,
        details=tuple(details),
        findings=(*found, *warnings),
        facts={"plans": [_facts(plan) for plan in _distinct(made)]},
        unknown=unknown,
    )


def kernels_row(
    subject: Subject, tables: tuple[PlanTable | None, PlanTable], max_model_len: int
) -> Row:
    """Every kernel beside attention that a step can launch, compiled for the GPU."""
    if not subject.gpu.cc:
        return Row(name="kernels", details=("nothing to compile",))
    small = shortened(subject.config)
    device = torch.device("cuda")
    model = model_of(subject.choices, subject.entry, small, subject.dtype, device)
    try:
        launches = step_launches(model, small, subject.choices, tables, max_model_len, subject.gpu)
    except Exception as error:  # noqa: BLE001  whatever a model raises is the finding
        return Row(name="kernels", findings=(_no_step(error),))
    proof = prove_steps(launches, subject.gpu, subject.question.cache)
    return Row(
        name="kernels",
        details=proof.lines,
        findings=proof.findings,
        facts={"kernels": [asdict(taken) for taken in proof.taken]},
        unknown=proof.unknown,
    )


def _no_step(error: Exception) -> Finding:
    return Finding(
        where="a step on no device",
        saw=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        rule="steps of every size run",
        change="report this model: its layers and its plans do not agree",
        code="step_failed",
    )


def _graph_findings(subject: Subject, text: PlanTable) -> list[Finding]:
    """Decodes that no CUDA graph holds: an error where graphs were asked for, as at start-up."""
    config = subject.choices
    if not graph_sizes(config, on_cpu=not subject.gpu.cc):
        return []
    found = graph_findings(p for p in text if p.shape.phase is Phase.DECODE)
    asked = config.cuda_graphs is not None
    return found if asked else [replace(f, severity="warning") for f in found]


def _window_findings(subject: Subject, text: PlanTable) -> list[Finding]:
    """A layer whose window no plan has would see other keys than its configuration says."""
    gqa = subject.config.text.gqa
    if gqa is None:
        return []
    planned = {(p.shape.site.window, p.shape.phase) for p in text}
    return [
        Finding(
            where=f"layers {_runs([i for i, w in enumerate(gqa.windows) if w == window])}",
            saw=f"no {phase} plan with a window of {window} keys",
            rule="each layer is planned with the window that config.json gives it",
            change="declare the layer's site in the model's text_sites",
            code="unplanned_window",
        )
        for window in dict.fromkeys(gqa.windows)
        for phase in dict.fromkeys(p.shape.phase for p in text)
        if (window, phase) not in planned
    ]


def _layers(text: TextConfig) -> list[str]:
    """Which layers see how much."""
    if text.mla is not None:
        return [f"layers 0-{text.num_layers - 1}: latent, {text.num_heads} heads, all keys"]
    assert text.gqa is not None
    lines: list[str] = []
    for window in dict.fromkeys(text.gqa.windows):
        layers = [i for i, w in enumerate(text.gqa.windows) if w == window]
        keys = "all keys" if window is None else f"its own and {window} keys before"
        heads = f"{text.num_heads} heads on {text.num_kv_heads} of {text.head_dim}"
        lines.append(f"layers {_runs(layers)}: {heads}, {keys}")
    return lines


def _runs(layers: list[int]) -> str:
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _distinct(plans: Iterable[AttentionPlan]) -> list[AttentionPlan]:
    """One of each kernel: buckets that run alike are one."""
    found: dict[object, AttentionPlan] = {}
    for p in plans:
        key = (p.shape.site, p.shape.phase, p.backend, p.kernel, p.tile_m, p.tile_n, p.num_stages)
        found.setdefault(key, p)
    return list(found.values())


def _spelled(plans: Iterable[AttentionPlan]) -> list[str]:
    lines: list[str] = []
    for p in _distinct(plans):
        site, taken = p.shape.site, ""
        if p.backend != "reference":
            taken = f", {p.num_warps} warps, {gib(p.smem_bytes)} shared, {p.registers} registers"
        window = "" if site.window is None else f" in windows of {site.window}"
        lines.append(
            f"{p.shape.phase}{window}: {p.backend} {p.kernel}, heads {site.num_q_heads}/"
            f"{site.num_kv_heads} of {site.head_dim}/{site.head_dim_v}, tile {p.tile_m} x "
            f"{p.tile_n}{taken}"
        )
    return lines


def _facts(p: AttentionPlan) -> dict[str, str | int | None]:
    site = p.shape.site
    return {
        "phase": str(p.shape.phase),
        "backend": p.backend,
        "kernel": p.kernel,
        "q_heads": site.num_q_heads,
        "kv_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "head_dim_v": site.head_dim_v,
        "window": site.window,
        "tile_m": p.tile_m,
        "tile_n": p.tile_n,
        "warps": p.num_warps,
        "stages": p.num_stages,
        "smem_bytes": p.smem_bytes,
        "registers": p.registers,
        "max_splits": p.max_splits,
    }
