"""A plan's Triton kernels compiled for its GPU, on a machine that needs none; those in CuTe DSL are
in processes of their own (`compile_fa4`, `compile_cute`). What a binary takes is held to what the
plan allows by `check.compiled`.

Triton keeps compiled kernels on disk, under a hash of their source, constants, target and
compiler."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from vitrail.attention.backends.fa4 import mend_launch
from vitrail.attention.backends.triton import Launch, join_launch, launches
from vitrail.attention.cubin import Taken, read_cubin
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.shape import PAGED

THREADS_PER_WARP = 32


def triton_launches(plan: AttentionPlan) -> tuple[Launch, ...]:
    """A plan's kernels that are Triton's: also what joins our CuTe kernel's results, and what makes
    FlashAttention-4's inputs safe."""
    if plan.backend == "triton":
        return launches(plan)
    if plan.backend == "fa4":
        return (mend_launch(plan),) if plan.shape.phase not in PAGED else ()
    return (join_launch(plan),) if plan.backend == "cute" and plan.max_splits > 1 else ()


def take(launch: Launch, cc: int) -> Taken:
    """Compile one kernel (or find it compiled) and read what it takes."""
    name = launch.kernel.fn.__name__  # pyright: ignore[reportAttributeAccessIssue]
    return taken(name, compile_launch(launch, cc), cc)


def taken(name: str, compiled: CompiledKernel, cc: int) -> Taken:
    """What a kernel that Triton compiled takes."""
    registers, stack_bytes = read_cubin(compiled.asm["cubin"])
    return Taken(
        kernel=name,
        cc=cc,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        stack_bytes=stack_bytes,
        smem_bytes=compiled.metadata.shared,
        tmem_columns=compiled.metadata._asdict().get("tmem_size") or 0,
    )


def compile_launch(launch: Launch, cc: int) -> CompiledKernel:
    """As a launch on that GPU would (with Triton 3.6, even under the same key on disk)."""
    names = launch.kernel.arg_names  # pyright: ignore[reportAttributeAccessIssue]
    types = launch.types | dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(
        launch.kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in launch.constants.items()},
        {
            (i,): [["tt.divisibility", 16]] if name in launch.aligned else []
            for i, name in enumerate(names)
            if types[name].startswith("*")
        },
    )
    return triton.compile(source, GPUTarget("cuda", cc, THREADS_PER_WARP), launch.options)
