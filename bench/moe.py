"""Experts of one layer on one GPU: from hidden states and top-k ids to the summed output, correct
before timed, in CUDA graphs that rotate over the weights of several layers.

    python bench/moe.py [--tokens 1,8,32,256,2048,8192] [--tune] [--split] [--compile I N]

Floors: bytes of the experts that a draw chooses over 4.20 TB/s, FLOPs over 700 TFLOP/s. `--tune`
sweeps tiles and prints the quickest of each product. `--compile I N`: only compile the I-th of N
shares of the sweep's kernels; processes started side by side warm the compiler's cache."""

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.ops.moe import fused
from vitrail.ops.moe.grouped import grouped_experts
from vitrail.ops.moe.naive import Routing, naive_experts, route
from vitrail.ops.moe.plan import Choice, ExpertsPlan, Tile

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 1408, 64, 6
EXPERT_BYTES = 3 * HIDDEN * INNER * 2
ROW_FLOPS = 2 * 3 * HIDDEN * INNER
BYTES_PER_S, FLOPS_PER_S = 4.20e12, 700e12
LAYERS = 4
SMEM = 227 << 10


class Layer(NamedTuple):
    gate_up: Tensor
    down: Tensor


class Draw(NamedTuple):
    """A batch: its states and choices."""

    x: Tensor
    routing: Routing

    @property
    def distinct(self) -> int:
        return len(self.routing.expert_ids.unique())


def make_layers(experts: int) -> list[Layer]:
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0, 0.02)

    return [
        Layer(normal(experts, 2 * INNER, HIDDEN), normal(experts, HIDDEN, INNER))
        for _ in range(LAYERS)
    ]


def draw(tokens: int, seed: int) -> Draw:
    """Uniform distinct choices."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device=DEVICE).to(DTYPE)
    logits = torch.randn(tokens, EXPERTS, device=DEVICE)
    return Draw(x, route(logits, torch.zeros(EXPERTS, device=DEVICE), TOP_K, True, 2.446))


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
    graph.replay()
    torch.cuda.synchronize()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    times, inner = [], max(1, min(20, int(20 / max(begin.elapsed_time(end), 1e-3))))
    for _ in range(repeats):
        begin.record()
        for _ in range(inner):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / inner / len(calls))
    return sorted(times)[len(times) // 2]


def small_tiles(bt: int, down: bool) -> Iterator[Tile]:
    for bn in (32, 64, 128):
        for bk in (64, 128):
            for stages in (3, 4, 6, 8):
                for warps in (4, 8):
                    size = stages * bk * 2 * ((1 if down else 2) * bn + bt)
                    if size > SMEM - 2048 or (warps == 8 and (bn < 128 and bt < 64)):
                        continue
                    if bn == 32 and bt > 16:
                        continue
                    yield Tile(bn=bn, bk=bk, stages=stages, warps=warps)


def large_tiles(bt: int, down: bool) -> Iterator[Tile]:
    for swap in (False, True):
        for bn in (64, 128, 256) if down else (64, 128):
            for stages in (3, 4):
                for rows in (True, False):
                    for programs, flat in ((0, False), (132, False), (132, True)):
                        size = stages * 128 * ((1 if down else 2) * bn + bt)
                        acc = bt * bn * (1 if down else 2)
                        if size > SMEM - 2048 or acc > 32768 or acc < 8192:
                            continue
                        warps = 8 if acc > 8192 else 4
                        if not rows and programs:
                            continue
                        if swap and (programs or stages == 3):
                            continue
                        yield Tile(
                            bn=bn, bk=64, stages=stages, warps=warps, swap=swap,
                            sorted=rows, programs=programs, flat=flat,
                        )  # fmt: skip


def split_tiles(bt: int, down: bool) -> Iterator[Tile]:
    for swap in (False, True):
        for bn in (64, 128, 256) if down else (64, 128):
            for bk, stages in ((64, 3), (64, 4), (128, 2), (128, 3)):
                for programs in (0, 132):
                    size = stages * bk * 2 * ((1 if down else 2) * bn + bt)
                    acc = bt * bn * (1 if down else 2)
                    if size > SMEM - 3072 or not 8192 <= acc <= 32768 or (bt == 64 and bn == 256):
                        continue
                    yield Tile(
                        bn=bn,
                        bk=bk,
                        stages=stages,
                        warps=4,
                        swap=swap,
                        sorted=True,
                        programs=programs,
                        split=True,
                    )


BASE = Tile(bn=64, bk=64, stages=4, warps=4)
BLOCKS = {1: (16,), 8: (16,), 32: (16,), 256: (32, 64), 2048: (64, 128), 8192: (64, 128, 256)}


def tiles(tokens: int, bt: int, down: bool, split: bool) -> Iterator[Tile]:
    if split:
        return split_tiles(bt, down) if tokens > 1024 else iter(())
    return small_tiles(bt, down) if tokens <= 1024 else large_tiles(bt, down)


def sweep(split: bool) -> Iterator[tuple[int, bool, Tile]]:
    """(rows of a block, which product, tile), each kernel once."""
    seen = set()
    for tokens, blocks in BLOCKS.items():
        for bt in blocks:
            for down in (False, True):
                for tile in tiles(tokens, bt, down, split):
                    if (bt, down, tile) not in seen:
                        seen.add((bt, down, tile))
                        yield bt, down, tile


def run_one(layer: Layer, batch: Draw, bt: int, down: bool, tile: Tile) -> Callable[[], object]:
    plan = ExpertsPlan(bt=bt, up=tile, down=tile)
    placed = fused.place(batch.routing.expert_ids, EXPERTS, plan)
    if not down:
        return lambda: fused.run_up(batch.x, layer.gate_up, placed, TOP_K, plan)
    act = torch.randn(len(placed.rows), INNER, device=DEVICE).to(DTYPE)
    slots = batch.routing.expert_ids.numel()
    return lambda: fused.run_down(act, layer.down, placed, slots, plan)


def compile_share(index: int, of: int, split: bool) -> None:
    """By running each kernel once on two experts."""
    layer = Layer(
        torch.zeros(2, 2 * INNER, HIDDEN, dtype=DTYPE, device=DEVICE),
        torch.zeros(2, HIDDEN, INNER, dtype=DTYPE, device=DEVICE),
    )
    routing = Routing(torch.zeros(1, TOP_K, dtype=torch.int64, device=DEVICE), torch.ones(1, TOP_K))
    batch = Draw(torch.zeros(1, HIDDEN, dtype=DTYPE, device=DEVICE), routing)
    for i, (bt, down, tile) in enumerate(sweep(split)):
        if i % of == index:
            try:
                run_one(layer, batch, bt, down, tile)()
            except Exception as error:  # noqa: BLE001  a sweep goes on
                print("does not compile", bt, down, tile, repr(error)[:200])
    torch.cuda.synchronize()


def check(name: str, layer: Layer, batch: Draw, call: Callable[[], Tensor]) -> bool:
    """The first tokens, against fp32: no further off than twice plain torch in bf16."""
    few = min(len(batch.x), 48)
    part = Routing(*(t[:few] for t in batch.routing))
    exact = naive_experts(batch.x[:few].float(), part, layer.gate_up.float(), layer.down.float())
    plain = naive_experts(batch.x[:few], part, *layer)
    limit = (plain.float() - exact).abs().max().item()
    got = (call()[:few].float() - exact).abs().max().item()
    good = got <= 2 * limit
    print(f"  {name}: error {got:.2e}, torch's {limit:.2e}{'' if good else '  NOT CORRECT'}")
    return good


def report(name: str, us: float, batch: Draw, share: float = 1.0) -> None:
    moved = batch.distinct * EXPERT_BYTES * share
    flops = batch.routing.expert_ids.numel() * ROW_FLOPS * share
    print(f"  {us:9.2f} us  {moved / us / 1e6:5.2f} TB/s  {flops / us / 1e6:6.1f} TFLOP/s  {name}")


def shown(tile: Tile) -> str:
    words = [f"{tile.bn}x{tile.bk} {tile.stages} stages {tile.warps} warps"]
    words += [
        name for name in ("swap", "sorted", "flat", "split", "prefetch") if getattr(tile, name)
    ]
    return " ".join(words) + (f" {tile.programs} programs" if tile.programs else "")


def tune(layers: list[Layer], tokens: int, split: bool) -> ExpertsPlan:
    batches = [draw(tokens, seed) for seed in range(LAYERS)]
    best: dict[tuple[int, bool], tuple[float, Tile]] = {}
    for bt in BLOCKS[tokens]:
        for down in (False, True):
            found: list[tuple[float, Tile]] = []
            for tile in tiles(tokens, bt, down, split):
                try:
                    calls = [
                        run_one(layer, batch, bt, down, tile)
                        for layer, batch in zip(layers, batches, strict=True)
                    ]
                    found.append((time_us(calls, 3), tile))
                except Exception as error:  # noqa: BLE001  a sweep goes on
                    print("  fails", bt, down, tile, repr(error)[:200])
            found.sort(key=lambda one: one[0])
            print(f"tokens {tokens} blocks of {bt} {'down' if down else 'up'}: {len(found)} tiles")
            for us, tile in found[:6]:
                report(shown(tile), us, batches[0], 1 / 3 if down else 2 / 3)
            if found:
                best[bt, down] = found[0]
    rows = [bt for bt in BLOCKS[tokens] if (bt, False) in best and (bt, True) in best]
    bt = min(rows, key=lambda bt: best[bt, False][0] + best[bt, True][0])
    return ExpertsPlan(bt=bt, up=best[bt, False][1], down=best[bt, True][1])


def measure(layers: list[Layer], tokens: int, plan: ExpertsPlan, name: str) -> None:
    batches = [draw(tokens, seed) for seed in range(LAYERS)]
    try:

        def call(layer: Layer, batch: Draw) -> Tensor:
            return fused.triton_experts(batch.x, batch.routing, *layer, plan)

        if check(name, layers[0], batches[0], lambda: call(layers[0], batches[0])):
            pairs = list(zip(layers, batches, strict=True))
            us = time_us([lambda p=p: call(*p) for p in pairs])
            report(f"{name}, whole", us, batches[0])
    except Exception:  # noqa: BLE001  a sweep goes on
        traceback.print_exc()


def case(layers: list[Layer], tokens: int, tuned: bool, split: bool) -> None:
    batches = [draw(tokens, seed) for seed in range(LAYERS)]
    pairs = list(zip(layers, batches, strict=True))
    floor = max(
        batches[0].distinct * EXPERT_BYTES / BYTES_PER_S,
        batches[0].routing.expert_ids.numel() * ROW_FLOPS / FLOPS_PER_S,
    )
    print(f"== {tokens} tokens: {batches[0].distinct} experts, floor {floor * 1e6:.1f} us")
    us = time_us([lambda p=p: grouped_experts(p[1].x, p[1].routing, *p[0]) for p in pairs], 3)
    report("torch grouped_mm, whole", us, batches[0])
    plan = tune(layers, tokens, split) if tuned else ExpertsPlan(bt=16, up=BASE, down=BASE)
    measure(layers, tokens, plan, "best")
    measure(layers, tokens, replace(plan, early=False), "best, one after the other")
    fetch = replace(plan, down=replace(plan.down, prefetch=True))
    if not plan.down.programs:
        measure(layers, tokens, fetch, "best, prefetch")
    ids = [batch.routing.expert_ids for batch in batches]
    print(f"  place {time_us([lambda i=i: fused.place(i, EXPERTS, plan) for i in ids]):.2f} us")
    part = torch.randn(tokens * TOP_K, HIDDEN, device=DEVICE).to(DTYPE)
    joins = [lambda b=b: fused.join(part, b.routing, EXPERTS, plan) for b in batches]
    print(f"  join {time_us(joins):.2f} us")
    how = Choice(top_k=TOP_K, num_shared=2, normalize=True, scaling=2.446)
    routers = torch.randn(LAYERS, EXPERTS, HIDDEN, device=DEVICE) * 0.02
    bias = torch.randn(EXPERTS, device=DEVICE) * 0.01
    for r, b in zip(routers, batches, strict=True):
        got, _ = fused.triton_route(b.x, r, bias, how, plan)
        want = route(b.x.float() @ r.T, bias, TOP_K, True, 2.446)
        same = (got.expert_ids[:, :TOP_K] == want.expert_ids).float().mean().item()
    print(f"  router: {same:.6f} of choices are torch's")
    calls = [
        lambda r=r, b=b: fused.triton_route(b.x, r, bias, how, plan)
        for r, b in zip(routers, batches, strict=True)
    ]
    print(f"  router, placed: {time_us(calls):.2f} us")
    plain = [
        lambda r=r, b=b: route(b.x.float() @ r.T, bias, TOP_K, True, 2.446)
        for r, b in zip(routers, batches, strict=True)
    ]
    print(f"  router, torch: {time_us(plain):.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,8,32,256,2048,8192")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--split", action="store_true", help="sweep kernels whose loads have warps")
    parser.add_argument("--compile", nargs=2, type=int)
    args = parser.parse_args()
    if args.compile:
        compile_share(*args.compile, args.split)
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    layers = make_layers(EXPERTS)
    for tokens in map(int, args.tokens.split(",")):
        try:
            case(layers, tokens, args.tune, args.split)
        except Exception:  # noqa: BLE001  a sweep goes on
            traceback.print_exc()


if __name__ == "__main__":
    main()
