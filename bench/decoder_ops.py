"""Ops of the text decoder on one GPU at Kimi-VL-A3B's shape, in bf16: correct before timed.

    python -m bench.decoder_ops [--check] [--only linear,head,...] [--sweep] [--profile]

Every op is first held against its definition in float32: an error of more than 1.2 times that of
the definition in bf16, or a result that is not finite, is reported, and the op is not timed. Then
each is timed in a CUDA graph over the weights and activations of many layers, so that none is
cached; `us` of one call, bytes over time, and the floor: bytes / 4.2 TB/s or FLOPs / 650 TFLOP/s.
The chain is the attention half of 27 layers (norms, projections, attention over 1,024 keys) as the
model runs it, with and without programmatic dependent launch; `--profile` lists its kernels."""

import argparse
import itertools
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail.ops.launch as launch_module
from tests.gpu.decoder_checks import (
    DENSE,
    DEVICE,
    DTYPE,
    EPS,
    HIDDEN,
    PAGE,
    SIZES,
    THETA,
    WORST,
    Slots,
    angles,
    checks,
    normal,
    way_checks,
)
from vitrail.attention.installed import releases
from vitrail.attention.metadata import paged_metadata
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.cache.kv_pool import KvPool
from vitrail.config.hardware import from_device
from vitrail.config.model import MlaConfig, RopeConfig, TextConfig
from vitrail.layers.attention import (
    MlaAttention,
    MlaForms,
    mla_cache_spec,
    mla_context,
    mla_sites,
)
from vitrail.layers.context import ForwardContext
from vitrail.layers.norm import RmsNorm
from vitrail.layers.rotary import make_rotary
from vitrail.ops.activation import naive as naive_activation
from vitrail.ops.activation import triton as fast_activation
from vitrail.ops.linear import fused as fast_linear
from vitrail.ops.linear.table import Way, way
from vitrail.ops.mla import fused as fast_mla
from vitrail.ops.mla import naive as naive_mla
from vitrail.ops.mla.naive import LatentNorm
from vitrail.ops.norm import naive as naive_norm
from vitrail.ops.norm import triton as fast_norm
from vitrail.ops.rope.naive import Turns

BYTES_PER_S, FLOPS_PER_S = 4.2e12, 650e12
VOCAB, LAYERS = 163840, 27
TOKENS = (1, 8, 32, 256, 8192)
COLD_BYTES = 256 << 20
KEYS = 1024
TEXT = TextConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    num_heads=SIZES.heads,
    num_kv_heads=SIZES.heads,
    head_dim=SIZES.head,
    intermediate_size=DENSE,
    rms_eps=EPS,
    rope=RopeConfig(theta=THETA, dim=SIZES.rope, interleaved=True),
    max_position=131072,
    tie_embeddings=False,
    mla=MlaConfig(
        kv_lora_rank=SIZES.rank,
        qk_nope_head_dim=SIZES.nope,
        qk_rope_head_dim=SIZES.rope,
        v_head_dim=SIZES.value,
        kv_norm_eps=1e-6,
    ),
    moe=None,
)
Call = Callable[[], object]


class Case(NamedTuple):
    """`calls`: the op over different memory."""

    name: str
    calls: list[Call]
    moved_bytes: float
    flops: float = 0.0


def check() -> set[str]:
    """Names of the ops that failed."""
    red: dict[str, None] = {}
    ratios: dict[str, float] = defaultdict(float)
    for found in (*checks(), *way_checks(swept_ways())):
        name, kind = f"{found.name} of {found.tokens}", found.name.split()[0]
        try:
            worst = max(found.ratios(), key=lambda r: float("inf") if r != r else r)
        except Exception:  # noqa: BLE001  whatever it is, that op is not timed
            traceback.print_exc()
            worst = float("nan")
        if not worst <= WORST:
            print(f"RED {name}: error ratio {worst:.3f}")
            red[kind] = None
        ratios[kind] = max(ratios[kind], worst)
    print("error ratios:", {k: round(v, 3) for k, v in ratios.items()})
    return set(red)


def swept_ways() -> list[Way]:
    return [
        Way(o, HIDDEN, w)
        for o, w in itertools.product((2, 4, 8, 16), (2, 4, 8))
        if 16 <= o * HIDDEN // (32 * w) <= 128
    ]


def copies(nbytes: float) -> int:
    return max(4, min(64, int(-(-COLD_BYTES // nbytes))))


def linear_cases(tokens: int, sweep: bool) -> Iterator[Case]:
    shapes = {"qkv_a": (SIZES.projected, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"lm_head": (VOCAB, HIDDEN)}
    if tokens <= 256:
        shapes |= {"gate_up": (2 * DENSE, HIDDEN), "down": (HIDDEN, DENSE)}
    for name, (outputs, channels) in shapes.items():
        if name == "lm_head" and tokens > 256:
            continue
        size = 2 * outputs * channels
        moved = size + 2 * tokens * (outputs + channels)
        flops = 2 * tokens * outputs * channels
        xs = [normal(tokens, channels) for _ in range(2)]
        ws = [
            normal(outputs, channels, std=0.02) for _ in range(max(2, min(40, COLD_BYTES // size)))
        ]
        pairs = list(zip(itertools.cycle(xs), ws))

        def of(op: Callable, pairs: list = pairs) -> list[Call]:
            return [lambda x=x, w=w: op(x, w) for x, w in pairs]

        yield Case(f"{name} library", of(F.linear), moved, flops)
        if name == "lm_head":
            fp32 = moved + 2 * tokens * outputs
            yield Case(
                f"{name} library to fp32", of(lambda x, w: F.linear(x, w).float()), fp32, flops
            )
            yield Case(
                f"{name} mm out fp32",
                of(lambda x, w: torch.mm(x, w.t(), out_dtype=torch.float32)),
                fp32,
                flops,
            )
        own = way(tokens, outputs, channels, False)
        ways = [] if own is None else [own]
        if sweep and name in ("qkv_a", "o_proj", "lm_head"):
            ways += [w for w in swept_ways() if w != own]
        dtype = torch.float32 if name == "lm_head" else DTYPE
        for chosen in ways:
            label = f"{name} {' '.join(map(str, chosen))}" + (" *" if chosen == own else "")

            def ours(x, w, chosen=chosen, dtype=dtype):
                return fast_linear.product(chosen, x, w, dtype)

            yield Case(label, of(ours), moved, flops)
        if name == "qkv_a":
            norm = normal(HIDDEN)

            def two(x, w, norm=norm):
                return F.linear(fast_norm.add_rms_norm(x, x, norm, EPS)[0], w)

            yield Case(f"{name} norm, then product", of(two), moved, flops)
            for chosen in ways:

                def fused(x, w, chosen=chosen, norm=norm):
                    return fast_linear.norm_product(chosen, x, x, norm, EPS, w)

                yield Case(f"{name} norm in {' '.join(map(str, chosen))}", of(fused), moved, flops)


def small_cases(tokens: int, sweep: bool) -> Iterator[Case]:
    n = copies(8 * tokens * HIDDEN)
    xs = [normal(tokens, HIDDEN) for _ in range(n)]
    norm = normal(HIDDEN)
    for name, ops in (("ours", fast_norm), ("plain", naive_norm)):
        calls = [lambda x=x, ops=ops: ops.add_rms_norm(x, x, norm, EPS) for x in xs]
        yield Case(f"add_rms_norm {name}", calls, 8 * tokens * HIDDEN)
    gates = [normal(tokens, 2 * DENSE) for _ in range(max(2, n // 8))]
    for name, ops in (("ours", fast_activation), ("plain", naive_activation)):
        calls = [lambda x=x, ops=ops: ops.silu_mul(x) for x in gates]
        yield Case(f"silu_mul {name}", calls, 6 * tokens * DENSE)


def mla_cases(tokens: int, sweep: bool) -> Iterator[Case]:
    size = 2 * SIZES.heads * SIZES.nope * SIZES.rank
    n = copies(2 * size + 2 * tokens * SIZES.projected)
    kv_bs = [normal(SIZES.heads, SIZES.nope + SIZES.value, SIZES.rank, std=0.05) for _ in range(n)]
    rows = [normal(tokens, SIZES.projected) for _ in range(n)]
    outs = [normal(tokens, SIZES.heads, SIZES.rank) for _ in range(n)]
    turns = Turns(*angles(tokens), True)
    norm, into = LatentNorm(normal(SIZES.rank), 1e-6), Slots(tokens)
    heads_bytes = 2 * tokens * SIZES.heads * SIZES.row
    if tokens <= 256:
        for name, ops in (("ours", fast_mla), ("plain", naive_mla)):
            calls = [
                lambda r=r, kv=kv, ops=ops: ops.absorbed_queries(
                    r, kv[:, : SIZES.nope], norm, turns, SIZES, into
                )
                for r, kv in zip(rows, kv_bs, strict=True)
            ]
            moved = size + heads_bytes + 2 * tokens * SIZES.projected
            yield Case(f"absorbed {name}", calls, moved, tokens * size)
            calls = [
                lambda o=o, kv=kv, ops=ops: ops.values(o, kv[:, SIZES.nope :])
                for o, kv in zip(outs, kv_bs, strict=True)
            ]
            yield Case(f"values {name}", calls, size + heads_bytes, tokens * size)
        kept = fast_mla.MAX_VALUE_TOKENS
        fast_mla.MAX_VALUE_TOKENS = 1 << 20 if tokens > kept else 0
        calls = [
            lambda o=o, kv=kv: fast_mla.values(o, kv[:, SIZES.nope :])
            for o, kv in zip(outs, kv_bs, strict=True)
        ]
        yield Case("values the other way", calls, size + heads_bytes, tokens * size)
        fast_mla.MAX_VALUE_TOKENS = kept
        return
    for name, ops in (("ours", fast_mla), ("plain", naive_mla)):
        calls = [
            lambda r=r, ops=ops: ops.expanded_queries(r, norm, turns, SIZES, into) for r in rows
        ]
        turned = 2 * tokens * (2 * SIZES.heads * SIZES.rope + 2 * SIZES.row)
        yield Case(f"expanded_queries {name}", calls, turned)
        latents = [r[:, -SIZES.row :].contiguous() for r in rows]
        calls = [
            lambda r=r, kv=kv, ops=ops: ops.expanded_keys(r, kv.flatten(0, 1), SIZES, False)
            for r, kv in zip(latents, kv_bs, strict=True)
        ]
        moved = 2 * tokens * SIZES.heads * (SIZES.head + SIZES.value)
        yield Case(f"expanded_keys {name}", calls, moved, 2 * tokens * size)
    calls = [lambda r=r, kv=kv: by_head(r, kv) for r, kv in zip(latents, kv_bs, strict=True)]
    yield Case("expanded_keys products into place", calls, moved, 2 * tokens * size)


def by_head(row_TC: Tensor, kv_b_HXR: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values by products of each head that write where the result lies."""
    tokens = len(row_TC)
    k = row_TC.new_empty(tokens, SIZES.heads, SIZES.head)
    v = row_TC.new_empty(tokens, SIZES.heads, SIZES.value)
    latent = row_TC[None, :, : SIZES.rank].expand(SIZES.heads, -1, -1)
    k_b, v_b = kv_b_HXR.split((SIZES.nope, SIZES.value), 1)
    torch.bmm(latent, k_b.transpose(1, 2), out=k.transpose(0, 1)[..., : SIZES.nope])
    torch.bmm(latent, v_b.transpose(1, 2), out=v.transpose(0, 1))
    k[..., SIZES.nope :] = row_TC[:, None, SIZES.rank :]
    return k, v


class Chain(nn.Module):
    """The attention half of every layer; the other half is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(HIDDEN, EPS, DTYPE) for _ in range(2 * LAYERS))
        self.layers = nn.ModuleList(MlaAttention(TEXT, i, DTYPE, MlaForms()) for i in range(LAYERS))
        for p in self.parameters():
            if p.ndim == 1:
                p.fill_(1)
            else:
                p.normal_(0, 0.02)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        rotary, residual = make_rotary(ctx.positions, TEXT.rope), None
        for i, layer in enumerate(self.layers):
            before, after = self.norms[2 * i], self.norms[2 * i + 1]
            row, residual = before.add_into(layer.qkv_a_proj, x, residual)
            x = layer(row, rotary, ctx)
            x, residual = after.add(x, residual)
        return x


def plans(pool_pages: int) -> PlanTable:
    p = torch.cuda.get_device_properties(0)
    gpu = from_device(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory)
    limits = PlanLimits(
        dtype="bfloat16", page_size=PAGE, max_batch=256, max_q_len=8192, max_kv_len=8192
    )
    return make_table(mla_sites(TEXT, MlaForms()), limits, gpu, None, releases())


def context(tokens: int, pool: KvPool, table: PlanTable) -> ForwardContext:
    """`tokens` decodes of KEYS keys, or one prefill of 8192."""
    prefill = tokens > 256
    batch, keys = (1, tokens) if prefill else (tokens, KEYS)
    pages = torch.randperm(batch * (keys // PAGE), device=DEVICE).int().view(batch, -1)
    meta = paged_metadata(PAGE, [keys if prefill else 1] * batch, [keys] * batch, pages)
    at = torch.arange(keys, device=DEVICE) if prefill else torch.full((batch,), keys - 1).to(DEVICE)
    owner = torch.zeros_like(at) if prefill else torch.arange(batch, device=DEVICE)
    return ForwardContext(
        positions=at,
        cache_slots=pages[owner, at // PAGE].long() * PAGE + at % PAGE,
        num_prefill=tokens if prefill else 0,
        prefill=meta if prefill else None,
        decode=None if prefill else meta,
        plans=table,
        pool=pool,
    )


def chain(tokens: int, profile: bool) -> None:
    torch.manual_seed(0)
    pool_pages = max(tokens * KEYS // PAGE if tokens <= 256 else tokens // PAGE, 1)
    spec = mla_cache_spec(TEXT, "bfloat16")
    with DEVICE:
        model = Chain()
        pool = KvPool([spec] * LAYERS, pool_pages, PAGE, DEVICE)
    for i in range(LAYERS):
        pool.latent(i).normal_()
    table = plans(pool_pages)
    ctx = mla_context(context(tokens, pool, table), MlaForms())
    x = normal(tokens, HIDDEN)
    weights = sum(p.numel() * 2 for p in model.parameters())
    read = weights + (tokens * KEYS * SIZES.row * 2 * LAYERS if tokens <= 256 else 0)
    kept = launch_module.may_start_early
    for early in (True, False):
        launch_module.may_start_early = kept if early else (lambda device: False)
        micros, graph = time_us([lambda: model(x, ctx)])
        print(
            f"chain T={tokens} {'early' if early else 'in turn'}: {micros:9.1f} us, a layer "
            f"{micros / LAYERS:7.2f}, weights and cache {read / BYTES_PER_S * 1e6:7.1f} us"
        )
        if profile and graph is not None:
            list_kernels(graph, micros)
    launch_module.may_start_early = kept


def list_kernels(graph: torch.cuda.CUDAGraph, micros: float) -> None:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            found[e.name].append(e.device_time)
    total = sum(sum(v) for v in found.values()) / 3
    print(f"    kernels together {total:.1f} us of {micros:.1f}")
    for name, times in sorted(found.items(), key=lambda kv: -sum(kv[1])):
        share = sum(times) / 3
        print(
            f"    {share:9.1f} us {len(times) // 3:4d} x {share / len(times) * 3:8.2f}  {name[:90]}"
        )


def time_us(run: list[Call], seconds: float = 0.05) -> tuple[float, torch.cuda.CUDAGraph]:
    """Microseconds a call, one after another in a graph; the lower of two medians; the graph."""
    for call in run:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in run:
            call()
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    medians = []
    for _ in range(2):
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 200):
            edges[0].record()
            graph.replay()
            edges[1].record()
            torch.cuda.synchronize()
            times.append(edges[0].elapsed_time(edges[1]) * 1e3)
        medians.append(sorted(times)[len(times) // 2] / len(run))
    return min(medians), graph


def once(run: list[Call]) -> tuple[float, None]:
    """In place of `time_us`: compiles, times nothing."""
    run[0]()
    return float("inf"), None


def report(case: Case, tokens: int, red: set[str]) -> None:
    if case.name.split()[0] in red:
        print(f"not timed: {case.name}")
        return
    try:
        micros, _ = time_us(case.calls)
    except Exception as error:  # noqa: BLE001  the next one may run
        print(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
        return
    floor = max(case.moved_bytes / BYTES_PER_S, case.flops / FLOPS_PER_S) * 1e6
    rate = f"{case.moved_bytes / micros / 1e6:5.2f} TB/s {case.flops / micros / 1e6:5.0f} TFLOP/s"
    print(f"T={tokens:<5d}{case.name:42s} {micros:9.2f} us {rate}  floor {floor:8.2f}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="only whether ops are right")
    parser.add_argument("--only", default="linear,small,mla,chain")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warm", action="store_true", help="only compile")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    begin = time.perf_counter()
    if args.warm:
        global time_us
        time_us = once
    red = set() if args.warm else check()
    print(f"checked in {time.perf_counter() - begin:.1f} s")
    if args.check:
        return
    sets = {"linear": linear_cases, "small": small_cases, "mla": mla_cases}
    counts = [int(t) for t in args.tokens.split(",")]
    for name in args.only.split(","):
        for tokens in counts:
            try:
                if name == "chain":
                    if tokens != 8:
                        chain(tokens, args.profile)
                    continue
                for case in sets[name](tokens, args.sweep and tokens <= 4):
                    report(case, tokens, red)
            except Exception:  # noqa: BLE001  the next one may run
                traceback.print_exc()
            torch.cuda.empty_cache()
    print(f"done in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
