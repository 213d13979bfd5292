"""What a compiled kernel takes, read from its binary (ELF), and held to what its plan allows. Knows
no kernel language."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

# Measured on an H200: latent tiles of 64 rows that spill so much were still the quickest ones.
SPILL_BYTES = 256
# The most that FlashAttention-4's kernels of our sites were seen to take in the release that we
# launch (split decodes on SM103): its choice, so that more means another compiler.
FA4_SPILL_BYTES = 400
# Attributes of a binary's `.nv.info`, a symbol's number and a 32-bit value each; of a kernel's own
# section, the three sizes of a program.
_REGISTERS, _STACK, _THREADS = 0x2F, 0x12, 0x10
_VALUE_FORMAT = 0x04


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one program of a compiled kernel takes: registers a thread, bytes of stack a thread
    (spilled registers), bytes of shared memory, columns of tensor memory."""

    kernel: str
    cc: int
    num_warps: int
    registers: int
    stack_bytes: int
    smem_bytes: int
    tmem_columns: int = 0


def hold(taken: Taken, plan: AttentionPlan, gpu: Hardware) -> Iterator[Finding]:
    """What a compiled kernel takes beyond its plan."""
    spill_bytes = FA4_SPILL_BYTES if plan.backend == "fa4" else SPILL_BYTES
    limits = (
        ("registers", taken.registers, plan.registers, "registers a thread"),
        ("shared_memory", taken.smem_bytes, plan.smem_bytes, "bytes of shared memory"),
        ("stack", taken.stack_bytes, spill_bytes, "bytes of spilled registers a thread"),
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


def read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread of the one kernel in a binary. Raises `ValueError` where
    it is not an ELF file with a kernel's attributes."""
    values = {
        attribute: struct.unpack_from("<I", value, 4)[0]
        for name, info in _sections(cubin)
        if name == ".nv.info"
        for attribute, value in _attributes(info)
        if len(value) == 8
    }
    if _REGISTERS not in values:
        raise ValueError(f"a binary of {len(cubin)} bytes without a register count")
    return values[_REGISTERS], values.get(_STACK, 0)


def read_threads(cubin: bytes) -> int:
    """Threads of a program of the one kernel in a binary, where it is compiled for their number.
    Raises `ValueError` where it is not."""
    for name, info in _sections(cubin):
        for attribute, value in _attributes(info) if name.startswith(".nv.info.") else ():
            if attribute == _THREADS and len(value) == 12:
                return math.prod(struct.unpack("<III", value))
    raise ValueError(f"a binary of {len(cubin)} bytes without a number of threads")


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"no ELF file: it starts with {cubin[:4]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, start, size in headers:
        begin = names + name
        yield cubin[begin : cubin.index(b"\0", begin)].decode(), cubin[start : start + size]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of `.nv.info`: format, attribute, then a 16-bit value or a size and that
    many bytes. Values of sizes alone."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _VALUE_FORMAT:
            yield attribute, info[at : at + size]
            at += size
