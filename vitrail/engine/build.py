"""From an `EngineConfig` to a running `Engine`: every plan is made and accepted here, before the
first request; then weights are loaded, the encoder's peak is measured and the KV pool is sized
after it."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.attention.warm import warm
from vitrail.cache.budget import CacheBudget, plan_cache
from vitrail.cache.encoder import EncoderCache
from vitrail.cache.encoder_pool import EncoderPool
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.manager import Manager
from vitrail.cache.spec import ITEM_BYTES, LayerSpec
from vitrail.config.engine import GIB, EngineConfig, validate
from vitrail.config.finding import Finding, Refused, accept, errors
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType, ModelConfig, VisionConfig
from vitrail.engine.batch import BatchBuilder
from vitrail.engine.checkpoint import Checkpoint
from vitrail.engine.deterministic import attention_of, model_of, served
from vitrail.engine.encode import ImageEncoder
from vitrail.engine.encode_graphs import EncodeGraphs
from vitrail.engine.engine import Engine
from vitrail.engine.floors import Shapes
from vitrail.engine.graphs import GraphParts, capture_graphs, graph_bytes, graph_sizes
from vitrail.engine.measure import run_worst_steps
from vitrail.engine.parcel import Door
from vitrail.engine.placement import (
    device_of,
    dtype_of,
    encoder_patches_of,
    hardware_of,
    kv_dtype_of,
    specs_of,
    step_tokens_of,
    video_frames_of,
)
from vitrail.engine.prepare import ServingFacts
from vitrail.engine.runner import Runner, RunnerParts
from vitrail.engine.sampler import Sampler
from vitrail.engine.scheduler import Scheduler, SchedulerLimits
from vitrail.layers.linear import torch_dtype
from vitrail.models.interface import ImageModel, Model, ModelEntry
from vitrail.models.registry import find, load_entry, load_gguf_entry
from vitrail.vision.preprocess import ImageProcessor
from vitrail.weights import headers, load
from vitrail.weights.plan import resolve

log = logging.getLogger("vitrail.engine")
# GPU memory left to the forward pass beside weights, encoder and pages.
WORKSPACE_BYTES = 2 * GIB


class Built(NamedTuple):
    """A ready engine and what a frontend must know of it."""

    engine: Engine
    facts: ServingFacts


class Tower(NamedTuple):
    """A vision tower that is ready alone, for measurements: `encoder` fills `pool`."""

    encoder: ImageEncoder
    pool: EncoderPool
    vision: VisionConfig
    hardware: Hardware
    device: torch.device
    dtype: DType


class Placed(NamedTuple):
    """What a configuration computes, in which types, and where."""

    shapes: Shapes
    hardware: Hardware
    device: torch.device


class _Stages:
    """Seconds of each stage of a start-up, in order."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._took: list[str] = []

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self._took.append(f"{name} {now - self._last:.1f}")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._began:.1f} s ({', '.join(self._took)})"


class _Sizes(NamedTuple):
    """Limits that the model, the device and the user's choices give together."""

    max_model_len: int
    encoder_patches: int
    cache: CacheBudget


def build_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    processor: ImageProcessor | None,
    progress: load.Progress | None = None,
) -> Built:
    """Raises `Refused` with every finding of the first stage that has any: choices, config.json,
    weights (headers), attention plans, cache size. Weights are read after all but the last."""
    stages = _Stages()
    found = errors(validate(config))
    if found:
        raise Refused(found)
    device = device_of(config)
    hardware = hardware_of(device)
    entry = load_entry(checkpoint.architecture)
    model_config = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype = dtype_of(config, model_config, device)
    frames = video_frames_of(config, model_config)
    model = model_of(config, entry, model_config, dtype, device)
    patches = encoder_patches_of(config, model_config, processor)
    image_plans = _image_plans(config, model, model_config.vision, dtype, patches, hardware)
    stages.done("plans and kernels of the tower")
    _load(config, entry, model_config, model, checkpoint, device, progress)
    model = served(config, model, model_config.vision, device)
    stages.done("weights")
    encode_graphs = _encode_graphs(model, image_plans, model_config.vision, patches, device)
    largest = None if processor is None else processor.max_patches
    peak = _measure_encoder(model, image_plans, model_config, dtype, patches, largest, device)
    stages.done("measuring the tower")
    sizes = _sizes(config, model_config, specs_of(config, model), patches, device, peak)
    engine = _assemble(
        config, model_config, model, sizes, image_plans, device, stages, encode_graphs
    )
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
    vision = model_config.vision
    facts = ServingFacts(
        vocab_size=model_config.text.vocab_size,
        max_model_len=sizes.max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        image_token_id=model_config.image_token_id,
        encoder_patches=sizes.encoder_patches,
        kv_tokens=sizes.cache.num_tokens,
        patch_rules=None if vision is None else vision.rules,
        video_frames=frames,
        encoder_resizes=device.type == "cuda",
    )
    return Built(engine, facts)


def build_tower(
    config: EngineConfig, checkpoint: Checkpoint, processor: ImageProcessor | None
) -> Tower:
    """The encoder of a vision model, as `build_engine` makes it, without an engine around it.
    Raises `Refused`, for a model without a tower too."""
    found = errors(validate(config))
    if found:
        raise Refused(found)
    device = device_of(config)
    hardware = hardware_of(device)
    entry = load_entry(checkpoint.architecture)
    model_config = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype = dtype_of(config, model_config, device)
    model = model_of(config, entry, model_config, dtype, device)
    vision = model_config.vision
    if vision is None or not isinstance(model, ImageModel):
        raise Refused(
            Finding(
                where="model",
                saw=f"{checkpoint.architecture}, which takes text alone",
                rule="a model with a vision tower",
                change="give a vision model",
            )
        )
    patches = encoder_patches_of(config, model_config, processor)
    plans = _image_plans(config, model, vision, dtype, patches, hardware)
    _load(config, entry, model_config, model, checkpoint, device, None)
    pool = EncoderPool()
    model = served(config, model, vision, device)
    assert isinstance(model, ImageModel), "as it was before it was loaded"
    encoder = ImageEncoder(model, plans, pool, device, vision.patch_size)
    return Tower(encoder, pool, vision, hardware, device, dtype)


def placed(config: EngineConfig, checkpoint: Checkpoint) -> Placed:
    """As `build_engine` would decide. Raises `Refused`."""
    device, entry = device_of(config), load_entry(checkpoint.architecture)
    model = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    dtype = dtype_of(config, model, device)
    shapes = Shapes(model=model, dtype=dtype, kv_dtype=kv_dtype_of(config) or dtype)
    return Placed(shapes, hardware_of(device), device)


def _image_plans(
    config: EngineConfig,
    model: Model,
    vision: VisionConfig | None,
    dtype: DType,
    patches: int,
    hardware: Hardware,
) -> PlanTable:
    rules = None if vision is None else vision.rules
    longest = patches if rules is None or rules.tile is None else rules.tile**2
    if longest > patches:
        raise Refused(
            Finding(
                where="encoder_patches",
                saw=str(patches),
                rule=f"at least {longest}, the patches of one tile",
                change=f"pass --encoder-patches {longest} or more",
            )
        )
    limits = PlanLimits(
        dtype=dtype,
        page_size=None,
        max_batch=max(1, patches),
        max_q_len=max(1, longest),
        max_kv_len=max(1, longest),
        batch_invariant=config.deterministic,
    )
    sites = model.image_sites() if isinstance(model, ImageModel) else ()
    prefer = attention_of(config, hardware)
    return _ready(make_table(sites, limits, hardware, prefer, releases()), hardware)


def _ready(plans: PlanTable, hardware: Hardware) -> PlanTable:
    """Say why plans are not the best ones, and compile what they name. Raises `Refused`."""
    for warning in plans.warnings:
        log.warning("%s", warning)
    if found := warm(plans, hardware):
        raise Refused(found)
    return plans


def _load(
    config: EngineConfig,
    entry: ModelEntry,
    model_config: ModelConfig,
    model: Model,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: load.Progress | None,
) -> None:
    weight_map, module = entry.weight_map(model_config), cast(nn.Module, model)
    if config.weights == "random":
        load.randomize(weight_map, module, device, config.seed)
        return
    if checkpoint.gguf is None:
        parts = find(checkpoint.architecture).folders
        found, source = accept(headers.read(checkpoint.folder, parts)), checkpoint.folder
    else:
        weight_map = load_gguf_entry(checkpoint.architecture).gguf_map(model_config)
        found, source = checkpoint.gguf.headers, checkpoint.gguf
    plan = accept(resolve(weight_map, found, load.parameters_of(module)))
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
    device: torch.device,
) -> int:
    """Bytes that encoding takes beyond weights and finished pictures in the worst step within the
    budget, features of a begun picture included. Not measured on a CPU, where the pages' size does
    not depend on it. `largest`: patches of the largest picture, None if no processor says."""
    if config.vision is None or device.type == "cpu":
        return 0
    assert isinstance(model, ImageModel), f"{config.architecture} with a tower"
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kind = torch_dtype(dtype)
    run_worst_steps(model, plans, config.vision, kind, patches, largest, device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def _encode_graphs(
    model: Model,
    plans: PlanTable,
    vision: VisionConfig | None,
    patches: int,
    device: torch.device,
) -> EncodeGraphs | None:
    """The tower in graphs, before what they hold is left to the cache; none on a CPU."""
    if vision is None or not isinstance(model, ImageModel) or device.type != "cuda":
        return None
    graphs = EncodeGraphs(model, plans, vision, patches, device)
    graphs.capture()
    return graphs


def _sizes(
    config: EngineConfig,
    model: ModelConfig,
    specs: Sequence[LayerSpec],
    patches: int,
    device: torch.device,
    encoder_peak: int,
) -> _Sizes:
    """The pages' budget, and the longest request: the user's, or what model and pages both
    allow."""
    wanted = config.max_model_len or model.text.max_position
    if wanted > model.text.max_position:
        raise Refused(
            Finding(
                where="max_model_len",
                saw=str(wanted),
                rule=f"at most the model's {model.text.max_position} positions",
                change=f"pass --max-model-len {model.text.max_position} or less",
            )
        )
    token_bytes = sum(s.bytes_per_token() for s in specs)
    budget = config.kv_cache_bytes or _kv_bytes(config, device, encoder_peak)
    # no more than every running request at full length can use
    pages_each = -(-wanted // config.page_size)
    budget = min(budget, config.max_running * pages_each * config.page_size * token_bytes)
    if config.max_model_len is None:
        held = budget // (token_bytes * config.page_size) * config.page_size
        if held < wanted:
            log.warning(
                "max_model_len: the model has %d positions, the cache of %d bytes holds %d tokens; "
                "serving %d. Pass --kv-cache-bytes or --max-model-len to choose",
                wanted,
                budget,
                held,
                held,
            )
        wanted = max(1, min(wanted, held))
    cache = accept(plan_cache(specs, config.page_size, budget, wanted, config.max_running))
    return _Sizes(wanted, patches, cache)


def _kv_bytes(config: EngineConfig, device: torch.device, encoder_peak: int) -> int:
    if device.type == "cpu":
        return GIB
    free, total = torch.cuda.mem_get_info(device)
    kept = int(total * (1 - config.memory_fraction))
    others = encoder_peak + config.encoder_cache_bytes + graph_bytes(graph_sizes(config, device))
    return free - kept - others - WORKSPACE_BYTES


def _image_encoder(
    model: Model,
    vision: VisionConfig | None,
    plans: PlanTable,
    pool: EncoderPool,
    device: torch.device,
    graphs: EncodeGraphs | None,
) -> ImageEncoder | None:
    if vision is None or not isinstance(model, ImageModel):
        return None
    return ImageEncoder(model, plans, pool, device, vision.patch_size, graphs)


def _assemble(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    sizes: _Sizes,
    image_plans: PlanTable,
    device: torch.device,
    stages: _Stages,
    encode_graphs: EncodeGraphs | None,
) -> Engine:
    specs, dtype = specs_of(config, model), dtype_of(config, model_config, device)
    graphs = graph_sizes(config, device)
    # One page more than the manager knows of: where padded rows write.
    pool = KvPool(specs, sizes.cache.num_pages + bool(graphs), config.page_size, device)
    sites = model.text_sites()
    plans = _text_plans(config, sites, dtype, sizes.max_model_len, hardware_of(device))
    stages.done("plans and kernels of the decoder")
    row_bytes = model_config.text.hidden_size * ITEM_BYTES[dtype]
    encoder_pool = EncoderPool()
    image_id, vocab_size = model_config.image_token_id, model_config.text.vocab_size
    door = Door(device)
    builder = BatchBuilder(
        max_running=config.max_running,
        max_pages=-(-sizes.max_model_len // config.page_size),
        page_size=config.page_size,
        device=device,
        sites=sites,
    )
    parts = RunnerParts(
        model=model,
        pool=pool,
        encoder_pool=encoder_pool,
        encoder=_image_encoder(
            model, model_config.vision, image_plans, encoder_pool, device, encode_graphs
        ),
        builder=builder,
        sampler=Sampler(
            config.max_running,
            vocab_size,
            [] if image_id is None or image_id >= vocab_size else [image_id],
            device,
        ),
        plans=plans,
        door=door,
        graphs=capture_graphs(
            GraphParts(
                model=model,
                pool=pool,
                plans=plans,
                builder=builder,
                scratch_page=sizes.cache.num_pages,
                max_len=sizes.max_model_len,
            ),
            config,
            door,
        ),
    )
    stages.done("graphs")
    scheduler = _scheduler(config, sizes, row_bytes, hardware_of(device))
    return Engine(scheduler, Runner(parts), step_ahead=config.step_ahead)


def _text_plans(
    config: EngineConfig,
    sites: Sequence[tuple[AttentionSite, Phase]],
    dtype: DType,
    max_model_len: int,
    hardware: Hardware,
) -> PlanTable:
    assert all(phase is not Phase.ENCODE for _, phase in sites)
    limits = PlanLimits(
        dtype=dtype,
        page_size=config.page_size,
        max_batch=config.max_running,
        max_q_len=step_tokens_of(config, hardware),
        max_kv_len=max_model_len,
        kv_dtype=kv_dtype_of(config),
        batch_invariant=config.deterministic,
        decodes_extend=config.deterministic,
    )
    prefer = attention_of(config, hardware)
    return _ready(make_table(sites, limits, hardware, prefer, releases()), hardware)


def _scheduler(
    config: EngineConfig, sizes: _Sizes, row_bytes: int, hardware: Hardware
) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_step_tokens=step_tokens_of(config, hardware),
            max_model_len=sizes.max_model_len,
            encoder_patches=sizes.encoder_patches,
            page_size=config.page_size,
            prefix_cache=config.prefix_cache,
        ),
        Manager(sizes.cache.num_pages, config.page_size, config.prefix_cache),
        EncoderCache(config.encoder_cache_bytes, row_bytes),
    )
