"""Sampling of rows of logits on a GPU: microseconds a call, ours beside the definition in torch.

    python bench/sampling.py [--vocab 163840] [--rows 1,32,256]

Checks first that both give the same tokens. Floor: the logits read once at 4.2 TB/s. Rotates over
rows that the L2 cache does not hold; the middle of 20 calls between CUDA events."""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.ops.sampling import naive, triton

BYTES_PER_S = 4.2e12
COLD_BYTES = 400 << 20


def took(call: Callable[[int], object], sets: int) -> float:
    """Microseconds."""
    times: list[float] = []
    for i in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(i % sets)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[5:])


def measure(rows: int, vocab: int) -> None:
    sets = max(2, COLD_BYTES // (4 * rows * vocab))
    sets = min(sets, 64)
    g = torch.Generator("cuda").manual_seed(0)
    x = [torch.randn(rows, vocab, device="cuda", generator=g) * 2 for _ in range(sets)]
    never = torch.zeros(vocab, device="cuda")
    never[7] = -torch.inf
    index = torch.arange(rows, device="cuda")
    u = torch.rand(rows, dtype=torch.float64, device="cuda", generator=g)
    t = torch.full_like(u, 0.8)
    some = naive.Filters(*(torch.full_like(u, v) for v in (float(vocab), 0.9, 0.0)))
    every = naive.Filters(*(torch.full_like(u, v) for v in (50.0, 0.95, 0.02)))
    kinds: dict[str, Callable[..., Tensor]] = {
        "greedy": lambda ops, i: ops.best_tokens(x[i], never)[0],
        "plain": lambda ops, i: ops.draw_plain(x[i], index, never, t, u),
        "top-p": lambda ops, i: ops.draw_filtered(x[i], index, never, t, some, u),
        "top-k, top-p, min-p": lambda ops, i: ops.draw_filtered(x[i], index, never, t, every, u),
    }
    floor = 4e6 * rows * vocab / BYTES_PER_S
    for name, kind in kinds.items():
        got, want = kind(triton, 0), kind(naive, 0)
        same = float((got == want).double().mean())
        us = [took(lambda i, o=ops, k=kind: k(o, i), sets) for ops in (triton, naive)]
        print(
            f"{rows:4} x {vocab} {name:20} {us[0]:8.1f} us, in torch {us[1]:9.1f}, floor "
            f"{floor:.1f}; equal tokens {same:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=163_840)
    parser.add_argument("--rows", default="1,32,256")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows in args.rows.split(","):
        measure(int(rows), args.vocab)


if __name__ == "__main__":
    main()
