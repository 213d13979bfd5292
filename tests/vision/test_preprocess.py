"""The mechanism of every processor: which pixel lands where, and what patches a caller may
bring."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config.finding import Refused
from vitrail.config.model import PatchRules
from vitrail.vision.preprocess import from_patches, pad, patchify, resize

EXAMPLES = settings(max_examples=50, derandomize=True, deadline=None)
SIDES = st.integers(1, 7)
RULES = PatchRules(patch_size=1, merge=2)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@EXAMPLES
@given(SIDES, SIDES, st.sampled_from([1, 3, 14]))
def test_patchify_is_row_major_and_channels_first(rows: int, columns: int, size: int) -> None:
    pixels = noise(rows * size, columns * size)
    patches = patchify(pixels, size)
    assert patches.shape == (rows * columns, 3 * size * size)
    for y, x, c in ((0, 0, 0), (rows * size - 1, 0, 1), (size - 1, columns * size - 1, 2)):
        patch = patches[y // size * columns + x // size]
        assert patch[c * size * size + y % size * size + x % size] == pixels[y, x, c]
    back = patches.reshape(rows, columns, 3, size, size).transpose(0, 3, 1, 4, 2)
    assert np.array_equal(back.reshape(pixels.shape), pixels)


@EXAMPLES
@given(SIDES, SIDES, SIDES, SIDES)
def test_pad_is_black_below_and_right(height: int, width: int, below: int, right: int) -> None:
    pixels = noise(height, width)
    padded = pad(pixels, height + below, width + right)
    assert np.array_equal(padded[:height, :width], pixels)
    assert padded.sum(dtype=int) == pixels.sum(dtype=int)
    assert padded.shape == (height + below, width + right, 3)


def test_resize_keeps_its_axes_and_the_same_size_untouched() -> None:
    pixels = noise(9, 31)
    assert resize(pixels, 9, 31) is pixels
    tall = np.zeros((40, 20, 3), np.uint8)
    tall[20:] = 255
    got = resize(tall, 10, 30)
    assert got.shape == (10, 30, 3)
    assert got[:3].max() == 0
    assert got[-3:].min() == 255


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.float16])
def test_patches_of_the_caller(dtype: type) -> None:
    """Flat or [N, 3, P, P]: the same content, which the type and the grid's shape are part of."""
    values = patchify(noise(4, 6), 1).astype(dtype)

    def bring(patches: np.ndarray, height: int, width: int) -> bytes:
        image = from_patches(patches, (height, width), None, RULES, "images[0]")
        kept = np.uint8 if dtype is np.uint8 else np.float32
        assert image.patches.dtype == kept
        assert np.array_equal(image.patches, values)
        assert (image.grid.height, image.grid.width) == (height, width)
        assert (image.grid.num_patches, image.grid.num_tokens) == (24, 6)
        return image.digest

    flat = bring(values, 4, 6)
    assert flat == bring(values.reshape(24, 3, 1, 1), 4, 6)
    assert flat != bring(values, 6, 4)
    assert (flat == from_patches_digest(values.astype(np.uint8))) == (dtype is np.uint8)


def from_patches_digest(patches: np.ndarray) -> bytes:
    return from_patches(patches, (4, 6), None, RULES, "images[0]").digest


@pytest.mark.parametrize(
    ("shape", "dtype", "grid", "saw"),
    [
        ((24, 3), np.uint8, (3, 8), "a grid of 3 x 8"),
        ((24, 3), np.uint8, (0, 8), "a grid of 0 x 8"),
        ((24, 3), np.uint8, (-4, -6), "a grid of -4 x -6"),
        ((23, 3), np.uint8, (4, 6), r"\[23, 3\] for a grid of 4 x 6"),
        ((24, 12), np.uint8, (4, 6), r"\[24, 12\]"),
        ((24, 3), np.uint16, (4, 6), "uint16"),
        ((24, 3), np.int64, (4, 6), "int64"),
        ((24, 3), np.complex64, (4, 6), "complex64"),
    ],
)
def test_patches_that_fit_no_grid_are_refused(
    shape: tuple[int, ...], dtype: type, grid: tuple[int, int], saw: str
) -> None:
    with pytest.raises(Refused, match=saw):
        from_patches(np.zeros(shape, dtype), grid, None, RULES, "images[0]")


def test_patches_that_are_not_finite_are_refused() -> None:
    patches = np.zeros((24, 3), np.float32)
    patches[3, 1], patches[20, 0] = np.nan, np.inf
    with pytest.raises(Refused, match="2 values that are not finite"):
        from_patches_digest(patches)
