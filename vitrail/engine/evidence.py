"""What an error shows of itself without what it was computing on: its cause, its frames, the sizes
of what they held, and which releases ran."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import subprocess
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitrail.config.cause import Cause, read, relative
from vitrail.engine.capsule import Array, Call

MAX_CALLS, MAX_LOCALS = 4, 64
KERNELS = ("vitrail/ops/", "vitrail/attention/")
PACKAGE_ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "numpy", "flash-attn-4", "nvidia-cutlass-dsl")


def cause_of(error: BaseException) -> Cause:
    return read("".join(traceback.format_exception(error)))


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _frames(error: BaseException) -> Iterator[tuple[str, int, FrameType]]:
    """Ours, from the outermost: file, line and frame."""
    for frame, line in traceback.walk_tb(_root(error).__traceback__):
        file = relative(frame.f_code.co_filename)
        if file.startswith("vitrail/"):
            yield file, line, frame


def trace_of(error: BaseException) -> list[str]:
    return [f"{file}:{line}:{frame.f_code.co_name}" for file, line, frame in _frames(error)]


def calls_of(error: BaseException) -> tuple[Call, ...]:
    """Sizes alone of what the innermost frames of kernels' code hold."""
    found = [each for each in _frames(error) if each[0].startswith(KERNELS)]
    return tuple(_call(*each) for each in found[-MAX_CALLS:])


def _call(file: str, line: int, frame: FrameType) -> Call:
    arrays: dict[str, Array] = {}
    numbers: dict[str, int | float | bool | None] = {}
    others: dict[str, str] = {}
    for name, value in list(_flat(frame.f_locals.items()))[:MAX_LOCALS]:
        if isinstance(value, Tensor | np.ndarray):
            arrays[name] = array_of(value)
        elif value is None or isinstance(value, float) or _is_size(value):
            numbers[name] = cast(Any, value)
        else:
            others[name] = type(value).__name__
    return Call(file, frame.f_code.co_name, line, arrays, numbers, others)


def _flat(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Fields of a dataclass or a named tuple, each by itself."""
    for name, value in items:
        inner: dict[str, object] = {}
        if is_dataclass(value) and not isinstance(value, type):
            inner = {f.name: attrgetter(f.name)(value) for f in fields(value)}
        elif isinstance(value, tuple) and "_fields" in vars(type(value)):
            inner = cast(Any, value)._asdict()
        yield from (
            ((f"{name}.{each}", v) for each, v in inner.items()) if inner else ((name, value),)
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def array_of(value: Tensor | np.ndarray) -> Array:
    if isinstance(value, np.ndarray):
        return Array(value.shape, value.dtype.name)
    dtype = str(value.dtype).removeprefix("torch.")
    return Array(tuple(value.shape), dtype, tuple(value.stride()), value.device.type)


def versions() -> dict[str, str]:
    """What ran, by package. "vitrail" is a commit where its folder is a checkout."""
    found: dict[str, str] = {"vitrail": _commit()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"cuda": str(torch.version.cuda)}


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
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("vitrail")
    return "unknown"
