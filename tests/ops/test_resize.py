"""Patches made on a device: Pillow's pixels bit for bit, by the definition and by the kernels."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.ops.resize import naive
from vitrail.ops.resize import triton as kernels
from vitrail.ops.resize.naive import Resample
from vitrail.ops.resize.taps import columns_first, taps
from vitrail.vision.preprocess import pad, patchify, resize

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
side = st.integers(1, 60)


def noise(height, width, seed=0):
    """Extremes are frequent: overshoot beyond 0 and 255 must be clamped after each pass."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (height, width, 3), np.uint8)
    pixels[generator.random((height, width)) < 0.3] = 255
    pixels[generator.random((height, width)) < 0.3] = 0
    return pixels


def by_pillow(pixels, size, grid, patch):
    return patchify(pad(resize(pixels, *size), grid[0] * patch, grid[1] * patch), patch)


def on_device(make, pixels, size, grid, patch):
    down, across = (
        Resample(*map(torch.tensor, taps(old, new)))
        for old, new in zip(pixels.shape[:2], size, strict=True)
    )
    return make(torch.tensor(pixels), down, across, grid, patch).numpy()


@given(old=st.tuples(side, side), new=st.tuples(side, side), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_definition_is_pillows(old, new, seed):
    assume(columns_first(old, new))
    grid = tuple(-(-n // 5) for n in new)
    pixels = noise(*old, seed)
    got = on_device(naive.resized_patches, pixels, new, grid, 5)
    assert np.array_equal(got, by_pillow(pixels, new, grid, 5))


@pytest.mark.parametrize(
    ("size", "new"), [(1024, 897), (4032, 1034), (3024, 775), (1000, 3000), (511, 511), (3, 200)]
)
def test_long_sides_are_pillows(size, new):
    pixels = noise(3, size)
    want = np.asarray(Image.fromarray(pixels).resize((new, 3), Image.Resampling.BICUBIC))
    got = on_device(naive.resized_patches, pixels, (3, new), (3, new), 1)
    assert np.array_equal(got.reshape(3, new, 3), want)


@interpreted
@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        ((37, 50), (20, 31), 1),
        ((9, 7), (23, 30), 0),
        ((31, 31), (31, 31), 0),
        ((1, 40), (1, 13), 2),
    ],
)
def test_kernels_are_the_definition(old, new, more):
    """Also with whole patches of padding."""
    grid = tuple(-(-n // 14) + more for n in new)
    pixels = noise(*old)
    want = on_device(naive.resized_patches, pixels, new, grid, 14)
    assert np.array_equal(want, by_pillow(pixels, new, grid, 14))
    assert np.array_equal(on_device(kernels.resized_patches, pixels, new, grid, 14), want)


def test_a_picture_larger_than_its_grid_is_refused():
    with pytest.raises(AssertionError, match="in 5 x 10"):
        on_device(naive.resized_patches, noise(8, 8), (8, 8), (1, 2), 5)
