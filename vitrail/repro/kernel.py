"""A capsule of what failed within one kernel where no engine was: of a test, as the night keeps it.
No torch."""

import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from vitrail.attention.fault import KernelFault, kernel_fault
from vitrail.config.cause import read

FORMAT = 1
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl")


class KernelCapsule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`signature` as in the digest; `error` the first line with its numbers; `gpu` the device's
    name, "" for none."""

    version: int = FORMAT
    kind: Literal["kernel"] = "kernel"
    signature: str
    error: str
    versions: dict[str, str]
    gpu: str
    fault: KernelFault


def kernel_capsule(error: BaseException) -> KernelCapsule | None:
    """None where no kernel's launch or plan is what raised. With the values of small integer
    tensors: for errors of tests, whose tokens are nobody's."""
    fault = kernel_fault(error, values=True)
    if fault is None:
        return None
    cause = read("".join(traceback.format_exception(error)))
    return KernelCapsule(
        signature=cause.signature,
        error=cause.title,
        versions={name: found for name in PACKAGES if (found := _version(name))},
        gpu=_gpu(),
        fault=fault,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _gpu() -> str:
    """Where torch runs already: a launch that failed needed it."""
    torch = sys.modules.get("torch")
    there = torch is not None and torch.cuda.is_available()
    return torch.cuda.get_device_name() if torch is not None and there else ""
