"""`plan`: one pure function from an attention shape and a device to the way it will be run, or the
findings that forbid it. No torch. `PlanTable` holds the plans an engine made at start-up; a step
only looks them up.

What a kernel needs of its plan is in `AttentionPlan`; the numbers are chosen in `tiles` and `fa4`
and held against the rules of `legality`."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from vitrail.attention.fa4 import FA4_RULES, choose_fa4, release_findings
from vitrail.attention.legality import (
    CUTE_RULES,
    LAWS,
    TRITON_RULES,
    Rule,
    broken,
    finding,
    shape_findings,
)
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.attention.tiles import (
    Choice,
    Choose,
    Facts,
    choose_cute,
    choose_triton,
    facts,
)
from vitrail.config.finding import Finding, accept
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType, KvDType


class Backend(NamedTuple):
    """A backend made of kernels: how its numbers are chosen, and what must hold of them."""

    choose: Choose
    rules: tuple[Rule, ...]


KERNEL_BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "triton": Backend(choose_triton, LAWS + TRITON_RULES),
        "cute": Backend(choose_cute, LAWS + CUTE_RULES),
        "fa4": Backend(choose_fa4, LAWS + FA4_RULES),
    }
)
# Backends that have a module, and so can be planned.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {name: f"vitrail.attention.backends.{name}" for name in ("reference", "triton", "cute", "fa4")}
)
# Those that need a distribution beside torch. What is installed comes in as data, a release by
# backend (`installed.releases`).
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {"fa4": "flash-attn-4", "cute": "nvidia-cutlass-dsl"}
)
CUTLASS_RELEASE = "4.8.1"
NOTHING: Mapping[str, str] = MappingProxyType({})
# What a GPU is planned for, best first, where nobody prefers one: by (phase, compute capability)
# what was measured to be quicker there (docs/notes/attention-h200.md).
MEASURED_ORDER: Mapping[tuple[Phase, int], tuple[str, ...]] = MappingProxyType(
    {
        (Phase.ENCODE, 90): ("fa4", "triton", "reference"),
        (Phase.PREFILL, 90): ("fa4", "triton", "reference"),
        (Phase.EXTEND, 90): ("fa4", "triton", "reference"),
        (Phase.DECODE, 90): ("cute", "triton", "reference"),
    }
)
CUDA_ORDER = ("triton", "reference")
SMALL_IMAGE = 512  # patches of images that ours encodes quicker than FlashAttention-4

# The reference holds at most this many bytes of fp32 scores, and of fp32 keys and values, at once.
REFERENCE_SCORE_BYTES = 64 << 20
REFERENCE_KEY_BYTES = 64 << 20
# Plans kept: those of an engine's start-up, and of one beside it.
CACHED_PLANS = 4096


class Loader(StrEnum):
    """How keys and values reach the cores. `TORCH`: indexing. `TRITON`: the compiler's loads, one
    address a row, any page size. `ROWS`: each loader thread copies whole rows (cp.async). `BULK`:
    boxes of min(page, tile) rows (TMA)."""

    TORCH = "torch"
    TRITON = "triton"
    ROWS = "rows"
    BULK = "bulk"


# By the numbers of `tiles`.
LOADERS = tuple(Loader)
KERNELS = ("torch", "varlen", "extend", "decode", "latent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How one shape runs. `backend` is a name in `BACKENDS`, `kernel` one of `KERNELS`: "torch",
    "varlen" (encode, prefill), "extend", "decode" (up to 32 queries), "latent" (extend, decode).

    Scores are made in blocks of [block_batch sequences, block_heads query heads, block_q,
    block_kv], `score_bytes` in all. A kernel's program makes one block as a tile of `tile_m` rows
    by `tile_n` keys of one key head. `pack_gqa`: its rows are (query, head of the group), row r of
    a sequence being query r // group, head r % group; a tile may begin within a group.
    `dim_blocks`, `dim_v_blocks`: powers of two (0: none) that together cover head_dim and
    head_dim_v, 72 by (64, 16), 192 by (128, 64), a latent's 512 + 64 by (512, 64).

    Splits: the keys of a tile of rows are cut in work items of whole pages, at least
    `min_item_pages` each but for the last, at most `max_splits` a tile and `max_items` a launch,
    whatever the lengths within the bucket; an item is a program a key head, and `wave_items` run
    at once (0: all the same, nothing is split). `max_splits` 1: nothing to combine. `item_pages` >
    0 fixes the pages of an item (batch-invariant); 0: they follow the real lengths of the batch.
    `workspace_bytes`: fp32 partial outputs and their lse of all items. `lse`: the log of the
    softmax denominator is written beside the output.

    `rows_per_thread` rows of a tile for each of `loader_threads`; `predicated`: the last of them
    are guarded. `smem_bytes`, `registers` (a thread), `tmem_columns`: what a program takes at most;
    the proof by compilation refuses a kernel that takes more."""

    shape: AttentionShape
    backend: str
    kernel: str
    block_batch: int
    block_heads: int
    block_q: int
    block_kv: int
    score_bytes: int
    tile_m: int
    tile_n: int
    dim_blocks: tuple[int, int]
    dim_v_blocks: tuple[int, int]
    pack_gqa: bool
    lse: bool
    num_warps: int
    num_stages: int
    loader: Loader
    loader_threads: int
    rows_per_thread: int
    predicated: bool
    max_splits: int
    wave_items: int
    max_items: int
    min_item_pages: int
    item_pages: int
    smem_bytes: int
    registers: int
    tmem_columns: int
    workspace_bytes: int


def plan(
    shape: AttentionShape,
    gpu: Hardware,
    prefer: str | None = None,
    installed: Mapping[str, str] = NOTHING,
) -> AttentionPlan | list[Finding]:
    """The plan for `shape` on `gpu`, or every reason why there is none. `prefer` names a backend;
    one that cannot run the shape is refused, never replaced. `installed`: releases of those that
    need one, by backend. Equal arguments, the same plan."""
    made = _planned(shape, gpu, prefer, tuple(sorted(installed.items())))
    return made if isinstance(made, AttentionPlan) else list(made)


@lru_cache(maxsize=CACHED_PLANS)
def _planned(
    shape: AttentionShape,
    gpu: Hardware,
    prefer: str | None,
    installed: tuple[tuple[str, str], ...],
) -> AttentionPlan | tuple[Finding, ...]:
    found = (*_preference_findings(prefer), *shape_findings(shape))
    if found:
        return found
    refused: list[_Refused] = []
    f, releases = facts(shape, gpu), dict(installed)
    for name in (prefer,) if prefer else order(shape, gpu):
        made = _attempt(name, shape, gpu, f, releases)
        if isinstance(made, AttentionPlan):
            return made
        refused.append(made)
    return tuple(found for why in refused for found in why.findings(shape))


def plan_on(
    name: str, shape: AttentionShape, gpu: Hardware, installed: Mapping[str, str] | None = None
) -> AttentionPlan | list[Finding]:
    """As `plan`, for a shape without findings of its own, on one backend. `installed` None:
    whatever is."""
    made = _attempt(name, shape, gpu, facts(shape, gpu), installed)
    return made if isinstance(made, AttentionPlan) else made.findings(shape)


class _Refused(NamedTuple):
    """Rules that a backend's choice breaks, or what is not installed. Their sentences are written
    where somebody reads them."""

    backend: str
    rules: list[Rule]
    facts: Facts
    choice: Choice
    releases: tuple[Finding, ...] = ()

    def findings(self, shape: AttentionShape) -> list[Finding]:
        broken = [finding(r, shape, self.backend, self.facts, self.choice) for r in self.rules]
        return [*broken, *self.releases]


def _attempt(
    name: str, shape: AttentionShape, gpu: Hardware, f: Facts, installed: Mapping[str, str] | None
) -> AttentionPlan | _Refused:
    if name == "reference":
        return _plan_reference(shape, gpu)
    backend = KERNEL_BACKENDS[name]
    c = backend.choose(f)
    if rules := broken(backend.rules, f, c):
        return _Refused(name, rules, f, c)
    if installed is not None and name in DISTRIBUTIONS:
        release = installed.get(name)
        if lacking := tuple(_release_findings(name, release, f, c)):
            return _Refused(name, [], f, c, lacking)
    return _plan_kernel(name, shape, c)


def _release_findings(name: str, release: str | None, f: Facts, c: Choice) -> Iterable[Finding]:
    if name == "fa4":
        return release_findings(release, f, c)
    return () if release == CUTLASS_RELEASE else (_other_cutlass(release),)


def _other_cutlass(release: str | None) -> Finding:
    return Finding(
        where="attention backend cute",
        saw=f"nvidia-cutlass-dsl {release}" if release else "nvidia-cutlass-dsl is not installed",
        rule=f"{CUTLASS_RELEASE}: what its compiler makes of our kernel was measured and proved",
        change=f"pip install nvidia-cutlass-dsl=={CUTLASS_RELEASE}",
        code="cutlass_release" if release else "cutlass_not_installed",
    )


def passed_over(
    made: AttentionPlan,
    gpu: Hardware,
    names: tuple[str, ...],
    installed: Mapping[str, str] = NOTHING,
) -> list[Finding]:
    """Why those of `names` before the planned backend could not run its shape, as warnings."""
    found: list[Finding] = []
    for name in names:
        if name == made.backend:
            break
        refused = plan_on(name, made.shape, gpu, installed)
        assert isinstance(refused, list), f"{name} plans {made.shape}"
        found += [replace(f, severity="warning") for f in refused]
    return found


def order(shape: AttentionShape, gpu: Hardware) -> tuple[str, ...]:
    """Backends for a shape on `gpu`, best first."""
    if not gpu.cc:
        return ("reference",)
    small = shape.max_kv_len <= SMALL_IMAGE and not shape.batch_invariant
    if shape.phase is Phase.ENCODE and small:
        return CUDA_ORDER
    return MEASURED_ORDER.get((shape.phase, gpu.cc), CUDA_ORDER)


def _preference_findings(prefer: str | None) -> list[Finding]:
    if prefer is None or prefer in BACKENDS:
        return []
    return [
        Finding(
            where="attention",
            saw=f"backend {prefer!r}",
            rule=f"one of {', '.join(BACKENDS)}",
            change="name one of these or leave the choice to the plan",
            code="unknown_backend",
        )
    ]


def _plan_reference(shape: AttentionShape, gpu: Hardware) -> AttentionPlan:
    """Blocks within the limits above. On a CPU they stay in its caches: measured on fp32 heads of
    72, 256 x 1024 takes 1.2 to 1.7 times as long as a fused loop, 64 MiB at once 2.0 to 2.2."""
    site = shape.site
    limit, q, kv = (
        (512 << 10, 256, 1024) if gpu.cc == 0 else (REFERENCE_SCORE_BYTES // 4, 1024, 4096)
    )
    key_bytes = 4 * (site.head_dim if site.latent_rank else site.head_dim + site.head_dim_v)
    max_keys = REFERENCE_KEY_BYTES // (key_bytes * site.num_kv_heads)
    block_kv = max(1, min(shape.max_kv_len, kv, max_keys))
    block_q = min(shape.max_q_len, q)
    block_heads = max(1, min(site.num_q_heads, limit // (block_q * block_kv)))
    scores = block_heads * block_q * block_kv
    batch = shape.batch if shape.phase in PAGED else 1
    block_batch = max(1, min(batch, limit // scores, max_keys // block_kv))
    return AttentionPlan(
        shape=shape,
        backend="reference",
        kernel="torch",
        block_batch=block_batch,
        block_heads=block_heads,
        block_q=block_q,
        block_kv=block_kv,
        score_bytes=4 * block_batch * scores,
        tile_m=block_heads * block_q,
        tile_n=block_kv,
        dim_blocks=(site.head_dim, 0),
        dim_v_blocks=(site.head_dim_v, 0),
        pack_gqa=False,
        lse=True,
        num_warps=0,
        num_stages=1,
        loader=Loader.TORCH,
        loader_threads=0,
        rows_per_thread=0,
        predicated=False,
        max_splits=1,
        wave_items=shape.batch,
        max_items=shape.batch,
        min_item_pages=1,
        item_pages=0,
        smem_bytes=0,
        registers=0,
        tmem_columns=0,
        workspace_bytes=0,
    )


def _plan_kernel(name: str, shape: AttentionShape, c: Choice) -> AttentionPlan:
    site = shape.site
    pack = site.num_q_heads // site.num_kv_heads if c.pack else 1
    return AttentionPlan(
        shape=shape,
        backend=name,
        kernel=KERNELS[c.kernel],
        block_batch=1,
        block_heads=min(pack, c.tile_m),
        block_q=-(-c.tile_m // pack),
        block_kv=c.tile_n,
        score_bytes=4 * c.tile_m * c.tile_n,
        tile_m=c.tile_m,
        tile_n=c.tile_n,
        dim_blocks=(c.dim_a, c.dim_b),
        dim_v_blocks=(c.dim_v_a, c.dim_v_b),
        pack_gqa=bool(c.pack),
        lse=True,
        num_warps=c.warps,
        num_stages=c.stages,
        loader=LOADERS[c.loader],
        loader_threads=c.loader_threads,
        rows_per_thread=c.rows_per_thread,
        predicated=bool(c.predicated),
        max_splits=c.max_splits,
        wave_items=c.wave_items,
        max_items=c.max_items,
        min_item_pages=c.min_item_pages,
        item_pages=c.item_pages,
        smem_bytes=c.smem_bytes,
        registers=c.registers,
        tmem_columns=c.tmem_columns,
        workspace_bytes=c.workspace_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The bounds an engine plans for. `page_size` None: an encoder without a cache; then a
    sequence's queries are its keys and `max_q_len` is not used. `kv_dtype`: what the pages
    hold. `batch_invariant` as in `AttentionShape`. `decodes_extend`: a decode is planned as an
    extend of one query, so that the same kernel in the same tiles serves a position as part of a
    prompt and by itself."""

    dtype: DType
    page_size: int | None
    max_batch: int
    max_q_len: int
    max_kv_len: int
    kv_dtype: KvDType | None = None
    batch_invariant: bool = False
    decodes_extend: bool = False


class PlanTable:
    """Plans by (site, phase, batch bucket, kv bucket), made once. Buckets are powers of two up to
    the limits; `select` takes the smallest that holds the batch. `warnings`: why some are not on
    the device's best backend."""

    def __init__(
        self,
        plans: Mapping[tuple[AttentionSite, Phase], list[AttentionPlan]],
        limits: PlanLimits,
        warnings: tuple[Finding, ...],
    ):
        """`plans`: for each site and phase, batch buckets times kv buckets, the latter inner."""
        self._plans = plans
        self.warnings = warnings
        self._batches = batch_buckets(limits)
        self._kv_lens = kv_buckets(limits)

    def select(self, site: AttentionSite, phase: Phase, batch: int, kv_len: int) -> AttentionPlan:
        """The plan for a batch of `batch` sequences whose longest has `kv_len` keys."""
        assert batch <= self._batches[-1], f"{phase}: {batch} sequences of {self._batches[-1]}"
        assert kv_len <= self._kv_lens[-1], f"{phase}: {kv_len} keys of {self._kv_lens[-1]}"
        row = bisect_left(self._batches, batch) * len(self._kv_lens)
        return self._plans[site, phase][row + bisect_left(self._kv_lens, kv_len)]

    def __len__(self) -> int:
        return sum(len(p) for p in self._plans.values())

    def __iter__(self) -> Iterator[AttentionPlan]:
        return chain.from_iterable(self._plans.values())


def make_table(
    sites: Iterable[tuple[AttentionSite, Phase]],
    limits: PlanLimits,
    gpu: Hardware,
    prefer: str | None,
    installed: Mapping[str, str] = NOTHING,
) -> PlanTable:
    """Plan every site and bucket. Raises `Refused` with the findings of all of them."""
    plans: dict[tuple[AttentionSite, Phase], list[AttentionPlan]] = {}
    found: dict[Finding, None] = {}
    warnings: dict[Finding, None] = {}
    for site, phase in dict.fromkeys(sites):
        plans[site, phase] = []
        for batch in batch_buckets(limits):
            for kv_len in kv_buckets(limits):
                shape = _bucket(site, phase, limits, batch, kv_len)
                made = plan(shape, gpu, prefer, installed)
                if isinstance(made, AttentionPlan):
                    plans[site, phase].append(made)
                    if prefer is None:
                        better = passed_over(made, gpu, order(shape, gpu), installed)
                        warnings.update(dict.fromkeys(better))
                else:
                    found.update(dict.fromkeys(made))
    if found:
        accept(list(found))
    return PlanTable(plans, limits, tuple(warnings))


def _bucket(
    site: AttentionSite, phase: Phase, limits: PlanLimits, batch: int, kv_len: int
) -> AttentionShape:
    if limits.decodes_extend and phase is Phase.DECODE:
        phase = Phase.EXTEND
    max_q_len = {Phase.ENCODE: kv_len, Phase.DECODE: 1}.get(phase, min(limits.max_q_len, kv_len))
    return AttentionShape(
        site=site,
        phase=phase,
        dtype=limits.dtype,
        page_size=limits.page_size if phase in PAGED else None,
        batch=batch,
        max_q_len=max_q_len,
        max_kv_len=kv_len,
        kv_dtype=limits.kv_dtype if phase in PAGED else None,
        batch_invariant=limits.batch_invariant,
    )


def batch_buckets(limits: PlanLimits) -> list[int]:
    return buckets(limits.max_batch)


def kv_buckets(limits: PlanLimits) -> list[int]:
    return buckets(limits.max_kv_len, smallest=256)


def buckets(limit: int, smallest: int = 1) -> list[int]:
    """Powers of two from `smallest`, ending with `limit` itself."""
    sizes: list[int] = []
    size = smallest
    while size < limit:
        sizes.append(size)
        size *= 2
    return [*sizes, limit]
