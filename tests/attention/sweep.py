"""Every GPU times every attention shape of every model we serve, and their neighbours, through the
planner's own arithmetic: axes are NumPy arrays that broadcast, so a shape's pages, lengths, batches
and dtypes are one call."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from vitrail.attention.legality import Rule
from vitrail.attention.tiles import Choose, Facts
from vitrail.config.hardware import GPUS, Hardware, find


class Site(NamedTuple):
    """`served`: a model of ours has it, so that our own kernels must plan it on every GPU."""

    name: str
    q_heads: int
    kv_heads: int
    dim: int
    dim_v: int
    latent: int = 0
    causal: int = 1
    window: int = -1
    sink: int = 0
    softcap: int = 0
    served: bool = True


def _text(name: str, q: int, kv: int, dim: int, dim_v: int, **more: int) -> Iterator[Site]:
    """Under tensor parallelism of 1, 2, 4, 8: key heads are divided, then repeated."""
    for tp in (1, 2, 4, 8):
        if q % tp == 0:
            yield Site(f"{name} tp{tp}", q // tp, max(1, kv // tp), dim, dim_v, **more)


PAGED: tuple[Site, ...] = (
    *_text("MiMo full", 64, 4, 192, 128),
    *_text("MiMo window", 64, 8, 192, 128, window=127, sink=1),
    *_text("Qwen2-7B", 28, 4, 128, 128),
    *_text("Qwen2-1.5B", 12, 2, 128, 128),
    *_text("Llama", 32, 8, 128, 128),
    Site("SmolLM2", 9, 3, 64, 64),
    *(Site(f"MLA {h} absorbed", h, 1, 576, 512, latent=512) for h in (1, 2, 4, 8, 16, 32, 64, 128)),
    Site("MLA narrow", 16, 1, 320, 256, latent=256),
    *(Site(f"group {g}", g, 1, 128, 128) for g in (2, 3, 5, 6, 7, 9, 12, 24, 48, 71, 128)),
    Site("one to one", 16, 16, 128, 128),
    Site("small", 8, 2, 64, 64, window=511),
    Site("80", 8, 8, 80, 80),
    Site("96 capped", 8, 4, 96, 96, softcap=1),
    Site("gemma", 8, 4, 256, 256),
    Site("gemma window", 8, 4, 256, 256, window=1023, softcap=1),
    Site("gemma sink", 8, 4, 256, 256, sink=1),
    # Nobody's: what backends refuse.
    Site("72 in pages", 16, 16, 72, 72, served=False),
    Site("wide", 4, 4, 512, 512, served=False),
    Site("wider", 4, 4, 1024, 1024, served=False),
    Site("odd", 4, 4, 100, 52, served=False),
    Site("264", 4, 4, 264, 264, served=False),
    Site("264/64", 4, 4, 264, 64, served=False),
    Site("192", 4, 4, 192, 192, served=False),
    Site("latent small", 16, 1, 192, 128, latent=128, served=False),
    Site("latent capped", 16, 1, 576, 512, latent=512, softcap=1, served=False),
    Site("heads", 1 << 24, 1 << 24, 64, 64, served=False),
)

PACKED: tuple[Site, ...] = (
    Site("MoonViT", 16, 16, 72, 72, causal=0),
    Site("MoonViT tp2", 8, 8, 72, 72, causal=0),
    Site("SigLIP tp4", 4, 4, 72, 72, causal=0),
    Site("MiMo ViT", 32, 8, 64, 64, causal=0),
    Site("MiMo ViT window", 32, 8, 64, 64, causal=0, window=64, sink=1),
    Site("MiMo ViT tp8", 4, 1, 64, 64, causal=0, window=64, sink=1),
    Site("80", 16, 16, 80, 80, causal=0),
    Site("128", 8, 8, 128, 128, causal=0),
    *(Site(f"MLA {h} expanded", h, h, 192, 128) for h in (1, 2, 4, 8, 16, 32, 128)),
    Site("Llama", 32, 8, 128, 128),
    Site("gemma", 8, 4, 256, 256, softcap=1),
    Site("gemma plain", 8, 4, 256, 256),
    Site("sink", 8, 4, 256, 256, sink=1, served=False),
    Site("7", 4, 4, 7, 7, served=False),
    Site("4", 4, 4, 4, 4, served=False),
    Site("52", 4, 4, 100, 52, served=False),
    Site("264", 4, 4, 264, 264, served=False),
    Site("264/64", 4, 4, 264, 64, served=False),
    Site("192", 4, 4, 192, 192, served=False),
    Site("wide", 4, 4, 512, 512, served=False),
    Site("wider", 4, 4, 1024, 1024, served=False),
    Site("widest", 4, 4, 2048, 1024, served=False),
)

# (bytes of a query, of a key; half precision)
DTYPES = ((2, 2, 1), (2, 1, 1), (4, 4, 0), (4, 1, 0))
PAGES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 48, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256)
Q_LENS = (*range(1, 34), 500, 8192)
BATCHES = (1, 7, 64, 256)
KV_LENS = (1, 1000, 8192, 1 << 20)
PATCHES = (1, 63, 256, 1024, 4356, 4900, 16384, 65536)


# Where a planner may refuse a model of ours.
EXCUSED: dict[str, Callable[[Facts], Any]] = {
    "triton_e4m3": lambda f: (f.kv_bytes == 1) & (f.cc < 89),
    "triton_e4m3_dtype": lambda f: (f.kv_bytes == 1) & (f.half == 0),
    # 8,192 latent queries of 128 heads at once, or splits that may not follow the batch.
    "workspace": lambda f: (f.invariant == 1) | ((f.latent > 0) & (f.batch * f.q_len >= 8192)),
}


class Axes(NamedTuple):
    gpus: tuple[Hardware, ...] = GPUS
    pages: tuple[int, ...] = PAGES
    q_lens: tuple[int, ...] = Q_LENS
    batches: tuple[int, ...] = BATCHES
    kv_lens: tuple[int, ...] = KV_LENS
    patches: tuple[int, ...] = PATCHES


ALL = Axes()
# Each kind of GPU, one older than all, and the values at which rules turn.
FEW = Axes(
    gpus=(
        replace(find("A100"), name="older", cc=75),
        *(find(name) for name in ("A100", "L40S", "H200", "B300", "RTX 5090")),
    ),
    pages=(1, 16, 48, 64, 128, 256),
    q_lens=(1, 17, 32, 33),
    batches=(1, 256),
    kv_lens=(1000, 8192, 1 << 20),
    patches=(1, 1024, 4900),
)


def spread(*values: Iterable[int]) -> list[np.ndarray]:
    """Each along its own dimension."""
    arrays = [np.array(list(v), np.int64) for v in values]
    return [
        a.reshape([-1 if i == at else 1 for i in range(len(arrays))]) for at, a in enumerate(arrays)
    ]


def facts_of(gpu: Hardware, site: Site, lens: dict[str, Any]) -> Facts:
    return Facts(
        cc=gpu.cc,
        num_sms=gpu.num_sms,
        smem_block=gpu.smem_per_block_bytes,
        smem_sm=gpu.smem_per_sm_bytes,
        registers_sm=gpu.registers_per_sm,
        tmem=gpu.tmem_columns,
        q_heads=site.q_heads,
        kv_heads=site.kv_heads,
        dim=site.dim,
        dim_v=site.dim_v,
        latent=site.latent,
        causal=site.causal,
        window=site.window,
        sink=site.sink,
        softcap=site.softcap,
        **lens,
    )


def cases(axes: Axes = ALL) -> Iterator[tuple[Site, Facts]]:
    """One entry a GPU and site; its other facts are arrays."""
    fixed, which = (0, 1), range(len(DTYPES))
    page, q, batch, kv, fix, dtype = spread(
        axes.pages, axes.q_lens, axes.batches, axes.kv_lens, fixed, which
    )
    dtypes = dict(
        zip(("q_bytes", "kv_bytes", "half"), np.array(DTYPES)[dtype.ravel()].T, strict=True)
    )
    paged = {"page": page, "q_len": q, "batch": batch, "kv_len": kv, "invariant": fix, **dtypes}
    patches, batch, fix, _ = spread(axes.patches, axes.batches, fixed, which)
    lens = {"page": 0, "q_len": patches, "batch": batch, "kv_len": patches, "invariant": fix}
    for gpu in axes.gpus:
        for site in PAGED:
            yield site, facts_of(gpu, site, {"paged": 1, **paged})
        for site in PACKED:
            yield site, facts_of(gpu, site, {"paged": 0, **lens, **dtypes})


@dataclass
class Swept:
    """What a sweep saw. `refused`: combinations, by rule. `broken`: combinations that were planned
    although a law does not hold, by law. `missed`: refusals that a model of ours cannot have."""

    combinations: int = 0
    planned: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)


def sweep(
    choose: Choose,
    rules: tuple[Rule, ...],
    laws: tuple[Rule, ...],
    facts: Iterable[tuple[Site, Facts]],
) -> Swept:
    """Plans every case as the planner does, by `choose` and `rules`, and holds the plans against
    `laws`."""
    seen = Swept()
    for site, f in facts:
        shape = np.broadcast_shapes(*(np.shape(x) for x in f))
        seen.combinations += int(np.prod(shape))
        c = choose(f)
        planned = np.ones(shape, bool)
        for rule in rules:
            holds = truth(rule.holds(f, c), shape)
            if holds.all():
                continue
            planned &= holds
            seen.refused[rule.name] += int((~holds).sum())
            if site.served:
                excuse = EXCUSED[rule.name](f) if rule.name in EXCUSED else False
                missed = int((~holds & ~truth(excuse, shape)).sum())
                seen.missed[f"{rule.name}: {site.name}, cc {f.cc}"] += missed
        seen.planned += int(planned.sum())
        for law in laws:
            wrong = planned & ~truth(law.holds(f, c), shape)
            if wrong.any():
                seen.broken[law.name] += int(wrong.sum())
    seen.missed = +seen.missed
    return seen


def truth(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, bool), shape)
