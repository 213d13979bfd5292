"""Launches written down instead of made. Within `recording(gpu)`, the meta device stands for `gpu`:
operations choose their kernels as they would there, and what they would launch is in the recording.
So a model that runs on no device says which kernels it needs, and the code that runs says it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from vitrail.config.hardware import Hardware, from_device

P = ParamSpec("P")
T = TypeVar("T")


class Recorded(NamedTuple):
    """A kernel's launch: `arguments` by position, `constants` and options by name."""

    kernel: Any
    arguments: Sequence[Any]
    constants: Mapping[str, Any]


class Recording(NamedTuple):
    """What was launched on a GPU that is not here, in order."""

    gpu: Hardware
    launches: list[Recorded]


_NOW: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(gpu: Hardware) -> Iterator[Recording]:
    """Of this thread. Recordings do not nest."""
    assert _NOW.get() is None, "one at a time"
    made = Recording(gpu, [])
    before = _NOW.set(made)
    try:
        yield made
    finally:
        _NOW.reset(before)


def recorded(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> bool:
    """Whether the launch was written down, and is not to be made."""
    made = _NOW.get()
    if made is not None:
        made.launches.append(Recorded(kernel, arguments, constants))
    return made is not None


def on_gpu(device: torch.device) -> bool:
    """Whether operations run our kernels there."""
    return device.type == "cuda" or (device.type == "meta" and _NOW.get() is not None)


def gpu_of(device: torch.device) -> Hardware:
    """The facts of the GPU that holds a tensor, or that a recording is of."""
    made = _NOW.get() if device.type == "meta" else None
    return _found(device) if made is None else made.gpu


@cache
def _found(device: torch.device) -> Hardware:
    found = torch.cuda.get_device_properties(device)
    return from_device(
        found.name, found.major * 10 + found.minor, found.multi_processor_count, found.total_memory
    )


def by_device(
    choose: Callable[Concatenate[torch.device, P], T],
) -> Callable[Concatenate[torch.device, P], T]:
    """`choose(device, ...)`, remembered of devices that are what they say."""
    known = cache(choose)

    @wraps(choose)
    def chosen(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> T:
        if device.type == "meta":
            return choose(device, *args, **kwargs)
        return known(device, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    return chosen
