"""NVILA's image rules: the published choices of tiles, their pixels, and the strict reading."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.config.finding import Finding, Refused
from vitrail.models.nvila.processor import MIN_TILES, NvilaProcessor, choose_tiles
from vitrail.vision.image import DecodedImage, ImageLimits, from_array
from vitrail.vision.preprocess import ImageGrid

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=64_000_000)
GOLDEN = Path(__file__).parents[2] / "golden" / "nvila_lite" / "reference.npz"
SIGLIP = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "do_convert_rgb": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "SiglipProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 448, "width": 448},
}


def processor(kind: Any) -> NvilaProcessor:
    return NvilaProcessor(kind=kind, tile_pixels=448, patch_size=14, image_token_id=151649)


S2, LITE = processor("nvila"), processor("nvila_lite")


def picture(width: int, height: int) -> DecodedImage:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return from_array(noise, LIMITS, "image")


def grids(made: tuple[ImageGrid, ...] | Finding) -> tuple[ImageGrid, ...]:
    assert not isinstance(made, Finding)
    return made


@pytest.mark.parametrize(
    ("width", "height", "block", "tiles", "tokens", "lite"),
    [
        (640, 480, (3, 4), 17, 3072, 13),
        (1920, 1080, (3, 4), 17, 3072, 9),
        (300, 1200, (6, 2), 17, 3072, 5),
        (448, 448, (3, 3), 14, 2304, 1),
        (37, 91, (5, 2), 15, 2560, 11),
    ],
)
def test_the_published_choices(
    width: int, height: int, block: tuple[int, int], tiles: int, tokens: int, lite: int
) -> None:
    """Of both authors' code, run on these sizes."""
    (grid,) = grids(S2.grids(height, width, True))
    assert (grid.block, grid.sequences, grid.num_tokens) == (block, tiles, tokens)
    parts = grids(LITE.grids(height, width, True))
    assert len(parts) == lite == np.load(GOLDEN)[f"tiles_{width}x{height}"][0]
    assert {(p.sequences, p.num_tokens) for p in parts} == {(1, 121)}
    made = LITE.parts(picture(width, height), True)
    assert [p.grid for p in made] == list(parts)


def test_every_tile_has_the_golden_pixels() -> None:
    """The golden data keeps the sum of each tile's samples, of pictures drawn one after another
    from one generator: the authors' choice, resize, order and crop, and the whole as the last."""
    rng = np.random.default_rng(0)
    for width, height in ((640, 480), (1920, 1080), (300, 1200), (448, 448), (37, 91)):
        noise = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        image = from_array(noise, LIMITS, "image")
        count, *sums = np.load(GOLDEN)[f"tiles_{width}x{height}"].tolist()
        parts = LITE.parts(image, True)
        assert [int(part.patches.sum(dtype=int)) for part in parts] == sums
        assert len(sums) == count
        # 8B's first tile is the same whole; where Lite has its block, its last ones are the same
        (eight,) = S2.parts(image, True)
        tiles = eight.patches.reshape(eight.grid.sequences, -1).sum(1, dtype=int).tolist()
        assert tiles[0] == sums[-1]
        if count - 1 >= MIN_TILES:
            assert tiles[5:] == sums[:-1]


def test_several_pictures_and_frames_are_one_tile_each() -> None:
    for width, height in ((640, 480), (37, 91), (5000, 10)):
        (grid,) = grids(S2.grids(height, width, False))
        assert (grid.block, grid.sequences, grid.num_tokens) == (None, 1, 256)
        (grid,) = grids(LITE.grids(height, width, False))
        assert (grid.sequences, grid.num_tokens) == (1, 121)


def tile_of(image: DecodedImage, rows: int, columns: int, index: int) -> np.ndarray:
    """Squashed and cropped with PIL alone, as the authors do, and cut into patches one by one."""
    whole = Image.fromarray(image.pixels).resize((448 * columns, 448 * rows))
    left, top = index % columns * 448, index // columns * 448
    tile = np.asarray(whole.crop((left, top, left + 448, top + 448)))
    cut = [tile[y : y + 14, x : x + 14] for y in range(0, 448, 14) for x in range(0, 448, 14)]
    return np.stack([patch.transpose(2, 0, 1).ravel() for patch in cut])


@pytest.mark.parametrize(("width", "height"), [(640, 480), (91, 37), (448, 448), (300, 1200)])
def test_pixels_are_the_published_ones(width: int, height: int) -> None:
    image = picture(width, height)
    (part,) = S2.parts(image, True)
    assert part.grid.block is not None
    rows, columns = part.grid.block
    scales = [(1, 1), *[(2, 2)] * 4, *[(rows, columns)] * (rows * columns)]
    numbers = [0, *range(4), *range(rows * columns)]
    want = [tile_of(image, *scale, i) for scale, i in zip(scales, numbers, strict=True)]
    assert np.array_equal(part.patches, np.concatenate(want))
    parts = LITE.parts(image, True)
    columns, rows = choose_tiles(height, width, 1, 12, 448)
    want = [tile_of(image, rows, columns, i) for i in range(rows * columns)]
    if len(want) > 1:
        want.append(tile_of(image, 1, 1, 0))
    assert len(parts) == len(want)
    for got, expected in zip(parts, want, strict=True):
        assert np.array_equal(got.patches, expected)
    (alone,) = S2.parts(image, False)
    assert np.array_equal(alone.patches, tile_of(image, 1, 1, 0))


def published_choice(width: int, height: int, least: int, most: int) -> tuple[int, int]:
    """The rule in other words: all ratios in the authors' order; the nearest; of equals the last
    one small enough, or the first."""
    pairs = {
        (i, j)
        for n in range(least, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if most >= i * j >= least
    }
    ordered = sorted(pairs, key=lambda x: x[0] * x[1])
    distance = [abs(width / height - i / j) for i, j in ordered]
    nearest = [p for p, d in zip(ordered, distance, strict=True) if d == min(distance)]
    fitting = [p for p in nearest[1:] if width * height > 0.5 * 448 * 448 * p[0] * p[1]]
    return fitting[-1] if fitting else nearest[0]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([(1, 12), (9, 12)]))
def test_every_size_gets_the_published_tiles(
    width: int, height: int, bounds: tuple[int, int]
) -> None:
    """A dimension of 448 is where ties and areas matter; so are whole ratios."""
    for w, h in ((width, height), (width, width), (2 * height, height), (height, 3 * height)):
        got = choose_tiles(h, w, *bounds, 448)
        assert got == published_choice(w, h, *bounds)
        assert bounds[0] <= got[0] * got[1] <= bounds[1]


def test_ties_go_to_more_tiles_for_larger_pictures() -> None:
    assert [choose_tiles(side, side, 1, 12, 448) for side in (300, 640, 900, 2000)] == [
        (1, 1),
        (2, 2),
        (2, 2),
        (3, 3),
    ]


def test_max_patches_is_the_largest_picture() -> None:
    assert S2.max_patches == 17 * 1024
    assert LITE.max_patches == 13 * 1024
    for w in range(50, 3000, 170):
        for h in range(50, 3000, 130):
            for kind in (S2, LITE):
                patches = sum(g.num_patches for g in grids(kind.grids(h, w, True)))
                assert patches <= kind.max_patches


def test_separators() -> None:
    """A line feed after each part; one more in Lite's text for exactly one picture."""
    made = [(k.separators(a).end, k.separators(a).text) for k in (S2, LITE) for a in (True, False)]
    assert made == [("\n", ""), ("\n", ""), ("\n", "\n"), ("\n", "")]


def test_equal_tiles_are_one_and_kinds_are_not() -> None:
    image = picture(448, 448)
    assert LITE.parts(image, True)[0].digest == LITE.parts(image, False)[0].digest
    assert S2.parts(image, True)[0].digest != S2.parts(image, False)[0].digest
    assert S2.identity != LITE.identity


def write(folder: Path, *, parts: bool = False, kind: str = "nvila", **changed: Any) -> Path:
    vision = {"image_size": 448, "patch_size": 14}
    if parts:
        projector = "mlp_downsample" if kind == "nvila" else "mlp_downsample_3x3_fix"
        config = {
            "mm_projector_cfg": {"mm_projector_type": projector},
            "vision_tower_cfg": vision,
        }
    else:
        config = {"model_type": kind, "vision_config": vision, "image_token_id": 151655}
    (folder / "config.json").write_text(json.dumps(config))
    place = folder / "vision_tower" if parts else folder
    place.mkdir(exist_ok=True)
    kept = {k: v for k, v in {**SIGLIP, **changed}.items() if v != "absent"}
    (place / "preprocessor_config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("kind", ["nvila", "nvila_lite"])
@pytest.mark.parametrize("parts", [True, False])
def test_both_layouts_are_read(tmp_path: Path, kind: str, parts: bool) -> None:
    got = NvilaProcessor.load(write(tmp_path, kind=kind, parts=parts))
    assert (got.kind, got.tile_pixels, got.patch_size) == (kind, 448, 14)
    assert got.image_token_id == (151649 if parts else 151655)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", {"height": 384, "width": 384}),
        ("size", "absent"),
        ("image_mean", [0.48, 0.45, 0.4]),
        ("image_std", "absent"),
        ("resample", 2),
        ("rescale_factor", 1.0),
        ("do_resize", False),
        ("do_center_crop", True),
        ("image_processor_type", "CLIPImageProcessor"),
    ],
)
def test_a21_what_the_file_says_is_never_ignored(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        NvilaProcessor.load(write(tmp_path, **{key: value}))
    assert [f.where for f in caught.value.findings] == [f"preprocessor_config.json: {key}"]
