"""Attention that makes what kernels give back and computes nothing. No plan names it: `check` puts
it in a plan's place to run a model on the meta device, where what is alive is counted and nothing
has a value.

Legend: T packed queries, H query heads, D head_dim, E head_dim_v."""

import torch

from vitrail.attention.backend import Attended, AttentionBackend
from vitrail.attention.call import Call, check_lengths, check_tensors


class Hollow(AttentionBackend):
    """Holds a call to its plan as kernels do; outputs in the queries' dtype and an fp32 lse, as
    every kernel makes them. A sink counts as read."""

    def attend(self, call: Call) -> Attended:
        check_tensors(call)
        check_lengths(call.plan, call.meta)
        if call.sink_H is not None:
            call.sink_H.float()
        q_THD = call.q_THD
        out_THE = q_THD.new_empty((*q_THD.shape[:2], call.plan.shape.site.head_dim_v))
        return Attended(out_THE, torch.empty(out_THE.shape[:2], device=q_THD.device))


BACKEND: AttentionBackend = Hollow()
