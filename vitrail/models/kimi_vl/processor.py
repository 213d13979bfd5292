"""Kimi-VL's image processor: native resolution up to a patch budget, black padding to whole tokens.

The rule, as the authors publish it: with more than `in_token_limit` whole patches, scale both sides
by sqrt(limit / patches), truncated to pixels, bicubic; pad right and below to whole tokens; refuse
a grid side of 512 patches or more. Padding comes after the limit, so a grid may exceed it. No
torch."""

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from vitrail.config.finding import Finding, Refused
from vitrail.config.reader import Keys, load_json
from vitrail.ops.resize.taps import columns_first
from vitrail.vision.image import DecodedImage
from vitrail.vision.preprocess import (
    HALVES,
    ImageGrid,
    PatchedImage,
    Separators,
    pad,
    patchify,
    resize,
)

UNRESIZED_BYTES = 4  # of a picture for each of its patches', at most
MAX_SIDE = 512  # patches; the authors' code raises from here on

_IGNORED = ("auto_map", "num_pooled_tokens", "processor_class")


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiVLProcessor:
    """The published parameters of one checkpoint. `in_token_limit` in patches, tested before
    padding; `merge` x `merge` patches become one token. An `ImageProcessor`."""

    patch_size: int
    in_token_limit: int
    merge: int
    image_token_id: int

    @classmethod
    def load(cls, folder: Path) -> "KimiVLProcessor":
        """From a checkpoint's preprocessor_config.json, read strictly, and the image token and
        patch size of its config.json. Raises `Refused` with every finding, one of them being that
        preprocessor_config.json is missing: the class defaults of the authors' code are not what
        their checkpoints use, so nothing is assumed."""
        keys = Keys(load_json(folder / "preprocessor_config.json"), "preprocessor_config.json")
        model = Keys(load_json(folder / "config.json"), "config.json")
        vision = model.child("vision_config")
        sides = keys.take_ints("merge_kernel_size")
        processor = cls(
            patch_size=keys.take("patch_size", int),
            in_token_limit=keys.take("in_token_limit", int),
            merge=sides[0] if sides else 0,
            image_token_id=model.take("media_placeholder_token_id", int),
        )
        keys.expect("image_processor_type", "KimiVLImageProcessor")
        keys.require("pad_input", True)
        keys.require("image_mean", HALVES)
        keys.require("image_std", HALVES)
        keys.ignore(_IGNORED)
        keys.finish()
        tower = (vision.take("patch_size", int), vision.take_ints("merge_kernel_size"))
        found = keys.findings + model.findings
        if not found:
            found = processor._findings(sides, tower)
        if found:
            raise Refused(found)
        return processor

    def _findings(
        self, sides: tuple[int, ...], tower: tuple[int, tuple[int, ...]]
    ) -> list[Finding]:
        """What no Kimi-VL checkpoint can say: impossible sizes, or others than the tower's."""
        seen = (self.patch_size, sides)
        rules = (
            (seen == tower, f"the tower's in config.json: {tower[0]}, {list(tower[1])}"),
            (self.patch_size >= 2, "a patch_size of at least 2"),
            (len(sides) == 2 and len(set(sides)) == 1 and self.merge >= 1, "two equal sides"),
            (self.in_token_limit >= 1, "an in_token_limit of at least 1"),
        )
        return [
            Finding(
                where="preprocessor_config.json",
                saw=f"patch_size {self.patch_size}, merge_kernel_size {list(sides)}, "
                f"in_token_limit {self.in_token_limit}",
                rule=rule,
                change="restore the published preprocessor_config.json",
                code="bad_config",
            )
            for holds, rule in rules
            if not holds
        ]

    @property
    def identity(self) -> bytes:
        """32 bytes over the rule and its numbers."""
        numbers = (self.patch_size, self.in_token_limit, self.merge)
        return blake3(b"kimi_vl bicubic pad mean=std=0.5" + struct.pack("<3Q", *numbers)).digest()

    @property
    def max_patches(self) -> int:
        """Largest `num_patches` of any grid, exactly; above `in_token_limit` for thin pictures."""
        return _max_patches(self)

    def grid(self, height: int, width: int) -> ImageGrid | Finding:
        """Grid and tokens of a picture of `height` x `width` pixels, or why Kimi-VL cannot take it:
        a side of 512 patches, or a side that scaling would leave without a pixel."""
        assert min(height, width) > 0, f"a picture of {height} x {width}"
        rows, columns = self._scaled(height, width)
        token = self.patch_size * self.merge
        grid_height, grid_width = (-(-side // token) * self.merge for side in (rows, columns))
        if min(rows, columns) < 1 or max(grid_height, grid_width) >= MAX_SIDE:
            return Finding(
                where="image",
                saw=f"{width} x {height} pixels, which scale to {columns} x {rows} and make "
                f"{grid_width} x {grid_height} patches",
                rule=f"each side of Kimi-VL's grid is 1 to {MAX_SIDE - 1} patches",
                change="crop the picture, or scale its long side down",
                code="image_too_long",
            )
        return ImageGrid(
            height=grid_height,
            width=grid_width,
            num_tokens=grid_height * grid_width // self.merge**2,
            resized_height=rows,
            resized_width=columns,
        )

    def process(self, image: DecodedImage) -> PatchedImage:
        """The picture's patches, uint8. Raises `Refused` with `grid`'s finding."""
        grid = self.grid(image.height, image.width)
        if isinstance(grid, Finding):
            raise Refused(grid)
        pixels = resize(image.pixels, grid.resized_height, grid.resized_width)
        size = self.patch_size
        pixels = pad(pixels, grid.height * size, grid.width * size)
        return PatchedImage(patches=patchify(pixels, size), grid=grid, digest=image.digest)

    def grids(self, height: int, width: int, alone: bool) -> tuple[ImageGrid, ...] | Finding:
        """One part, whatever else is in the request."""
        grid = self.grid(height, width)
        return grid if isinstance(grid, Finding) else (grid,)

    def parts(self, image: DecodedImage, alone: bool) -> tuple[PatchedImage, ...]:
        return (self.process(image),)

    def unresized(self, image: DecodedImage, alone: bool) -> PatchedImage | None:
        grid = self.grid(image.height, image.width)
        if isinstance(grid, Finding):
            raise Refused(grid)
        most = UNRESIZED_BYTES * grid.num_patches * 3 * self.patch_size**2
        sizes = (image.height, image.width), (grid.resized_height, grid.resized_width)
        if image.pixels.nbytes > most or not columns_first(*sizes):
            return None
        return PatchedImage(patches=image.pixels, grid=grid, digest=image.digest)

    def separators(self, alone: bool) -> Separators:
        """None: the template frames each picture."""
        return Separators()

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels after the limit; may reach 0."""
        patches = (width // self.patch_size) * (height // self.patch_size)
        if patches <= self.in_token_limit:
            return height, width
        scale = math.sqrt(self.in_token_limit / patches)
        return int(height * scale), int(width * scale)


@lru_cache(maxsize=64)
def _max_patches(processor: KimiVLProcessor) -> int:
    """The best m x n tokens. Unscaled pictures are arithmetic: a side pads to m tokens with as few
    as merge * (m - 1) whole patches (and a rest), so thin pictures gain most. Only where that
    leaves n below what would beat the best so far, scaled pictures are searched."""
    merge, limit = processor.merge, processor.in_token_limit
    top = (MAX_SIDE - 1) // merge
    best = 0
    for m in range(1, top + 1):
        columns = merge * (m - 1)
        n = min(top, limit // columns // merge + 1) if columns else top
        best = max(best, m * n)
        n = max(n, best // m) + 1
        while n <= top and _scaled_reaches(processor, m, n):
            best = m * n
            n += 1
    return best * merge**2


def _scaled_reaches(processor: KimiVLProcessor, m: int, n: int) -> bool:
    """Whether a picture above the limit gets n rows by m columns of tokens, where
    merge^2 (m - 1) (n - 1) > limit. With b x a whole patches of size P, its scaled sides are at
    most (P b + P - 1) and (P a + P - 1) times sqrt(limit / (a b)), and both must pass the least
    pixels of n and m tokens. That bounds a for each b, and then b. The first pair found passes
    by less than a token, so it is n x m exactly."""
    size, merge, limit = processor.patch_size, processor.merge, processor.in_token_limit
    token, rest = size * merge, size - 1
    least_m, least_n = token * (m - 1) + 1, token * (n - 1) + 1
    slack = 2 * size * rest + rest**2
    low, high = least_m**2 / (limit * size**2), limit * size**2 / least_n**2
    # low * b - slack / P^2 <= a <= high * b + high * slack / P^2, and low > high
    last_b = int(slack / size**2 * (1 + high) / (low - high)) + 1
    for b in range(merge * (n - 1), last_b + 1):
        first_a = max(merge * (m - 1), int(low * b - slack / size**2))
        last_a = int(high * (b + slack / size**2)) + 1
        for a in range(first_a, last_a + 1):
            height, width = processor._scaled(size * b + rest, size * a + rest)
            if height >= least_n and width >= least_m:
                return True
    return False
