"""Variants of a decode step's kernels against what is, each held against its definition first: one
table. Bench only: what pays is kept, and this file goes.

    python -m bench.decode_variants [--seconds 100]

Latent attention: queries piece by piece (as it was), at once, and with older keys before the wait.
Experts of one token: tiles, rows in registers. 256 tokens: blocks first to last, last to first.
The choice by ints or floats. Nine layers of all."""

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import cutlass
import torch
import triton
import triton.language as tl
from cutlass import Int64, const_expr, cute

from bench import decode_step, moe
from bench.attention import MLA, Case, calls, error_ratio, shape_of, tensors
from bench.attention import time_us as attention_us
from bench.decoder_ops import HIDDEN, KEYS, PAGE, context, normal
from vitrail.attention.backends import cute as backend
from vitrail.attention.decode_spec import WARPGROUP
from vitrail.attention.installed import releases
from vitrail.attention.kernels.decode_sm90 import BLOCK, DecodeSm90
from vitrail.attention.plan import PlanLimits, make_table
from vitrail.attention.plan import plan as attention_plan
from vitrail.attention.shape import Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.config.finding import accept
from vitrail.layers.attention import MlaForms, mla_cache_spec, mla_context, mla_sites
from vitrail.models.deepseek_v3 import DeepseekV3ForCausalLM
from vitrail.ops.dispatch import gpu_of
from vitrail.ops.moe import fused
from vitrail.ops.moe import plan as moe_plan
from vitrail.ops.moe import triton as kernels
from vitrail.ops.moe.tile import Alone, ExpertsPlan
from vitrail.ops.moe.triton import SIZES, _begin

DEVICE = torch.device("cuda")


class Before(DecodeSm90):
    """Each piece of the queries waits for the one before."""

    @cute.jit
    def _load_queries(self, mQ, mItems, item, kv_head, s_q: cute.Pointer, thread):
        spec = self.spec
        group = const_expr(spec.heads // spec.kv_heads)
        q_row, row, rows = mItems[item, 0], mItems[item, 1], mItems[item, 2]
        pieces = const_expr(spec.dim // 8)
        threads = const_expr(spec.groups * WARPGROUP)
        for i in cutlass.range_constexpr(cute.ceil_div(spec.tile_m * pieces, threads)):
            piece = i * threads + thread
            if piece < spec.tile_m * pieces:
                n, c = piece // pieces, piece % pieces
                offset = (c // 8) * (spec.tile_m * BLOCK) + n * BLOCK + ((c % 8) ^ (n % 8)) * 8
                target = cute.make_tensor((s_q + offset).align(16), cute.make_layout(8))
                flat = row + n
                if flat < rows:
                    query, head = flat // group, kv_head * group + flat % group
                    source = self._piece(
                        mQ,
                        Int64(q_row + query) * mQ.stride[0]
                        + Int64(head) * mQ.stride[1]
                        + Int64(c * 8),
                    )
                    cute.autovec_copy(source, target)
                else:
                    target.fill(self.dtype(0.0))


class EarlyKeys(DecodeSm90):
    early_keys = True


@triton.jit(do_not_specialize=SIZES)
def moe_choose_before(
    ids, weights, rows, counts, part, bias, tokens, num_experts, cap, scaling,
    SPANS: tl.constexpr, ROUTED: tl.constexpr, SHARED: tl.constexpr, NORMALIZE: tl.constexpr,
    XP: tl.constexpr, KP: tl.constexpr, PLACE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For the program's token the ROUTED best of sigmoid(logits) + bias, the first of equals, then
    SHARED experts (they follow the routed ones) with weight 1. A score that is no number ranks
    last, and makes the weights what it is. PLACE: also takes a row of each expert."""
    K: tl.constexpr = ROUTED + SHARED
    x = tl.arange(0, XP)
    k = tl.arange(0, KP)
    t = tl.program_id(0)
    known = x < num_experts
    extra = tl.load(bias + x, mask=known, other=0.0)
    _begin(EARLY)
    logits = tl.zeros([XP], tl.float32)
    for j in tl.static_range(SPANS):
        at = part + (j * tokens + t).to(tl.int64) * num_experts + x
        logits += tl.load(at, mask=known, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = tl.where(scores == scores, scores + extra, -1e30)
    ranked = tl.where(known, ranked, float("-inf"))
    total = 0.0
    chosen = tl.where(k < ROUTED, 0, num_experts + k - ROUTED)
    weight = tl.where(k < ROUTED, 0.0, 1.0)
    for i in tl.static_range(ROUTED):
        best = tl.argmax(ranked, 0)
        value = tl.sum(tl.where(x == best, scores, 0.0), 0)
        ranked = tl.where(x == best, float("-inf"), ranked)
        total += value
        chosen = tl.where(k == i, best, chosen)
        weight = tl.where(k == i, value, weight)
    factor = scaling
    if NORMALIZE:
        factor = scaling / (total + 1e-20)
    weight = tl.where(k < ROUTED, weight * factor, weight)
    tl.store(ids + t.to(tl.int64) * K + k, chosen, mask=k < K)
    tl.store(weights + t.to(tl.int64) * K + k, weight, mask=k < K)
    if PLACE:
        taken = tl.atomic_add(counts + chosen, 1, mask=k < ROUTED, sem="relaxed")
        row = chosen * cap + tl.where(k < ROUTED, taken, t)
        tl.store(rows + row, t * K + k, mask=k < K)
        if t == 0:
            tl.store(counts + chosen, tokens + k * 0, mask=(k >= ROUTED) & (k < K))


CHOOSE = {"before": moe_choose_before, "now": kernels.moe_choose}
ATTENTION = {"before": Before, "at once": DecodeSm90, "early keys": EarlyKeys}
_COMPILED: dict[tuple[str, object], Callable[..., None]] = {}
_HERE: Callable[..., object] = backend.compiled


def use_attention(name: str) -> None:
    """Compiled here, past what is kept on disk."""
    backend.kernel_of.cache_clear()
    backend.compiled.cache_clear()
    backend.DecodeSm90 = ATTENTION[name]

    def kept(_: str, __: object, make: Callable[[], tuple]) -> tuple:
        return make()

    def compiled(made: object) -> Callable[..., None]:
        key = (name, made)
        if key not in _COMPILED:
            began = time.perf_counter()
            _COMPILED[key] = _HERE.__wrapped__(made)
            print(f"    compiled in {time.perf_counter() - began:.1f} s", flush=True)
        return _COMPILED[key]

    backend.kept = kept
    backend.compiled = compiled
    compiled.cache_clear = lambda: None


def use_alone(alone: Alone | None) -> None:
    """In the plans of one token."""
    change_plans(1, lambda plan: replace(plan, alone=alone))


def use_backward(up: bool, down: bool) -> None:
    def other(plan: ExpertsPlan) -> ExpertsPlan:
        return replace(
            plan, up=replace(plan.up, backward=up), down=replace(plan.down, backward=down)
        )

    change_plans(768, other)


def change_plans(most: int, other: Callable[[ExpertsPlan], ExpertsPlan]) -> None:
    """The plan of up to `most` tokens; of one token, a row of its own."""
    rows = dict(MEASURED_ROWS)
    rows[most] = other(rows[16] if most == 1 else rows[most])
    rows = tuple(sorted(rows.items(), key=lambda pair: pair[0] or 1 << 30))
    moe_plan.MEASURED = MappingProxyType({MEASURED_KEY: rows})


((MEASURED_KEY, _rows),) = moe_plan.MEASURED.items()
MEASURED_ROWS = dict(_rows)

ALONES = tuple(
    Alone(up=up, up_warps=up_warps, down=8, down_warps=8)
    for up, up_warps in ((2, 8), (4, 8), (1, 4), (2, 4), (1, 8))
)
DOWNS = ((4, 4), (8, 4), (4, 8), (16, 8))


def attention() -> None:
    gpu = gpu_of(DEVICE)
    for batch, keys in ((1, 32768), (32, 8192), (256, 1024), (1, 1024)):
        name = f"MLA 16 {batch} x {keys >> 10}k"
        case = Case(name=name, site=MLA, phase=Phase.DECODE, lens=(keys,) * batch, q_len=1, page=64)
        made = accept(attention_plan(shape_of(case), gpu, "cute", releases()))
        inputs = tensors(case)
        found = []
        for variant in ATTENTION:
            use_attention(variant)
            run = calls(case, made, inputs)
            ratio = error_ratio(case, inputs, run[0]())
            if not ratio <= 2:
                found.append(f"{variant} WRONG {ratio:.2f}")
                continue
            us = attention_us(run)
            found.append(f"{variant} {us:.2f} us {case.moved_bytes / us / 1e6:.2f} TB/s")
        print(f"{name:16} " + " | ".join(found), flush=True)


def one_token() -> Alone:
    """The quickest rows."""
    layers = moe.make_layers()
    torch.manual_seed(1)
    gpu = gpu_of(DEVICE)
    whole = [moe.draw(layer, 1, True) for layer in layers]
    routed = [moe.draw(layer, 1, False) for layer in layers]
    shape = moe.ExpertsShape(moe.HIDDEN, moe.INNER, moe.ROUTED + moe.SHARED, 8)

    def layer_us() -> float:
        return moe.time_us(
            [
                lambda b=b: fused.triton_mixture(
                    gpu, b.x, b.layer.router, b.layer.bias, moe.CHOICE, b.layer.gate_up,
                    b.layer.down,
                )
                for b in whole
            ]
            * 4
        )  # fmt: skip

    def show(name: str, us: float, part: float) -> None:
        print(
            f"one token {name:44} layer {us:6.2f} us, routed experts {part:6.2f} us "
            f"{routed[0].bytes / part / 1e6:.2f} TB/s",
            flush=True,
        )

    use_alone(None)
    tiles = moe_plan.experts_plan(1, shape, gpu)
    part = moe.time_us(
        [
            lambda b=b: fused.triton_experts(b.x, b.routing, b.layer.gate_up, b.layer.down, tiles)
            for b in routed
        ]
        * 4
    )
    show("tiles", layer_us(), part)
    times: dict[Alone, float] = {}

    def attempt(alone: Alone) -> None:
        use_alone(alone)
        plan = replace(tiles, alone=alone)
        try:
            b = whole[0]
            ok = moe.correct(
                str(alone),
                b,
                lambda: fused.alone(
                    b.x, b.routing, b.layer.gate_up, b.layer.down, moe.SHARED, plan
                ),
            )
            mixed = fused.triton_mixture(
                gpu, b.x, b.layer.router, b.layer.bias, moe.CHOICE, b.layer.gate_up, b.layer.down
            )
            want = moe.naive_experts(
                b.x.float(), b.routing, b.layer.gate_up.float(), b.layer.down.float()
            )
            off = (mixed.float() - want).abs().max().item() / want.abs().max().item()
            if not ok or not off < 0.02:
                print(f"one token {alone} WRONG {off:.3f}")
                return
            part = moe.time_us(
                [
                    lambda b=b: fused.alone(b.x, b.routing, b.layer.gate_up, b.layer.down, 0, plan)
                    for b in routed
                ]
                * 4
            )
            times[alone] = layer_us()
            show(str(alone)[6:-1], times[alone], part)
        except Exception:  # noqa: BLE001  the others go on
            traceback.print_exc()

    for alone in ALONES:
        attempt(alone)
    best = min(times, key=times.__getitem__)
    for down, warps in DOWNS:
        attempt(replace(best, down=down, down_warps=warps))
    return min(times, key=times.__getitem__)


class Variant(NamedTuple):
    tokens: int
    name: str
    attention: str
    choose: str
    known: bool = False
    alone: Alone | None = None
    item_pages: int | None = None
    backward: tuple[bool, bool] = (False, False)


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor


def capture(model: DeepseekV3ForCausalLM, tokens: int, item_pages: int | None) -> Captured:
    """As `decode_step.capture`, the same numbers each time. Checks that a replay makes of other
    states what launches one by one do, the newest keys and what the memory of sums holds being NaN
    before."""
    torch.manual_seed(tokens)
    limits = PlanLimits(
        dtype="bfloat16", page_size=PAGE, max_batch=tokens, max_q_len=1, max_kv_len=8 * KEYS
    )
    table = make_table(mla_sites(model.text, MlaForms()), limits, gpu_of(DEVICE), None, releases())
    if item_pages is not None:
        table._plans = {  # noqa: SLF001
            site: [replace(plan, min_item_pages=item_pages) for plan in plans]
            for site, plans in table._plans.items()  # noqa: SLF001
        }
    specs = [mla_cache_spec(model.text, "bfloat16")] * decode_step.LAYERS
    with DEVICE:
        pool = KvPool(specs, tokens * KEYS // PAGE, PAGE, DEVICE)
    for layer in range(decode_step.LAYERS):
        pool.latent(layer).normal_()
    ctx, x = mla_context(context(tokens, pool, table), MlaForms()), normal(tokens, HIDDEN)
    model(x, ctx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, ctx)
    for _ in range(4):
        x.copy_(normal(tokens, HIDDEN))
        want = model(x, ctx)
        for layer in range(decode_step.LAYERS):
            pool.latent(layer).flatten(0, 1)[ctx.cache_slots] = torch.nan
        graph.replay()
        assert torch.equal(out, want), "a replay gives other bits"
    return Captured(graph, out.clone())


def layers(alone: Alone, out_of_time: Callable[[], bool]) -> None:
    model = decode_step.build()
    cases = (
        Variant(1, "as it was", "before", "before", False, None),
        Variant(1, "queries at once", "at once", "before", False, None),
        Variant(1, "older keys early", "early keys", "before", False, None),
        Variant(
            1, "older keys early, items of 64", "early keys", "before", False, None, item_pages=1
        ),
        Variant(1, "choice by ints", "before", "now", False, None),
        Variant(1, "rows", "before", "before", False, alone),
        Variant(1, "rows, sum knows early", "before", "before", True, alone),
        Variant(1, "rows, sum, queries, choice", "at once", "now", True, alone),
        Variant(1, "all", "early keys", "now", True, alone),
        Variant(1, "all, items of 64", "early keys", "now", True, alone, item_pages=1),
        Variant(256, "as it was", "before", "before"),
        Variant(256, "choice by ints", "before", "now"),
        Variant(256, "choice, queries at once", "at once", "now"),
        Variant(256, "choice, older keys early", "early keys", "now"),
        Variant(256, "choice, queries, up backward", "at once", "now", backward=(True, False)),
        Variant(256, "choice, queries, both backward", "at once", "now", backward=(True, True)),
        Variant(32, "as it was", "before", "before"),
        Variant(32, "choice, queries at once", "at once", "now"),
        Variant(32, "choice, older keys early", "early keys", "now"),
    )
    graphs: list[tuple[int, str, torch.cuda.CUDAGraph]] = []
    first: dict[int, torch.Tensor] = {}
    for case in cases:
        tokens, name = case.tokens, case.name
        if out_of_time():
            print("out of time: not every case was captured")
            break
        use_attention(case.attention)
        use_backward(*case.backward)
        if tokens == 1:
            use_alone(case.alone)
        kernels.moe_choose, fused.KNOWN = CHOOSE[case.choose], case.known
        try:
            made = capture(model, tokens, case.item_pages)
            graphs.append((tokens, name, made.graph))
            want = first.setdefault(tokens, made.out).float()
            off = (made.out.float() - want).norm() / want.norm()
            print(f"    {tokens} tokens, {name}: off the first by {off.item():.5f}", flush=True)
        except Exception:  # noqa: BLE001  the others go on
            traceback.print_exc()
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(5):  # in turns, so that a clock that falls is everybody's
        for tokens, name, graph in graphs:
            times = 30 if tokens < 64 else 8
            found.setdefault((tokens, name), []).append(decode_step.time_us(graph, times))
    for (tokens, name), times in found.items():
        print(f"{tokens:4} tokens, nine layers, {name:32} {sorted(times)[2]:8.1f} us", flush=True)
    for tokens, name, graph in graphs:
        if tokens == 1 and name in ("as it was", "all"):
            print(f"a layer, {name}:")
            decode_step.timeline(graph)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100)
    args = parser.parse_args()
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    best = Alone(up=2, down=8)
    for part in (one_token, attention):
        try:
            best = part() or best
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        print(f"[{time.perf_counter() - began:.0f} s]", flush=True)
    layers(best, lambda: time.perf_counter() - began > args.seconds)
    print(f"best {best}  [{time.perf_counter() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
