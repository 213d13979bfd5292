"""Attention that makes what kernels give back and computes nothing. No plan names it: `check` puts
it in a plan's place to run a model on the meta device, where what is alive is counted and nothing
has a value.

Legend: T packed queries, H query heads, D head_dim, E head_dim_v."""

import torch
from torch import Tensor

from vitrail.attention.backend import Attended, AttentionBackend
from vitrail.attention.call import check_lengths, check_tensors
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata
from vitrail.attention.plan import AttentionPlan
from vitrail.config.model import KvScales


class Hollow(AttentionBackend):
    """Holds a call to its plan as kernels do; outputs in the queries' dtype and an fp32 lse, as
    every kernel makes them. A sink counts as read."""

    def attend(
        self,
        plan: AttentionPlan,
        q_THD: Tensor,
        k: Tensor,
        v: Tensor,
        meta: VarlenMetadata | PagedMetadata,
        sink_H: Tensor | None,
        scales: KvScales,
    ) -> Attended:
        check_tensors(plan, q_THD, k, v, sink_H)
        check_lengths(plan, meta)
        if sink_H is not None:
            sink_H.float()
        out_THE = q_THD.new_empty((*q_THD.shape[:2], plan.shape.site.head_dim_v))
        return Attended(out_THE, torch.empty(out_THE.shape[:2], device=q_THD.device))


BACKEND: AttentionBackend = Hollow()
