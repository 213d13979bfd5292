"""What an engine will hold, as pure arithmetic: dtypes, the encoder's budget, the limits that plans
are made for, and what is left for pages. Start-up feeds it what the device says, `check` what is
predicted; both get the same plan or the same findings. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vitrail.attention.plan import AttentionPlan, PlanLimits
from vitrail.cache.budget import CacheBudget, plan_cache
from vitrail.cache.spec import LayerSpec, stored_as
from vitrail.check.encoder_peak import encoder_peak
from vitrail.config.engine import GIB, EngineConfig
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware
from vitrail.config.model import ITEM_BYTES, DType, KvDType, ModelConfig, TextConfig, VisionConfig
from vitrail.vision.preprocess import ImageProcessor

# Tokens of a step where nobody says.
GPU_STEP_TOKENS, CPU_STEP_TOKENS = 8192, 2048
# Patches encoded in a step where no processor says how large an image can be.
DEFAULT_ENCODER_PATCHES = 16_384
# Of a GPU's memory, a planned budget of patches takes at most one part in so many.
MEMORY_SHARE = 64
# What a driver's context and loaded kernels take beside what is allocated: measured on an H200
# 527 MiB at once, 653 after the first products.
CONTEXT_BYTES = 660 << 20
# GPU memory left to the forward pass beside weights, encoder and pages.
WORKSPACE_BYTES = 2 * GIB
# Of decode graphs: each one's own, and what the largest keeps between its kernels.
GRAPH_BYTES, GRAPH_WORKSPACE_BYTES = 16 << 20, GIB // 2
# Pages on a CPU, whose memory nobody asks for.
CPU_KV_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits that the model, the device and the user's choices give together. `warnings`: what
    was made smaller than the model allows."""

    max_model_len: int
    encoder_patches: int
    cache: CacheBudget
    warnings: tuple[Finding, ...] = ()


def served_dtype(config: EngineConfig, model: ModelConfig, on_cpu: bool) -> DType:
    """Of weights and activations."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if on_cpu else model.dtype


def masked_ids(model: ModelConfig) -> list[int]:
    """Ids of the vocabulary that are never sampled."""
    image_id = model.image_token_id
    return [] if image_id is None or image_id >= model.text.vocab_size else [image_id]


def kv_dtype(config: EngineConfig) -> KvDType | None:
    """What the cache keeps; None: what the model computes in."""
    return None if config.kv_cache_dtype == "auto" else "float8_e4m3fn"


def stored_specs(config: EngineConfig, specs: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """A model's layers as the cache keeps them."""
    kept = kv_dtype(config)
    return specs if kept is None else stored_as(specs, kept)


def encoder_budget(
    config: EngineConfig, model: ModelConfig, processor: ImageProcessor | None, gpu: Hardware
) -> int:
    """Patches a step: asked for, or the largest picture the processor makes, so that no picture
    alone waits for a second step. On a GPU as many of the largest as a step's tokens come from, for
    more small steps are bound by the host; but no more than its share of memory holds at the
    peak."""
    vision = model.vision
    if vision is None:
        return 0
    if config.encoder_patches is not None:
        return config.encoder_patches
    largest = DEFAULT_ENCODER_PATCHES if processor is None else processor.max_patches
    if not gpu.cc:
        return largest
    patches = step_tokens(config, on_cpu=False) * vision.rules.merge**2
    hidden, dtype = model.text.hidden_size, served_dtype(config, model, on_cpu=False)
    count = -(-patches // largest)
    room = gpu.hbm_bytes // MEMORY_SHARE
    while count > 1 and encoder_peak(vision, hidden, dtype, count * largest, largest) > room:
        count -= 1
    return count * largest


def image_limits(
    vision: VisionConfig | None, dtype: DType, patches: int, fixed: bool = False
) -> PlanLimits | list[Finding]:
    """The bounds that the tower's attention is planned for; `fixed`: `--deterministic`."""
    rules = None if vision is None else vision.rules
    longest = patches if rules is None or rules.tile is None else rules.tile**2
    if longest > patches:
        return [
            Finding(
                where="encoder_patches",
                saw=str(patches),
                rule=f"at least {longest}, the patches of one tile",
                change=f"pass --encoder-patches {longest} or more",
            )
        ]
    return PlanLimits(
        dtype=dtype,
        page_size=None,
        max_batch=max(1, patches),
        max_q_len=max(1, longest),
        max_kv_len=max(1, longest),
        batch_invariant=fixed,
    )


def step_tokens(config: EngineConfig, on_cpu: bool) -> int:
    """The user's choice, or as many as keep the device at its products rather than its launches."""
    if config.max_step_tokens is not None:
        return config.max_step_tokens
    return CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS


def text_limits(config: EngineConfig, dtype: DType, max_model_len: int, on_cpu: bool) -> PlanLimits:
    """The bounds that the decoder's attention is planned for."""
    return PlanLimits(
        dtype=dtype,
        page_size=config.page_size,
        max_batch=config.max_running,
        max_q_len=step_tokens(config, on_cpu),
        max_kv_len=max_model_len,
        kv_dtype=kv_dtype(config),
        batch_invariant=config.deterministic,
        decodes_extend=config.deterministic,
    )


def ladder(largest: int) -> list[int]:
    """Sizes up to `largest`: 1, 2, 4, then by eights to 64, sixteens to 256, thirty-twos."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return [*(s for s in sizes if s < largest), largest] if largest else []


def graph_sizes(config: EngineConfig, on_cpu: bool) -> list[int]:
    """Batch sizes of the decode graphs, none on a CPU."""
    if on_cpu:
        return []
    asked = config.max_running if config.cuda_graphs is None else config.cuda_graphs
    return ladder(min(asked, config.max_running))


def graph_bytes(sizes: Sequence[int], vocab_size: int) -> int:
    """Device memory that graphs of these sizes may take, the largest one's logits twice (they are
    converted) among it."""
    if not sizes:
        return 0
    logits = 2 * ITEM_BYTES["float32"] * sizes[-1] * vocab_size
    return len(sizes) * GRAPH_BYTES + GRAPH_WORKSPACE_BYTES + logits


def graph_findings(plans: Iterable[AttentionPlan]) -> list[Finding]:
    """Why decodes cannot be captured over these plans: the reference asks the host for lengths."""
    return [
        Finding(
            where="cuda_graphs",
            saw=f"attention decode on backend {plan.backend}",
            rule="work of captured decodes is data on the device",
            change="pass --cuda-graphs 0, or leave the attention's choice to the plan",
            code="decode_not_capturable",
        )
        for plan in plans
        if plan.backend == "reference"
    ][:1]


def kv_bytes(
    config: EngineConfig, text: TextConfig, free: int, total: int, encoder_peak: int
) -> int:
    """Bytes for pages on a GPU of `total` bytes, `free` of them when weights are loaded."""
    kept = int(total * (1 - config.memory_fraction))
    graphs = graph_bytes(graph_sizes(config, on_cpu=False), text.vocab_size)
    return free - kept - encoder_peak - config.encoder_cache_bytes - graphs - WORKSPACE_BYTES


def predicted_left(
    config: EngineConfig, text: TextConfig, total: int, held: Iterable[int], encoder_peak: int
) -> int:
    """Bytes for pages on a GPU of `total` bytes of which nobody else has any; `held`: weights and
    the tower's graphs."""
    free = total - CONTEXT_BYTES - sum(held)
    return kv_bytes(config, text, free, total, encoder_peak)


def plan_sizes(
    config: EngineConfig, text: TextConfig, specs: Sequence[LayerSpec], patches: int, left: int
) -> Sizes | list[Finding]:
    """The pages' budget, and the longest request: the user's, or what model and pages both allow.
    `specs` as stored; `left`: bytes for pages where the user does not say."""
    wanted = config.max_model_len or text.max_position
    if wanted > text.max_position:
        return [
            Finding(
                where="max_model_len",
                saw=str(wanted),
                rule=f"at most the model's {text.max_position} positions",
                change=f"pass --max-model-len {text.max_position} or less",
            )
        ]
    token_bytes = sum(s.bytes_per_token() for s in specs)
    if config.kv_cache_bytes is None and left < token_bytes * config.page_size:
        return [_no_room(left, token_bytes * config.page_size)]
    # no more than every running request at full length can use
    pages_each = -(-wanted // config.page_size)
    most = config.max_running * pages_each * config.page_size * token_bytes
    budget = min(config.kv_cache_bytes or left, most)
    warnings: tuple[Finding, ...] = ()
    if config.max_model_len is None:
        held = budget // (token_bytes * config.page_size) * config.page_size
        if held < wanted:
            warnings = (_shorter(budget, held, wanted),)
        wanted = max(1, min(wanted, held))
    cache = plan_cache(specs, config.page_size, budget, wanted, config.max_running)
    if isinstance(cache, list):
        return cache
    return Sizes(max_model_len=wanted, encoder_patches=patches, cache=cache, warnings=warnings)


def _no_room(left: int, page_bytes: int) -> Finding:
    return Finding(
        where="memory",
        saw=f"{left} bytes left for pages of {page_bytes}",
        rule="weights, encoder, its cache and the forward pass leave room for a page at least",
        change="use a larger GPU, or a smaller --encoder-patches or --encoder-cache-bytes",
        code="out_of_memory",
    )


def _shorter(budget: int, held: int, wanted: int) -> Finding:
    return Finding(
        where="max_model_len",
        saw=f"the model has {wanted} positions, the cache of {budget} bytes holds {held} tokens; "
        f"serving {held}",
        rule="a request fits in the cache",
        change="pass --kv-cache-bytes or --max-model-len to choose",
        code="shorter_context",
        severity="warning",
    )
