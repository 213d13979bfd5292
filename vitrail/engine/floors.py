"""The least that a step must move and compute, by group of kernels: weights read once, the cache's
rows read once, multiplications counted twice. Pure arithmetic on a `StepPlan` and a configuration.
No torch.

Left out, so that the floor is one: activations between kernels (but for norms), work that only an
implementation needs (padding, expansion of cached latents, sorting). Distinct experts of a step are
the expectation of uniform routing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.config.model import (
    CHANNELS,
    ITEM_BYTES,
    DType,
    KvDType,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    MoonVitConfig,
    TextConfig,
    VisionConfig,
)
from vitrail.engine.kernel_groups import Group
from vitrail.engine.step import EncodeJob, StepPlan

FLOAT32 = 4


class Work(NamedTuple):
    """Bytes of device memory and floating point operations."""

    num_bytes: float
    flops: float

    def plus(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second: bytes moved, operations of products. `source`: where the
    figures are from."""

    bytes_per_s: float
    flops_per_s: float
    source: str

    def seconds(self, work: Work) -> float:
        """Of whichever takes longer."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is computed, in which types; `kv_dtype` is what the cache keeps."""

    model: ModelConfig
    dtype: DType
    kv_dtype: KvDType

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]


def floor_seconds(shapes: Shapes, plans: Iterable[StepPlan], rates: Rates) -> dict[Group, float]:
    """The floor of each group over all these steps, each step's own floors added up."""
    total: dict[Group, float] = {}
    for plan in plans:
        for group, work in step_work(shapes, plan).items():
            total[group] = total.get(group, 0.0) + rates.seconds(work)
    return total


def step_work(shapes: Shapes, plan: StepPlan) -> dict[Group, Work]:
    """One step's, without groups that have nothing to do."""
    text = shapes.model.text
    tokens = sum(s.length for s in (*plan.prefills, *plan.decodes))
    sampled = len(plan.sampled)
    found: dict[Group, Work] = {}
    if tokens:
        found["gemm"] = _products(text, shapes.item, tokens, sampled)
        found["attention"] = _attention(shapes, plan)
        norms = (2 * text.num_layers + 1) * 4 * tokens * text.hidden_size * shapes.item
        found["elementwise"] = Work(norms, 0.0)
    if tokens and text.moe is not None:
        found["moe"] = _experts(text, text.moe, shapes.item, tokens)
    if sampled:
        found["sampling"] = Work(sampled * text.vocab_size * FLOAT32, 0.0)
    if plan.encodes and shapes.model.vision is not None:
        found["encode"] = _encoding(shapes, shapes.model.vision, plan.encodes)
    return found


def linear_parameters(text: TextConfig) -> int:
    """Of the products that all tokens go through: projections and dense MLPs; neither experts, the
    shared ones among them, nor routers, nor the head."""
    size, moe = text.hidden_size, text.moe
    if text.mla is not None:
        attention = _mla_parameters(text, text.mla)
    else:
        heads = 2 * text.num_heads + 2 * text.num_kv_heads
        attention = size * heads * text.head_dim
    total = text.num_layers * attention
    if moe is None:
        return total + text.num_layers * 3 * size * text.intermediate_size
    return total + moe.first_moe_layer * 3 * size * text.intermediate_size


def _mla_parameters(text: TextConfig, mla: MlaConfig) -> int:
    size, heads = text.hidden_size, text.num_heads
    per_rank = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        size * heads * text.head_dim
        + size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        + mla.kv_lora_rank * per_rank
        + heads * mla.v_head_dim * size
    )


def expert_parameters(text: TextConfig, moe: MoeConfig) -> int:
    """Of one expert."""
    return 3 * text.hidden_size * moe.intermediate_size


def distinct_experts(moe: MoeConfig, tokens: int) -> float:
    """How many of a layer's experts `tokens` choose, expected for uniform choices."""
    return moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)


def _products(text: TextConfig, item: int, tokens: int, sampled: int) -> Work:
    linear, head = linear_parameters(text), text.vocab_size * text.hidden_size
    used = linear + (head if sampled else 0)
    return Work(used * item, 2 * (tokens * linear + sampled * head))


def _experts(text: TextConfig, moe: MoeConfig, item: int, tokens: int) -> Work:
    """Routers, which are fp32, the experts that tokens choose, and the shared ones."""
    layers, each = text.num_layers - moe.first_moe_layer, expert_parameters(text, moe)
    router = moe.num_experts * text.hidden_size
    read = router * FLOAT32 + (distinct_experts(moe, tokens) + moe.num_shared) * each * item
    flops = 2.0 * tokens * (router + (moe.top_k + moe.num_shared) * each)
    return Work(layers * read, layers * flops)


def _attention(shapes: Shapes, plan: StepPlan) -> Work:
    """Cached rows read once a layer; scores and values of every pair of a query and a key that it
    sees, in latent form for decodes (what they read) and expanded for prefills."""
    text, kept = shapes.model.text, ITEM_BYTES[shapes.kv_dtype]
    total = Work(0.0, 0.0)
    spans = [(s.start, s.length) for s in (*plan.prefills, *plan.decodes)]
    if text.mla is not None:
        row = text.mla.kv_lora_rank + text.mla.qk_rope_head_dim
        expanded = text.head_dim + text.mla.v_head_dim
        for start, length in spans:
            wide = row + text.mla.kv_lora_rank if length == 1 else expanded
            flops = 2.0 * text.num_heads * _pairs(start, length, None) * wide
            total = total.plus(Work((start + length) * row * kept, flops))
        return Work(total.num_bytes * text.num_layers, total.flops * text.num_layers)
    windows = (None,) * text.num_layers if text.gqa is None else text.gqa.windows
    row = 2 * text.num_kv_heads * text.head_dim
    for window in windows:
        for start, length in spans:
            seen = start + length if window is None else min(start + length, window + length)
            flops = 4.0 * text.num_heads * text.head_dim * _pairs(start, length, window)
            total = total.plus(Work(seen * row * kept, flops))
    return total


def _pairs(start: int, length: int, window: int | None) -> float:
    """Pairs of a query in [start, start + length) and a key at or before it, at most `window`
    before."""
    whole = length * start + length * (length + 1) / 2
    if window is None or start + length - 1 <= window:
        return whole
    rising = max(0, min(length, window - start))  # queries that see all before them
    pairs = rising * start + rising * (rising + 1) / 2
    return pairs + (length - rising) * (window + 1)


def _encoding(shapes: Shapes, vision: VisionConfig, jobs: Iterable[EncodeJob]) -> Work:
    """The tower's layers and, of MoonViT, the projector; weights read once."""
    size, layers = vision.hidden_size, vision.num_layers
    if not isinstance(vision, MoonVitConfig):
        layers -= 1  # SigLIP is read at its last layer but one
    layer = 4 * size**2 + 2 * size * vision.intermediate_size
    embed = CHANNELS * vision.patch_size**2 * size
    used = float(layers * layer + embed)
    wide = size * vision.merge**2
    project = wide**2 + wide * shapes.model.text.hidden_size
    flops = 0.0
    for job in jobs:
        length = job.height * job.width
        flops += 2.0 * job.num_patches * used + 4.0 * job.count * layers * length**2 * size
        if isinstance(vision, MoonVitConfig) and job.is_last:
            flops += 2.0 * job.num_tokens * project
    return Work(used * shapes.item, flops)
