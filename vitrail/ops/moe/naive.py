"""The definition of the mixture of experts: sigmoid router with a correction bias, gated experts.

Legend: T tokens, M hidden channels, X experts, K experts a token, I intermediate channels, F = 2I
([gate | up]); Y experts and J experts a token with the shared ones."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.ops.activation.naive import silu_mul
from vitrail.ops.moe.plan import Choice

# Added to the sum of the chosen scores before dividing, as the model's authors do.
SUM_FLOOR = 1e-20


class Routing(NamedTuple):
    """The experts of each token, best biased score first, and what their outputs are multiplied
    with (fp32)."""

    expert_ids: Int[Tensor, "T K"]
    weights: Float[Tensor, "T K"]


def route(
    logits_TX: Float[Tensor, "T X"],
    bias_X: Float[Tensor, "X"],
    top_k: int,
    normalize: bool,
    scaling: float,
) -> Routing:
    """Choose `top_k` experts a token by sigmoid(logit) + bias. The weights are the scores without
    the bias, divided by their sum if `normalize`, times `scaling`. `logits` and `bias` must be
    fp32: a rounded score changes the choice."""
    assert logits_TX.dtype == bias_X.dtype == torch.float32, (logits_TX.dtype, bias_X.dtype)
    scores_TX = logits_TX.sigmoid()
    ids_TK = (scores_TX + bias_X).topk(top_k, dim=-1).indices
    weights_TK = scores_TX.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + SUM_FLOOR)
    return Routing(ids_TK, weights_TK * scaling)


def naive_route(
    x_TM: Float[Tensor, "T M"],
    router_XM: Float[Tensor, "X M"],
    bias_X: Float[Tensor, "X"],
    choice: Choice,
) -> Routing:
    """`route` by the router's product in fp32; then the shared experts, numbered after the routed,
    with weight 1."""
    logits_TX = F.linear(x_TM.float(), router_XM)
    ids_TK, weights_TK = route(logits_TX, bias_X, choice.top_k, choice.normalize, choice.scaling)
    shared = torch.arange(choice.num_shared, device=ids_TK.device) + len(router_XM)
    return Routing(
        torch.cat([ids_TK, shared.expand(len(ids_TK), -1)], 1),
        F.pad(weights_TK, (0, choice.num_shared), value=1.0),
    )


def naive_experts(
    x_TM: Float[Tensor, "T M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
) -> Float[Tensor, "T M"]:
    """sum over a token's experts of weight * down(silu(gate x) * up x), summed in fp32. Computes
    every expert for every token: the definition, free of data-dependent shapes, X / K times the
    work."""
    out_TM = torch.zeros_like(x_TM, dtype=torch.float32)
    for expert, (gate_up_FM, down_MI) in enumerate(zip(gate_up_XFM, down_XMI, strict=True)):
        weight_T = (routing.weights * (routing.expert_ids == expert)).sum(-1)
        y_TM = F.linear(silu_mul(F.linear(x_TM, gate_up_FM)), down_MI)
        out_TM += weight_T.unsqueeze(-1) * y_TM
    return out_TM.to(x_TM.dtype)
