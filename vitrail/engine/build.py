"""From an `EngineConfig` to a running `Engine`: every plan is made and accepted here, before the
first request; then weights are loaded, the encoder's peak is measured and the KV pool is sized
after it."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from vitrail.attention.installed import releases
from vitrail.attention.plan import AttentionPlan, PlanTable, make_table
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.attention.warm import missing, prepare, warm
from vitrail.cache.encoder import EncoderCache
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.manager import Manager
from vitrail.check.encoder_peak import encoder_peak, product_bytes, tower_graph_bytes
from vitrail.check.fixed import attention_of, model_of
from vitrail.check.sizes import (
    CPU_KV_BYTES,
    Sizes,
    encoder_budget,
    graph_sizes,
    image_limits,
    kv_bytes,
    masked_ids,
    plan_sizes,
    predicted_left,
    served_dtype,
    step_tokens,
    stored_specs,
    text_limits,
)
from vitrail.check.weights import plan_load, read_headers
from vitrail.config.engine import EngineConfig, validate
from vitrail.config.finding import Refused, accept, errors
from vitrail.config.hardware import Hardware
from vitrail.config.model import ITEM_BYTES, DType, ModelConfig, VisionConfig
from vitrail.engine.ahead import Ahead
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.deterministic import computed_as_asked
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.encode_graphs import EncodeGraphs
from vitrail.engine.engine import Engine
from vitrail.engine.graphs import GraphParts, capture_graphs
from vitrail.engine.graphs import Recorder as GraphRecorder
from vitrail.engine.measure import run_worst_steps
from vitrail.engine.parcel import Door
from vitrail.engine.placement import device_of, hardware_of, video_frames_of
from vitrail.engine.policy import PATCHES_BESIDE, SchedulerLimits
from vitrail.engine.prepare import ServingFacts
from vitrail.engine.recorder import Recorder, facts_of, watched_start
from vitrail.engine.runner import Runner, RunnerParts
from vitrail.engine.sampler import Sampler
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.side import SideStream
from vitrail.engine.warm_steps import missing_steps, note_steps
from vitrail.layers.linear import torch_dtype
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.interface import ImageModel, Model, ModelEntry
from vitrail.models.registry import load_entry
from vitrail.vision.preprocess import ImageProcessor
from vitrail.vision.rungs import rungs_of
from vitrail.weights import load

log = logging.getLogger("vitrail.engine")


class Built(NamedTuple):
    """A ready engine and what a frontend must know of it."""

    engine: Engine
    facts: ServingFacts


class Peak(NamedTuple):
    """Bytes of the worst step of encoding."""

    measured: int
    predicted: int


class _Stages:
    """Seconds of each stage of a start-up, in order."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._took: list[str] = []

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self._took.append(f"{name} {now - self._last:.1f}")
        log.debug("%s: %.2f s", name, now - self._last)
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._began:.1f} s ({', '.join(self._took)})"


def build_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    processor: ImageProcessor | None,
    progress: load.Progress | None = None,
    ahead: Ahead | None = None,
    capsules: Path | None = None,
) -> Built:
    """Raises `Refused` with every finding of the first stage that has any: choices, config.json,
    weights (headers), attention plans, cache size. Weights are read after all but the last.
    `ahead`: compilers that have begun already; they end here. `capsules`: the folder for capsules
    of what fails, here and in steps."""
    with watched_start(capsules, config, checkpoint):
        if found := errors(validate(config)):
            raise Refused(found)
        return _build(config, checkpoint, processor, progress, ahead, capsules)


def _build(
    config: EngineConfig,
    checkpoint: Checkpoint,
    processor: ImageProcessor | None,
    progress: load.Progress | None,
    ahead: Ahead | None,
    capsules: Path | None,
) -> Built:
    stages = _Stages()
    device = device_of(config)
    hardware, entry = hardware_of(device), load_entry(checkpoint.architecture)
    model_config = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype, vision = served_dtype(config, model_config, device.type == "cpu"), model_config.vision
    frames = video_frames_of(config, model_config)
    model = model_of(config, entry, model_config, dtype, device)
    patches = encoder_budget(config, model_config, processor, hardware)
    tower_plans = image_plans(config, model, vision, dtype, patches, hardware)
    guess = _text_plans_ahead(config, model_config, model, dtype, hardware)
    steps_name, steps = missing_steps(config, checkpoint)
    with ahead or Ahead.begin(config) as ahead:
        ahead.ask(missing([*tower_plans, *guess], hardware), steps)
        stages.done("plans")
        load_weights(config, entry, model_config, model, checkpoint, device, progress)
        model = computed_as_asked(config, model, vision, device)
        stages.done("weights")
        prepare(tower_plans)
        ahead.finish_kernels()
        ready(tower_plans, hardware)
        stages.done("kernels of the tower")
        largest = None if processor is None else processor.max_patches
        graphs = capture_tower(config, model, tower_plans, vision, (patches, largest), device)
        stages.done("graphs of the tower")
        side = SideStream(device)
        peak = _measure_encoder(model, tower_plans, model_config, dtype, patches, largest, side)
        ahead.finish()
    stages.done("measuring the tower, compilers beside")
    specs = stored_specs(config, model.cache_specs())
    sizes = _sizes(config, model_config, model, graphs, patches, device, peak)
    encoder_pool = EncoderPool()
    encoder = image_encoder(model, vision, tower_plans, encoder_pool, side, graphs)
    engine = _assemble(config, model_config, model, sizes, encoder, encoder_pool, device, stages)
    if capsules is not None:
        facts = facts_of(config, checkpoint, sizes, specs, hardware)
        engine.keep(Recorder(capsules, facts, engine.runner.parts, tower_plans))
    if steps_name is not None:
        note_steps(steps_name)
    log.info(
        "ready in %s: %s on %s in %s, %d KV tokens in %d pages of %s",
        stages,
        checkpoint.architecture,
        hardware.name,
        dtype,
        sizes.cache.num_tokens,
        sizes.cache.num_pages,
        dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
    )
    return Built(engine, _facts(model_config, sizes, frames, device))


def _facts(model: ModelConfig, sizes: Sizes, frames: int, device: torch.device) -> ServingFacts:
    return ServingFacts(
        vocab_size=model.text.vocab_size,
        max_model_len=sizes.max_model_len,
        eos_token_ids=model.eos_token_ids,
        image_token_id=model.image_token_id,
        encoder_patches=sizes.encoder_patches,
        kv_tokens=sizes.cache.num_tokens,
        patch_rules=None if model.vision is None else model.vision.rules,
        video_frames=frames,
        encoder_resizes=device.type == "cuda",
    )


def image_plans(
    config: EngineConfig,
    model: Model,
    vision: VisionConfig | None,
    dtype: DType,
    patches: int,
    hardware: Hardware,
) -> PlanTable:
    """As decided. Nothing is compiled yet."""
    limits = accept(image_limits(vision, dtype, patches, config.deterministic))
    sites = model.image_sites() if isinstance(model, ImageModel) else ()
    prefer = attention_of(config, hardware)
    return make_table(sites, limits, hardware, prefer, releases())


def _text_plans_ahead(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    dtype: DType,
    hardware: Hardware,
) -> Iterable[AttentionPlan]:
    """The decoder's, whose kernels are compiled while weights are read. How long requests may be is
    not known yet, so this is a guess that decides nothing."""
    most = model_config.text.max_position
    longest = min(config.max_model_len or most, most)
    with suppress(Refused):
        return _text_plans(config, model.text_sites(), dtype, longest, hardware)
    return ()


def ready(plans: PlanTable, hardware: Hardware) -> PlanTable:
    """Say why plans are not the best ones, and compile what they name. Raises `Refused`."""
    for warning in plans.warnings:
        log.warning("%s", warning)
    if found := warm(plans, hardware):
        raise Refused(found)
    return plans


def load_weights(
    config: EngineConfig,
    entry: ModelEntry,
    model_config: ModelConfig,
    model: Model,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: load.Progress | None,
) -> None:
    module = cast(nn.Module, model)
    if config.weights == "random":
        load.randomize(entry.weight_map(model_config), module, device, config.seed)
        return
    source = checkpoint.gguf or checkpoint.folder
    found, parameters = read_headers(checkpoint), load.parameters_of(module)
    plan = accept(plan_load(checkpoint, model_config, parameters, found))
    for warning in plan.warnings:
        log.warning("%s", warning)
    load.load(plan, module, source, device, progress)


def _measure_encoder(
    model: Model,
    plans: PlanTable,
    config: ModelConfig,
    dtype: DType,
    patches: int,
    largest: int | None,
    side: SideStream,
) -> Peak:
    """Bytes that encoding takes beyond weights and finished pictures in the worst step within the
    budget, features of a begun picture included. Not measured on a CPU, where the pages' size does
    not depend on it. `largest`: patches of the largest picture, None if no processor says."""
    device = side.device
    if config.vision is None or device.type == "cpu":
        return Peak(0, 0)
    assert isinstance(model, ImageModel), f"{config.architecture} with a tower"
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kind = torch_dtype(dtype)
    run_worst_steps(model, plans, config.vision, kind, patches, largest, side)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    predicted = encoder_peak(config.vision, config.text.hidden_size, dtype, patches, largest)
    predicted += product_bytes(hardware_of(device).cc)
    log.info("encoding takes %d MiB, %d predicted", peak >> 20, predicted >> 20)
    return Peak(peak, predicted)


def capture_tower(
    config: EngineConfig,
    model: Model,
    plans: PlanTable,
    vision: VisionConfig | None,
    patches: tuple[int, int | None],
    device: torch.device,
) -> EncodeGraphs | None:
    """The tower in graphs, before what they hold is left to the cache; none on a CPU or where none
    are wanted. `patches`: the budget, and of the largest picture if known."""
    wanted = device.type == "cuda" and config.cuda_graphs != 0
    if vision is None or not isinstance(model, ImageModel) or not wanted:
        return None
    rungs = rungs_of(vision, *patches, model.image_sites(), plans)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graphs = EncodeGraphs(model, plans, vision, rungs, device)
    graphs.capture(GraphRecorder(device, first=False))
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved(device) - before
    said = "%d graphs of the tower, of up to %d patches: %d MiB"
    log.info(said, len(rungs), graphs.most, taken >> 20)
    return graphs


def _sizes(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    graphs: EncodeGraphs | None,
    patches: int,
    device: torch.device,
    peak: Peak,
) -> Sizes:
    """What is left on the device, in pages and the longest request."""
    left, text = CPU_KV_BYTES, model_config.text
    if device.type != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        left = kv_bytes(config, text, free, total, peak.measured)
        held = _held(config, model_config, model, graphs)
        predicted = predicted_left(config, text, total, held, peak.predicted)
        log.info("left for pages: %d MiB, %d predicted", left >> 20, predicted >> 20)
    specs = stored_specs(config, model.cache_specs())
    sizes = accept(plan_sizes(config, text, specs, patches, left))
    for warning in sizes.warnings:
        log.warning("%s", warning)
    return sizes


def _held(
    config: EngineConfig, model_config: ModelConfig, model: Model, graphs: EncodeGraphs | None
) -> tuple[int, int]:
    """Bytes that weights and the tower's graphs hold on a GPU, as `check` predicts them."""
    weights = sum(p.numel() * p.element_size() for p in cast(nn.Module, model).parameters())
    if graphs is None or model_config.vision is None:
        return weights, 0
    dtype = served_dtype(config, model_config, on_cpu=False)
    return weights, tower_graph_bytes(model_config.vision, dtype, [graphs.most])


def image_encoder(
    model: Model,
    vision: VisionConfig | None,
    plans: PlanTable,
    pool: EncoderPool,
    side: SideStream,
    graphs: EncodeGraphs | None,
) -> ImageEncoder | None:
    if vision is None or not isinstance(model, ImageModel):
        return None
    return ImageEncoder(model, plans, pool, side.device, vision.patch_size, side, graphs)


def _assemble(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    sizes: Sizes,
    encoder: ImageEncoder | None,
    encoder_pool: EncoderPool,
    device: torch.device,
    stages: _Stages,
) -> Engine:
    specs, on_cpu = stored_specs(config, model.cache_specs()), device.type == "cpu"
    dtype, graphs = served_dtype(config, model_config, on_cpu), graph_sizes(config, on_cpu)
    # One page more than the manager knows of: where padded rows write.
    pool = KvPool(specs, sizes.cache.num_pages + bool(graphs), config.page_size, device)
    sites, hardware = model.text_sites(), hardware_of(device)
    plans = ready(_text_plans(config, sites, dtype, sizes.max_model_len, hardware), hardware)
    stages.done("plans and kernels of the decoder")
    row_bytes = model_config.text.hidden_size * ITEM_BYTES[dtype]
    door, vocab_size = Door(device), model_config.text.vocab_size
    builder = BatchBuilder(
        max_running=config.max_running,
        max_pages=-(-sizes.max_model_len // config.page_size),
        page_size=config.page_size,
        device=device,
        sites=sites,
    )
    sampler = Sampler(config.max_running, vocab_size, masked_ids(model_config), device)
    parts = RunnerParts(
        model=model,
        pool=pool,
        encoder_pool=encoder_pool,
        encoder=encoder,
        builder=builder,
        sampler=sampler,
        plans=plans,
        door=door,
        graphs=capture_graphs(
            GraphParts(
                model=model,
                pool=pool,
                plans=plans,
                builder=builder,
                sampler=sampler,
                scratch_page=sizes.cache.num_pages,
                max_len=sizes.max_model_len,
            ),
            config,
            door,
        ),
    )
    stages.done("graphs")
    scheduler = _scheduler(config, sizes, row_bytes, on_cpu)
    return Engine(scheduler, Runner(parts), step_ahead=config.step_ahead)


def _text_plans(
    config: EngineConfig,
    sites: Sequence[tuple[AttentionSite, Phase]],
    dtype: DType,
    max_model_len: int,
    hardware: Hardware,
) -> PlanTable:
    """As decided. Nothing is compiled yet."""
    assert all(phase is not Phase.ENCODE for _, phase in sites)
    limits = text_limits(config, dtype, max_model_len, on_cpu=not hardware.cc)
    prefer = attention_of(config, hardware)
    return make_table(sites, limits, hardware, prefer, releases())


def _scheduler(config: EngineConfig, sizes: Sizes, row_bytes: int, on_cpu: bool) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_step_tokens=step_tokens(config, on_cpu),
            max_model_len=sizes.max_model_len,
            encoder_patches=sizes.encoder_patches,
            patches_beside=0 if on_cpu else PATCHES_BESIDE,
            page_size=config.page_size,
            prefix_cache=config.prefix_cache,
        ),
        Manager(sizes.cache.num_pages, config.page_size, config.prefix_cache),
        EncoderCache(config.encoder_cache_bytes, row_bytes),
    )
