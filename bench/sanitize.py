"""Each kind of attention kernel of ours once, on small shapes, for tools that watch memory:

    compute-sanitizer --report-api-errors no --tool memcheck python -m bench.sanitize
    compute-sanitizer --tool racecheck python -m bench.sanitize --backend cute
    python -m bench.sanitize --guard

Pages that nobody wrote hold NaN and block tables name an impossible page past a row's end; results
are held against the reference on the CPU. Without `--guard` every tensor is an allocation of its
own, so that memcheck sees its ends. `--guard`, where there is no such tool: every tensor, those
that a backend makes too, lies between two guards of NaN; a result that is not finite read one or
was not written, a guard that changed was written. Exits with 1 where anything is wrong. On a
machine without a GPU the kernels run in Triton's interpreter."""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from tests.attention.packed import varlen_metadata
from vitrail.attention.backend import Attended, load_backend
from vitrail.attention.installed import releases
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata, Work, paged_metadata
from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.cache.kv_pool import quantized
from vitrail.config.finding import accept
from vitrail.config.hardware import CPU, Hardware, find, from_device
from vitrail.config.model import DType, KvScales

GUARD_BYTES = 4096
NO_PAGE = 1 << 30
TOLERANCE = 0.03  # of half precision against fp32, values of about 1
Meta = PagedMetadata | VarlenMetadata


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more: Any) -> AttentionSite:
    facts: dict[str, Any] = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`splits`: the launch must be cut and combined."""

    site: AttentionSite
    phase: Phase
    lens: tuple[tuple[int, int], ...]
    page: int = 16
    e4m3: bool = False
    splits: bool = False


DECODES = ((1, 1500), (1, 1), (1, 65))
IMAGES = ((100, 100), (1, 1), (65, 65))
CHUNKS = ((70, 200), (3, 3), (1, 90))
GQA, MLA = site(8, 2, 128, 128), site(16, 1, 576, 512, latent_rank=512, scale=192**-0.5)
EDGES = {"window": 33, "sink": True}
CASES = {
    "decode": Case(site=GQA, phase=Phase.DECODE, lens=DECODES, splits=True),
    "decode 192/128": Case(
        site=site(8, 1, 192, 128), phase=Phase.DECODE, lens=DECODES, page=64, splits=True
    ),
    "decode e4m3": Case(site=GQA, phase=Phase.DECODE, lens=DECODES, e4m3=True, splits=True),
    "latent": Case(site=MLA, phase=Phase.DECODE, lens=DECODES, page=64, splits=True),
    "latent e4m3": Case(site=MLA, phase=Phase.DECODE, lens=DECODES, e4m3=True, splits=True),
    "latent 64 rows": Case(
        site=site(64, 1, 576, 512, latent_rank=512), phase=Phase.DECODE, lens=DECODES, splits=True
    ),
    "decode page 1": Case(site=GQA, phase=Phase.DECODE, lens=DECODES, page=1, splits=True),
    "several queries": Case(
        site=site(8, 2, 128, 128, **EDGES), phase=Phase.DECODE, lens=((5, 90), (1, 1), (3, 300))
    ),
    "extend": Case(site=GQA, phase=Phase.EXTEND, lens=CHUNKS),
    "extend window sink": Case(
        site=site(8, 2, 128, 128, **EDGES), phase=Phase.EXTEND, lens=CHUNKS, page=1
    ),
    "encode": Case(site=site(2, 2, 72, 72, causal=False), phase=Phase.ENCODE, lens=IMAGES),
    "encode window sink": Case(
        site=site(2, 2, 64, 64, causal=False, **EDGES), phase=Phase.ENCODE, lens=IMAGES
    ),
    "prefill": Case(site=site(2, 2, 192, 128), phase=Phase.PREFILL, lens=IMAGES),
}


class Guards(TorchDispatchMode):
    """Within it, what torch hands out uninitialised lies between two guards of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self.between(args[0], named.get("dtype") or torch.float32, named.get("device"))
        if func is torch.ops.aten.new_empty.default:
            return self.between(args[1], named.get("dtype") or args[0].dtype, args[0].device)
        return func(*args, **named)

    def between(self, shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        """Every byte 255, which is NaN in every float type; aligned as an allocation would be."""
        size = math.prod(shape) * dtype.itemsize
        whole = 2 * GUARD_BYTES + size
        block = torch.full((whole,), 255, dtype=torch.uint8, device=device or "cpu")
        self._blocks.append((block, size))
        return block[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(tuple(shape))

    def broken(self) -> int:
        """Guard bytes that were written."""
        return sum(
            int((block[:GUARD_BYTES] != 255).sum() + (block[GUARD_BYTES + size :] != 255).sum())
            for block, size in self._blocks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """`kv`: keys and values, in pages (a latent's alone) where the phase has them; where nobody
    wrote, NaN. `table`: with `NO_PAGE` past a row's pages."""

    q: Tensor
    kv: tuple[Tensor, ...]
    table: Tensor | None
    sink: Tensor | None
    scales: KvScales

    def mapped(self, move: Callable[[Tensor], Tensor]) -> "Inputs":
        return Inputs(
            q=move(self.q),
            kv=tuple(move(t) for t in self.kv),
            table=None if self.table is None else move(self.table),
            sink=None if self.sink is None else move(self.sink),
            scales=self.scales,
        )


def make_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """On the CPU."""
    g, where = torch.Generator().manual_seed(0), case.site
    q = torch.randn(sum(n for n, _ in case.lens), where.num_q_heads, where.head_dim, generator=g)
    widths = [where.head_dim] if where.latent_rank else [where.head_dim, where.head_dim_v]
    heads = () if where.latent_rank else (where.num_kv_heads,)
    sink = torch.linspace(-1, 1, where.num_q_heads) if where.sink else None
    total = sum(n for _, n in case.lens)
    rows = [torch.randn(total, *heads, width, generator=g) for width in widths]
    if case.phase not in PAGED:
        kv = tuple(t.to(dtype) for t in rows)
        return Inputs(q=q.to(dtype), kv=kv, table=None, sink=sink, scales=KvScales())
    pages = [-(-n // case.page) for _, n in case.lens]
    ids = torch.randperm(sum(pages) + 2, generator=g)[: sum(pages)].split(pages)
    table = torch.full((len(pages), max(pages) + 1), NO_PAGE, dtype=torch.int32)
    slots: list[Tensor] = []
    for row, (mine, (_, n)) in enumerate(zip(ids, case.lens, strict=True)):
        table[row, : len(mine)] = mine.int()
        slots.append((mine[:, None] * case.page + torch.arange(case.page)).flatten()[:n])
    pools: list[Tensor] = []
    for t in rows:
        pool = torch.full(((sum(pages) + 2) * case.page, *t.shape[1:]), torch.nan)
        pool[torch.cat(slots)] = t
        pool = quantized(pool, 0.5) if case.e4m3 else pool.to(dtype)
        pools.append(pool.unflatten(0, (-1, case.page)))
    scales = KvScales(0.5, 0.5) if case.e4m3 else KvScales()
    return Inputs(q=q.to(dtype), kv=tuple(pools), table=table, sink=sink, scales=scales)


def shape_of(case: Case, dtype: DType) -> AttentionShape:
    return AttentionShape(
        site=case.site,
        phase=case.phase,
        dtype=dtype,
        page_size=case.page if case.phase in PAGED else None,
        batch=len(case.lens),
        max_q_len=max(n for n, _ in case.lens),
        max_kv_len=max(n for _, n in case.lens),
        kv_dtype="float8_e4m3fn" if case.e4m3 else None,
    )


def call(case: Case, made: AttentionPlan, inputs: Inputs) -> tuple[Attended, Meta]:
    backend, (q_lens, kv_lens) = load_backend(made.backend), zip(*case.lens, strict=True)
    if inputs.table is None:
        packed = varlen_metadata(q_lens, inputs.q.device, kv_lens)
        return backend.varlen(made, inputs.q, *inputs.kv, packed, inputs.sink), packed
    meta = paged_metadata(case.page, q_lens, kv_lens, inputs.table)
    if case.site.latent_rank:
        return backend.latent(made, inputs.q, *inputs.kv, meta, inputs.scales), meta
    return backend.paged(made, inputs.q, *inputs.kv, meta, inputs.sink, inputs.scales), meta


def exact(case: Case, inputs: Inputs) -> Attended:
    """The reference in fp32 over what the pages stand for."""
    scale = inputs.scales.k
    wide = inputs.mapped(lambda t: t.float() if t.is_floating_point() else t)
    kv = tuple(t * scale for t in wide.kv)
    plain = Inputs(q=wide.q, kv=kv, table=wide.table, sink=wide.sink, scales=KvScales())
    shape = shape_of(
        Case(site=case.site, phase=case.phase, lens=case.lens, page=case.page), "float32"
    )
    return call(case, accept(plan(shape, CPU, "reference")), plain)[0]


def planned(case: Case, gpu: Hardware, backend: str) -> AttentionPlan | None:
    """None where the backend does not run such a case. In the interpreter, where products of
    bfloat16 are wrong, in float16."""
    shape = shape_of(case, "bfloat16" if torch.cuda.is_available() else "float16")
    made = plan(shape, gpu, backend, releases())
    return made if isinstance(made, AttentionPlan) else None


def run_case(case: Case, made: AttentionPlan, device: torch.device, guard: bool) -> list[str]:
    """What is wrong with the case's kernels on this device."""
    dtype = made.shape.dtype
    inputs = make_inputs(case, getattr(torch, dtype))
    want = exact(case, inputs)
    guards = Guards()

    def move(t: Tensor) -> Tensor:
        return (
            guards.between(t.shape, t.dtype, device)
            if guard
            else torch.empty_like(t, device=device)
        ).copy_(t)

    inputs = inputs.mapped(move)
    with guards if guard else contextlib.nullcontext():
        got, meta = call(case, made, inputs)
    return list(_faults(case, made, got, want, meta)) + (
        [f"{n} guard bytes were written"] if (n := guards.broken()) else []
    )


def _faults(
    case: Case, made: AttentionPlan, got: Attended, want: Attended, meta: Meta
) -> Iterator[str]:
    out, lse = got.out.float().cpu(), got.lse.cpu()
    if not (out.isfinite().all() and lse.isfinite().all()):
        yield "a result is not finite: NaN was read, or an element not written"
    elif (error := (out - want.out).abs().max().item()) > TOLERANCE:
        yield f"off by {error:.3g}"
    elif (error := (lse - want.lse).abs().max().item()) > TOLERANCE:
        yield f"the log-sum-exp is off by {error:.3g}"
    if case.splits and not len(meta.work.get(made, _no_work).combines):
        yield "nothing was split: the combine did not run"


def _no_work() -> Work:
    raise AssertionError("the backend left no work behind")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guard", action="store_true", help="guards of NaN around every tensor")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    device, gpu = torch.device("cpu"), find("H200")
    if torch.cuda.is_available():
        device, facts = torch.device("cuda"), torch.cuda.get_device_properties(0)
        cc = facts.major * 10 + facts.minor
        gpu = from_device(facts.name, cc, facts.multi_processor_count, facts.total_memory)
    print(f"{gpu.name}, torch {torch.__version__}, {'guards' if args.guard else 'no guards'}")
    wrong = 0
    for name, case in CASES.items():
        made = planned(case, gpu, args.backend)
        if args.only not in name or made is None:
            continue
        faults = run_case(case, made, device, args.guard)
        wrong += bool(faults)
        print(f"{name:20s} {'; '.join(faults) or 'right'}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
