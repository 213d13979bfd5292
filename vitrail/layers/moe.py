"""Mixture of experts with a sigmoid router and shared experts.

Legend: T tokens, M hidden channels, X experts, I intermediate channels."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.config.model import MoeConfig
from vitrail.layers.linear import GatedMlp, parameter
from vitrail.ops.dispatch import select_experts
from vitrail.ops.moe.naive import Routing, route


class Router(nn.Module):
    """`weight` [X, M] and `bias` [X] are fp32 whatever the model's dtype: rounding a score changes
    which experts are chosen. The bias decides the choice, never the weight."""

    def __init__(self, hidden: int, moe: MoeConfig):
        super().__init__()
        self.moe = moe
        self.weight = parameter(moe.num_experts, hidden, dtype=torch.float32)
        self.bias = parameter(moe.num_experts, dtype=torch.float32)

    def forward(self, x_TM: Float[Tensor, "T M"]) -> Routing:
        logits_TX = F.linear(x_TM.float(), self.weight)
        moe = self.moe
        return route(logits_TX, self.bias, moe.top_k, moe.normalize, moe.routed_scaling)


class MoeLayer(nn.Module):
    """Routed experts plus, where the model has them, shared experts as one gated MLP of
    `num_shared * intermediate_size`. `gate_up` [X, 2I, M] is [gate | up]; `down` [X, M, I]."""

    def __init__(self, hidden: int, moe: MoeConfig, dtype: torch.dtype):
        super().__init__()
        self.widths = (hidden, moe.intermediate_size)
        self.router = Router(hidden, moe)
        self.gate_up = parameter(moe.num_experts, 2 * moe.intermediate_size, hidden, dtype=dtype)
        self.down = parameter(moe.num_experts, hidden, moe.intermediate_size, dtype=dtype)
        self.shared = (
            GatedMlp(hidden, moe.num_shared * moe.intermediate_size, dtype)
            if moe.num_shared
            else None
        )

    def forward(self, x_TM: Float[Tensor, "T M"]) -> Float[Tensor, "T M"]:
        run = select_experts(x_TM.device, x_TM.dtype, self.widths)
        out_TM = run(x_TM, self.router(x_TM), self.gate_up, self.down)
        return out_TM if self.shared is None else out_TM + self.shared(x_TM)
