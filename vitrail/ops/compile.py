"""Recorded launches compiled for a GPU that need not be here, as Triton would compile them at their
first launch there: its own binder says what a kernel is specialised for."""

# parts of Triton's runtime that have no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime import JITFunction
from triton.runtime.jit import create_function_from_signature

from vitrail.ops.record import Recorded

THREADS_PER_WARP = 32


@dataclass(frozen=True, slots=True)
class Special:
    """A kernel with all that it is specialised for. `name`: of the kernel, with its module;
    `facts`: the rest, its source among it, spelled: equal ones are one binary."""

    name: str
    facts: str
    source: ASTSource
    options: dict[str, Any]

    def compile(self, cc: int) -> CompiledKernel:
        """For GPUs of compute capability `cc`; or as Triton's disk holds it."""
        return compile_source(self.source, _target(cc), self.options)


def is_compiled(kernel: object) -> bool:
    """Whether Triton compiles it: its interpreter does not."""
    return isinstance(kernel, JITFunction)


def specialised(launches: Iterable[Recorded], cc: int) -> list[Special]:
    """Each distinct kernel once, in the order of first launches. Of kernels that are
    compiled."""
    found: dict[tuple[str, str], Special] = {}
    for kernel, arguments, constants in launches:
        bound, special, options = _binder(kernel, cc)(*arguments, **_asked(kernel, constants))
        name, facts = (
            f"{kernel.module}.{kernel.fn.__name__}",
            f"{special} {sorted(options.items())} {kernel.cache_key}",  # the last of its source
        )
        if (name, facts) in found:
            continue
        packed = kernel._pack_args(
            make_backend(_target(cc)), _asked(kernel, constants), bound, special, options
        )
        taken, signature, constexprs, attributes = packed
        source = ASTSource(kernel, signature, constexprs, attributes)
        found[name, facts] = Special(name, facts, source, vars(taken))
    return list(found.values())


def _asked(kernel: JITFunction[Any], constants: Any) -> dict[str, Any]:
    return {**constants, "debug": bool(kernel.debug)}


@cache
def _target(cc: int) -> GPUTarget:
    return GPUTarget("cuda", cc, THREADS_PER_WARP)


@cache
def _binder(kernel: JITFunction[Any], cc: int) -> Any:
    return create_function_from_signature(
        kernel.signature, kernel.params, make_backend(_target(cc))
    )
