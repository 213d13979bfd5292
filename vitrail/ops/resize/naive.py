"""The definition of a picture's patches on a device: two passes of `taps`, rows inside, rounded to
8 bits after each; black to the right and below; patches row-major, channels first.

Legend: H W a picture's sides, h w those it is resized to, N patches, F = 3 * P * P samples of a
patch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int32, UInt8
from torch import Tensor

from vitrail.ops.resize.taps import FRACTION_BITS


class Resample(NamedTuple):
    """`taps` of one axis on the device."""

    starts: Int32[Tensor, "new"]
    weights: Int32[Tensor, "new width"]


def resized_patches(
    pixels_HW3: UInt8[Tensor, "H W 3"],
    down: Resample,
    across: Resample,
    grid: tuple[int, int],
    patch_size: int,
) -> UInt8[Tensor, "N F"]:
    """The picture resized by `down` (its rows) and `across` (its columns), and cut into `grid`
    (rows, columns) patches of `patch_size` samples a side, which cover it."""
    narrow_Hw3 = _pass(pixels_HW3.transpose(0, 1), across).transpose(0, 1)
    small_hw3 = _pass(narrow_Hw3, down)
    rows, columns = (side * patch_size for side in grid)
    right, below = columns - small_hw3.shape[1], rows - small_hw3.shape[0]
    assert min(right, below) >= 0, f"{tuple(small_hw3.shape)} in {rows} x {columns}"
    padded = F.pad(small_hw3, (0, 0, 0, right, 0, below))
    cut = padded.unflatten(0, (grid[0], patch_size)).unflatten(2, (grid[1], patch_size))
    return cut.permute(0, 2, 4, 1, 3).flatten(0, 1).flatten(1)


def _pass(x_LX3: UInt8[Tensor, "L X 3"], by: Resample) -> UInt8[Tensor, "new X 3"]:
    """Along the first axis."""
    total = torch.full((len(by.starts), *x_LX3.shape[1:]), 1 << (FRACTION_BITS - 1))
    total = total.to(x_LX3.device)
    for j in range(by.weights.shape[1]):
        at = (by.starts + j).clamp(max=len(x_LX3) - 1).long()
        total += x_LX3[at].long() * by.weights[:, j, None, None]
    return (total >> FRACTION_BITS).clamp(0, 255).to(torch.uint8)
