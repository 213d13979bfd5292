"""Mixture of experts with a sigmoid router and shared experts.

Legend: T tokens, M hidden channels, X routed experts, Y all experts, I intermediate channels."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.config.model import MoeConfig
from vitrail.layers.linear import parameter
from vitrail.ops.dispatch import select_mixture
from vitrail.ops.moe.plan import Choice


class Router(nn.Module):
    """`weight` [X, M] and `bias` [X] are fp32 whatever the model's dtype: rounding a score changes
    which experts are chosen. The bias decides the choice, never the weight."""

    def __init__(self, hidden: int, moe: MoeConfig):
        super().__init__()
        self.choice = Choice(
            top_k=moe.top_k,
            num_shared=moe.num_shared,
            normalize=moe.normalize,
            scaling=moe.routed_scaling,
        )
        self.weight = parameter(moe.num_experts, hidden, dtype=torch.float32)
        self.bias = parameter(moe.num_experts, dtype=torch.float32)


class MoeLayer(nn.Module):
    """Routed experts and, where the model has them, shared ones, which every token chooses with
    weight 1: one gated MLP of `num_shared * intermediate_size` is so many experts' sum. `gate_up`
    [Y, 2I, M] is [gate | up]; `down` [Y, M, I]; the shared experts come last. `fixed`: see
    `layers.fixed`."""

    fixed = False

    def __init__(self, hidden: int, moe: MoeConfig, dtype: torch.dtype):
        super().__init__()
        experts, inner = moe.num_experts + moe.num_shared, moe.intermediate_size
        self.widths = (hidden, inner)
        self.router = Router(hidden, moe)
        self.gate_up = parameter(experts, 2 * inner, hidden, dtype=dtype)
        self.down = parameter(experts, hidden, inner, dtype=dtype)

    def forward(self, x_TM: Float[Tensor, "T M"]) -> Float[Tensor, "T M"]:
        router = self.router
        run = select_mixture(x_TM.device, x_TM.dtype, self.widths, self.fixed)
        return run(x_TM, router.weight, router.bias, router.choice, self.gate_up, self.down)
