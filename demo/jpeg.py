"""JPEG's losses on packed patches: 8 x 8 blocks of each picture, cosine transform, quanta.

Chroma is halved within each block, as 4:2:0 halves it, and the tables of quanta are the standard's.
Shapes: N patches, B blocks.
"""

import math
from dataclasses import dataclass

import torch
from layout import PATCH, Layout
from torch import Tensor

LUMA = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113,
    92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
CHROMA = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99, *[99] * 32,
)  # fmt: skip
# Rows: luma, the two chromas, from red, green, blue.
YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


@dataclass
class Blocks:
    """Which pixels make up each block, and where each pixel lies among the blocks' values."""

    pixel_B64: Tensor  # int32, patch * 196 + y * 14 + x; the last row and column fill up a block
    value_N196: Tensor  # int32, block * 64 + place
    picture_B: Tensor
    wave_64_64: Tensor  # the transform's rows, orthonormal
    halve_64_64: Tensor  # means of 2 x 2
    quanta_3_64: Tensor
    ycc_33: Tensor
    rgb_33: Tensor  # the inverse


def cosine_rows() -> Tensor:
    k = torch.arange(8.0)
    rows = torch.cos(math.pi * (2 * k[None] + 1) * k[:, None] / 16) / 2
    rows[0] *= 2**-0.5
    return torch.kron(rows, rows)


def build_blocks(layout: Layout) -> Blocks:
    pixels, values, pictures, at, first = [], [], [], 0, 0
    for picture, (height, width) in enumerate(layout.size_P2.tolist()):
        down, across = -(-height // 8), -(-width // 8)
        y, x = torch.arange(height), torch.arange(width)
        columns = width // PATCH
        flat = ((y[:, None] // PATCH) * columns + x // PATCH) * PATCH**2 + first * PATCH**2
        flat = flat + (y[:, None] % PATCH) * PATCH + x % PATCH
        yy = torch.arange(down * 8).clamp(max=height - 1)
        xx = torch.arange(across * 8).clamp(max=width - 1)
        block = flat[yy][:, xx].view(down, 8, across, 8).transpose(1, 2).reshape(-1, 64)
        place = ((y[:, None] // 8) * across + x // 8 + at) * 64 + (y[:, None] % 8) * 8 + x % 8
        value = torch.empty(height * width, dtype=torch.long)
        value[(flat - first * PATCH**2).flatten()] = place.flatten()
        pixels.append(block)
        values.append(value.view(-1, PATCH**2))
        pictures.append(torch.full((down * across,), picture))
        at, first = at + down * across, first + height * width // PATCH**2
    pair = torch.kron(torch.eye(4), torch.full((2, 2), 0.5))
    return Blocks(
        torch.cat(pixels).int(), torch.cat(values).int(), torch.cat(pictures), cosine_rows(),
        torch.kron(pair, pair), torch.tensor([LUMA, CHROMA, CHROMA]).float(), torch.tensor(YCC),
        torch.tensor(YCC).inverse(),
    )  # fmt: skip


def compress(image: Tensor, quality_P: Tensor, blocks: Blocks) -> Tensor:
    """Pixels [N, 3, 14, 14] from 0 to 1 with the losses of `quality_P` times the standard's tables
    (1 is quality 50, 0.2 quality 90); as they were where it is 0."""
    N, scale = len(image), quality_P[blocks.picture_B]
    planes = image.flatten(2).transpose(0, 1).reshape(3, -1) * 255 - 128
    values = planes[:, blocks.pixel_B64]  # [3, B, 64]
    turned = torch.tensordot(blocks.ycc_33, values, 1)
    halved = torch.cat([turned[:1], turned[1:] @ blocks.halve_64_64])
    quanta = (blocks.quanta_3_64[:, None] * scale[:, None]).round().clamp(min=1)
    kept = (halved @ blocks.wave_64_64.T / quanta).round() * quanta
    back = torch.tensordot(blocks.rgb_33, kept @ blocks.wave_64_64, 1)
    lossy = torch.where(scale[:, None] > 0, back, values).flatten(1)[:, blocks.value_N196]
    return ((lossy + 128) / 255).clamp(0, 1).transpose(0, 1).reshape(N, 3, PATCH, PATCH)
