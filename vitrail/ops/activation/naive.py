"""The definition of the gated activation.

Legend: T tokens, I intermediate channels."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def silu_mul(gate_up: Float[Tensor, "T I2"]) -> Float[Tensor, "T I"]:
    """silu(gate) * up, where the last axis is [gate | up], I channels each. Same dtype."""
    gate_TI, up_TI = gate_up.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI
