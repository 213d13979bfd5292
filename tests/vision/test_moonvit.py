"""MoonViT against golden data and the tower written out; batches against single pictures."""

import pytest
import torch
from moonvit_reference import CONFIG, ours, plans, published, reference, written_out
from torch import nn

from vitrail.ops.vision.naive import normalise, positions
from vitrail.vision.moonvit import MoonVit


@pytest.fixture(scope="module")
def tower() -> MoonVit:
    return ours()[0]


def pixels(grids, seed=0):
    count = sum(h * w for h, w in grids)
    return torch.randn(count, 3 * 14 * 14, generator=torch.Generator().manual_seed(seed))


def test_a20_golden_tower_batched_and_alone(tower):
    golden = reference()
    grids = [(h, w) for h, w in golden["image_grid_hws"].tolist()]
    assert (CONFIG.pos_height, CONFIG.pos_width) in grids
    patches, want = golden["pixel_values"].flatten(1), golden["vit_last"]
    table = plans(tower, 256)
    got = tower(patches, grids, table)
    assert (got - want).abs().max() <= 1e-5
    sizes = [h * w for h, w in grids]
    for grid, mine, expected in zip(grids, patches.split(sizes), want.split(sizes), strict=True):
        assert (tower(mine, [grid], table) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("grid", [(2, 2), (4, 6), (38, 28), (64, 64)])
def test_a20_layer_by_layer(tower, grid):
    """Wrong table, rotation, activation or order would show in the layer that has it."""
    patches = pixels([grid], seed=sum(grid))
    seen = []
    hooks = [
        block.register_forward_hook(lambda _m, _args, out: seen.append(out.x + out.delta))
        for block in tower.encoder.blocks
    ]
    last = tower(patches, [grid], plans(tower, 4096))
    for hook in hooks:
        hook.remove()
    embedded, *blocks, final, _ = written_out(published(), patches.view(-1, 3, 14, 14), *grid)
    assert (
        tower.patch_embed(patches) + positions(tower.pos_embed, [grid]) - embedded
    ).abs().max() <= 1e-5
    for got, want in zip([*seen, last], [*blocks, final], strict=True):
        assert torch.cosine_similarity(got, want, dim=-1).min() >= 0.9999
        assert (got - want).abs().max() <= 2e-5


def test_batched_is_alone_for_mixed_sizes(tower):
    """A picture's states do not depend on its neighbours, their number or their order."""
    grids = [(2, 2), (6, 10), (16, 16), (2, 24), (6, 10)]
    table = plans(tower, 256)
    parts = [pixels([grid], seed) for seed, grid in enumerate(grids)]
    alone = [tower(part, [grid], table) for part, grid in zip(parts, grids, strict=True)]
    together = tower(torch.cat(parts), grids, table)
    assert (together - torch.cat(alone)).abs().max() <= 1e-5
    backwards = tower(torch.cat(parts[::-1]), grids[::-1], table)
    assert (backwards - torch.cat(alone[::-1])).abs().max() <= 1e-5
    assert (alone[1] - alone[4]).abs().max() > 0.1


def test_bytes_are_normalised_on_the_way_in(tower):
    raw = torch.arange(256, dtype=torch.uint8).repeat(10)[: 4 * 588].view(4, 588)
    scaled = (raw.double() / 255 - 0.5) / 0.5
    assert (normalise(raw, torch.float32).double() - scaled).abs().max() <= 1e-6
    assert torch.equal(normalise(scaled.float(), torch.float32), scaled.float())
    table = plans(tower, 4)
    from_floats = tower(scaled.float(), [(2, 2)], table)
    assert (tower(raw, [(2, 2)], table) - from_floats).abs().max() <= 1e-5


def test_bfloat16_tower_is_near_fp32(tower):
    grids = [(6, 10), (4, 4)]
    half, _ = ours(torch.bfloat16)
    want = tower(pixels(grids), grids, plans(tower, 64))
    got = half(pixels(grids), grids, plans(half, 64, dtype="bfloat16"))
    assert got.dtype == torch.bfloat16
    assert torch.cosine_similarity(got.float(), want, dim=-1).min() >= 0.999


def test_no_layer_asks_the_device_for_anything():
    """On the meta device there is nothing to read: any host-side look at a tensor would raise."""
    with torch.device("meta"):
        tower = MoonVit(CONFIG, torch.float32)
        patches = torch.empty((84, 588), dtype=torch.uint8)
    out = tower(patches, [(6, 10), (4, 6)], plans(tower, 64))
    assert out.shape == (84, CONFIG.hidden_size)


def test_norms_have_the_published_eps():
    """1e-5 everywhere, not the 1e-6 of one port."""
    tower, projector = ours()
    norms = [m for m in (*tower.modules(), *projector.modules()) if isinstance(m, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-5] * (2 * CONFIG.num_layers + 2)


def test_patches_and_grids_must_agree(tower):
    with pytest.raises(AssertionError, match="10 patches"):
        tower(torch.zeros(10, 588), [(2, 4)], plans(tower, 16))
