"""Resizing feature maps by area: fp32 whatever the model computes in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.models.driver import load_folder
from tests.nvila import GoldenNvila
from vitrail.models.interface import ImageShape
from vitrail.models.nvila.model import Nvila
from vitrail.vision.tiles import picture_map, resize_area

SHAPES = [((8, 8), (24, 32)), ((16, 16), (24, 8)), ((16, 16), (8, 40)), ((5, 7), (3, 11))]


def by_area(x_hwM: Tensor, size: tuple[int, int]) -> Tensor:
    """The mean over each cell's area, written out, with every sum and quotient in the dtype of
    `x_hwM`: what a device may do."""
    height, width = x_hwM.shape[:2]
    rows = []
    for i in range(size[0]):
        ys = range(i * height // size[0], -(-(i + 1) * height // size[0]))
        for j in range(size[1]):
            xs = range(j * width // size[1], -(-(j + 1) * width // size[1]))
            cells = [x_hwM[y, x] for y in ys for x in xs]
            total = cells[0]
            for cell in cells[1:]:
                total = total + cell
            rows.append(total / len(cells))
    return torch.stack(rows).unflatten(0, size)


class OwnDtype(TorchFunctionMode):
    """Within it torch resizes by area as `by_area` does: torch's own kernels on a CPU sum bf16 in
    fp32 inside, so that no value would tell which dtype they were given. `seen`: of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not F.interpolate:
            return func(*args, **(kwargs or {}))
        (image,), how = args, kwargs or {}
        assert how["mode"] == "area"
        self.seen.append(image.dtype)
        return by_area(image[0].permute(1, 2, 0), how["size"]).permute(2, 0, 1)[None]


def features(height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return (3 * torch.randn((height, width, 9), generator=generator) + 5).bfloat16()


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_the_area_resize_of_bf16_is_fp32_rounded_once(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    x = features(*before)
    want = by_area(x.double(), after).bfloat16()
    with OwnDtype() as torch_:
        got = resize_area(x, after)
    assert torch_.seen == [torch.float32]
    # where fp32 is near a tie, its last digit may choose the other side
    for each in (got, resize_area(x, after)):
        assert each.dtype == torch.bfloat16
        assert (each != want).float().mean() <= 0.001
    if after[0] % before[0] or after[1] % before[1]:
        assert (by_area(x, after) != want).float().mean() > 0.01, "bf16 would be seen"


def test_in_a_bf16_model_every_scale_is_resized_in_fp32() -> None:
    """The whole projection of 8B's pictures, with and without blocks."""
    golden = GoldenNvila("nvila_s2")
    _, model = load_folder(golden.folder, "bfloat16")
    assert isinstance(model, Nvila)
    assert golden.blocks == [(3, 4), None, (9, 1)]
    tiles = 17 + 1 + 14
    rows = features(tiles, 64).repeat(1, 1, 16).flatten(0, 1)
    shapes = [ImageShape(8, 8, block) for block in golden.blocks]
    with OwnDtype() as torch_:
        honest = model.project_images(rows, shapes)
    assert torch_.seen == [torch.float32] * 4, "two smaller scales of two pictures"
    assert honest.dtype == torch.bfloat16
    plain = model.project_images(rows, shapes)
    assert torch.cosine_similarity(plain.float(), honest.float(), dim=-1).min() >= 0.9999


def test_scales_keep_their_order_and_the_last_is_not_resized() -> None:
    """1 x 1 and 2 x 2 tiles of 2 x 2 patches to the (1, 3) of the last scale."""
    tile, block = 2, (1, 3)
    x = torch.arange(8 * 4 * 2, dtype=torch.float32).view(32, 2)
    got = picture_map(x, block, tile, (1, 2))
    assert got.shape == (2, 6, 6)
    last = x[20:].view(3, 2, 2, 2).transpose(0, 1).reshape(2, 6, 2)
    assert torch.equal(got[..., 4:], last)
    assert torch.equal(got[..., :2], by_area(x[:4].view(2, 2, 2), (2, 6)))
