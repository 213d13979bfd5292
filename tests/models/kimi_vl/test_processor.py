"""Kimi-VL's image rule: the authors' grids and pixels, its edges, and its strict reading."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config.finding import Finding, Refused
from vitrail.models.kimi_vl.processor import MAX_SIDE, KimiVLProcessor
from vitrail.ops.vision.naive import normalise
from vitrail.vision.image import DecodedImage, ImageLimits, decode, from_array
from vitrail.vision.placeholders import expand
from vitrail.vision.preprocess import ImageGrid

TESTS = Path(__file__).parents[2]
PICTURES = TESTS / "cases" / "images"
CASES = {c["id"]: c for c in json.loads((PICTURES / "manifest.json").read_text())["cases"]}
SIZED = [name for name, case in CASES.items() if case["expect"] == "accept"]
GOLDEN = np.load(TESTS / "golden" / "preprocess" / "preprocess.npz")
GOLDEN_KIMI = sorted({k.rpartition("/")[0] for k in GOLDEN if k.startswith("kimi/")})
LIMITS = ImageLimits(max_bytes=32 << 20, max_pixels=64_000_000)

PREPROCESSOR = {
    "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": 4096,
    "patch_size": 14,
    "num_pooled_tokens": 1024,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "pad_input": True,
    "merge_kernel_size": [2, 2],
}
CONFIG = {
    "media_placeholder_token_id": 163605,
    "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]},
}


def processor(limit: int, patch_size: int = 14, merge: int = 2) -> KimiVLProcessor:
    return KimiVLProcessor(
        patch_size=patch_size, in_token_limit=limit, merge=merge, image_token_id=163605
    )


def write(folder: Path, preprocessor: object = PREPROCESSOR, config: object = CONFIG) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_findings(folder: Path, **changed: object) -> list[Finding]:
    kept = {k: v for k, v in {**PREPROCESSOR, **changed}.items() if v is not None}
    with pytest.raises(Refused) as caught:
        KimiVLProcessor.load(write(folder, kept))
    return list(caught.value.findings)


def shape(limit: int, height: int, width: int) -> tuple[int, int, int]:
    grid = processor(limit).grid(height, width)
    assert isinstance(grid, ImageGrid)
    return grid.height, grid.width, grid.num_tokens


def decoded(name: str) -> DecodedImage:
    return decode((PICTURES / CASES[name]["file"]).read_bytes(), LIMITS, "image")


def test_grids_of_the_published_processor() -> None:
    assert shape(4096, 480, 640) == (36, 46, 414)
    assert shape(4096, 448, 448)[2] == 256
    assert shape(4096, 777, 1001) == (56, 72, 1008)
    assert shape(4096, 91, 37) == (8, 4, 8)
    assert shape(256, 1200, 300) == (34, 10, 85)  # 340 patches: padding comes after the limit


@pytest.mark.parametrize("case", GOLDEN_KIMI)
def test_golden_pixels(case: str) -> None:
    """The published processor's output, bit for bit: grid, tokens, statistics and samples."""
    _, limit, size = case.split("/")
    width, height = (int(side) for side in size.split("x"))
    y, x = np.mgrid[:height, :width]
    red, green = (np.linspace(0, 255, side).astype(np.uint8) for side in (width, height))
    blue = (7 * x + 13 * y + x * y % 31 * 5) % 256
    pixels = np.stack([red[x], green[y], blue.astype(np.uint8)], -1)
    kimi = processor(int(limit.removeprefix("limit")))
    image = kimi.process(from_array(pixels, LIMITS, "image"))
    assert image.patches.dtype == np.uint8
    assert (image.grid.height, image.grid.width) == tuple(GOLDEN[f"{case}/grid"])
    assert image.grid.num_tokens == GOLDEN[f"{case}/tokens"]
    got = normalise(torch.from_numpy(image.patches.copy()), torch.float32).numpy()
    assert (len(got), 3, 14, 14) == tuple(GOLDEN[f"{case}/shape"])
    exact = got.astype(np.float64)
    stats = (exact.mean(), exact.std(), exact.min(), exact.max())
    assert np.abs(stats - GOLDEN[f"{case}/stats"]).max() < 1e-6
    if f"{case}/full" in GOLDEN:
        want, sample = GOLDEN[f"{case}/full"].ravel(), got.ravel()
    else:
        want, sample = GOLDEN[f"{case}/sample"], got.ravel()[:: got.size // 4096][:4096]
    assert np.abs(sample - want).max() < 1e-6


@pytest.mark.parametrize("name", SIZED)
def test_a03_a10_a28_counts_before_pixels_equal_counts_after(name: str) -> None:
    """Each shared picture: the manifest's grid from the upright size, and as many patches."""
    image = decoded(name)
    for limit, want in CASES[name]["kimi_vl"].items():
        kimi = processor(int(limit))
        grid = kimi.grid(image.height, image.width)
        if want is None:
            assert isinstance(grid, Finding)
            assert str(MAX_SIDE - 1) in grid.rule
            with pytest.raises(Refused, match=f"{image.width} x {image.height} pixels"):
                kimi.process(image)
            continue
        assert isinstance(grid, ImageGrid)
        assert [grid.height, grid.width] == want["grid_hw"]
        assert grid.num_tokens == want["tokens"]
        assert (grid.num_patches > int(limit)) == want["over_budget"]
        patched = kimi.process(image)
        assert patched.grid == grid
        assert patched.patches.shape == (4 * grid.num_tokens, 3 * 14 * 14)
        assert patched.digest == image.digest


def test_a01_one_pixel_pictures_are_one_token_among_others() -> None:
    kimi = processor(4096)
    one = kimi.process(decoded("size_1x1_png"))
    page = kimi.process(from_array(np.zeros((1850, 918, 3), np.uint8), LIMITS, "i"))
    tokens = [one.grid.num_tokens, one.grid.num_tokens, page.grid.num_tokens]
    assert tokens[:2] == [1, 1]
    prompt = expand([9, 163605, 163605, 8, 163605], [1, 2, 4], tokens, 163605)
    assert prompt.token_ids.count(163605) == sum(tokens)
    pixels = one.patches.reshape(2, 2, 3, 14, 14)
    assert np.array_equal(pixels[0, 0, :, 0, 0], decoded("size_1x1_png").pixels[0, 0])
    assert np.count_nonzero(one.patches) <= 3  # everything else is padding


def test_a08_a10_grid_comes_from_the_upright_size() -> None:
    turned = decoded("exif_tall_o6_jpg")
    baked = from_array(turned.pixels, LIMITS, "image")
    kimi = processor(4096)
    assert kimi.grid(turned.height, turned.width) == kimi.grid(baked.height, baked.width)
    assert np.array_equal(kimi.process(turned).patches, kimi.process(baked).patches)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([1, 37, 256, 4096, 16384]),
    st.sampled_from([(14, 2), (3, 1), (16, 4)]),
)
def test_every_grid_holds_its_picture(
    height: int, width: int, limit: int, sizes: tuple[int, int]
) -> None:
    size, merge = sizes
    kimi = processor(limit, size, merge)
    grid = kimi.grid(height, width)
    if isinstance(grid, Finding):
        return
    assert grid.height % merge == grid.width % merge == 0
    assert max(grid.height, grid.width) < MAX_SIDE
    assert grid.num_tokens * merge**2 == grid.num_patches <= kimi.max_patches
    for side, inside in ((grid.height, grid.resized_height), (grid.width, grid.resized_width)):
        assert side * size - size * merge < inside <= side * size
    if (height // size) * (width // size) <= limit:
        assert (grid.resized_height, grid.resized_width) == (height, width)
    else:
        assert grid.resized_height * grid.resized_width <= limit * (size + size - 1) ** 2
    other = kimi.grid(width, height)
    assert isinstance(other, ImageGrid)
    assert (other.height, other.width) == (grid.width, grid.height)


def brute_max_patches(limit: int, size: int, merge: int, most: int) -> int:
    """Every count of whole patches up to `most` a side, with the rests that give the most."""
    whole = np.arange(most, dtype=np.float64)
    patches = whole[:, None] * whole
    scale = np.sqrt(limit / np.maximum(patches, limit))
    token, top = size * merge, (MAX_SIDE - 1) // merge

    def side(count: np.ndarray) -> np.ndarray:
        largest = np.ceil(np.floor((size * count + size - 1) * scale) / token)
        smallest = np.ceil(np.floor(np.maximum(size * count, 1) * scale) / token)
        return np.where(smallest <= top, np.minimum(largest, top), 0)

    return int((side(whole[:, None]) * side(whole[None, :])).max()) * merge**2


@pytest.mark.parametrize(
    ("limit", "size", "merge"),
    [(n, 14, 2) for n in (1, 2, 5, 7, 37, 256, 1015, 1016, 4096, 5079, 16384)]
    + [(n, 3, 2) for n in (5, 11)]
    + [(n, 2, 1) for n in (3, 10, 257)]
    + [(13, 14, 3), (40, 16, 1), (1 << 20, 14, 2)],
)
def test_max_patches_is_exact(limit: int, size: int, merge: int) -> None:
    most = 1300 if limit > 4096 else 700
    assert processor(limit, size, merge).max_patches == brute_max_patches(limit, size, merge, most)


def test_max_patches_is_reached_by_a_picture_and_exceeds_the_limit() -> None:
    """The largest sequence is a thin picture's: padding adds most to short sides."""
    for limit, height, width, patches in ((4096, 153, 6733, 5352), (16384, 489, 7083, 17856)):
        grid = processor(limit).grid(height, width)
        assert isinstance(grid, ImageGrid)
        assert grid.num_patches == patches == processor(limit).max_patches


def test_a_side_that_scales_to_nothing_is_refused() -> None:
    """The published code asks PIL for 0 pixels there; with real limits the long side is refused."""
    grid = processor(1).grid(14, 14 * 400)
    assert isinstance(grid, Finding)
    assert "scale to 280 x 0" in grid.saw
    for limit in (37, 4096):
        for width in (100_000, 64_000_000):
            grid = processor(limit).grid(14, width)
            assert isinstance(grid, Finding)
            assert grid.code == "image_too_long"


def test_a21_limits_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    seen = []
    for limit in (4096, 16384):
        kimi = KimiVLProcessor.load(write(tmp_path, {**PREPROCESSOR, "in_token_limit": limit}))
        assert kimi == processor(limit)
        grid = kimi.grid(1792, 1792)
        assert isinstance(grid, ImageGrid)
        seen.append((grid.num_tokens, kimi.identity))
    assert [tokens for tokens, _ in seen] == [1024, 4096]
    assert seen[0][1] != seen[1][1]
    assert processor(4096).identity == seen[0][1]
    assert len({processor(4096, 14, 1).identity, processor(4096, 16).identity, seen[0][1]}) == 3


@pytest.mark.parametrize(
    ("key", "value", "saw"),
    [
        ("pad_input", False, "False"),
        ("pad_input", None, "missing"),
        ("image_mean", [0.48, 0.45, 0.4], "0.48"),
        ("image_std", None, "missing"),
        ("in_token_limit", None, "missing"),
        ("in_token_limit", 0, "in_token_limit 0"),
        ("in_token_limit", "4096", "of type str"),
        ("patch_size", 16, "patch_size 16"),
        ("merge_kernel_size", [2, 3], r"[2, 3]"),
        ("merge_kernel_size", None, "merge_kernel_size []"),
        ("image_processor_type", "Qwen2VLImageProcessor", "Qwen2VL"),
        ("max_pixels", 1003520, "unknown key"),
    ],
)
def test_a21_what_the_file_says_is_never_ignored(
    key: str, value: object, saw: str, tmp_path: Path
) -> None:
    found = load_findings(tmp_path, **{key: value})
    assert any(saw in f.saw for f in found), found
    assert all(f.where.startswith("preprocessor_config.json") for f in found)


def test_a21_every_finding_at_once(tmp_path: Path) -> None:
    found = load_findings(tmp_path, pad_input=False, min_pixels=1, max_pixels=2, patch_size="14")
    keys = {f.where.rpartition(" ")[2] for f in found}
    assert keys == {"pad_input", "min_pixels", "max_pixels", "patch_size"}


def test_a_checkpoint_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"preprocessor_config.json: no such file"):
        KimiVLProcessor.load(tmp_path)
    write(tmp_path, PREPROCESSOR, {"vision_config": CONFIG["vision_config"]})
    with pytest.raises(Refused, match="media_placeholder_token_id: missing"):
        KimiVLProcessor.load(tmp_path)


def test_scale_is_the_published_formula() -> None:
    """int(side * sqrt(limit / patches)), the patches counted whole."""
    scale = math.sqrt(256 / (1001 // 14 * (777 // 14)))
    grid = processor(256).grid(777, 1001)
    assert isinstance(grid, ImageGrid)
    assert (grid.resized_height, grid.resized_width) == (int(777 * scale), int(1001 * scale))
