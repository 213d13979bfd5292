"""Upright pixels -> patches: the mechanism that every tower's processor is made of.

Owns the shapes (`ImageGrid`, `PatchedImage`), the contract of a model's processor
(`ImageProcessor`) and the steps resize, pad, patchify, normalise. Patches stay uint8 until they are
on the device, where the tower normalises them; `normalise` is the definition. Knows no model's
sizes, and no files."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from blake3 import blake3
from jaxtyping import Float32, UInt8
from PIL import Image

from vitrail.config.finding import Finding, Refused
from vitrail.config.model import PatchRules
from vitrail.vision.image import DecodedImage

Pixels = UInt8[np.ndarray, "height width 3"]
NewPixels = UInt8[np.ndarray, "new_height new_width 3"]
Patches = UInt8[np.ndarray, "patches features"] | Float32[np.ndarray, "patches features"]
# Mean and deviation of each channel that towers normalise by (`ops.vision.naive.normalise`).
HALVES = [0.5, 0.5, 0.5]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """What one picture, or one part of it, becomes: `sequences` attention sequences of `height` x
    `width` patches each, padding included, and `num_tokens` in a row in the prompt.
    `resized_height` x `resized_width` are the picture's pixels inside, before padding. `block`:
    (rows, columns) of tiles in the last of several scales."""

    height: int
    width: int
    num_tokens: int
    resized_height: int
    resized_width: int
    sequences: int = 1
    block: tuple[int, int] | None = None

    @property
    def sequence_patches(self) -> int:
        return self.height * self.width

    @property
    def num_patches(self) -> int:
        return self.sequences * self.sequence_patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Separators:
    """Text that a picture brings into the prompt. `end`: after the tokens of each of its parts,
    tokenised by itself; `text`: after that, as if the template had written it."""

    end: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedImage:
    """`patches` [grid.num_patches, C*P*P]: raw uint8, or float32 already normalised by the caller.
    Or the upright picture itself, of which the encoder makes the same patches: uint8 [height,
    width, 3]. `digest`: 32 bytes that identify the content."""

    patches: Patches | Pixels
    grid: ImageGrid
    digest: bytes

    @property
    def resized(self) -> tuple[int, int] | None:
        """(rows, columns) to which the encoder resizes; None where there are patches already."""
        grid = self.grid
        return (grid.resized_height, grid.resized_width) if self.patches.ndim == 3 else None


@runtime_checkable
class ImageProcessor(Protocol):
    """How one checkpoint turns pictures into patches and counts their tokens. A picture is one
    part or several, each with a row of tokens of its own. `alone`: it is the only picture of its
    request, frames of videos not counted and themselves never alone."""

    @property
    def image_token_id(self) -> int:
        """The id that marks image positions in a prompt."""
        ...

    @property
    def identity(self) -> bytes:
        """32 bytes over every parameter that changes the patches: part of an image's prefix key."""
        ...

    @property
    def max_patches(self) -> int:
        """Patches of the largest picture that `parts` can make, padding included."""
        ...

    def grids(self, height: int, width: int, alone: bool) -> tuple[ImageGrid, ...] | Finding:
        """The one truth from an upright picture's pixels to its parts' grids and token counts; a
        `Finding` where the checkpoint cannot take that size."""
        ...

    def parts(self, image: DecodedImage, alone: bool) -> tuple[PatchedImage, ...]:
        """The patches of `grids`. Raises `Refused` with its finding."""
        ...

    def unresized(self, image: DecodedImage, alone: bool) -> PatchedImage | None:
        """What `parts` gives, left to an encoder that resizes; None where it is several parts or
        sequences, or where the picture itself is too large to send in their place."""
        ...

    def separators(self, alone: bool) -> Separators:
        """The text around a picture's parts."""
        ...


def resize(pixels: Pixels, height: int, width: int) -> NewPixels:
    """PIL's bicubic (antialiased when shrinking), as the published processors use it."""
    if pixels.shape[:2] == (height, width):
        return pixels
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized)


def pad(pixels: Pixels, height: int, width: int) -> NewPixels:
    """Black below and to the right, up to `height` x `width`."""
    if pixels.shape[:2] == (height, width):
        return pixels
    padded = np.zeros((height, width, 3), np.uint8)
    padded[: pixels.shape[0], : pixels.shape[1]] = pixels
    return padded


def patchify(pixels: Pixels, patch_size: int) -> UInt8[np.ndarray, "patches features"]:
    """Patches in row-major order, each flattened channels first (C, P, P). The sides are multiples
    of `patch_size`."""
    size, (height, width, _) = patch_size, pixels.shape
    assert height % size == width % size == 0, f"{height} x {width} is not whole patches"
    cut = pixels.reshape(height // size, size, width // size, size, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(-1, 3 * size * size)


def from_patches(
    patches: np.ndarray,
    grid: tuple[int, int],
    block: tuple[int, int] | None,
    rules: PatchRules,
    where: str,
) -> PatchedImage:
    """A picture that the caller preprocessed, as `rules` take it: its sequences' rows in order, of
    uint8 samples or normalised floats, [N, 3*P*P] or [N, 3, P, P]; `grid`: (height, width) of a
    sequence in patches; `block`: (rows, columns) of tiles. Raises `Refused` for other types or
    shapes, a grid that is not whole tokens or not the tile, and floats that are not finite."""

    def refuse(saw: str, rule: str) -> Refused:
        change = "pass what the checkpoint's processor made, with its grid"
        return Refused.because(where=where, saw=saw, rule=rule, change=change)

    height, width = grid
    broken = _grid_rule(height, width, block, rules)
    if broken is not None:
        blocks = "" if block is None else f" with a block of {block[0]} x {block[1]}"
        raise refuse(f"a grid of {height} x {width}{blocks}", broken)
    size, sequences = rules.patch_size, rules.num_sequences(block)
    count = sequences * height * width
    shapes = ((count, 3 * size * size), (count, 3, size, size))
    if patches.shape not in shapes or patches.dtype.kind not in "uf":
        raise refuse(
            f"patches of {patches.dtype} {list(patches.shape)} for a grid of {height} x {width}",
            f"uint8 or float patches of shape {list(shapes[0])} or {list(shapes[1])}",
        )
    if patches.dtype.kind == "u" and patches.dtype != np.uint8:
        raise refuse(f"patches of {patches.dtype}", "raw samples are uint8")
    kept = np.uint8 if patches.dtype == np.uint8 else np.float32
    rows = np.ascontiguousarray(patches.reshape(shapes[0]), kept)
    if not np.isfinite(rows).all():
        bad = int((~np.isfinite(rows)).sum())
        raise refuse(f"{bad} values that are not finite", "every value is finite")
    made = ImageGrid(
        height=height,
        width=width,
        num_tokens=rules.num_tokens(height, width, block),
        resized_height=height * size * (block[0] if block else 1),
        resized_width=width * size * (block[1] if block else 1),
        sequences=sequences,
        block=block,
    )
    return PatchedImage(patches=rows, grid=made, digest=patches_digest(rows, made))


def patches_digest(patches: Patches, grid: ImageGrid) -> bytes:
    """32 bytes over patches, their type, and how they make a picture."""
    numbers = (grid.height, grid.width, *(grid.block or (0, 0)))
    digest = blake3(b"vitrail patches" + struct.pack("<c4Q", patches.dtype.char.encode(), *numbers))
    digest.update(np.ascontiguousarray(patches).view(np.uint8).data)
    return digest.digest()


def even_frames(count: int, wanted: int) -> Sequence[int]:
    """Indices of `wanted` frames spread evenly over `count`, the first and the last among them;
    a short video's frames come more than once. Halves are rounded to even, as published."""
    return np.round(np.linspace(0, count - 1, wanted)).astype(int).tolist()


def _grid_rule(
    height: int, width: int, block: tuple[int, int] | None, rules: PatchRules
) -> str | None:
    """The rule that a grid breaks, if any."""
    if rules.tile is None:
        if block is not None:
            return "this tower takes no blocks"
        whole = min(height, width) >= 1 and height % rules.merge == width % rules.merge == 0
        return None if whole else f"sides are positive multiples of {rules.merge}"
    if (height, width) != (rules.tile, rules.tile):
        return f"a tile is {rules.tile} x {rules.tile} patches"
    if block is not None and (not rules.scales or min(block) < 1):
        return "a block is at least 1 x 1 tiles" if rules.scales else "this tower takes no blocks"
    return None
