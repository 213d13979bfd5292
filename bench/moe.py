"""Experts of one Kimi-VL-A3B layer on one GPU: from hidden states and top-k ids to the summed
output, correct before timed, in CUDA graphs that rotate over the weights of several layers.

    python bench/moe.py [--tokens 1,8,32,256,2048,8192] [--tune] [--compile I N]

`routed`: the 64 routed experts; `layer`: router, routed and shared experts. Floors: bytes of the
experts that a draw chooses over 4.20 TB/s, FLOPs over 700 TFLOP/s. `--tune` sweeps tiles and prints
the quickest of each product, of the layer's experts. `--compile I N`: only compile the I-th of N
shares of the sweep's kernels; processes started side by side warm the compiler's cache."""

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.ops.dispatch import gpu_of
from vitrail.ops.moe import fused
from vitrail.ops.moe.grouped import grouped_experts
from vitrail.ops.moe.naive import Routing, naive_experts, naive_route
from vitrail.ops.moe.plan import Choice, ExpertsShape, direct, experts_plan
from vitrail.ops.moe.tile import ExpertsPlan, Tile

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
HIDDEN, INNER, ROUTED, TOP_K, SHARED = 2048, 1408, 64, 6, 2
CHOICE = Choice(top_k=TOP_K, num_shared=SHARED, normalize=True, scaling=2.446)
EXPERT_BYTES = 3 * HIDDEN * INNER * 2
ROW_FLOPS = 2 * 3 * HIDDEN * INNER
BYTES_PER_S, FLOPS_PER_S = 4.20e12, 700e12
LAYERS = 4
SMEM_BYTES = 227 << 10
PRODUCTS = {"up": 2 / 3, "down": 1 / 3}  # and their share of the work
CHECKED = 48  # tokens that are also computed in fp32


class Layer(NamedTuple):
    router: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor


class Batch(NamedTuple):
    """Hidden states of one layer, and what its router chose."""

    x: Tensor
    routing: Routing
    layer: Layer

    @property
    def bytes(self) -> int:
        return len(self.routing.expert_ids.unique()) * EXPERT_BYTES

    @property
    def flops(self) -> int:
        return self.routing.expert_ids.numel() * ROW_FLOPS

    @property
    def floor_us(self) -> float:
        return max(self.bytes / BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e6


def mean_floor_us(batches: Sequence[Batch]) -> float:
    return sum(batch.floor_us for batch in batches) / len(batches)


def make_layers() -> list[Layer]:
    torch.manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, 0.02)

    experts = ROUTED + SHARED
    return [
        Layer(
            normal(ROUTED, HIDDEN, dtype=torch.float32),
            normal(ROUTED, dtype=torch.float32),
            normal(experts, 2 * INNER, HIDDEN),
            normal(experts, HIDDEN, INNER),
        )
        for _ in range(LAYERS)
    ]


def draw(layer: Layer, tokens: int, shared: bool) -> Batch:
    x = torch.randn(tokens, HIDDEN, device=DEVICE).to(DTYPE)
    routing = naive_route(x, layer.router, layer.bias, CHOICE)
    if shared:
        return Batch(x, Routing(routing.expert_ids.int(), routing.weights), layer)
    few = Routing(*(t[:, :TOP_K].contiguous() for t in routing))
    alone = layer._replace(gate_up=layer.gate_up[:ROUTED], down=layer.down[:ROUTED])
    return Batch(x, Routing(few.expert_ids.int(), few.weights), alone)


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median over graphs of all `calls`, microseconds a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay_us(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / times / len(calls)

    replay_us(1)
    times = max(1, min(10, int(6_000 / len(calls) / max(replay_us(1), 1.0))))
    return sorted(replay_us(times) for _ in range(repeats))[repeats // 2]


def tiles(tokens: int, bt: int, product: str) -> Iterator[Tile]:
    if tokens <= 512:
        yield from few(bt, product)
    else:
        yield from many(bt, product)


def few(bt: int, product: str) -> Iterator[Tile]:
    for bn in (64, 128):
        for bk in (64, 128):
            for stages in (3, 4, 6):
                for warps in (4, 8) if bn == 128 and bt >= 64 else (4,):
                    one = Tile(bn=bn, bk=bk, stages=stages, warps=warps)
                    if fits(one, bt, product):
                        yield one


def many(bt: int, product: str) -> Iterator[Tile]:
    down = product == "down"
    for bn in (64, 128, 256) if down else (64, 128):
        for stages in (3, 4):
            area = bt * bn * (1 if down else 2)
            warps = 8 if area > 8192 else 4
            one = Tile(bn=bn, bk=64, stages=stages, warps=warps, swap=False, halves=True)
            if not fits(one, bt, product) or not 8192 <= area <= 32768:
                continue
            yield from (one, replace(one, swap=True))
            if down:
                yield replace(one, sorted=True)
                yield replace(one, sorted=True, halves=False, programs=132, flat=True)
            else:
                yield replace(one, paired=True)


def fits(tile: Tile, bt: int, product: str) -> bool:
    rows = bt + tile.bn * (2 if product == "up" else 1)
    return tile.stages * tile.bk * 2 * rows <= SMEM_BYTES - 3072


# Rows of a block that are worth a try.
BLOCKS = {
    1: (16,),
    2: (16,),
    4: (16,),
    8: (16,),
    16: (16,),
    24: (16, 32),
    32: (16, 32),
    48: (16, 32),
    64: (16, 32),
    128: (32, 64),
    256: (32, 64),
    512: (64, 128),
    1024: (128,),
    2048: (128,),
    4096: (128,),
    8192: (128,),
    16384: (128,),
}


def sweep(sizes: Sequence[int]) -> Iterator[tuple[int, str, Tile]]:
    """(tokens, product, tile), each kernel once."""
    seen = set()
    for tokens in sizes:
        for bt in BLOCKS[tokens]:
            for product in PRODUCTS:
                for tile in tiles(tokens, bt, product):
                    plan = ExpertsPlan(bt=bt, up=tile, down=tile)
                    how = direct(tokens, tokens * (TOP_K + SHARED), ROUTED + SHARED, plan)
                    if (bt, product, tile, how) not in seen:
                        seen.add((bt, product, tile, how))
                        yield tokens, bt, product, tile


def one_product(batch: Batch, bt: int, product: str, tile: Tile) -> Callable[[], object]:
    plan, (x, routing, layer) = ExpertsPlan(bt=bt, up=tile, down=tile), batch
    ids = routing.expert_ids
    placed = fused.place(ids, len(layer.down), plan)
    if product == "up":
        return lambda: fused.run_up(x, layer.gate_up, ids, placed, plan)
    act = torch.randn(placed.blocks * bt, INNER, device=DEVICE).to(DTYPE)
    return lambda: fused.run_down(act, layer.down, ids, placed, tile, plan)


def compile_share(index: int, of: int, sizes: Sequence[int]) -> None:
    """By running each kernel once."""
    experts, empty = ROUTED + SHARED, torch.empty(0, device=DEVICE)
    layer = Layer(
        empty,
        empty,
        torch.zeros(experts, 2 * INNER, HIDDEN, dtype=DTYPE, device=DEVICE),
        torch.zeros(experts, HIDDEN, INNER, dtype=DTYPE, device=DEVICE),
    )
    for i, (tokens, bt, product, tile) in enumerate(sweep(sizes)):
        if i % of == index:
            ids = torch.arange(TOP_K + SHARED, dtype=torch.int32, device=DEVICE)
            ids = ids.expand(tokens, -1).contiguous()
            x = torch.zeros(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
            try:
                one_product(Batch(x, Routing(ids, ids.float()), layer), bt, product, tile)()
            except Exception as error:  # noqa: BLE001  a sweep goes on
                print("does not compile", bt, product, tile, repr(error)[:200])
    torch.cuda.synchronize()


def correct(name: str, batch: Batch, call: Callable[[], Tensor]) -> bool:
    """The first tokens, against fp32: no further off than twice plain torch in bf16."""
    x, routing, layer = batch
    x, few_chosen = x[:CHECKED], Routing(*(t[:CHECKED] for t in routing))
    exact = naive_experts(x.float(), few_chosen, layer.gate_up.float(), layer.down.float())
    plain = naive_experts(x, few_chosen, layer.gate_up, layer.down)
    limit = (plain.float() - exact).abs().max().item()
    got = (call()[:CHECKED].float() - exact).abs().max().item()
    if not got <= 2 * limit:
        print(f"  {name}: NOT CORRECT: error {got:.2e}, plain torch's is {limit:.2e}")
    return got <= 2 * limit


def report(name: str, us: float, batches: Sequence[Batch], share: float = 1.0) -> None:
    moved = sum(batch.bytes for batch in batches) / len(batches) * share
    flops = batches[0].flops * share
    print(f"  {us:8.2f} us {moved / us / 1e6:5.2f} TB/s {flops / us / 1e6:6.1f} TFLOP/s  {name}")


def shown(tile: Tile) -> str:
    words = [f"{tile.bn}x{tile.bk} {tile.stages} stages {tile.warps} warps"]
    flags = ("swap", "sorted", "flat", "halves", "paired")
    words += [name for name in flags if getattr(tile, name)]
    return " ".join(words) + (f" {tile.programs} programs" if tile.programs else "")


def tune(batches: list[Batch]) -> None:
    tokens = len(batches[0].x)
    for bt in BLOCKS[tokens]:
        for product, share in PRODUCTS.items():
            found: list[tuple[float, Tile]] = []
            for tile in tiles(tokens, bt, product):
                try:
                    calls = [one_product(batch, bt, product, tile) for batch in batches]
                    found.append((time_us(calls, 3), tile))
                except Exception as error:  # noqa: BLE001  a sweep goes on
                    print("  fails", bt, product, tile, repr(error)[:120])
            found.sort(key=lambda one: one[0])
            print(f"  {tokens} tokens, blocks of {bt}, {product}: {len(found)} tiles")
            for us, tile in found[:3]:
                report(shown(tile), us, batches, share)


def measure(name: str, batches: list[Batch], plan: ExpertsPlan) -> None:
    def call(batch: Batch) -> Tensor:
        return fused.triton_experts(
            batch.x, batch.routing, batch.layer.gate_up, batch.layer.down, plan
        )

    if correct(name, batches[0], lambda: call(batches[0])):
        report(name, time_us([lambda b=b: call(b) for b in batches]), batches)


def parts(batches: list[Batch], plan: ExpertsPlan) -> None:
    """What is beside the products."""
    experts = len(batches[0].layer.down)
    ids = [batch.routing.expert_ids for batch in batches]
    if not fused.place(ids[0], experts, plan).direct:
        print(f"  place {time_us([lambda i=i: fused.place(i, experts, plan) for i in ids]):.2f} us")
    part = torch.randn(ids[0].numel(), HIDDEN, device=DEVICE).to(DTYPE)
    joins = [lambda b=b: fused.join(part, b.routing, experts, plan) for b in batches]
    routes = [
        lambda b=b: fused.triton_route(b.x, b.layer.router, b.layer.bias, CHOICE, plan)
        for b in batches
    ]
    plain = [lambda b=b: naive_route(b.x, b.layer.router, b.layer.bias, CHOICE) for b in batches]
    ours, theirs = routes[0]()[0], plain[0]()
    same = (ours.expert_ids == theirs.expert_ids).float().mean().item()
    print(
        f"  join {time_us(joins):.2f} us, router {time_us(routes):.2f} us (torch "
        f"{time_us(plain):.2f} us; {same:.6f} of choices are torch's)"
    )


def case(layers: list[Layer], tokens: int, tuned: bool) -> None:
    torch.manual_seed(tokens)
    gpu = gpu_of(DEVICE)
    whole = [draw(layer, tokens, True) for layer in layers]
    routed = [draw(layer, tokens, False) for layer in layers]
    print(
        f"== {tokens} tokens: floors {mean_floor_us(routed):.1f} us routed, "
        f"{mean_floor_us(whole):.1f} us with shared"
    )
    if tuned:
        tune(whole)
    plan = experts_plan(tokens, ExpertsShape(HIDDEN, INNER, ROUTED + SHARED, TOP_K + SHARED), gpu)
    measure("routed", routed, plan)
    if tuned:
        measure("routed, one after the other", routed, replace(plan, early=0))
    measure("with shared", whole, plan)
    layer_calls = [
        lambda b=b: fused.triton_mixture(
            gpu, b.x, b.layer.router, b.layer.bias, CHOICE, b.layer.gate_up, b.layer.down
        )
        for b in whole
    ]
    report("layer", time_us(layer_calls), whole)
    if not tuned:
        grouped = [
            lambda b=b: grouped_experts(b.x, b.routing, b.layer.gate_up, b.layer.down)
            for b in routed
        ]
        report("routed, torch's grouped product", time_us(grouped), routed)
    parts(whole, plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,8,32,256,2048,8192")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", nargs=2, type=int)
    args = parser.parse_args()
    sizes = [int(tokens) for tokens in args.tokens.split(",")]
    if args.compile:
        compile_share(*args.compile, sizes)
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    layers = make_layers()
    for tokens in sizes:
        try:
            case(layers, tokens, args.tune)
        except Exception:  # noqa: BLE001  a sweep goes on
            traceback.print_exc()


if __name__ == "__main__":
    main()
