"""The golden NVILAs without the engine: features, logits, and what may be reordered and what may
not."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.driver import Driver, image_plans, load_folder
from tests.nvila import IMAGE, KINDS, GoldenNvila
from vitrail.models.interface import ImageShape
from vitrail.models.nvila.model import Nvila

pytestmark = pytest.mark.suite("parity", minutes=1, owner="models")

LIMIT = 1e-4


class Loaded:
    """A golden checkpoint in our model, and its tiles' features."""

    def __init__(self, kind: str):
        self.golden = GoldenNvila(kind)
        config, model = load_folder(self.golden.folder)
        assert isinstance(model, Nvila)
        self.config, self.model = config, model
        self.tiles = torch.from_numpy(self.golden.tiles)
        self.plans = image_plans(model, "float32", 64, 256)
        self.features = self.encode(self.tiles)
        self.want = torch.from_numpy(self.golden.features)

    def encode(self, tiles: Tensor) -> Tensor:
        """[tiles, 64, F] -> [tiles * 64, C]."""
        return self.model.encode_patches(tiles.flatten(0, 1), [(8, 8)] * len(tiles), self.plans)

    def project(self, features: Tensor, blocks: list[Any]) -> Tensor:
        return self.model.project_images(features, [ImageShape(8, 8, b) for b in blocks])

    def pictures(self) -> list[Tensor]:
        """Each picture's features."""
        counts = [64 * (1 if b is None else 5 + b[0] * b[1]) for b in self.golden.blocks]
        return list(self.features.split(counts))


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return Loaded(request.param)


@pytest.fixture(scope="module")
def s2() -> Loaded:
    return Loaded("nvila_s2")


def test_image_features(loaded: Loaded) -> None:
    got = loaded.project(loaded.features, loaded.golden.blocks)
    assert got.shape == loaded.want.shape
    assert (got - loaded.want).abs().max() <= LIMIT


def test_logits_and_greedy_from_the_golden_features(loaded: Loaded) -> None:
    ids = loaded.golden.ids
    run = Driver(loaded.model, "float32", 16, len(ids) + 16)
    sequence = run.add(ids, IMAGE, loaded.want)
    logits = run.step([(sequence, len(ids))])[0]
    assert (logits - torch.from_numpy(loaded.golden.logits)).abs().max() <= LIMIT
    assert run.greedy(sequence, logits[-1], 12) == loaded.golden.greedy


def test_our_features_are_no_further_from_float64_than_the_golden_ones(loaded: Loaded) -> None:
    """What is left between the two is rounding, and not a formula: every product and norm again in
    float64, with attention written out."""
    exact = Exact(loaded.model)
    truth = exact(loaded.tiles.double(), loaded.golden.blocks)
    ours = loaded.project(loaded.features, loaded.golden.blocks)
    off = (loaded.want - truth).abs().max()
    assert off <= 5e-5
    assert (ours - truth).abs().max() <= 1.5 * off


class Exact:
    """The tower in float64, a tile at a time; the projector is ours, in float64."""

    def __init__(self, model: Nvila):
        self.tower = model.tower
        self.projector = to_double(model.projector)

    def __call__(self, tiles: Tensor, blocks: list[Any]) -> Tensor:
        return self.projector(torch.cat([self._tile(tile) for tile in tiles]), blocks)

    def _tile(self, patches: Tensor) -> Tensor:
        x = self._linear(self.tower.patch_embed, patches) + self.tower.pos_embed.double()
        for block in self.tower.blocks:
            qkv = self._linear(block.attn.qkv, self._norm(block.norm1, x))
            q, k, v = qkv.view(64, 3, 2, 72).permute(1, 2, 0, 3)
            out = (q @ k.transpose(1, 2) * 72**-0.5).softmax(-1) @ v
            x = x + self._linear(block.attn.out, out.transpose(0, 1).flatten(1))
            up = self._linear(block.mlp.up, self._norm(block.norm2, x))
            x = x + self._linear(block.mlp.down, nn.functional.gelu(up, approximate="tanh"))
        return x

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, layer.weight.double(), layer.bias.double())

    def _norm(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        shape = norm.normalized_shape
        return nn.functional.layer_norm(
            x, shape, norm.weight.double(), norm.bias.double(), norm.eps
        )


def to_double(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module).double()


def test_the_last_layer_is_not_there_and_not_read(loaded: Loaded) -> None:
    """Its weights in the checkpoint are ignored by rows of the map, by name."""
    from tests.models.driver import resolve_folder
    from vitrail.weights.plan import LoadPlan

    plan = resolve_folder(loaded.model, loaded.config, loaded.golden.folder)
    assert isinstance(plan, LoadPlan)
    assert len(loaded.model.tower.blocks) == 2
    prefix = "vision_tower.vision_model."
    assert len(plan.ignored) == 18
    assert all(
        name.startswith((f"{prefix}encoder.layers.2.", f"{prefix}post_layernorm."))
        for name in plan.ignored
    )
    assert not any("layers.2." in r.tensor for r in plan.reads if "vision" in r.tensor)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a19_features_of_fewer_pictures_name_both_counts(s2: Loaded, lost: int) -> None:
    """One picture's features removed from the packed order."""
    left = [p for i, p in enumerate(s2.pictures()) if i != lost]
    tiles = sum(map(len, left)) // 64
    with pytest.raises(ValueError, match=f"features of {tiles} tiles for 3 pictures of 32 tiles"):
        s2.project(torch.cat(left), s2.golden.blocks)


# 12 pictures of as many different numbers of tiles.
TWELVE: list[tuple[int, int] | None] = [None, *((1, n) for n in range(1, 8)), (3, 3), (2, 5)]
TWELVE += [(11, 1), (4, 3)]


class Pictures(list[tuple[Any, Tensor, Tensor]]):
    """(block, tiles, tokens when it is alone) of each."""

    def __repr__(self) -> str:
        return f"{len(self)} pictures"


@pytest.fixture(scope="module")
def twelve(s2: Loaded) -> Pictures:
    made = Pictures()
    for number, block in enumerate(TWELVE):
        count = 1 if block is None else 5 + block[0] * block[1]
        generator = torch.Generator().manual_seed(number)
        tiles = torch.randn((count, 64, 588), generator=generator)
        made.append((block, tiles, s2.project(s2.encode(tiles), [block])))
    assert len({len(tiles) for _, tiles, _ in made}) == 12
    return made


@pytest.mark.nightly
@settings(max_examples=10, derandomize=True, deadline=None)
@given(order=st.permutations(range(12)), cut=st.integers(1, 11))
def test_a_batch_of_twelve_tile_counts_equals_each_alone_in_every_order(
    s2: Loaded, twelve: Pictures, order: list[int], cut: int
) -> None:
    """Pictures with and without blocks, of 1 to 17 tiles, in one pass over the tower or two."""
    chosen = [twelve[i] for i in order]
    tiles = torch.cat([tiles for _, tiles, _ in chosen])
    at = len(tiles) * cut // 12
    features = torch.cat([s2.encode(tiles[:at]), s2.encode(tiles[at:])])
    got = s2.project(features, [block for block, _, _ in chosen])
    want = torch.cat([alone for _, _, alone in chosen])
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4


def test_blocks_matter_and_travel_with_their_picture(s2: Loaded) -> None:
    """The same tiles under another block give other tokens, and a swap of two blocks of one size
    is seen."""
    part = s2.pictures()[0]
    tokens = [s2.project(part, [block]) for block in ((3, 4), (4, 3), (12, 1))]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (tokens[i] - tokens[j]).abs().max() > 0.05
    both = s2.project(torch.cat((part, part)), [(3, 4), (4, 3)])
    swapped = s2.project(torch.cat((part, part)), [(4, 3), (3, 4)])
    assert (both - swapped).abs().max() > 0.05


def test_bf16_is_near_fp32(loaded: Loaded) -> None:
    _, half = load_folder(loaded.golden.folder, "bfloat16")
    assert isinstance(half, Nvila)
    tiles = loaded.tiles
    rows = half.encode_patches(
        tiles.flatten(0, 1), [(8, 8)] * len(tiles), image_plans(half, "bfloat16", 64, 64)
    )
    shapes = [ImageShape(8, 8, b) for b in loaded.golden.blocks]
    got = half.project_images(rows, shapes).float()
    assert torch.cosine_similarity(got, loaded.want, dim=-1).min() >= 0.995


def test_uint8_pixels_are_normalised_on_the_way_in(s2: Loaded) -> None:
    raw = np.random.default_rng(random.Random(3).randrange(9)).integers(0, 256, (2, 64, 588))
    scaled = torch.from_numpy((raw / 255 - 0.5) / 0.5).float()
    whole = s2.encode(torch.from_numpy(raw.astype(np.uint8)))
    assert (whole - s2.encode(scaled)).abs().max() <= 1e-4
