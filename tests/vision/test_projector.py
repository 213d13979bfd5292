"""The projector against golden data; the order of merged patches."""

import pytest
import torch
from moonvit_reference import CONFIG, TEXT_HIDDEN, ours, plans, published, reference, written_out

from vitrail.vision.projector import merge_patches


def test_a20_golden_features_batched_and_alone():
    golden = reference()
    grids = [(h, w) for h, w in golden["image_grid_hws"].tolist()]
    tower, projector = ours()
    table = plans(tower, 256)
    patches, want = golden["pixel_values"].flatten(1), golden["image_features"]
    features = projector(tower(patches, grids, table), grids)
    assert features.shape == (99, TEXT_HIDDEN)
    assert (features - want).abs().max() <= 1e-5
    sizes = [h * w for h, w in grids]
    tokens = [size // 4 for size in sizes]
    for grid, mine, expected in zip(grids, patches.split(sizes), want.split(tokens), strict=True):
        alone = projector(tower(mine, [grid], table), [grid])
        assert (alone - expected).abs().max() <= 1e-5


def test_a20_features_of_a_wide_and_a_tall_picture():
    tower, projector = ours()
    for grid in ((2, 14), (14, 2)):
        shape = (grid[0] * grid[1], 588)
        patches = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        *_, want = written_out(published(), patches.view(-1, 3, 14, 14), *grid)
        got = projector(tower(patches, [grid], plans(tower, 28)), [grid])
        assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_blocks_are_row_major_and_so_are_patches_in_them(merge):
    """Every patch carries its picture, row and column."""
    grids = [(2 * merge, 3 * merge), (merge, merge), (merge, 4 * merge)]
    patches = torch.tensor(
        [(i, r, c) for i, (h, w) in enumerate(grids) for r in range(h) for c in range(w)]
    ).float()
    merged = merge_patches(patches, grids, merge).unflatten(1, (merge, merge, 3))
    expected = [
        (i, r * merge, c * merge)
        for i, (h, w) in enumerate(grids)
        for r in range(h // merge)
        for c in range(w // merge)
    ]
    assert merged[:, 0, 0].tolist() == [list(map(float, e)) for e in expected]
    offsets = merged - merged[:, :1, :1]
    for kh in range(merge):
        for kw in range(merge):
            assert (offsets[:, kh, kw] == torch.tensor([0.0, kh, kw])).all()


def test_a_grid_that_does_not_divide_is_our_own_fault():
    with pytest.raises(AssertionError, match="3 x 2"):
        merge_patches(torch.zeros(6, CONFIG.hidden_size), [(3, 2)], 2)


def test_d27_no_pictures_no_tokens():
    _, projector = ours()
    assert projector(torch.zeros(0, CONFIG.hidden_size), []).shape == (0, TEXT_HIDDEN)
