"""Bytes that encoding takes at its worst, beside weights and finished pictures: what start-up
measures on a GPU (`engine/measure`), as arithmetic on the tower's shape."""

from vitrail.config.model import DType, VisionConfig


def encoder_peak(
    vision: VisionConfig, text_hidden: int, dtype: DType, patches: int, largest: int | None
) -> int:
    return 0
