"""A capsule of what failed within one kernel where no engine was: of a test."""

import msgspec
import torch

from vitrail.attention.fault import KernelFault, OpFault, kernel_fault
from vitrail.engine.evidence import cause_of, versions

FORMAT = 1


class KernelCapsule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`signature` as in the digest; `error` the first line with its numbers; `gpu` the device's
    name, "" for none."""

    fault: KernelFault  # the first in the file: how it is known
    version: int = FORMAT
    signature: str
    error: str
    versions: dict[str, str]
    gpu: str


def kernel_capsule(error: BaseException) -> KernelCapsule | None:
    """None where no kernel's launch or plan is what raised. With the values of small integer
    tensors: for errors of tests, whose tokens are nobody's."""
    fault, cause = kernel_fault(error, values=True), cause_of(error)
    return None if fault is None else _capsule(fault, cause.signature, cause.title)


def op_capsule(fault: OpFault, wrong: str) -> KernelCapsule:
    """Of an op that is not its definition."""
    return _capsule(fault, f"numerics {fault.op} is not its definition", wrong)


def _capsule(fault: KernelFault, signature: str, error: str) -> KernelCapsule:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return KernelCapsule(
        signature=signature, error=error, versions=versions(), gpu=gpu, fault=fault
    )
