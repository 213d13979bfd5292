"""`plan`: one pure function from an attention shape and a device to the way it will be run, or the
findings that forbid it. No torch. `PlanTable` holds the plans an engine made at start-up; a step
only looks them up."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import Finding, accept
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType

BACKENDS: Mapping[str, str] = MappingProxyType(
    {"reference": "vitrail.attention.backends.reference"}
)
# The reference holds at most this many bytes of fp32 scores, and of fp32 keys and values, at once.
REFERENCE_SCORE_BYTES = 64 << 20
REFERENCE_KEY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How one shape runs. `backend` is a name in `BACKENDS`. Scores are made in blocks of
    [block_batch sequences, block_heads query heads, block_q, block_kv], `score_bytes` in all."""

    shape: AttentionShape
    backend: str
    block_batch: int
    block_heads: int
    block_q: int
    block_kv: int
    score_bytes: int


def plan(
    shape: AttentionShape, gpu: Hardware, prefer: str | None = None
) -> AttentionPlan | list[Finding]:
    """The plan for `shape` on `gpu`, or every reason why there is none. `prefer` names a backend;
    one that cannot run the shape is refused, never replaced."""
    found = [
        *_preference_findings(prefer),
        *_size_findings(shape),
        *_site_findings(shape),
        *_latent_findings(shape),
    ]
    return found or _plan_reference(shape, gpu)


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


def _size_findings(shape: AttentionShape) -> list[Finding]:
    site = shape.site
    sizes = {
        "num_q_heads": site.num_q_heads,
        "num_kv_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "head_dim_v": site.head_dim_v,
        "batch": shape.batch,
        "max_q_len": shape.max_q_len,
        "max_kv_len": shape.max_kv_len,
    }
    return [
        _illegal(shape, name, str(value), "at least 1", "give a positive size")
        for name, value in sizes.items()
        if value < 1
    ]


def _site_findings(shape: AttentionShape) -> list[Finding]:
    site, phase, paged = shape.site, shape.phase, shape.phase in PAGED
    found: list[Finding] = []

    def require(ok: bool, field: str, saw: str, rule: str, change: str) -> None:
        if not ok:
            found.append(_illegal(shape, field, saw, rule, change))

    require(
        site.num_kv_heads < 1 or site.num_q_heads % site.num_kv_heads == 0,
        "num_q_heads",
        f"{site.num_q_heads} query heads for {site.num_kv_heads} key heads",
        "query heads are a multiple of key heads",
        "change the head counts or pad the heads",
    )
    require(
        paged == (shape.page_size is not None),
        "page_size",
        f"{shape.page_size} in phase {phase}",
        "extend and decode have pages, encode and prefill have none",
        "set page_size to match the phase",
    )
    require(
        shape.page_size is None or 1 <= shape.page_size <= 256,
        "page_size",
        str(shape.page_size),
        "1 to 256 tokens",
        "use 64",
    )
    require(
        phase is Phase.ENCODE or site.causal,
        "causal",
        f"a bidirectional site in phase {phase}",
        "queries see no later key than their own outside encode",
        "set causal, or call it in the encode phase",
    )
    require(
        site.window is None or site.window >= 0,
        "window",
        str(site.window),
        "at least 0 keys",
        "use None for no window",
    )
    require(
        site.softcap is None or site.softcap > 0,
        "softcap",
        str(site.softcap),
        "above 0",
        "use None for no cap",
    )
    return found


def _latent_findings(shape: AttentionShape) -> list[Finding]:
    site, phase = shape.site, shape.phase
    found: list[Finding] = []
    if not site.latent_rank:
        return found
    if site.num_kv_heads != 1 or not site.head_dim_v == site.latent_rank <= site.head_dim:
        saw = (
            f"rank {site.latent_rank} with {site.num_kv_heads} key heads, head_dim "
            f"{site.head_dim}, head_dim_v {site.head_dim_v}"
        )
        rule = "a latent has one key head, head_dim_v equal to its rank and head_dim at least that"
        change = "describe the absorbed form of the layer"
        found.append(_illegal(shape, "latent_rank", saw, rule, change))
    if phase not in PAGED:
        rule, change = "latent rows live in pages", "use extend or decode"
        found.append(_illegal(shape, "phase", phase, rule, change))
    if site.sink:
        found.append(_illegal(shape, "sink", "a sink", "latent sites have none", "drop it"))
    return found


def _illegal(shape: AttentionShape, field: str, saw: str, rule: str, change: str) -> Finding:
    where = f"attention {shape.phase}: {field}"
    return Finding(where=where, saw=saw, rule=rule, change=change, code="illegal_shape")


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
        block_batch=block_batch,
        block_heads=block_heads,
        block_q=block_q,
        block_kv=block_kv,
        score_bytes=4 * block_batch * scores,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The bounds an engine plans for. `page_size` None: an encoder without a cache; then a
    sequence's queries are its keys and `max_q_len` is not used."""

    dtype: DType
    page_size: int | None
    max_batch: int
    max_q_len: int
    max_kv_len: int


class PlanTable:
    """Plans by (site, phase, batch bucket, kv bucket), made once. Buckets are powers of two up to
    the limits; `select` takes the smallest that holds the batch."""

    def __init__(
        self, plans: Mapping[tuple[AttentionSite, Phase], list[AttentionPlan]], limits: PlanLimits
    ):
        """`plans`: for each site and phase, batch buckets times kv buckets, the latter inner."""
        self._plans = plans
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


def make_table(
    sites: Iterable[tuple[AttentionSite, Phase]],
    limits: PlanLimits,
    gpu: Hardware,
    prefer: str | None,
) -> PlanTable:
    """Plan every site and bucket. Raises `Refused` with the findings of all of them."""
    plans: dict[tuple[AttentionSite, Phase], list[AttentionPlan]] = {}
    found: dict[Finding, None] = {}
    for site, phase in dict.fromkeys(sites):
        plans[site, phase] = []
        for batch in batch_buckets(limits):
            for kv_len in kv_buckets(limits):
                made = plan(_bucket(site, phase, limits, batch, kv_len), gpu, prefer)
                if isinstance(made, AttentionPlan):
                    plans[site, phase].append(made)
                else:
                    found.update(dict.fromkeys(made))
    if found:
        accept(list(found))
    return PlanTable(plans, limits)


def _bucket(
    site: AttentionSite, phase: Phase, limits: PlanLimits, batch: int, kv_len: int
) -> AttentionShape:
    max_q_len = {Phase.ENCODE: kv_len, Phase.DECODE: 1}.get(phase, min(limits.max_q_len, kv_len))
    return AttentionShape(
        site=site,
        phase=phase,
        dtype=limits.dtype,
        page_size=limits.page_size if phase in PAGED else None,
        batch=batch,
        max_q_len=max_q_len,
        max_kv_len=kv_len,
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
