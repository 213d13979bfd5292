"""The towers' products.

Legend: N rows, I input channels, O output channels."""

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.ops.dispatch import select_linear, select_vision


class TowerLinear(nn.Linear):
    """y = x weight^T + bias. `fixed`: see `layers.fixed`."""

    fixed = False

    def forward(self, input: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        if not self.fixed:
            return super().forward(input)
        return select_linear(input.device, True).linear(input, self.weight, self.bias)

    def gelu(self, x_NI: Float[Tensor, "N I"], approximate: str) -> Float[Tensor, "N O"]:
        """gelu(y); `approximate`: torch's name of the form."""
        if self.fixed:
            return F.gelu(self(x_NI), approximate=approximate)
        ops = select_vision(x_NI.device)
        return ops.linear_gelu(x_NI, self.weight, self.bias, approximate)

    def embed(
        self, patches_NI: Float[Tensor, "N I"] | UInt8[Tensor, "N I"]
    ) -> Float[Tensor, "N O"]:
        """Of normalised patches, in the weight's dtype."""
        ops = select_vision(patches_NI.device)
        if self.fixed:
            return self(ops.normalise(patches_NI, self.weight.dtype))
        return ops.embed(patches_NI, self.weight, self.bias)
