"""The devices we plan for, as datasheet facts. Planners take a `Hardware`; nothing else in the
package asks which GPU it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. `cc` is the compute capability times ten (0: a CPU); bytes and counts as
    published."""

    name: str
    cc: int
    num_sms: int
    smem_per_block_bytes: int
    hbm_bytes: int


CPU = Hardware(name="cpu", cc=0, num_sms=0, smem_per_block_bytes=0, hbm_bytes=0)
