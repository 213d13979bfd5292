"""From a tower's tiles to one picture's tokens: chessboard merge of several scales, and the
projectors that fold neighbouring patches. Pictures are packed one after the other and every one
carries its own block, so that no two need to be of one size.

    tiles of a picture, packed:   scale 1 | scale 2: s x s tiles | ... | block: rows x columns tiles

Legend: N packed patches, M tower channels, S M with every scale's channels side by side, t patches
a side of a tile, m patches a side of a token, L packed tokens."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.config.model import SiglipConfig
from vitrail.vision.linear import TowerLinear

Block = tuple[int, int] | None


class TileProjector(nn.Module):
    """NVILA's projectors, by the published index of their layers:

        8B:    LN 1, linear 2, GELU, linear 4                        over 2 x 2 patches, 3 scales
        Lite:  LN 1, linear 2, GELU, LN 4, linear 5, GELU, linear 7  over 3 x 3 patches

    GELU is exact (erf), the norms' eps torch's default, 1e-5."""

    def __init__(self, config: SiglipConfig, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.config = config
        channels = config.hidden_size * (len(config.scales) + 1)
        merged = config.merge**2 * channels
        self.norm = nn.LayerNorm(merged, dtype=dtype)
        if config.scales:
            sizes = (merged, hidden_size, hidden_size)
            self.inner_norm = None
        else:
            sizes = (merged, config.merge * channels, hidden_size, hidden_size)
            self.inner_norm = nn.LayerNorm(sizes[1], dtype=dtype)
        self.layers = nn.ModuleList(
            TowerLinear(before, after, dtype=dtype)
            for before, after in zip(sizes[:-1], sizes[1:], strict=True)
        )
        self.requires_grad_(False)

    def forward(
        self, x_NM: Float[Tensor, "N M"], blocks: Sequence[Block]
    ) -> Float[Tensor, "L hidden"]:
        """Tokens of the pictures in order. `x_NM`: the features of all their tiles, packed;
        `blocks`: of each picture, (rows, columns) of its last scale, None where it is one tile.
        Raises `ValueError`, with both counts, where the features are not those of these
        pictures."""
        config = self.config
        tile = config.tile**2
        sizes = [config.rules.num_sequences(block) * tile for block in blocks]
        if sum(sizes) != x_NM.shape[0]:
            raise ValueError(
                f"features of {x_NM.shape[0] // tile} tiles for {len(blocks)} pictures of "
                f"{sum(sizes) // tile} tiles"
            )
        maps = [
            picture_map(part, block, config.tile, config.scales)
            for part, block in zip(x_NM.split(sizes), blocks, strict=True)
        ]
        folded = torch.cat(
            [x_NM.new_empty((0, self.norm.normalized_shape[0]))]
            + [fold(each, config.tile, config.merge) for each in maps]
        )
        return self._paste(self._project(folded), blocks)

    def _project(self, x: Float[Tensor, "L fold"]) -> Float[Tensor, "L hidden"]:
        first, *rest = self.layers
        x = first(self.norm(x))
        for index, layer in enumerate(rest):
            x = F.gelu(x)
            if index == 0 and self.inner_norm is not None:
                x = self.inner_norm(x)
            x = layer(x)
        return x

    def _paste(
        self, x: Float[Tensor, "L hidden"], blocks: Sequence[Block]
    ) -> Float[Tensor, "L hidden"]:
        """Tokens tile by tile -> row by row of each whole picture."""
        side = -(-self.config.tile // self.config.merge)
        grids = [block or (1, 1) for block in blocks]
        counts = [rows * columns * side * side for rows, columns in grids]
        pasted = [x.new_empty((0, x.shape[1]))]
        for (rows, columns), part in zip(grids, x.split(counts), strict=True):
            pasted.append(chessboard(part, rows, columns, side).flatten(0, 1))
        return torch.cat(pasted)


def picture_map(
    x_NM: Float[Tensor, "N M"], block: Block, tile: int, scales: Sequence[int]
) -> Float[Tensor, "height width SM"]:
    """One picture's features at its last scale, every scale's channels side by side, the smallest
    scale first. The other scales are resized to it by area, in fp32. Without a block its one tile
    stands for every scale."""
    if block is None:
        return chessboard(x_NM, 1, 1, tile).repeat(1, 1, len(scales) + 1)
    grids = [*((side, side) for side in scales), block]
    counts = [rows * columns * tile * tile for rows, columns in grids]
    parts = x_NM.split(counts)
    size = (block[0] * tile, block[1] * tile)
    maps = [
        resize_area(chessboard(part, rows, columns, tile), size)
        for part, (rows, columns) in zip(parts, grids, strict=True)
    ]
    return torch.cat(maps, dim=-1)


def chessboard(
    x_NM: Float[Tensor, "N M"], rows: int, columns: int, side: int
) -> Float[Tensor, "height width M"]:
    """`rows` x `columns` tiles of `side` x `side` rows each, row-major, pasted into one map."""
    cut = x_NM.unflatten(0, (rows, columns, side, side))
    return cut.transpose(1, 2).flatten(0, 1).flatten(1, 2)


def resize_area(
    x_hwM: Float[Tensor, "h w M"], size: tuple[int, int]
) -> Float[Tensor, "height width M"]:
    """The mean over the area that each cell covers, in fp32, in the dtype of `x_hwM`."""
    if tuple(x_hwM.shape[:2]) == size:
        return x_hwM
    image_1Mhw = x_hwM.float().permute(2, 0, 1)[None]
    resized = F.interpolate(image_1Mhw, size, mode="area")
    return resized[0].permute(1, 2, 0).to(x_hwM.dtype)


def fold(
    x_hwM: Float[Tensor, "height width M"], tile: int, merge: int
) -> Float[Tensor, "tokens mmM"]:
    """The map cut into tiles, row-major, and each tile into `merge` x `merge` patches, whose
    channels are concatenated in (row, column) order; a tile that is not whole gets zeros below and
    to the right."""
    height, width, channels = x_hwM.shape
    tiles = x_hwM.unflatten(1, (width // tile, tile)).unflatten(0, (height // tile, tile))
    tiles = tiles.transpose(1, 2).flatten(0, 1)  # [tiles, tile, tile, M]
    short = -tile % merge
    tiles = F.pad(tiles, (0, 0, 0, short, 0, short))
    side = (tile + short) // merge
    cut = tiles.unflatten(2, (side, merge)).unflatten(1, (side, merge)).transpose(2, 3)
    return cut.reshape(-1, merge * merge * channels)
