"""What an engine's steps launch beside attention, for a GPU that need not be here: decodes of every
batch, chunks of prompts of every kind of length, tokens drawn in every way, pictures. The model
runs on the meta device within a recording, so its own code names the kernels; attention, whose
plans name them (`attention.compile`), computes nothing."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.attention.backend import HOLLOW
from vitrail.attention.metadata import PagedMetadata, paged_metadata
from vitrail.attention.plan import AttentionPlan, PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.spec import LayerSpec
from vitrail.check.sizes import graph_sizes, step_tokens, stored_specs
from vitrail.config.engine import EngineConfig
from vitrail.config.hardware import Hardware
from vitrail.config.model import CHANNELS, ModelConfig, PatchRules, VisionConfig
from vitrail.layers.context import ForwardContext
from vitrail.models.interface import ImageModel, ImageShape, Model
from vitrail.ops.dispatch import select_resize, select_sampling
from vitrail.ops.record import Recorded, recording
from vitrail.ops.resize.naive import Resample
from vitrail.ops.sampling.naive import Filters

META = torch.device("meta")
FEW = 32  # counts up to which every one is run
DRAWN = 3  # rows of a kind: of one, of an even and of an odd number columns lie differently


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Which steps: `decodes` batches of a graph each (empty: of any size up to `max_running`),
    prompts of up to `max_tokens`, `longest` of one sequence."""

    decodes: Sequence[int]
    max_running: int
    max_tokens: int
    longest: int
    page_size: int


class HollowTable(PlanTable):
    """The plans of `table`, computed by nobody."""

    def __init__(self, table: PlanTable):
        self._table = table
        self.warnings = ()

    def select(self, site: AttentionSite, phase: Phase, batch: int, kv_len: int) -> AttentionPlan:
        return replace(self._table.select(site, phase, batch, kv_len), backend=HOLLOW)


def shortened(model: ModelConfig) -> ModelConfig:
    """With one layer of each kind, of the decoder and of the tower."""
    text, vision = model.text, model.vision
    layers = min(text.num_layers, 1 if text.moe is None else text.moe.first_moe_layer + 1)
    gqa = text.gqa
    text = replace(
        text,
        num_layers=layers,
        gqa=None if gqa is None else replace(gqa, windows=gqa.windows[:layers]),
    )
    return replace(
        model, text=text, vision=None if vision is None else replace(vision, num_layers=2)
    )


def counts(most: int) -> list[int]:
    """Numbers of rows up to `most`, of every kind that tiles are chosen by: all few ones, then the
    last of each half octave and the first of the next."""
    edges = [n << k for k in range(most.bit_length()) for n in (2, 3)]
    around = {n + more for n in edges for more in (0, 1)}
    return sorted({n for n in (*range(1, FEW + 1), *around, most) if n <= most})


def step_launches(
    model: Model,
    config: ModelConfig,
    choices: EngineConfig,
    tables: tuple[PlanTable | None, PlanTable],
    longest: int,
    gpu: Hardware,
) -> list[Recorded]:
    """Of all steps that `choices` allow. `tables`: plans of pictures (None: no tower) and of text;
    `longest`: tokens of a sequence."""
    steps = Steps(
        decodes=graph_sizes(choices, on_cpu=False),
        max_running=choices.max_running,
        max_tokens=step_tokens(choices, on_cpu=False),
        longest=longest,
        page_size=choices.page_size,
    )
    specs = stored_specs(choices, model.cache_specs())
    made = text_launches(model, specs, config.text.vocab_size, tables[1], steps, gpu)
    if isinstance(model, ImageModel) and config.vision is not None and tables[0] is not None:
        made += image_launches(model, config.vision, tables[0], gpu)
    return made


@torch.inference_mode()
def text_launches(
    model: Model,
    specs: Sequence[LayerSpec],
    vocab_size: int,
    plans: PlanTable,
    steps: Steps,
    gpu: Hardware,
) -> list[Recorded]:
    """Of the decoder and of sampling. `specs` as stored; `plans`: of the decoder's sites."""
    pool, hollow = KvPool(specs, 2, steps.page_size, META), HollowTable(plans)
    with recording(gpu) as made:
        for chunk, decodes in _batches(steps):
            context = _context(chunk, decodes, steps.page_size, hollow, pool)
            ids = torch.empty(sum(chunk) + decodes, dtype=torch.int64, device=META)
            hidden = model.forward(model.embed(ids), context)
            rows = decodes if not chunk else decodes + len(chunk)
            model.logits(hidden if not chunk else hidden[:rows])
        for rows in range(1, DRAWN + 1):
            _draw(torch.empty((rows, vocab_size), dtype=torch.float32, device=META))
    return made.launches


def _batches(steps: Steps) -> Iterator[tuple[list[int], int]]:
    """Chunks of prompts, and how many decodes: decodes alone, prompts alone (of one sequence where
    it may be as long, and of several), and both."""
    decodes = counts(min(steps.max_running, steps.max_tokens))
    yield from (([], size) for size in steps.decodes or decodes)
    for size in counts(steps.max_tokens):
        yield _cut(size, steps.longest), 0
        if size > 1:
            yield [1, *_cut(size - 1, steps.longest)], 0
    for size in decodes:
        if size < steps.max_tokens:
            yield [1], size
            yield _cut(steps.max_tokens - size, steps.longest), size


def _cut(tokens: int, longest: int) -> list[int]:
    """Into as few sequences as may be."""
    whole, rest = divmod(tokens, longest)
    return [*[longest] * whole, *([rest] if rest else [])]


def _context(
    chunk: list[int], decodes: int, page_size: int, plans: PlanTable, pool: KvPool
) -> ForwardContext:
    tokens = sum(chunk) + decodes
    return ForwardContext(
        positions=torch.empty(tokens, dtype=torch.int64, device=META),
        cache_slots=torch.empty(tokens, dtype=torch.int64, device=META),
        num_prefill=sum(chunk),
        prefill=_paged(chunk, page_size) if chunk else None,
        decode=_paged([1] * decodes, page_size) if decodes else None,
        plans=plans,
        pool=pool,
    )


def _paged(q_lens: list[int], page_size: int) -> PagedMetadata:
    """Sequences that begin with these tokens."""
    pages = -(-max(q_lens) // page_size)
    table = torch.empty((len(q_lens), pages), dtype=torch.int32, device=META)
    return paged_metadata(page_size, q_lens, q_lens, table)


def _draw(logits_SV: Tensor) -> None:
    """Every kind of row, its parameters as a parcel holds them."""
    ops, rows = select_sampling(META), len(logits_SV)
    never_V = torch.empty(logits_SV.shape[1], dtype=torch.float32, device=META)
    index = torch.empty(rows, dtype=torch.int64, device=META)
    u, temperature, *kept = torch.empty((5, rows), dtype=torch.float64, device=META)
    ops.best_tokens(logits_SV, never_V)
    ops.keep_best(logits_SV, never_V, index, index)
    ops.draw_plain(logits_SV, index, never_V, temperature, u)
    ops.draw_filtered(logits_SV, index, never_V, temperature, Filters(*kept), u)


def unequal(rules: PatchRules) -> list[ImageShape]:
    """A wide picture and a higher one with other patches and tokens, as the tower takes them."""
    if rules.tile is None:
        side = rules.merge
        return [ImageShape(2 * side, 5 * side), ImageShape(7 * side, 3 * side)]
    if rules.scales:
        return [ImageShape(rules.tile, rules.tile, block) for block in ((1, 3), None, (2, 1))]
    return [ImageShape(rules.tile, rules.tile)] * 2


@torch.inference_mode()
def image_launches(
    model: ImageModel, vision: VisionConfig, plans: PlanTable, gpu: Hardware
) -> list[Recorded]:
    """Of pictures alone and together; where they are not tiles, resized there too."""
    rules, hollow = vision.rules, HollowTable(plans)
    images, features = unequal(rules), CHANNELS * vision.patch_size**2
    with recording(gpu) as made:
        for step in (images[:1], images):
            numbers = [rules.num_sequences(i.block) for i in step]
            shapes = zip(step, numbers, strict=True)
            grids = [(i.height, i.width) for i, n in shapes for _ in range(n)]
            rows = sum(height * width for height, width in grids)
            patches = torch.empty((rows, features), dtype=torch.uint8, device=META)
            model.project_images(model.encode_patches(patches, grids, hollow), step)
        if rules.tile is None:
            _resize(images[0], vision.patch_size)
    return made.launches


def _resize(image: ImageShape, side: int) -> None:
    """From twice its size."""
    pixels = torch.empty((2 * image.height, 2 * image.width, CHANNELS), device=META)
    down, across = (
        Resample(*(torch.empty(size, dtype=torch.int32, device=META) for size in ((n,), (n, 9))))
        for n in (image.height * side, image.width * side)
    )
    grid = (image.height, image.width)
    select_resize(META).resized_patches(pixels.byte(), down, across, grid, side)
