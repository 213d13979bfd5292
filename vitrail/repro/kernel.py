"""A capsule of what failed within one kernel where no engine was: of a test, as the night keeps it.
No torch."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from vitrail.attention.fault import KernelFault, kernel_fault

FORMAT = 1
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl")


class KernelCapsule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`error` is the exception's type and first line; `gpu` the device's name, "" for none."""

    version: int = FORMAT
    kind: Literal["kernel"] = "kernel"
    error: str
    versions: dict[str, str]
    gpu: str
    fault: KernelFault


def kernel_capsule(error: BaseException) -> bytes | None:
    """JSON, or None where no kernel's launch or plan is what raised. With the values of small integer tensors:
    a test's, nobody's tokens."""
    fault = kernel_fault(error, values=True)
    if fault is None:
        return None
    first = (str(error).splitlines() or [""])[0]
    return msgspec.json.encode(
        KernelCapsule(
            error=f"{type(error).__name__}: {first}",
            versions=_versions(),
            gpu=_gpu(),
            fault=fault,
        )
    )
