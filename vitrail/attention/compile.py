"""The proof of a plan: every kernel that it names is compiled for its GPU, on a machine that needs
none, and what the binary takes is held to what the plan allows. Registers and stack are read from
the binary itself (ELF), shared memory from the compiler's launch metadata.

Compiled kernels are kept on disk by the compiler, under a hash of their source, constants, target
and compiler. Knows Triton's kernels only."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from vitrail.attention.backends.triton import Launch, launches
from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

THREADS_PER_WARP = 32
# Attributes of a binary's `.nv.info`: a symbol's number and a 32-bit value.
_REGISTERS, _STACK = 0x2F, 0x12
_VALUE_FORMAT = 0x04


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one program of a compiled kernel takes: registers a thread, bytes of stack a thread
    (spilled registers), bytes of shared memory."""

    kernel: str
    cc: int
    num_warps: int
    registers: int
    stack_bytes: int
    smem_bytes: int


def prove(plans: Iterable[AttentionPlan], gpu: Hardware) -> list[Finding]:
    """Compile every kernel that `plans` name, each distinct one once, for `gpu`. Empty, or what
    exceeds its plan."""
    found: dict[Finding, None] = {}
    taken: dict[str, Taken] = {}
    for plan in plans:
        for launch in launches(plan):
            name = repr(launch)
            if name not in taken:
                taken[name] = take(launch, gpu.cc)
            found.update(dict.fromkeys(hold(taken[name], plan, gpu)))
    return list(found)


def hold(taken: Taken, plan: AttentionPlan, gpu: Hardware) -> Iterator[Finding]:
    """What a compiled kernel takes beyond its plan."""
    limits = (
        ("registers", taken.registers, plan.registers, "registers a thread"),
        ("shared_memory", taken.smem_bytes, plan.smem_bytes, "bytes of shared memory"),
        ("stack", taken.stack_bytes, SPILL_BYTES, "bytes of spilled registers a thread"),
    )
    site = plan.shape.site
    for code, saw, limit, unit in limits:
        if saw > limit:
            yield Finding(
                where=f"attention {plan.shape.phase}: kernel {taken.kernel} on {gpu.name}",
                saw=f"{saw} {unit} for tiles of {plan.tile_m} x {plan.tile_n}, heads of "
                f"{site.head_dim} and {site.head_dim_v}, {plan.num_stages} stages",
                rule=f"the plan allows {limit}",
                change="report this plan: its arithmetic is wrong for this compiler",
                code=f"compiled_{code}",
            )


# Measured on an H200: latent tiles of 64 rows that spill so much were still the quickest ones.
SPILL_BYTES = 256


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


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread of the one kernel in a binary. Raises `ValueError` where
    it is not an ELF file with a kernel's attributes."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"no ELF file: it starts with {cubin[:4]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    names = headers[names_index][4]
    values: dict[int, int] = {}
    for name, _, _, _, start, size in headers:
        begin = names + name
        if cubin[begin : cubin.index(b"\0", begin)] == b".nv.info":
            values.update(_attributes(cubin[start : start + size]))
    if _REGISTERS not in values:
        raise ValueError(f"a binary of {len(cubin)} bytes without a register count")
    return values[_REGISTERS], values.get(_STACK, 0)


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of `.nv.info`: format, attribute, then a 16-bit value or a size and that
    many bytes."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _VALUE_FORMAT:
            if size == 8:
                yield attribute, struct.unpack_from("<I", info, at + 4)[0]
            at += size
