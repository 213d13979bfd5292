"""Upright pixels -> patches: the mechanism that every tower's processor is made of.

Owns the shapes (`ImageGrid`, `PatchedImage`), the contract of a model's processor
(`ImageProcessor`) and the steps resize, pad, patchify, normalise. Patches stay uint8 until they are
on the device, where the tower normalises them; `normalise` is the definition. Knows no model's
sizes, and no files."""

import struct
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from blake3 import blake3
from jaxtyping import Float32, UInt8
from PIL import Image

from vitrail.config.finding import Finding, Refused
from vitrail.vision.image import DecodedImage

Pixels = UInt8[np.ndarray, "height width 3"]
NewPixels = UInt8[np.ndarray, "new_height new_width 3"]
Patches = UInt8[np.ndarray, "patches features"] | Float32[np.ndarray, "patches features"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """What one picture becomes. `height` x `width` in patches, padding included; `num_tokens` in
    the prompt; `resized_height` x `resized_width` the picture's pixels inside, before padding."""

    height: int
    width: int
    num_tokens: int
    resized_height: int
    resized_width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """Per channel, on samples scaled to 0..1: (x - mean) / std."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedImage:
    """`patches` [grid.height * grid.width, C*P*P]: raw uint8, or float32 already normalised by the
    caller. `digest`: 32 bytes that identify the content."""

    patches: Patches
    grid: ImageGrid
    digest: bytes


@runtime_checkable
class ImageProcessor(Protocol):
    """How one checkpoint turns pictures into patches and counts their tokens."""

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
        """Patches of the largest attention sequence that `process` can make, padding included."""
        ...

    def grid(self, height: int, width: int) -> ImageGrid | Finding:
        """The one truth from an upright picture's pixels to its grid and token count; a `Finding`
        where the checkpoint cannot take that size."""
        ...

    def process(self, image: DecodedImage) -> PatchedImage:
        """`grid`'s patches of `image`. Raises `Refused` with `grid`'s finding."""
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


def normalise(
    patches: UInt8[np.ndarray, "patches features"], how: Normalisation
) -> Float32[np.ndarray, "patches features"]:
    """(x / 255 - mean) / std in float32, channels first in each row: what a tower does to uint8."""
    mean, std = (np.array(v, np.float32)[None, :, None] for v in (how.mean, how.std))
    samples = patches.reshape(len(patches), 3, -1).astype(np.float32) / np.float32(255)
    return ((samples - mean) / std).reshape(patches.shape)


def from_patches(
    patches: np.ndarray, height: int, width: int, *, patch_size: int, merge: int, where: str
) -> PatchedImage:
    """A picture that the caller preprocessed: `height` * `width` rows of uint8 samples or
    normalised floats, [N, 3*P*P] or [N, 3, P, P]; `merge` patches a side make one token. Raises
    `Refused` for other types or shapes, a grid that is not whole tokens, and floats that are not
    finite."""

    def refuse(saw: str, rule: str) -> Refused:
        change = "pass what the checkpoint's processor made, with its grid"
        return Refused(Finding(where=where, saw=saw, rule=rule, change=change))

    features = 3 * patch_size * patch_size
    shapes = ((height * width, features), (height * width, 3, patch_size, patch_size))
    if min(height, width) < 1 or height % merge or width % merge:
        raise refuse(f"a grid of {height} x {width}", f"sides are positive multiples of {merge}")
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
    digest = blake3(
        b"vitrail patches" + struct.pack("<cQQ", rows.dtype.char.encode(), height, width)
    )
    digest.update(rows.tobytes())
    grid = ImageGrid(
        height=height,
        width=width,
        num_tokens=height * width // merge**2,
        resized_height=height * patch_size,
        resized_width=width * patch_size,
    )
    return PatchedImage(patches=rows, grid=grid, digest=digest.digest())
