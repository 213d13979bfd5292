"""Attention on one GPU: ours against the floor and torch's own, cold L2, correct before timed.

    python -m bench.attention [--seconds 95] [--only MLA,8/1] [--backends cute,triton] [--sweep]

Each case runs its plan on random keys. A few of its sequences are first computed in float32; where
a backend is further off than twice plain torch in the same dtype, it is reported and not timed.
Decodes rotate over enough key-value memory that none of it is cached, in a CUDA graph. The floor is
max(bytes / 4.46 TB/s, FLOPs / 788 TFLOP/s), what one H200 was measured to reach; the goal is
max(bytes / (0.95 x 4.46 TB/s) + 8 us, FLOPs / (0.8 x 788 TFLOP/s)). Without `--backends`: those
that a plan would try, best first. `--sweep` also times other tiles than the plan's; `--flex` also
torch's FlexAttention, compiled, on packed sequences. `--compile I
N`: only compile the I-th of N shares of the Triton kernels for an H200, on any machine; processes
started side by side warm the compiler's cache."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tests.attention.packed import varlen_metadata
from vitrail.attention.backend import Attended, load_backend
from vitrail.attention.backends.triton import Launch, launches
from vitrail.attention.compile import compile_launch
from vitrail.attention.installed import releases
from vitrail.attention.metadata import paged_metadata
from vitrail.attention.plan import AttentionPlan, order, plan
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import accept
from vitrail.config.hardware import Hardware, find, from_device

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BYTES_PER_S, FLOPS_PER_S = 4.46e12, 788e12
COLD_BYTES = 512 << 20
NOISE = 0.01  # of the largest output: what half precision may be off by in any case
LSE_ERROR = 2e-3
Call = Callable[[], Attended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`lens`: keys of each sequence; `q_len` None: as many queries."""

    name: str
    site: AttentionSite
    phase: Phase
    lens: tuple[int, ...]
    q_len: int | None = None
    page: int = 64

    @property
    def q_lens(self) -> tuple[int, ...]:
        return self.lens if self.q_len is None else (self.q_len,) * len(self.lens)

    @property
    def kv_bytes(self) -> int:
        site = self.site
        width = site.head_dim + (0 if site.latent_rank else site.head_dim_v)
        return 2 * sum(self.lens) * site.num_kv_heads * width

    @property
    def moved_bytes(self) -> int:
        width = self.site.head_dim + self.site.head_dim_v
        return self.kv_bytes + 2 * sum(self.q_lens) * self.site.num_q_heads * width

    @property
    def flops(self) -> float:
        """Of the pairs that see each other."""
        pairs = sum(
            q * k - (q * (q - 1) / 2 if self.site.causal else 0)
            for q, k in zip(self.q_lens, self.lens, strict=True)
        )
        return 2 * pairs * self.site.num_q_heads * (self.site.head_dim + self.site.head_dim_v)


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more) -> AttentionSite:
    facts = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


GQA, WIDE, NARROW = site(32, 8, 128, 128), site(64, 4, 192, 128), site(8, 1, 192, 128)
MLA = site(16, 1, 576, 512, latent_rank=512, scale=192**-0.5)
MLA_128 = site(128, 1, 576, 512, latent_rank=512, scale=192**-0.5)
PLAIN = site(32, 32, 128, 128)
EXPANDED, VISION = site(16, 16, 192, 128), site(16, 16, 72, 72, causal=False)
MIXED = (
    256,
    529,
    784,
    1024,
    1156,
    1600,
    1936,
    2209,
    2500,
    2916,
    3364,
    3600,
    4096,
    4356,
    4356,
    5854,
)


def cases() -> Iterator[Case]:
    """The most important first."""

    def decode(name: str, where: AttentionSite, batch: int, keys: int, page: int = 64) -> Case:
        shown = f"{name} {batch} x {keys >> 10}k" + (f" page {page}" if page != 64 else "")
        return Case(
            name=shown, site=where, phase=Phase.DECODE, lens=(keys,) * batch, q_len=1, page=page
        )

    for batch, keys in ((64, 8192), (8, 8192), (1, 8192), (256, 1024)):
        for name, where in (("32/8 x 128", GQA), ("64/4 x 192/128", WIDE), ("8/1", NARROW)):
            yield decode(name, where, batch, keys)
    for batch, keys in ((32, 8192), (256, 1024), (1, 32768), (32, 1024), (1, 1024)):
        yield decode("MLA 16", MLA, batch, keys)
    for images, patches in ((1, 256), (16, 256), (1, 1024), (1, 4356), (8, 4356), (1, 16384)):
        name = f"vision {images} x {patches}"
        yield Case(name=name, site=VISION, phase=Phase.ENCODE, lens=(patches,) * images)
    yield Case(name="vision 16 mixed", site=VISION, phase=Phase.ENCODE, lens=MIXED)
    for batch, keys in ((1, 8192), (8, 2048), (1, 1024)):
        name = f"prefill 16 x 192/128, {batch} x {keys >> 10}k"
        yield Case(name=name, site=EXPANDED, phase=Phase.PREFILL, lens=(keys,) * batch)
    yield Case(name="prefill 32 x 128, 1 x 8k", site=PLAIN, phase=Phase.PREFILL, lens=(8192,))
    yield Case(name="extend 32/8 x 128, 1 x 8k", site=GQA, phase=Phase.EXTEND, lens=(8192,))
    for batch, keys in ((1, 65536), (1, 1024), (8, 1024), (64, 1024), (8, 65536), (256, 8192)):
        for name, where in (("32/8 x 128", GQA), ("64/4 x 192/128", WIDE), ("8/1", NARROW)):
            yield decode(name, where, batch, keys)
    for page in (16, 128, 1):
        yield decode("32/8 x 128", GQA, 64, 8192, page)
        yield decode("64/4 x 192/128", WIDE, 64, 8192, page)
        yield decode("MLA 16", MLA, 32, 8192, page)
    yield decode("MLA 128", MLA_128, 32, 8192)
    yield decode("MLA 128", MLA_128, 256, 1024)
    yield decode("MLA 16", MLA, 8, 65536)
    yield decode("32/8 x 128", GQA, 64, 65536)
    yield decode("64/4 x 192/128", WIDE, 64, 65536)


def shape_of(case: Case) -> AttentionShape:
    return AttentionShape(
        site=case.site,
        phase=case.phase,
        dtype="bfloat16",
        page_size=case.page if case.phase in PAGED else None,
        batch=len(case.lens),
        max_q_len=max(case.q_lens),
        max_kv_len=max(case.lens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """A case's inputs in `copies` places: queries, and keys and values as the backend takes them
    (pages, latent pages or packed); `metas`: one a copy."""

    q: Tensor
    kv: tuple[Tensor, ...]
    metas: list


def tensors(case: Case) -> Tensors:
    g = torch.Generator(DEVICE).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=DEVICE, dtype=DTYPE)

    where, copies = case.site, 1
    q = normal(sum(case.q_lens), where.num_q_heads, where.head_dim)
    widths = (where.head_dim,) if where.latent_rank else (where.head_dim, where.head_dim_v)
    if case.phase not in PAGED:
        kv = tuple(normal(sum(case.lens), where.num_kv_heads, width) for width in widths)
        return Tensors(q=q, kv=kv, metas=[varlen_metadata(case.q_lens, DEVICE, case.lens)])
    if case.phase is Phase.DECODE:
        copies = max(-(-COLD_BYTES // case.kv_bytes), 2)
    pages = [-(-n // case.page) for n in case.lens]
    ids = torch.randperm(sum(pages) * copies, generator=g, device=DEVICE, dtype=torch.int32)
    heads = () if where.latent_rank else (where.num_kv_heads,)
    kv = tuple(normal(ids.numel(), case.page, *heads, width) for width in widths)
    metas = []
    for mine in ids.view(copies, -1):
        table = torch.zeros(len(case.lens), max(pages), dtype=torch.int32, device=DEVICE)
        for row, part in enumerate(mine.split(pages)):
            table[row, : len(part)] = part
        metas.append(paged_metadata(case.page, case.q_lens, case.lens, table))
    return Tensors(q=q, kv=kv, metas=metas)


def calls(case: Case, made: AttentionPlan, inputs: Tensors) -> list[Call]:
    backend = load_backend(made.backend)
    run = backend.varlen
    if case.phase in PAGED:
        run = backend.latent if case.site.latent_rank else backend.paged
    return [lambda meta=meta: run(made, inputs.q, *inputs.kv, meta) for meta in inputs.metas]


def error_ratio(case: Case, inputs: Tensors, got: Attended) -> float:
    """The worst error of a few sequences' last queries, over that of plain torch in bfloat16."""
    where, worst = case.site, 0.0
    group = where.num_q_heads // where.num_kv_heads
    for seq in {0, len(case.lens) // 2, len(case.lens) - 1}:
        stop, keys = sum(case.q_lens[: seq + 1]), case.lens[seq]
        rows = slice(stop - min(case.q_lens[seq], 64), stop)
        k, v = sequence(case, inputs, seq)
        q = inputs.q[rows].transpose(0, 1)
        results = []
        for dtype in (torch.float32, DTYPE):
            kk, vv = (t.to(dtype).transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
            scores = q.to(dtype) @ kk.transpose(1, 2) * where.scale
            if where.causal:
                own = torch.arange(keys - scores.shape[1], keys, device=DEVICE)[:, None]
                scores.masked_fill_(torch.arange(keys, device=DEVICE) > own, -torch.inf)
            if dtype is torch.float32:
                lse = scores.logsumexp(-1).transpose(0, 1)
            results.append((scores.softmax(-1) @ vv).transpose(0, 1).float())
        exact, plain = results
        ours = (got.out[rows].float() - exact).abs().max().item()
        least = NOISE * exact.abs().max().item()
        worst = max(worst, ours / max((plain - exact).abs().max().item(), least))
        # Keys that were left out show here first, however many there are.
        if not (got.lse[rows] - lse).abs().max().item() < LSE_ERROR or not ours < float("inf"):
            return float("nan")
    return worst


def sequence(case: Case, inputs: Tensors, seq: int) -> tuple[Tensor, Tensor]:
    """Keys and values [S, K, D] of a sequence in the first copy."""
    n = case.lens[seq]
    if case.phase not in PAGED:
        start = sum(case.lens[:seq])
        return inputs.kv[0][start : start + n], inputs.kv[1][start : start + n]
    pages = inputs.metas[0].block_table[seq, : -(-n // case.page)].long()
    rows = [t[pages].flatten(0, 1)[:n] for t in inputs.kv]
    if case.site.latent_rank:
        return rows[0][:, None], rows[0][:, None, : case.site.latent_rank]
    return rows[0], rows[1]


def time_us(run: list[Call], seconds: float = 0.08) -> float:
    """Microseconds a call, the calls one after another in a CUDA graph; median of replays, the
    better of two rounds: a GPU that comes from heavier work is slow for a while."""
    for call in run:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in run:
            call()
    medians = []
    for _ in range(2):
        medians.append(_median_us(graph, seconds) / len(run))
        time.sleep(0.05)
    return min(medians)


def _median_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 50):
        edges[0].record()
        graph.replay()
        edges[1].record()
        torch.cuda.synchronize()
        times.append(edges[0].elapsed_time(edges[1]) * 1e3)
    return sorted(times)[len(times) // 2]


def torch_us(case: Case, inputs: Tensors) -> float | None:
    """torch's scaled_dot_product_attention where sequences are packed and equally long."""
    if case.phase in PAGED or len(set(case.lens)) > 1:
        return None
    q, k, v = (t.unflatten(0, (len(case.lens), -1)).transpose(1, 2) for t in (inputs.q, *inputs.kv))

    def call() -> Attended:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=case.site.causal, scale=case.site.scale
        )
        return Attended(out, out)

    return time_us([call] * 2)


def flex_us(case: Case, inputs: Tensors) -> float | None:
    """torch's FlexAttention, compiled; sequences that are packed stay apart by a block mask."""
    if case.phase in PAGED:
        return None
    owner = torch.arange(len(case.lens), device=DEVICE).repeat_interleave(
        torch.tensor(case.lens, device=DEVICE)
    )

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = owner[query] == owner[key]
        return own & (query >= key) if case.site.causal else own

    total = sum(case.lens)
    torch.compiler.reset()  # each case has a kernel of its own: no limit on how many
    mask = create_block_mask(sees, None, None, total, total, device=DEVICE)
    run = torch.compile(flex_attention, dynamic=False)
    q, k, v = (t.transpose(0, 1)[None] for t in (inputs.q, *inputs.kv))

    def call() -> Attended:
        out = run(q, k, v, block_mask=mask, scale=case.site.scale)
        return Attended(out, out)

    return time_us([call] * 2)


def show(case: Case, name: str, micros: float) -> str:
    floor = max(case.moved_bytes / BYTES_PER_S, case.flops / FLOPS_PER_S) * 1e6
    goal = case.flops / (0.8 * FLOPS_PER_S) * 1e6
    if case.phase is Phase.DECODE:
        goal = max(case.moved_bytes / (0.95 * BYTES_PER_S) * 1e6 + 8, goal)
    rate = (
        f"{case.moved_bytes / micros / 1e6:6.2f} TB/s"
        if case.phase is Phase.DECODE
        else f"{case.flops / micros / 1e6:6.0f} TFLOP/s"
    )
    verdict = "" if micros <= goal else f"  misses the goal x{micros / goal:.2f}"
    return f"{name:44s} {micros:9.1f} us {rate}  floor {floor:8.1f} goal {goal:8.1f}{verdict}"


def variants(made: AttentionPlan) -> Iterator[tuple[str, AttentionPlan]]:
    """Other tiles: (keys, buffers, warps, rows)."""
    if made.kernel == "latent" and made.tile_m == 16:
        tiles = [(64, 2, 8, 16), (32, 4, 8, 16), (32, 4, 4, 16), (32, 2, 4, 16), (32, 2, 8, 16)]
    elif made.kernel == "latent":
        tiles = [(32, 2, 8, 64), (32, 1, 8, 64), (64, 1, 8, 64), (64, 2, 8, 32), (64, 2, 8, 16)]
    elif made.kernel == "decode":
        tiles = [(64, 2, 4, 16), (32, 3, 4, 16), (32, 4, 4, 16), (32, 4, 2, 16), (128, 2, 8, 16)]
    elif made.kernel == "varlen" and made.shape.site.head_dim < 128:
        tiles = [(64, 2, 4, 64), (64, 3, 4, 64), (64, 2, 8, 128), (128, 2, 8, 128), (64, 1, 4, 64)]
    else:
        tiles = [(64, 1, 8, 128), (128, 1, 8, 128), (64, 1, 4, 64), (32, 2, 8, 128)]
    for n, stages, warps, m in tiles:
        name = f"    n {n} buffers {stages} warps {warps} m {m}"
        other = replace(made, tile_n=n, num_stages=stages, num_warps=warps, tile_m=m)
        blocks = row_blocks(other)
        yield name, replace(other, max_items=made.max_items * blocks // row_blocks(made))


def row_blocks(made: AttentionPlan) -> int:
    where = made.shape.site
    return -(-made.shape.max_q_len * (where.num_q_heads // where.num_kv_heads) // made.tile_m)


SWEPT = (
    "32/8 x 128 64 x 8k",
    "64/4 x 192/128 64 x 8k",
    "8/1 8 x 8k",
    "MLA 16 32 x 8k",
    "MLA 128 32 x 8k",
    "vision 8 x 4356",
    "prefill 16 x 192/128, 8 x 2k",
)


def run_case(case: Case, gpu: Hardware, args: argparse.Namespace) -> None:
    sweep, backends = args.sweep, args.backends
    options: list[tuple[str, AttentionPlan]] = []
    names = backends.split(",") if backends else order(shape_of(case), gpu)
    for backend in names:
        if backend == "reference":
            continue
        made = plan(shape_of(case), gpu, backend, releases())
        if isinstance(made, AttentionPlan):
            options.append((f"{case.name}, {backend}", made))
            if sweep and backend == "triton" and case.name in SWEPT:
                options += variants(made)
    inputs = tensors(case)
    for name, option in options:
        try:
            run = calls(case, option, inputs)
            ratio = error_ratio(case, inputs, run[0]())
            if not ratio <= 2:
                print(f"{name:44s} WRONG: error {ratio:.2f} x torch's; not timed", flush=True)
                continue
            line = show(case, name, time_us(run))
            other = torch_us(case, inputs) if option is options[0][1] else None
            tail = f"  error {ratio:.2f}" + (f"  torch SDPA {other:.1f} us" if other else "")
            print(line + tail, flush=True)
        except Exception as error:  # noqa: BLE001  a case that fails must not hide the others
            print(f"{name:44s} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
    try:
        micros = flex_us(case, inputs) if args.flex else None
        if micros is not None:
            print(show(case, f"{case.name}, torch flex", micros), flush=True)
    except Exception as error:  # noqa: BLE001
        print(f"{case.name}, torch flex FAILED: {str(error)[:300]}", flush=True)


def compile_all(gpu: Hardware, sweep: bool, share: int, shares: int) -> None:
    """This share of the kernels, into the compiler's cache; needs no GPU."""
    kernels: dict[str, Launch] = {}
    for case in cases():
        made = accept(plan(shape_of(case), gpu, "triton"))
        others = [p for _, p in variants(made)] if sweep and case.name in SWEPT else []
        for option in (made, *others):
            kernels |= {repr(launch): launch for launch in launches(option)}
    for launch in list(kernels.values())[share::shares]:
        compile_launch(launch, gpu.cc)


def ceilings() -> None:
    big = torch.empty(1 << 30, device=DEVICE, dtype=torch.float32).normal_()
    read = time_us([lambda: Attended(big.sum(), big[:0])])
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    product = time_us([lambda: Attended(a @ b, a[:0])])
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}: a sum reads {4 * big.numel() / read / 1e6:.2f} TB/s,"
    )
    print(f"8192^3 bf16 {2 * 8192**3 / product / 1e6:.0f} TFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--only", default="")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--backends", default="")
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("SHARE", "OF"))
    args = parser.parse_args()
    if args.compile:
        compile_all(find("H200"), args.sweep, *args.compile)
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    facts = torch.cuda.get_device_properties(0)
    gpu = from_device(
        facts.name,
        facts.major * 10 + facts.minor,
        facts.multi_processor_count,
        facts.total_memory,
    )
    ceilings()
    for case in cases():
        if time.perf_counter() - begin > args.seconds:
            print(f"out of time before {case.name}", flush=True)
            break
        if any(only in case.name for only in args.only.split(",")):
            run_case(case, gpu, args)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
