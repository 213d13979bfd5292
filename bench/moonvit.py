"""Kimi-VL's tower and projector at their published size on one GPU, and what a picture costs
before them.

    python -m bench.moonvit [--attention triton] [--parts rows,profile,...] [--tiny]

Random weights, norms of one and matrices of N(0, 0.02). Two pictures are first encoded in float32;
where ours in bf16 are further off than 1.2 times plain torch in bf16, nothing is timed. A row is
the median of 20 calls on packed random patches, waited for at both ends. Beside the rows: a
profile, the rate of each product and of attention alone, the bytes a second of what is between
them, a picture's time on the CPU, the rows in a graph. `--tiny`: small sizes on any machine, to see
that the script runs; its figures mean nothing."""

import argparse
import cProfile
import io
import pstats
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tests.attention.packed import varlen_metadata
from vitrail.attention.backend import load_backend
from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.attention.shape import Phase
from vitrail.config.hardware import CPU, from_device
from vitrail.config.model import MoonVitConfig
from vitrail.engine.encode import patches_of
from vitrail.engine.encode_graphs import EncodeGraphs
from vitrail.engine.graphs import Recorder
from vitrail.engine.step import EncodeJob
from vitrail.models.kimi_vl.processor import KimiVLProcessor
from vitrail.ops.dispatch import select_vision
from vitrail.ops.vision import naive
from vitrail.ops.vision.naive import Grids
from vitrail.vision.encoder import tower_site
from vitrail.vision.image import ImageLimits, from_pil
from vitrail.vision.moonvit import MoonVit
from vitrail.vision.projector import MergeProjector
from vitrail.vision.rungs import rungs_of

Sizes = Sequence[tuple[int, int]]
PUBLISHED = MoonVitConfig(
    patch_size=14,
    hidden_size=1152,
    num_layers=27,
    num_heads=16,
    intermediate_size=4304,
    pos_height=64,
    pos_width=64,
    merge=2,
)
TINY = MoonVitConfig(
    patch_size=14,
    hidden_size=144,
    num_layers=3,
    num_heads=2,
    intermediate_size=200,
    pos_height=16,
    pos_width=16,
    merge=2,
)
TEXT_HIDDEN = 2048
MIXED = (
    *[(66, 66)] * 4,
    *[(46, 62), (62, 46)] * 2,
    *[(34, 60), (74, 34)] * 2,
    *[(36, 36), (18, 24), (24, 18), (12, 36)],
)
ROWS: dict[str, tuple[Sizes, float]] = {  # pictures, and the goal in ms
    "1 x 1024^2": ([(66, 66)], 13),
    "8 x 1024^2": ([(66, 66)] * 8, 100),
    "16 mixed": (MIXED, 106),
    "1 x 448^2": ([(32, 32)], 0),
}
TINY_ROWS: dict[str, tuple[Sizes, float]] = {"3 small": ([(4, 6), (2, 2), (8, 8)], 0)}
ERROR = 1.2  # of plain torch's, at most


class Bench:
    """The tower and its projector in one dtype."""

    def __init__(self, config: MoonVitConfig, dtype: torch.dtype, device: torch.device):
        torch.manual_seed(0)
        self.config, self.device, self.dtype = config, device, dtype
        with torch.device(device):
            self.tower = MoonVit(config, torch.float32)
            self.projector = MergeProjector(config, TEXT_HIDDEN, torch.float32)
        for part in (self.tower, self.projector):
            for name, parameter in part.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0, 0.02)
            part.to(device, dtype)

    def plans(self, sizes: Sizes, prefer: str | None) -> PlanTable:
        hardware = CPU
        if self.device.type == "cuda":
            p = torch.cuda.get_device_properties(self.device)
            cc = p.major * 10 + p.minor
            hardware = from_device(p.name, cc, p.multi_processor_count, p.total_memory)
        limits = PlanLimits(
            dtype="bfloat16" if self.dtype == torch.bfloat16 else "float32",
            page_size=None,
            max_batch=len(sizes),
            max_q_len=max(h * w for h, w in sizes),
            max_kv_len=max(h * w for h, w in sizes),
        )
        return make_table(self.tower.sites(), limits, hardware, prefer, releases())

    def patches(self, sizes: Sizes) -> Tensor:
        count = sum(h * w for h, w in sizes)
        made = torch.randint(0, 256, (count, 3 * self.config.patch_size**2), dtype=torch.uint8)
        return made.to(self.device)

    def encode_patches(self, patches: Tensor, sizes: Sizes | Grids, plans: PlanTable) -> Tensor:
        return self.tower(patches, sizes, plans)

    def __call__(self, patches: Tensor, sizes: Sizes, plans: PlanTable) -> Tensor:
        return self.projector(self.tower(patches, sizes, plans), sizes)

    def plain(self, patches: Tensor, sizes: Sizes) -> Tensor:
        """The same in plain torch, picture by picture, torch's own attention."""
        tower, config = self.tower, self.config
        grids = Grids.of(sizes, self.device)
        embed = tower.patch_embed
        x = naive.embed(patches, embed.weight, embed.bias)
        x = naive.add_positions(x, tower.pos_embed, grids)
        tables = naive.rope_tables(grids, config.head_dim, config.rope_theta, self.device)
        heads = (config.num_heads,) * 3
        lengths = [h * w for h, w in sizes]
        for block in tower.encoder.blocks:
            qkv = block.attn.qkv(block.norm1(x)).unflatten(1, (sum(heads), config.head_dim))
            q, k, v = naive.rotate_heads(qkv, heads, *tables, True)
            parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
            out = [F.scaled_dot_product_attention(*(t[None] for t in p))[0] for p in parts]
            x = x + block.attn.out(torch.cat(out, 1).transpose(0, 1).flatten(1))
            up = F.gelu(block.mlp.up(block.norm2(x)), approximate="tanh")
            x = x + block.mlp.down(up)
        return self.projector(tower.encoder.norm(x), sizes)


def flops(config: MoonVitConfig, sizes: Sizes) -> tuple[float, float]:
    """(of products, of attention) of the tower and the projector."""
    width, count = config.hidden_size, sum(h * w for h, w in sizes)
    layer = 2 * (4 * width**2 + 2 * width * config.intermediate_size)
    merged = 4 * width
    projector = 2 * (merged**2 + merged * TEXT_HIDDEN) / 4
    embed = 2 * 3 * config.patch_size**2 * width
    attention = config.num_layers * 4 * width * sum((h * w) ** 2 for h, w in sizes)
    return count * (config.num_layers * layer + embed + projector), attention


def clock(call: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Median seconds of a call, the device waited for at both ends."""
    taken: list[float] = []
    for _ in range(times + 3):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken[3:])[times // 2]


def enqueue(call: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Median seconds until a call returns, the device not waited for."""
    taken: list[float] = []
    for _ in range(times):
        _wait(device)
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[times // 2]


def replay(call: Callable[[int], object], device: torch.device, times: int = 20) -> float:
    """Median seconds of a call on the device: 4 calls on 4 sets of tensors in one graph."""
    if device.type != "cuda":
        return clock(lambda: call(0), device, 3)
    for i in range(4):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(4):
            call(i)
    taken: list[float] = []
    for _ in range(times + 3):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        taken.append(a.elapsed_time(b) / 4e3)
    return sorted(taken[3:])[times // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_right(config: MoonVitConfig, half: Bench, sizes: Sizes, prefer: str | None) -> bool:
    """Of two pictures: ours against float32, beside plain torch in the same dtype."""
    exact = Bench(config, torch.float32, half.device)
    patches = half.patches(sizes)
    want = exact.plain(patches, sizes)
    ours, theirs = half(patches, sizes, half.plans(sizes, prefer)), half.plain(patches, sizes)
    off, plain = (((t.float() - want).norm() / want.norm()).item() for t in (ours, theirs))
    print(f"correctness: off by {off:.4g} of the norm, plain torch {plain:.4g}")
    return bool(ours.isfinite().all()) and off <= ERROR * plain


def time_rows(half: Bench, rows: dict[str, tuple[Sizes, float]], prefer: str | None) -> None:
    for name, (sizes, goal) in rows.items():
        patches, plans = half.patches(sizes), half.plans(sizes, prefer)
        call = partial(half, patches, sizes, plans)
        taken, host = clock(call, half.device), enqueue(call, half.device)
        plain = clock(lambda p=patches, s=sizes: half.plain(p, s), half.device, 2)
        work = sum(flops(half.config, sizes))
        line = f"{name:12s} {len(patches):6d} patches: {taken * 1e3:7.2f} ms (goal {goal}), "
        line += f"host {host * 1e3:.2f} ms, {work / taken / 1e12:.0f} TFLOP/s; "
        line += f"plain torch {plain * 1e3:.2f} ms"
        print(line, flush=True)


def graphs(half: Bench, rows: dict[str, tuple[Sizes, float]], prefer: str | None) -> None:
    """The rows as the engine runs them: the tower in the graphs of a budget of 5,352 patches where
    they fit, the projector launch by launch."""
    budget = (1, 5352)
    began, before = time.perf_counter(), torch.cuda.memory_reserved()
    plans = half.plans([budget] * 9, prefer)
    rungs = rungs_of(half.config, 5352, 5352, half.tower.sites(), plans)
    made = EncodeGraphs(half, plans, half.config, rungs, half.device)
    made.capture(Recorder(half.device, first=False))
    taken, held = time.perf_counter() - began, torch.cuda.memory_reserved() - before
    print(f"{len(made)} graphs in {taken:.2f} s, {held >> 20} MiB")
    for name, (sizes, goal) in rows.items():
        patches, plans = half.patches(sizes), half.plans(sizes, prefer)
        want, got = half.tower(patches, sizes, plans), made.run(patches, sizes)
        if got is None:
            continue
        off = ((got - want).float().norm() / want.float().norm()).item()

        def call(p: Tensor = patches, s: Sizes = sizes) -> None:
            features = made.run(p, s)
            assert features is not None
            half.projector(features, s)

        taken, host = clock(call, half.device), enqueue(call, half.device)
        print(
            f"{name:12s} {len(patches):6d} patches by graphs: {taken * 1e3:.2f} ms (goal {goal}), "
            f"host {host * 1e3:.2f} ms, off by {off:.3g} of the norm",
            flush=True,
        )


def launches(half: Bench, sizes: Sizes, prefer: str | None) -> None:
    """Where the host's time goes, launch by launch."""
    patches, plans = half.patches(sizes), half.plans(sizes, prefer)
    half(patches, sizes, plans)
    torch.cuda.synchronize()
    watch = cProfile.Profile()
    watch.runcall(half, patches, sizes, plans)
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(22)
    lines = [line[:120] for line in text.getvalue().splitlines() if line.strip()]
    print("\n".join(lines))


GROUPS = (
    ("attention", ("flash", "fmha", "attend", "kernel_cutlass")),
    ("products", ("gemm", "nvjet", "cutlass", "sm90_xmma", "splitk", "cublas")),
    ("norms", ("norm",)),
    ("rotation", ("rotate_kernel",)),
    ("mend", ("mend",)),
    ("copies", ("memcpy", "copy", "cat")),
)


def profile(half: Bench, sizes: Sizes, prefer: str | None) -> None:
    """Where the device's time goes, by kernel group and by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    patches, plans = half.patches(sizes), half.plans(sizes, prefer)
    half(patches, sizes, plans)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        half(patches, sizes, plans)
        torch.cuda.synchronize()
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        if event.device_type.name == "CUDA":
            name = event.name
            low = name.lower()
            found = next((g for g, words in GROUPS if any(w in low for w in words)), "other")
            groups[found] += event.device_time
            kernels[name].append(event.device_time)
    print(f"profile of {len(patches)} patches, ms of {sum(groups.values()) / 1e3:.2f}:")
    print("  " + ", ".join(f"{k} {v / 1e3:.2f}" for k, v in sorted(groups.items())))
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:16]:
        mean = sum(times) / len(times)
        print(f"  {sum(times) / 1e3:7.3f} ms = {len(times):3d} x {mean:7.1f} us  {name[:90]}")


def products(half: Bench, counts: Sequence[int]) -> None:
    """The rate of each product of the tower, as it runs and as it might."""
    device, c = half.device, half.config
    width, inner = c.hidden_size, c.intermediate_size
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, inner), "down": (inner, width)}
    shapes |= {"merged": (4 * width, 4 * width), "text": (4 * width, TEXT_HIDDEN)}
    wide = -(-inner // 128) * 128
    shapes |= {"up, padded": (width, wide), "down, padded": (wide, width)}
    total: dict[int, float] = defaultdict(float)
    for count in counts:
        for name, (k, n) in shapes.items():
            rows = count // 4 if name in ("merged", "text") else count
            x, w, b = ([torch.randn(*s, device=device, dtype=half.dtype) for _ in range(4)]
                       for s in ((rows, k), (n, k), (n,)))  # fmt: skip
            calls: dict[str, Callable[[int], object]] = {
                "": lambda i, x=x, w=w, b=b: F.linear(x[i], w[i], b[i]),
                "no bias": lambda i, x=x, w=w: F.linear(x[i], w[i]),
            }
            if name.startswith(("up", "merged")) and device.type == "cuda":
                ops = select_vision(device)
                calls["gelu"] = lambda i, x=x, w=w, b=b, o=ops: o.linear_gelu(
                    x[i], w[i], b[i], "tanh"
                )
                calls["then gelu"] = lambda i, x=x, w=w, b=b: F.gelu(
                    F.linear(x[i], w[i], b[i]), approximate="tanh"
                )
            line = f"product {name:12s} {rows:6d} x {k:4d} x {n:4d}:"
            for label, call in calls.items():
                taken = replay(call, device)
                line += f" {label} {taken * 1e6:7.1f} us {2 * rows * k * n / taken / 1e12:4.0f}"
                if not label and "padded" not in name:
                    total[count] += taken * (c.num_layers if rows == count else 1)
            print(line + " TFLOP/s", flush=True)
        print(f"products of {count} patches alone: {total[count] * 1e3:.2f} ms")


def operations(half: Bench, sizes: Sizes, prefer: str | None) -> None:
    """Each kernel between the products, and attention, beside the bytes or FLOPs it must do."""
    device, c, dtype = half.device, half.config, half.dtype
    ops, grids = select_vision(device), Grids.of(sizes, device)
    count, width = grids.num_patches, c.hidden_size
    x, y = ([torch.randn(count, width, device=device, dtype=dtype) for _ in range(4)]
            for _ in range(2))  # fmt: skip
    qkv = [torch.randn(count, 3 * c.num_heads, c.head_dim, device=device, dtype=dtype)
           for _ in range(4)]  # fmt: skip
    raw = [half.patches(sizes) for _ in range(4)]
    w, b = (
        torch.ones(width, device=device, dtype=dtype),
        torch.zeros(width, device=device, dtype=dtype),
    )
    tables = ops.rope_tables(grids, c.head_dim, c.rope_theta, device)
    heads, row = (c.num_heads,) * 3, 2 * count * width
    site = tower_site(c)
    meta = varlen_metadata([h * v for h, v in sizes], device)
    plan = half.plans(sizes, prefer).select(site, Phase.ENCODE, meta.batch, meta.max_kv_len)
    backend = load_backend(plan.backend)
    calls: dict[str, tuple[Callable[[int], Any], float]] = {
        "layer norm": (lambda i: ops.layer_norm(x[i], w, b, 1e-5), 2 * row),
        "add, layer norm": (lambda i: ops.add_layer_norm(x[i], y[i], w, b, 1e-5), 4 * row),
        "rotate": (lambda i: ops.rotate_heads(qkv[i], heads, *tables, True), 4 * row),
        "normalise": (lambda i: ops.normalise(raw[i], dtype), 3 * raw[0].numel()),
        "add positions": (lambda i: ops.add_positions(x[i], half.tower.pos_embed, grids), 2 * row),
        "angles": (
            lambda i: ops.rope_tables(grids, c.head_dim, c.rope_theta, device),
            4 * count * c.head_dim,
        ),
        f"attention ({plan.backend})": (
            lambda i: backend.varlen(plan, *qkv[i].split(heads, 1), meta, None),
            4 * row,
        ),
    }
    for name, (call, moved) in calls.items():
        taken = replay(call, device)
        line = f"{name:18s} {count:6d} patches: {taken * 1e6:7.1f} us"
        if name.startswith("attention"):
            rate = flops(c, sizes)[1] / c.num_layers / taken / 1e12
            print(f"{line}, {rate:.0f} TFLOP/s, {c.num_layers} layers {taken * 27e3:.2f} ms")
        else:
            print(f"{line}, {moved / taken / 1e12:.2f} TB/s of {moved / 1e6:.1f} MB", flush=True)


def pictures(device: torch.device) -> None:
    """Milliseconds of the CPU for a PIL picture of 1024 x 1024 noise, stage by stage; several."""
    generator = np.random.default_rng(0)
    limits = ImageLimits(max_bytes=1 << 30, max_pixels=1 << 30)
    made = [
        Image.fromarray(generator.integers(0, 256, (1024, 1024, 3), np.uint8)) for _ in range(8)
    ]
    processor = KimiVLProcessor(patch_size=14, in_token_limit=4096, merge=2, image_token_id=5)
    cpu = torch.device("cpu")
    decoded = from_pil(made[0], limits, "bench")
    print(f"from PIL {clock(lambda: from_pil(made[0], limits, 'bench'), cpu) * 1e3:.2f} ms")
    print(f"to patches {clock(lambda: processor.process(decoded), cpu) * 1e3:.2f} ms")

    def whole(image: Image.Image) -> object:
        return processor.process(from_pil(image, limits, "bench"))

    for threads in (1, 4, 8):
        with ThreadPoolExecutor(threads) as pool:
            taken = clock(lambda p=pool: list(p.map(whole, made)), cpu, 9)
        print(f"8 pictures by {threads} threads: {taken * 1e3:.2f} ms")
    part = processor.unresized(decoded, True)
    assert part is not None
    grid = part.grid
    job = EncodeJob(
        entry=0,
        height=grid.height,
        width=grid.width,
        num_tokens=grid.num_tokens,
        resized=part.resized,
    )
    call = partial(patches_of, [job], [part.patches], device, 14)
    same = np.array_equal(call().cpu().numpy(), processor.process(decoded).patches)
    print(
        f"resized by {device.type}: {clock(call, device) * 1e3:.2f} ms, host "
        f"{enqueue(call, device) * 1e3:.2f} ms, the same patches: {same}"
    )


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default=None)
    parser.add_argument("--parts", default="rows,profile,products,ops,pictures,graphs,launches")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    config, rows = (TINY, TINY_ROWS) if args.tiny else (PUBLISHED, ROWS)
    device = torch.device("cpu" if args.tiny else "cuda")
    half = Bench(config, torch.bfloat16, device)
    name = "cpu" if args.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, attention {args.attention or 'as planned'}")
    few = [(4, 6), (8, 8)] if args.tiny else [(30, 46), (66, 66)]
    if not is_right(config, half, few, args.attention):
        print("WRONG: not timed")
        return 1
    first, *_ = (sizes for sizes, _ in rows.values())
    most = MIXED if not args.tiny else first
    parts: dict[str, Callable[[], None]] = {
        "rows": lambda: time_rows(half, rows, args.attention),
        "profile": lambda: [profile(half, s, args.attention) for s in (first, most)][0],
        "products": lambda: products(half, [sum(h * w for h, w in s) for s in (first, most)]),
        "ops": lambda: [operations(half, s, args.attention) for s in (first, most)][0],
        "pictures": lambda: pictures(device),
        "graphs": lambda: graphs(half, rows, args.attention),
        "launches": lambda: launches(half, first, args.attention),
    }
    failed = 0
    for part in args.parts.split(","):
        if args.tiny and part in ("profile", "graphs", "launches"):
            continue
        try:
            parts[part]()
        except Exception:  # noqa: BLE001  the other parts are worth their time
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
