"""How Triton kernels are launched: quickly, and where it helps while the launch before still runs.

Triton's own launch takes tens of microseconds of Python: it binds names, asks what each argument
specialises a kernel for, prints a key and reads its knobs. Here a kernel that Triton has once
compiled and launched is found again by those same facts (constants, options, and of arguments type,
alignment, divisibility), and its C launcher is called with addresses. Where there is no such thing,
as in the interpreter, every launch is Triton's own.

A kernel that may start early (`EARLY`) asks for its dependents at once, loads what no kernel writes
(weights), and waits before it reads or writes anything else. *Every* program waits, also one that
has nothing to do: what comes next waits for this launch alone, and relies on it for all that came
before."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from triton import KernelInterface
from triton.runtime import JITFunction

from vitrail.ops.record import by_device, gpu_of, on_gpu, recorded

HOPPER = 90
# Whose launches are done as below; another release's may take other arguments.
QUICK_RELEASES = ("3.6",)
ALIGNED = 15  # a multiple of 16 has none of these bits
# Facts that follow another one, of what is rare.
UNALIGNED, WIDE = object(), object()
# What a parameter specialises a kernel for: its value; divisibility by 16 and one; one; type alone.
_VALUE, _ALL, _ONE, _TYPE = range(4)


@by_device
def may_start_early(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch: Hopper and later."""
    return on_gpu(device) and gpu_of(device).cc >= HOPPER


def launch(
    kernel: KernelInterface,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: Any,
    **constants: Any,
) -> None:
    """Run `kernel` with `arguments` by position and `constants` and options (`num_warps`, ...) by
    name, on the current stream of `device`, where the tensors are."""
    _launcher(kernel)(grid, device.index, arguments, constants)


def launch_early(
    kernel: KernelInterface,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: Any,
    **constants: Any,
) -> None:
    """`launch` of a kernel with a constant EARLY, which starts early where the device has that."""
    early = may_start_early(device)
    constants["EARLY"] = early
    if early:
        constants["launch_pdl"] = True
    _launcher(kernel)(grid, device.index, arguments, constants)


def _launcher(kernel: KernelInterface) -> "Launcher":
    found = _LAUNCHERS.get(id(kernel))  # a kernel's own hash is that of its source
    if found is None:
        found = _LAUNCHERS[id(kernel)] = Launcher(kernel)
    return found


class Prepared(NamedTuple):
    """A compiled kernel's C launcher, what it takes before the arguments, the constants that follow
    these, and what gives a device's stream."""

    run: Callable[..., None]
    function: int
    metadata: object
    constants: tuple[Any, ...]
    stream_of: Callable[[int], int]


class Launcher:
    """Launches one kernel. Owns what was found of it."""

    def __init__(self, kernel: KernelInterface):
        self._kernel = kernel
        self._found: dict[tuple[object, ...], Prepared] = {}
        known = triton.__version__.startswith(QUICK_RELEASES)
        self._parameters = kernel.params if known and isinstance(kernel, JITFunction) else []
        self._hows = [_how(p) for p in self._parameters]

    def __call__(
        self,
        grid: tuple[int, ...],
        device: int | None,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        if not self._hows or device is None:
            if not recorded(self._kernel, arguments, constants):
                self._kernel[grid](*arguments, **constants)
            return
        values, facts = _facts(arguments, self._hows)
        key = (device, tuple(constants), tuple(constants.values()), facts)
        found = self._found.get(key)
        if found is None:
            self._found[key] = self._prepare(grid, arguments, constants)
            return
        x, y, z = (*grid, 1, 1)[:3]
        run, function, metadata, more, stream_of = found
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *values, *more)

    def _prepare(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> Prepared:
        """Triton's own launch, and what the next ones need."""
        compiled = self._kernel[grid](*arguments, **constants)
        return Prepared(
            run=compiled.run,
            function=compiled.function,
            metadata=compiled.packed_metadata,
            constants=tuple(
                constants.get(p.name, p.default) for p in self._parameters[len(arguments) :]
            ),
            stream_of=_stream_of(),
        )


def _stream_of() -> Callable[[int], int]:
    active: Any = triton.runtime.driver.active
    return active.get_current_stream


def _how(parameter: Any) -> int:
    """What of an argument is a fact; as Triton specialises."""
    if parameter.is_constexpr:
        return _VALUE
    if parameter.do_not_specialize:
        return _TYPE
    return _ONE if parameter.do_not_specialize_on_alignment else _ALL


def _facts(arguments: tuple[Any, ...], hows: list[int]) -> tuple[list[Any], tuple[object, ...]]:
    """What the C launcher takes, tensors as addresses, and what a kernel is specialised for."""
    values: list[Any] = []
    facts: list[object] = []
    for argument, how in zip(arguments, hows, strict=False):
        kind = argument.__class__
        if kind is Tensor or kind is nn.Parameter:
            facts.append(argument.dtype)
            argument = argument.data_ptr()
            if how == _ALL and argument & ALIGNED:
                facts.append(UNALIGNED)
        elif how == _VALUE or argument is None:
            facts.append(argument)
        elif kind is int:
            if how != _TYPE:
                facts.append(argument == 1 or (how == _ALL and argument & ALIGNED == 0 and kind))
            if argument.bit_length() > 31:
                facts.append(WIDE)
        elif kind is float or kind is bool:
            facts.append(kind)
        else:
            facts.append((argument.base.dtype, tuple(argument.block_shape), argument.padding))
        values.append(argument)
    return values, tuple(facts)


_LAUNCHERS: dict[int, Launcher] = {}
