"""The proof of a plan: every kernel that it names is compiled for its GPU, on a machine that needs
none, and what the binary takes is held to what the plan allows (`cubin`): Triton's kernels here,
those in CuTe DSL in processes of their own (`compile_fa4`, `compile_cute`).

Triton keeps compiled kernels on disk, under a hash of their source, constants, target and
compiler."""

from collections.abc import Iterable

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from vitrail.attention import compile_cute, compile_fa4
from vitrail.attention.backends.fa4 import mend_launch
from vitrail.attention.backends.triton import Launch, join_launch, launches
from vitrail.attention.cubin import Taken, hold, read_cubin
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.shape import PAGED
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

THREADS_PER_WARP = 32


def prove(plans: Iterable[AttentionPlan], gpu: Hardware) -> list[Finding]:
    """Compile every kernel that `plans` name, each distinct one once, for `gpu`. Empty, or what
    exceeds its plan or does not compile. Plans of the reference name none."""
    plans = list(plans)
    found: dict[Finding, None] = {}
    taken: dict[str, Taken] = {}
    for plan in plans:
        for launch in triton_launches(plan):
            name = repr(launch)
            if name not in taken:
                taken[name] = take(launch, gpu.cc)
            found.update(dict.fromkeys(hold(taken[name], plan, gpu)))
    found.update(dict.fromkeys(compile_fa4.prove(plans, gpu)))
    found.update(dict.fromkeys(compile_cute.prove(plans, gpu)))
    return list(found)


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
    compiled = compile_launch(launch, cc)
    registers, stack_bytes = read_cubin(compiled.asm["cubin"])
    return Taken(
        kernel=launch.kernel.fn.__name__,  # pyright: ignore[reportAttributeAccessIssue]
        cc=cc,
        num_warps=launch.num_warps,
        registers=registers,
        stack_bytes=stack_bytes,
        smem_bytes=compiled.metadata.shared,
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
