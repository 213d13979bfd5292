"""How kernels of ops are launched: a kernel may start while the launch before it runs.

Such a kernel (`EARLY`) asks for its dependents at once, loads what no kernel writes (weights), and
waits before it reads or writes anything else. *Every* program waits, also one that has nothing to
do: what comes next waits for this launch alone, and relies on it for all that came before."""

from functools import cache

import torch
from triton import KernelInterface

HOPPER = (9, 0)


@cache
def may_start_early(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def launch(
    kernel: KernelInterface,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: object,
    **constants: int | bool,
) -> None:
    """Run `kernel`, which has a constant EARLY, with `arguments` by position and `constants` (the
    kernel's, `num_warps`, `num_stages`) by name."""
    early = may_start_early(device)
    options = {"launch_pdl": True} if early else {}
    kernel[grid](*arguments, EARLY=early, **constants, **options)
