"""NVILA's image rules: which tiles a picture becomes, and what stands around them in the prompt.

As the authors publish them. A tile is a square of the tower's size; a grid of i x j tiles (i
across) is chosen by the nearest aspect ratio among all with few enough tiles.

    8B, one picture:       the picture as 1 x 1, 2 x 2 and i x j tiles with 9 <= i j <= 12: one part
    Lite, one picture:     i x j tiles with i j <= 12, and one of the whole picture if i j > 1: a
                           part each
    several, or a frame:   each squashed into one tile

A line feed follows each part. For exactly one picture Lite's authors also write one into the text
after each tile, which their models were trained with. No torch."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from blake3 import blake3

from vitrail.config.finding import Finding, Refused
from vitrail.config.model import PatchRules
from vitrail.config.reader import Keys, load_json
from vitrail.vision.image import DecodedImage
from vitrail.vision.preprocess import (
    HALVES,
    ImageGrid,
    PatchedImage,
    Pixels,
    Separators,
    patches_digest,
    patchify,
    resize,
)

MAX_TILES = 12
SCALES = (1, 2)  # tiles a side of the scales below the last, 448 and 896 of 448, 896, 1344
MIN_TILES = 9  # of the last scale: as many as its square would have
IMAGE_TOKEN_ID = 151649  # of the authors' tokenizer, where config.json does not say
MERGE = {"nvila": 2, "nvila_lite": 3}

_IGNORED = ("processor_class", "_processor_class", "auto_map", "data_format", "input_data_format")
_RESCALE = 1 / 255
_BICUBIC = 3

Kind = Literal["nvila", "nvila_lite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvilaProcessor:
    """One checkpoint's rules; `tile_pixels` a side. An `ImageProcessor`."""

    kind: Kind
    tile_pixels: int
    patch_size: int
    image_token_id: int

    @classmethod
    def load(cls, folder: Path) -> "NvilaProcessor":
        """From config.json and the tower's preprocessor_config.json, read strictly. Raises
        `Refused` with every finding."""
        model = Keys(load_json(folder / "config.json"), "config.json")
        parts = model.has("mm_projector_cfg")
        place = folder / "vision_tower" if parts else folder
        keys = Keys(load_json(place / "preprocessor_config.json"), "preprocessor_config.json")
        vision = model.child("vision_tower_cfg" if parts else "vision_config")
        image_size, patch_size = vision.take("image_size", int), vision.take("patch_size", int)
        size = {"height": image_size, "width": image_size}
        keys.require("size", size)
        keys.expect("image_processor_type", "SiglipImageProcessor", "SiglipImageProcessorFast")
        keys.require("image_mean", HALVES)
        keys.require("image_std", HALVES)
        keys.expect("resample", _BICUBIC)
        keys.expect("rescale_factor", _RESCALE)
        for flag in ("do_resize", "do_rescale", "do_normalize"):
            keys.expect(flag, True)
        keys.expect("do_convert_rgb", True, None)
        keys.ignore(_IGNORED)
        keys.finish()
        kind = projector_kind(model) if parts else model.take("model_type", str)
        token = IMAGE_TOKEN_ID if parts else model.take("image_token_id", int)
        found = keys.findings + model.findings
        if kind not in MERGE or patch_size < 1 or image_size % max(1, patch_size):
            found.append(
                Finding(
                    where="config.json",
                    saw=f"{kind!r}, tiles of {image_size} pixels, patches of {patch_size}",
                    rule=f"one of {', '.join(MERGE)}, with tiles of whole patches",
                    change="restore the published config.json",
                    code="bad_config",
                )
            )
        if found:
            raise Refused(found)
        made: Kind = "nvila" if kind == "nvila" else "nvila_lite"
        return cls(kind=made, tile_pixels=image_size, patch_size=patch_size, image_token_id=token)

    @property
    def rules(self) -> PatchRules:
        """The tower's side of the same facts."""
        return PatchRules(
            patch_size=self.patch_size,
            merge=MERGE[self.kind],
            tile=self.tile_pixels // self.patch_size,
            scales=SCALES if self.kind == "nvila" else (),
        )

    @property
    def identity(self) -> bytes:
        """32 bytes over the rule and its numbers."""
        numbers = (self.tile_pixels, self.patch_size, MAX_TILES)
        return blake3(self.kind.encode() + struct.pack("<3Q", *numbers)).digest()

    @property
    def max_patches(self) -> int:
        """Of one picture: 8B's 1 + 4 + 12 tiles, Lite's 12 and the whole."""
        tiles = self.rules.num_sequences((1, MAX_TILES))
        return (tiles if self.kind == "nvila" else MAX_TILES + 1) * (self.rules.tile or 0) ** 2

    def grids(self, height: int, width: int, alone: bool) -> tuple[ImageGrid, ...] | Finding:
        """Every size can be squashed into tiles."""
        assert min(height, width) > 0, f"a picture of {height} x {width}"
        if not alone:
            return (self._grid(None),)
        if self.kind == "nvila":
            columns, rows = choose_tiles(height, width, MIN_TILES, MAX_TILES, self.tile_pixels)
            return (self._grid((rows, columns)),)
        columns, rows = choose_tiles(height, width, 1, MAX_TILES, self.tile_pixels)
        tiles = rows * columns
        return (self._grid(None),) * (tiles if tiles == 1 else tiles + 1)

    def parts(self, image: DecodedImage, alone: bool) -> tuple[PatchedImage, ...]:
        grids = self.grids(image.height, image.width, alone)
        assert not isinstance(grids, Finding)
        if not alone:
            return (self._patched(image.pixels, ((1, 1),), grids[0]),)
        if self.kind == "nvila":
            assert grids[0].block is not None
            scales = (*((side, side) for side in SCALES), grids[0].block)
            return (self._patched(image.pixels, scales, grids[0]),)
        columns, rows = choose_tiles(image.height, image.width, 1, MAX_TILES, self.tile_pixels)
        tiles = self._tiles(image.pixels, rows, columns)
        if len(tiles) > 1:
            tiles += self._tiles(image.pixels, 1, 1)
        return tuple(self._patched(tile, ((1, 1),), grids[0]) for tile in tiles)

    def unresized(self, image: DecodedImage, alone: bool) -> PatchedImage | None:
        return None

    def separators(self, alone: bool) -> Separators:
        return Separators(end="\n", text="\n" if alone and self.kind == "nvila_lite" else "")

    def _grid(self, block: tuple[int, int] | None) -> ImageGrid:
        rules, (rows, columns) = self.rules, block or (1, 1)
        side = rules.tile or 0
        return ImageGrid(
            height=side,
            width=side,
            num_tokens=rules.num_tokens(side, side, block),
            resized_height=rows * self.tile_pixels,
            resized_width=columns * self.tile_pixels,
            sequences=rules.num_sequences(block),
            block=block,
        )

    def _tiles(self, pixels: Pixels, rows: int, columns: int) -> list[np.ndarray]:
        """The picture squashed into `rows` x `columns` tiles, row-major."""
        size = self.tile_pixels
        whole = resize(pixels, rows * size, columns * size)
        return [
            whole[r * size : (r + 1) * size, c * size : (c + 1) * size]
            for r in range(rows)
            for c in range(columns)
        ]

    def _patched(
        self, pixels: Pixels, scales: tuple[tuple[int, int], ...], grid: ImageGrid
    ) -> PatchedImage:
        """One part: the tiles of all `scales` (rows, columns), one after the other. Its digest is
        over the patches, so that equal tiles of any pictures are one."""
        tiles = [t for rows, columns in scales for t in self._tiles(pixels, rows, columns)]
        patches = np.concatenate([patchify(tile, self.patch_size) for tile in tiles])
        assert len(patches) == grid.num_patches
        return PatchedImage(patches=patches, grid=grid, digest=patches_digest(patches, grid))


def choose_tiles(height: int, width: int, least: int, most: int, size: int) -> tuple[int, int]:
    """(columns, rows) of the tiles, `least` to `most` in number, whose aspect ratio is nearest to
    the picture's. Among equals the last one with less than twice the picture's area wins."""
    aspect, area = width / height, width * height
    nearest, chosen = float("inf"), (1, 1)
    for columns, rows in _candidates(least, most):
        difference = abs(aspect - columns / rows)
        if difference < nearest:
            nearest, chosen = difference, (columns, rows)
        elif difference == nearest and area > 0.5 * size * size * columns * rows:
            chosen = (columns, rows)
    return chosen


@lru_cache(maxsize=16)
def _candidates(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """In the authors' order: a set's, sorted by the product alone, so that equal products stay as
    the set has them. The set must be built as they build it."""
    found = {
        (i, j)
        for n in range(least, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if least <= i * j <= most
    }
    return tuple(sorted(found, key=lambda pair: pair[0] * pair[1]))


def projector_kind(model: Keys) -> str:
    """Which generation the projector of a checkpoint in sub-folders belongs to; '' for another."""
    projector = model.child("mm_projector_cfg").take("mm_projector_type", str)
    return {"mlp_downsample": "nvila", "mlp_downsample_3x3_fix": "nvila_lite"}.get(projector, "")
