"""From a tower's patches to a decoder's tokens: blocks of neighbouring patches become one row.

Parameters (published name): `norm.{weight,bias} [M]` (pre_norm), `up [m m M, m m M]` (linear_1),
`down [hidden, m m M]` (linear_2), each with bias.

Legend: N packed patches, M tower channels, m patches a side of a block, L packed tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.config.model import MoonVitConfig
from vitrail.ops.dispatch import select_vision
from vitrail.vision.linear import TowerLinear


class MergeProjector(nn.Module):
    """down(gelu(up(merge(norm x)))), with the exact GELU (erf), as the authors' code has it."""

    def __init__(self, config: MoonVitConfig, text_hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.merge = config.merge
        merged = config.merge**2 * config.hidden_size
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-5, dtype=dtype)
        self.up = TowerLinear(merged, merged, dtype=dtype)
        self.down = TowerLinear(merged, text_hidden_size, dtype=dtype)
        self.requires_grad_(False)

    def forward(
        self, x_NM: Float[Tensor, "N M"], grids: Sequence[tuple[int, int]]
    ) -> Float[Tensor, "L text_hidden"]:
        """`x_NM`: patches of pictures of these (height, width) grids, row-major, in order."""
        ops, norm = select_vision(x_NM.device), self.norm
        normed_NM = ops.layer_norm(x_NM, norm.weight, norm.bias, norm.eps)
        merged = merge_patches(normed_NM, grids, self.merge)
        return self.down(self.up.gelu(merged, "none"))


def merge_patches(
    x_NM: Float[Tensor, "N M"], grids: Sequence[tuple[int, int]], merge: int
) -> Float[Tensor, "L mmM"]:
    """Each `merge` x `merge` block of patches concatenated in (row, column) order; blocks
    row-major. Sides of grids are multiples of `merge`."""
    merged = [x_NM.new_empty((0, merge * merge * x_NM.shape[1]))]
    sizes = [height * width for height, width in grids]
    for (height, width), picture in zip(grids, x_NM.split(sizes), strict=True):
        assert height % merge == width % merge == 0, f"grid {height} x {width}, merge {merge}"
        blocks = picture.unflatten(0, (height // merge, merge, width // merge, merge))
        merged.append(blocks.transpose(1, 2).flatten(0, 1).flatten(1))
    return torch.cat(merged)
