"""A model's picture path run on the meta device: nothing is computed, every shape is. What would
fail for pictures of unequal sizes, what takes more a patch the more patches there are, and which
weights nothing reads, is found without a GPU and without weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.attention.plan import PlanTable
from vitrail.check.checks import is_tower
from vitrail.check.live_bytes import LiveBytes, storage_key
from vitrail.check.steps import HollowTable, unequal
from vitrail.config.finding import Finding
from vitrail.config.model import CHANNELS, PatchRules, VisionConfig
from vitrail.models.interface import ImageModel, ImageShape
from vitrail.weights.problems import labels

# What a step of several pictures may take more a patch than one of a single picture.
LINEAR = 1.05


class Shapes(LiveBytes):
    """Counts on the meta device, where torch would spell a bicubic resize out in a hundred steps
    that nobody sees."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        bicubic = torch.ops.aten.upsample_bicubic2d
        if func in (bicubic.default, bicubic.vec):
            func = _resized
        return super().__torch_dispatch__(func, types, args, kwargs)


def _resized(image: Tensor, size: Sequence[int], *_: object) -> Tensor:
    return image.new_empty((*image.shape[:2], *size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What a step of pictures took: bytes alive at its peak, its patches, and the storages read."""

    peak: int
    patches: int
    read: frozenset[int]


def trace_step(
    model: ImageModel, plans: PlanTable, vision: VisionConfig, images: Sequence[ImageShape]
) -> Traced:
    """Encode and project whole pictures in one step. Raises what the model raises, and `ValueError`
    where it makes another number of tokens than the pictures have."""
    rules = vision.rules
    counts = [rules.num_sequences(i.block) for i in images]
    grids = [(i.height, i.width) for i, n in zip(images, counts, strict=True) for _ in range(n)]
    num_patches = sum(height * width for height, width in grids)
    size = (num_patches, CHANNELS * vision.patch_size**2)
    hollow = HollowTable(plans)
    with torch.inference_mode(), torch.device("meta"), Shapes() as live:
        patches = torch.empty(size, dtype=torch.uint8)
        features = model.encode_patches(patches, grids, hollow)
        rows = model.project_images(features, images)
    wanted = sum(rules.num_tokens(i.height, i.width, i.block) for i in images)
    if rows.shape[0] != wanted:
        raise ValueError(f"the tower made {rows.shape[0]} tokens for slots of {wanted}")
    return Traced(peak=live.peak, patches=num_patches, read=frozenset(live.read))


def image_path_findings(
    model: ImageModel, plans: PlanTable, vision: VisionConfig
) -> tuple[list[Finding], frozenset[int]]:
    """Why pictures cannot be encoded: those of unequal sizes together, or already one alone. With
    the storages that were read."""
    images = unequal(vision.rules)
    try:
        return [], trace_step(model, plans, vision, images).read
    except Exception as error:  # noqa: BLE001  whatever a model raises is the finding
        together = _fails("pictures of unequal sizes in one step", images, error, "unequal_sizes")
    for image in images:
        try:
            trace_step(model, plans, vision, [image])
        except Exception as error:  # noqa: BLE001
            return [_fails("one picture", [image], error, "image_path")], frozenset()
    return [together], frozenset()


def _fails(what: str, images: Sequence[ImageShape], error: Exception, code: str) -> Finding:
    shapes = ", ".join(_spelled(image) for image in images)
    return Finding(
        where="vision tower",
        saw=f"{what} ({shapes}): {type(error).__name__}: {' '.join(str(error).split())[:300]}",
        rule="pictures of any sizes are encoded alone and together: packed and concatenated, never "
        "stacked",
        change="pack the features (tokens, channels), with each picture's shape beside them",
        code=code,
    )


def _spelled(image: ImageShape) -> str:
    blocks = "" if image.block is None else f" with {image.block[0]} x {image.block[1]} tiles"
    return f"{image.height} x {image.width} patches{blocks}"


def full_steps(rules: PatchRules, budget: int) -> list[list[ImageShape]]:
    """A step of one picture, then others that fill the budget: two large pictures of half of it
    each, and one of all of it; or as many tiles as there is room for."""
    if rules.tile is not None:
        one = ImageShape(rules.tile, rules.tile)
        return [[one], [one] * max(2, budget // rules.tile**2)]
    columns = max(1, budget // 2 // rules.merge**2) * rules.merge
    half = ImageShape(rules.merge, columns)
    return [[half], [half] * 2, [ImageShape(rules.merge, 2 * columns)]]


def growth_findings(
    model: ImageModel, plans: PlanTable, vision: VisionConfig, budget: int
) -> list[Finding]:
    """Whether memory is linear in patches, whatever pictures they are of."""
    first, *others = (trace_step(model, plans, vision, s) for s in full_steps(vision.rules, budget))
    alone = first.peak / first.patches
    worst = max(others, key=lambda step: step.peak / step.patches)
    together = worst.peak / worst.patches
    if together <= LINEAR * alone:
        return []
    return [
        Finding(
            where="vision tower",
            saw=f"{first.peak} bytes for {first.patches} patches, {worst.peak} for "
            f"{worst.patches}: {alone:.0f} and {together:.0f} bytes a patch",
            rule="memory is linear in patches, however many pictures they are of: no mask or "
            "scores over all of them",
            change="attend through VisionAttention, whose sequences are packed",
            code="encoder_memory",
        )
    ]


def unread_findings(module: nn.Module, read: frozenset[int]) -> list[Finding]:
    """Parameters of the picture path that no operation was given: loaded and never used."""
    towers = {
        name: p
        for name, p in module.named_parameters()
        if is_tower(name) and storage_key(p) not in read
    }
    if not towers:
        return []
    return [
        Finding(
            where=labels(list(towers)) if len(set(map(_stem, towers))) == 1 else ", ".join(towers),
            saw=f"{len(towers)} parameters that encoding a picture never reads",
            rule="every weight that is loaded is used",
            change="use it in the module, or list it as ignored in the map",
            code="unread_weight",
        )
    ]


def _stem(name: str) -> str:
    return "".join(c for c in name if not c.isdigit())
