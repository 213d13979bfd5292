"""What an error shows without what it was computing on: its cause, its frames, and which releases
ran."""

import subprocess
import traceback
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from vitrail.attention.installed import release
from vitrail.config.cause import Cause, read, relative

KERNELS = ("vitrail/ops/", "vitrail/attention/")
PACKAGE_ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "numpy", "flash-attn-4", "nvidia-cutlass-dsl")


def cause_of(error: BaseException) -> Cause:
    return read("".join(traceback.format_exception(error)))


def trace_of(error: BaseException) -> tuple[str, ...]:
    """FILE:LINE:FUNCTION of our frames, from the outermost, of what an error was raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    named = (f"{relative(frame.filename)}:{frame.lineno}:{frame.name}" for frame in frames)
    return tuple(name for name in named if name.startswith("vitrail/"))


def versions() -> dict[str, str]:
    """What ran, by package. "vitrail" is a commit where its folder is a checkout."""
    found = {name: release(name) for name in PACKAGES}
    known = {name: each for name, each in found.items() if each is not None}
    return {"vitrail": _commit(), **known, "cuda": str(torch.version.cuda)}


@lru_cache
def _commit() -> str:
    """The checkout's, "-dirty" where it has changes; else the release."""
    if (PACKAGE_ROOT / ".git").exists():
        command = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                ("git", "-C", str(PACKAGE_ROOT), *command),
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            )
            return done.stdout.strip()
    return release("vitrail") or "unknown"
