"""SigLIP over NVILA-8B's 17 tiles on one GPU: the share of the bf16 matrix rate that it reaches.

    python bench/siglip.py [--seconds 20] [--attention triton] [--profile] [--tiny]

Random weights of the published sizes. The features of two tiles are first computed in float32;
where ours in bf16 are further off than twice plain torch in bf16, nothing is timed. The matrix rate
is the best of several products measured in the same run; the goal is half of it. `--tiny`: small
sizes on any machine, to see that the script runs; its figures mean nothing."""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.config.hardware import CPU, Hardware, from_device
from vitrail.config.model import DType, SiglipConfig
from vitrail.vision.siglip import Siglip

PUBLISHED = SiglipConfig(
    patch_size=14,
    image_size=448,
    hidden_size=1152,
    num_layers=27,
    num_heads=16,
    intermediate_size=4304,
    layer_norm_eps=1e-6,
    merge=2,
    scales=(1, 2),
)
TINY = SiglipConfig(
    patch_size=14,
    image_size=56,
    hidden_size=144,
    num_layers=3,
    num_heads=2,
    intermediate_size=200,
    layer_norm_eps=1e-6,
    merge=2,
    scales=(1, 2),
)
TILES = 17
GOAL = 0.5
SQUARE = 8192


def tower_of(config: SiglipConfig, dtype: torch.dtype, device: torch.device) -> Siglip:
    """Random weights that keep the residual stream of order one."""
    torch.manual_seed(0)
    tower = Siglip(config, torch.float32)
    for name, parameter in tower.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, 0.02)
    return tower.to(device, dtype)


def plans(tower: Siglip, hardware: Hardware, dtype: DType, prefer: str | None) -> PlanTable:
    length = tower.config.tile**2
    limits = PlanLimits(
        dtype=dtype, page_size=None, max_batch=TILES, max_q_len=length, max_kv_len=length
    )
    table = make_table(tower.sites(), limits, hardware, prefer, releases())
    for warning in table.warnings:
        print(warning)
    print("attention:", *sorted({plan.backend for plan in table}))
    return table


def plain(tower: Siglip, patches: Tensor) -> Tensor:
    """The same in plain torch from the tower's parameters, tiles stacked and torch's own
    attention."""
    config, p = tower.config, dict(tower.named_parameters())
    eps, heads = config.layer_norm_eps, (3, config.num_heads, config.head_dim)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)

    x = linear("patch_embed", patches.to(tower.pos_embed.dtype))
    x = x.view(-1, config.tile**2, config.hidden_size) + tower.pos_embed
    for i in range(config.num_layers - 1):
        at = f"blocks.{i}."
        qkv = linear(f"{at}attn.qkv", norm(f"{at}norm1", x)).unflatten(2, heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(f"{at}attn.out", out)
        up = F.gelu(linear(f"{at}mlp.up", norm(f"{at}norm2", x)), approximate="tanh")
        x = x + linear(f"{at}mlp.down", up)
    return x.flatten(0, 1)


def flops(config: SiglipConfig, tiles: int) -> float:
    """Of the products and of attention, in all computed layers."""
    width, length = config.hidden_size, config.tile**2
    layer = 2 * (4 * width**2 + 2 * width * config.intermediate_size) + 4 * length * width
    embed = 2 * 3 * config.patch_size**2 * width
    return tiles * length * ((config.num_layers - 1) * layer + embed)


def clock(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of a call, at least five of them."""
    times: list[float] = []
    call()
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device, seconds: float, shapes: list[tuple[int, int, int]]) -> float:
    """The best FLOP/s of bf16 products (m, k, n)."""
    best = 0.0
    for m, k, n in shapes:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        taken = clock(lambda a=a, b=b: a @ b, device, seconds)
        rate = 2 * m * k * n / taken
        print(f"product {m} x {k} x {n}: {rate / 1e12:.0f} TFLOP/s")
        best = max(best, rate)
    return best


def profile(call: Callable[[], object], runs: int = 3) -> None:
    """Milliseconds of the device by kernel, of one call."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    for row in sorted(seen.key_averages(), key=lambda row: -row.device_time_total)[:12]:
        taken = row.device_time_total / 1e3 / runs
        print(f"{taken:8.3f} ms  {row.count // runs:4d} x  {row.key[:90]}")


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--attention", help="default the planned one")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    config = TINY if args.tiny else PUBLISHED
    device = torch.device("cpu" if args.tiny else "cuda")
    prefer = None if args.tiny else args.attention
    hardware, name = CPU, "cpu"
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        hardware, name = (
            from_device(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory),
            p.name,
        )
    length = config.tile**2
    patches = torch.randn(TILES * length, 3 * config.patch_size**2, device=device)
    exact, half = (tower_of(config, t, device) for t in (torch.float32, torch.bfloat16))
    table = plans(half, hardware, "bfloat16", prefer)
    two = patches[: 2 * length]
    want = plain(exact, two)
    ours, theirs = ((f - want).abs().max().item() for f in (half(two, table), plain(half, two)))
    print(f"{name}, torch {torch.__version__}; off by {ours:.3g}, plain torch {theirs:.3g}")
    if not ours <= 2 * theirs:
        print("WRONG: not timed")
        return 1
    share, rows = args.seconds / 5, TILES * length
    wide = (rows, config.hidden_size, config.intermediate_size)
    side = SQUARE if device.type == "cuda" else 256
    rate = matrix_rate(device, share, [(side, side, side), wide])
    taken = clock(lambda: half(patches, table), device, share)
    peer = clock(lambda: plain(half, patches), device, share)
    work = flops(config, TILES)
    for label, each in (("ours", taken), ("plain torch", peer)):
        print(
            f"{label}: {each * 1e3:.2f} ms for {TILES} tiles, {work / each / 1e12:.0f} TFLOP/s, "
            f"{work / each / rate:.0%} of the matrix rate"
        )
    if args.profile and device.type == "cuda":
        profile(lambda: half(patches, table))
    reached = work / taken / rate >= GOAL
    print(f"goal {GOAL:.0%}: {'reached' if reached else 'MISSED'}")
    return int(not reached)


if __name__ == "__main__":
    raise SystemExit(main())
