"""Attention that makes what kernels give back and computes nothing. No plan names it: `check` puts
it in a plan's place to run a model on the meta device, where what is alive is counted and nothing
has a value.

Legend: T packed queries, S packed keys, H query heads, K key heads, D head_dim, E head_dim_v,
N pages, P page size, C latent channels, R latent rank."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.attention.backend import UNSCALED, Attended, AttentionBackend, Sent
from vitrail.attention.call import check_lengths, check_tensors
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.records import Lengths
from vitrail.config.model import KvScales


class Hollow:
    """Stateless. Holds a call to its plan as kernels do; outputs in the queries' dtype and an fp32
    lse, as every kernel makes them."""

    def pack(self, plan: AttentionPlan, lengths: Lengths) -> Sent | None:
        """Nothing travels."""
        return None

    def varlen(
        self,
        plan: AttentionPlan,
        q_THD: Float[Tensor, "T H D"],
        k_SKD: Float[Tensor, "S K D"],
        v_SKE: Float[Tensor, "S K E"],
        meta: VarlenMetadata,
        sink_H: Float[Tensor, "H"] | None = None,
    ) -> Attended:
        """A sink counts as read."""
        check_tensors(plan, q_THD, k_SKD, v_SKE, sink_H)
        check_lengths(plan, meta)
        if sink_H is not None:
            sink_H.float()
        return _made(q_THD, v_SKE.shape[-1])

    def paged(
        self,
        plan: AttentionPlan,
        q_THD: Float[Tensor, "T H D"],
        k_NPKD: Float[Tensor, "N P K D"],
        v_NPKE: Float[Tensor, "N P K E"],
        meta: PagedMetadata,
        sink_H: Float[Tensor, "H"] | None = None,
        scales: KvScales = UNSCALED,
    ) -> Attended:
        check_tensors(plan, q_THD, k_NPKD, v_NPKE, sink_H)
        check_lengths(plan, meta)
        return _made(q_THD, v_NPKE.shape[-1])

    def latent(
        self,
        plan: AttentionPlan,
        q_THC: Float[Tensor, "T H C"],
        cache_NPC: Float[Tensor, "N P C"],
        meta: PagedMetadata,
        scales: KvScales = UNSCALED,
    ) -> Attended:
        check_lengths(plan, meta)
        return _made(q_THC, plan.shape.site.latent_rank)


BACKEND: AttentionBackend = Hollow()


def _made(q_THD: Tensor, channels: int) -> Attended:
    out_THE = q_THD.new_empty((*q_THD.shape[:2], channels))
    return Attended(out_THE, torch.empty(out_THE.shape[:2], device=q_THD.device))
