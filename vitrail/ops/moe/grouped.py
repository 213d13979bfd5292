"""Experts on their own tokens alone: rows sorted by expert, one product a segment. Two ways to the
same segments: from the host, or without ever reading their ends back from the device.

Legend: T tokens, M hidden channels, X experts, K experts a token, S = T * K rows sorted by expert,
I intermediate channels, F = 2I ([gate | up])."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.ops.activation.naive import silu_mul
from vitrail.ops.moe.naive import Routing

# Row strides that torch's grouped product takes.
GROUPED_ALIGN_BYTES = 16


def segmented_experts(
    x_TM: Float[Tensor, "T M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
) -> Float[Tensor, "T M"]:
    """As `naive_experts`, by a loop over the experts that have tokens. Reads the segments' ends:
    for tensors in host memory."""
    rows = _sort(x_TM, routing, gate_up_XFM.shape[0])
    out_SM = torch.empty_like(rows.x_SM)
    start = 0
    for expert, stop in enumerate(rows.ends_X.tolist()):
        if stop > start:
            hidden = silu_mul(F.linear(rows.x_SM[start:stop], gate_up_XFM[expert]))
            out_SM[start:stop] = F.linear(hidden, down_XMI[expert])
            start = stop
    return _combine(out_SM, rows.order_S, routing)


def grouped_experts(
    x_TM: Float[Tensor, "T M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
) -> Float[Tensor, "T M"]:
    """As `naive_experts`, by torch's grouped product, which takes the segments' ends on the device.
    M and I must be whole `GROUPED_ALIGN_BYTES`."""
    rows = _sort(x_TM, routing, gate_up_XFM.shape[0])
    hidden_SF = F.grouped_mm(rows.x_SM, gate_up_XFM.transpose(1, 2), offs=rows.ends_X)
    out_SM = F.grouped_mm(silu_mul(hidden_SF), down_XMI.transpose(1, 2), offs=rows.ends_X)
    return _combine(out_SM, rows.order_S, routing)


class _Sorted(NamedTuple):
    """Row s is token order[s] // K; the rows of expert e end at ends[e]."""

    x_SM: Float[Tensor, "S M"]
    order_S: Int[Tensor, "S"]
    ends_X: Int[Tensor, "X"]


def _sort(x_TM: Float[Tensor, "T M"], routing: Routing, num_experts: int) -> _Sorted:
    experts_S, order_S = routing.expert_ids.flatten().sort(stable=True)
    all_X = torch.arange(num_experts, device=x_TM.device)
    ends_X = torch.searchsorted(experts_S, all_X, right=True, out_int32=True)
    x_SM = x_TM.index_select(0, order_S // routing.expert_ids.shape[1])
    return _Sorted(x_SM, order_S, ends_X)


def _combine(
    out_SM: Float[Tensor, "S M"], order_S: Int[Tensor, "S"], routing: Routing
) -> Float[Tensor, "T M"]:
    """Back in the tokens' order and summed in fp32, in the routing's order whatever the batch
    holds."""
    tokens, top_k = routing.expert_ids.shape
    unsorted_SM = torch.empty_like(out_SM).index_copy_(0, order_S, out_SM)
    out_TKM = unsorted_SM.view(tokens, top_k, out_SM.shape[1])
    return torch.einsum("tk,tkm->tm", routing.weights, out_TKM.float()).to(out_SM.dtype)
