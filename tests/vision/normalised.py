"""What a tower does to raw samples, in numpy."""

import numpy as np
from jaxtyping import Float32, UInt8

from vitrail.vision.preprocess import Normalisation


def normalise(
    patches: UInt8[np.ndarray, "patches features"], how: Normalisation
) -> Float32[np.ndarray, "patches features"]:
    """(x / 255 - mean) / std in float32, channels first in each row: what a tower does to uint8."""
    mean, std = (np.array(v, np.float32)[None, :, None] for v in (how.mean, how.std))
    samples = patches.reshape(len(patches), 3, -1).astype(np.float32) / np.float32(255)
    return ((samples - mean) / std).reshape(patches.shape)
