"""Linear layers and the gated feed-forward layer made of two of them.

Legend: T tokens, I input channels, O output channels, M hidden channels."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.cache.kv_pool import DTYPES
from vitrail.config.model import DType
from vitrail.ops.dispatch import select_linear, select_silu_mul


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name of a configuration's dtype."""
    return DTYPES[dtype]


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An inference parameter on the current default device, not initialised."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x weight^T (+ bias). `weight` [O, I] as checkpoints store it, `bias` [O] or None.
    `fixed`: see `layers.fixed`."""

    fixed = False

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.bias = parameter(outputs, dtype=dtype) if bias else None

    def forward(self, x_TI: Float[Tensor, "T I"]) -> Float[Tensor, "T O"]:
        return select_linear(x_TI.device, self.fixed).linear(x_TI, self.weight, self.bias)


class GatedMlp(nn.Module):
    """down(silu(gate x) * up x). `gate_up_proj.weight` is [gate | up] along its rows."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * intermediate, dtype, bias)
        self.down_proj = Linear(intermediate, hidden, dtype, bias)

    def forward(self, x_TM: Float[Tensor, "T M"]) -> Float[Tensor, "T M"]:
        silu_mul = select_silu_mul(x_TM.device)
        return self.down_proj(silu_mul(self.gate_up_proj(x_TM)))
