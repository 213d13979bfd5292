"""The devices we plan for, as published facts. Planners take a `Hardware`; nothing else in the
package asks which GPU it is.

Sources: the CUDA programming guide's table of technical specifications by compute capability, and
each product's data sheet (decimal bytes there). Counts are of the product as sold, not of the full
chip."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from vitrail.config.finding import Refused


class Architecture(NamedTuple):
    """What a compute capability fixes. Registers are of 32 bits."""

    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    registers_per_sm: int
    tmem_columns: int  # tensor memory of an SM: so many columns of 128 lanes of 32 bits


def _kib(block: int, sm: int, tmem_columns: int = 0) -> Architecture:
    return Architecture(block << 10, sm << 10, 65536, tmem_columns)


ARCHITECTURES: Mapping[int, Architecture] = MappingProxyType(
    {
        0: Architecture(0, 0, 0, 0),
        80: _kib(163, 164),
        86: _kib(99, 100),
        87: _kib(163, 164),
        89: _kib(99, 100),
        90: _kib(227, 228),
        100: _kib(227, 228, 512),
        103: _kib(227, 228, 512),
        110: _kib(227, 228, 512),
        120: _kib(99, 100),
        121: _kib(99, 100),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. `cc` is the compute capability times ten (0: a CPU). `l2_bytes` and
    `hbm_bytes_per_s` 0: not known."""

    name: str
    cc: int
    num_sms: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    registers_per_sm: int
    tmem_columns: int
    hbm_bytes: int
    hbm_bytes_per_s: int
    l2_bytes: int


def _device(name: str, cc: int, num_sms: int, hbm_gb: int, gb_per_s: int, l2_mib: int) -> Hardware:
    return Hardware(
        name=name,
        cc=cc,
        num_sms=num_sms,
        hbm_bytes=hbm_gb * 10**9,
        hbm_bytes_per_s=gb_per_s * 10**9,
        l2_bytes=l2_mib << 20,
        **ARCHITECTURES[cc]._asdict(),
    )


CPU = _device("cpu", 0, 0, 0, 0, 0)
GPUS: tuple[Hardware, ...] = (
    _device("A100", 80, 108, 80, 2039, 40),
    _device("L40S", 89, 142, 48, 864, 96),
    _device("H100", 90, 132, 80, 3350, 50),
    _device("H200", 90, 132, 150, 4800, 50),  # its data sheet says 141, its driver 150.1
    _device("GH200", 90, 132, 144, 4900, 50),
    _device("B200", 100, 148, 180, 8000, 126),
    _device("B300", 103, 148, 288, 8000, 126),
    _device("Thor", 110, 20, 128, 273, 32),
    _device("RTX PRO 6000 Blackwell", 120, 188, 96, 1792, 128),
    _device("RTX 5090", 120, 170, 32, 1792, 96),
)


def find(name: str) -> Hardware:
    """The device called `name` ("cpu", "H200", ...; case does not matter). Raises `Refused`."""
    for device in (CPU, *GPUS):
        if device.name.lower() == name.lower():
            return device
    raise Refused.because(
        where="gpu",
        saw=repr(name),
        rule=f"one of {', '.join(d.name for d in (CPU, *GPUS))}",
        change="name one of these",
        code="unknown_gpu",
    )


def from_device(name: str, cc: int, num_sms: int, hbm_bytes: int) -> Hardware:
    """The device that a driver reports as `name` ("NVIDIA H200"): its own counts, its
    architecture's limits, and the speeds of the longest product name that it contains.
    Raises `Refused` where the compute capability is unknown."""
    if cc not in ARCHITECTURES:
        known = ", ".join(str(c) for c in ARCHITECTURES if c)
        raise Refused.because(
            where=f"gpu {name}",
            saw=f"compute capability {cc}",
            rule=f"one of {known}",
            change="run on one of these, or on the CPU",
            code="unknown_gpu",
        )
    twins = [d for d in GPUS if d.cc == cc and d.name in name]
    twin = max(twins, key=lambda d: len(d.name), default=CPU)
    return Hardware(
        name=name,
        cc=cc,
        num_sms=num_sms,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=twin.hbm_bytes_per_s,
        l2_bytes=twin.l2_bytes,
        **ARCHITECTURES[cc]._asdict(),
    )
