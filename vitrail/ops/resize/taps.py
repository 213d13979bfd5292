"""Which samples make a resized one, and by how much: Pillow's bicubic for 8 bits a channel, which
widens its kernel when it shrinks, in fixed point. Plain arithmetic on the host, no torch."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

# A weight of one. Sums of 8-bit samples stay within 32 bits.
FRACTION_BITS = 22
SUPPORT = 2.0  # samples to either side where nothing shrinks
A = -0.5


class Taps(NamedTuple):
    """Resized sample i is the sum over j of weights[i, j] * sample[starts[i] + j], plus a half,
    shifted right by FRACTION_BITS and clamped to 0..255. Weights beyond the picture are zero."""

    starts: Int32[np.ndarray, "new"]
    weights: Int32[np.ndarray, "new width"]


def columns_first(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether every Pillow resizes (height, width) `old` to `new` by columns, then rows. Since 13
    it takes rows first where that leaves it less to do, and rounds in between."""
    fewer_rows, fewer_columns = old[0] - new[0], old[1] - new[1]
    return fewer_rows <= 0 or fewer_rows <= 2 * fewer_columns


@lru_cache(maxsize=256)
def taps(size: int, new_size: int) -> Taps:
    """From `size` samples to `new_size`, in Pillow's order of operations in double precision."""
    assert min(size, new_size) >= 1, (size, new_size)
    scale = size / new_size
    stretch = max(scale, 1.0)
    support = SUPPORT * stretch
    width = math.ceil(support) * 2 + 1
    centres = (np.arange(new_size) + 0.5) * scale
    starts = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    counts = np.minimum((centres + support + 0.5).astype(np.int64), size) - starts
    weights = np.zeros((new_size, width))
    total = np.zeros(new_size)
    for j in range(width):
        kernel = _bicubic((j + starts - centres + 0.5) * (1.0 / stretch))
        weights[:, j] = np.where(j < counts, kernel, 0.0)
        total += weights[:, j]
    weights = np.where(total[:, None] != 0, weights / np.where(total == 0, 1, total)[:, None], 0)
    scaled = weights * (1 << FRACTION_BITS)
    rounded = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    made = Taps(starts.astype(np.int32), rounded)
    for array in made:
        array.flags.writeable = False
    return made


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = ((A + 2.0) * x - (A + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * A
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
