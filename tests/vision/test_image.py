"""One picture, whatever brought it: equal pixels from every entry; a refusal for what is none."""

import base64
import io
import json
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vitrail.config.finding import Refused
from vitrail.vision.image import (
    ACCEPTED,
    DecodedImage,
    ImageLimits,
    decode,
    from_array,
    from_path,
    from_pil,
    parse_data_url,
)

FOLDER = Path(__file__).parents[1] / "cases" / "images"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CASES = {case["id"]: case for case in MANIFEST["cases"]}
LIMITS = ImageLimits(max_bytes=32 << 20, max_pixels=64_000_000)
EXAMPLES = settings(max_examples=100, derandomize=True, deadline=None)
ORIENTATIONS = range(1, 9)


def read(name: str) -> bytes:
    return (FOLDER / CASES[name]["file"]).read_bytes()


def decoded(name: str) -> DecodedImage:
    return decode(read(name), LIMITS, "messages[0].content[1]")


def refused(name: str) -> str:
    with pytest.raises(Refused) as caught:
        decoded(name)
    assert [f.where for f in caught.value.findings] == ["messages[0].content[1]"]
    return str(caught.value)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(rows: np.ndarray, width: int, depth: int, colour: int, key: bytes) -> bytes:
    """A PNG of already packed `rows` (uint8 [height, bytes a row]) with a tRNS chunk: depths and
    colour keys that PIL cannot write."""
    header = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    parts = chunk(b"IHDR", header), chunk(b"tRNS", key), chunk(b"IDAT", body), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def exif(orientation: int, order: str = ">", kind: int = 3) -> bytes:
    """A block with two tags, orientation second."""
    head = (b"MM\0*" if order == ">" else b"II*\0") + struct.pack(order + "IH", 8, 2)
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((orientation, 0)[: 5 - kind]))
    tags = struct.pack(order + "HHII", 0x0100, 4, 1, 7)
    tags += struct.pack(order + "HHI", 0x0112, kind, 1) + value
    return b"Exif\0\0" + head + tags + bytes(4)


@pytest.mark.parametrize("name", CASES)
def test_manifest(name: str) -> None:
    """Every shared picture: accepted within its tolerance of the reference, or refused."""
    case = CASES[name]
    if case["expect"] == "reject_400":
        assert refused(name)
        return
    try:
        image = decoded(name)
    except Refused:
        if case["expect"] == "accept":
            raise
        return
    if "ref" in case:
        with Image.open(FOLDER / case["ref"]) as opened:
            want = np.asarray(opened.convert("RGB")).astype(int)
        assert image.pixels.shape == want.shape
        assert [image.width, image.height] == case["size_wh"]
        assert np.abs(image.pixels - want).max() <= case["tol"]


def test_a01_a03_tiny_and_thin_pictures_keep_their_shape() -> None:
    for width, height in ((1, 1), (3, 3), (500, 3), (499, 1), (1, 4000), (500, 19)):
        image = decoded(f"size_{width}x{height}_png")
        assert image.pixels.shape == (height, width, 3)
    one = np.array([[[9, 200, 3]]], np.uint8)
    assert np.array_equal(from_array(one, LIMITS, "images[0]").pixels, one)


def test_a04_grey_grey_alpha_and_rgba_become_rgb() -> None:
    grey = Image.new("L", (224, 224), 128)
    for data in (
        saved(grey, "JPEG", quality=85),
        saved(grey.convert("LA"), "PNG"),
        saved(grey.convert("RGBA"), "PNG"),
        saved(grey.convert("RGB"), "PNG"),
    ):
        image = decode(data, LIMITS, "image")
        assert image.pixels.shape == (224, 224, 3)
        assert np.unique(image.pixels).tolist() == [128]


def test_a06_alpha_lies_over_white_in_every_mode() -> None:
    rgba = noise(13, 29, 4)
    rgba[:, :, 3] = np.arange(29) * 9  # 0 to 252
    alpha = rgba[:, :, 3:].astype(float) / 255
    want = rgba[:, :, :3] * alpha + 255 * (1 - alpha)
    got = decode(saved(Image.fromarray(rgba), "PNG"), LIMITS, "image").pixels
    assert np.abs(got - want).max() <= 0.502
    assert np.array_equal(from_array(rgba, LIMITS, "image").pixels, got)

    grey = rgba[:, :, [0, 3]]
    want = grey[:, :, :1] * alpha + 255 * (1 - alpha)
    got = decode(saved(Image.fromarray(grey), "PNG"), LIMITS, "image").pixels
    assert np.abs(got - want).max() <= 0.502

    palette = Image.fromarray(rgba[:, :, :3]).quantize(7)
    entries = bytes([0, 255, 128, 255, 64, 255, 255])
    flat = np.asarray(palette.convert("RGB"))
    over = np.frombuffer(entries, np.uint8)[np.asarray(palette)][:, :, None] / 255
    got = decode(saved(palette, "PNG", transparency=entries), LIMITS, "image").pixels
    assert np.abs(got - (flat * over + 255 * (1 - over))).max() <= 0.502


def test_a06_what_alpha_hides_changes_nothing() -> None:
    first, second = noise(11, 17, 4, seed=1), noise(11, 17, 4, seed=2)
    for array in (first, second):
        array[:, :9, 3] = 0
        array[:, 9:] = 77
    one, two = (decode(saved(Image.fromarray(a), "PNG"), LIMITS, "image") for a in (first, second))
    assert (one.pixels[:, :9] == 255).all()
    assert one.digest == two.digest


@pytest.mark.parametrize(("depth", "colour"), [(2, 0), (4, 0), (8, 0), (16, 0), (8, 2)])
def test_a06_transparent_colour_is_white_at_every_depth(depth: int, colour: int) -> None:
    """8 columns of rising grey; the file's own third value is transparent."""
    channels = 3 if colour == 2 else 1
    values = np.arange(8) * (1 if depth < 8 else 5) % (1 << min(depth, 8))
    samples = values.repeat(channels)
    if depth == 16:
        rows, key = (samples * 1800).astype(">u2").view(np.uint8)[None], struct.pack(">H", 18000)
        widened = np.rint(samples * 1800 / 257)
    else:
        bits = (samples[:, None] >> np.arange(depth)[::-1]) & 1
        rows = np.packbits(bits.astype(np.uint8).ravel())[None]
        key = struct.pack(">H", int(values[2])) * channels
        widened = samples * (255 // ((1 << depth) - 1))
    image = decode(png(rows, 8, depth, colour, key), LIMITS, "image")
    want = widened.reshape(1, 8, channels).repeat(3 // channels, 2)
    want[0, values == values[2]] = 255
    assert np.array_equal(image.pixels, want)


def test_transparent_colour_of_48_bits_is_refused_not_guessed() -> None:
    rows = np.zeros((2, 12), np.uint8)
    with pytest.raises(Refused, match="48-bit RGB with a transparent colour"):
        decode(png(rows, 2, 16, 2, bytes(6)), LIMITS, "image")


def test_16_bits_are_rescaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 257 * 3).astype(np.uint16).reshape(3, 257)
    want = np.rint(ramp / 257)[:, :, None].repeat(3, 2)
    for kind in ("PNG", "TIFF"):
        got = decode(saved(Image.fromarray(ramp), kind), LIMITS, "image")
        assert np.array_equal(got.pixels, want)
    assert from_pil(Image.fromarray(ramp), LIMITS, "image").digest == got.digest


def tiff(bits: int, num_bytes: int) -> bytes:
    """An 8 x 1 grey TIFF of `bits` a sample."""
    tags = (
        (256, 8),
        (257, 1),
        (258, bits),
        (259, 1),
        (262, 1),
        (273, 122),
        (278, 1),
        (279, num_bytes),
    )
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries
    return head.ljust(122, b"\0") + bytes(num_bytes)


def test_samples_without_an_exact_8_bit_meaning_are_refused() -> None:
    assert decode(tiff(16, 16), LIMITS, "image").pixels.shape == (1, 8, 3)
    with pytest.raises(Refused, match="I;12"):
        decode(tiff(12, 12), LIMITS, "image")
    assert "float samples" in refused("tiff_float")
    for mode, saw in (("F", "float"), ("I", "32-bit"), ("LAB", "Lab"), ("HSV", "HSV")):
        with pytest.raises(Refused, match=saw):
            from_pil(Image.new(mode, (3, 2)), LIMITS, "image")


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a08_orientation_is_applied_on_every_path(
    orientation: int, kind: str, tmp_path: Path
) -> None:
    """Data URL, bytes, path, PIL image (read and unread): one digest, the upright picture's."""
    stored = Image.fromarray(noise(16, 24).repeat(8, 0).repeat(8, 1)).resize((24, 16))
    options = {"lossless": True} if kind == "WEBP" else {}
    if kind == "TIFF":  # no block of its own: a tag of the file
        data = saved(stored, kind, tiffinfo={0x0112: orientation})
    else:
        data = saved(stored, kind, exif=exif(orientation), **options)
    with Image.open(io.BytesIO(data)) as opened:
        want = ImageOps.exif_transpose(opened).convert("RGB")
    path = tmp_path / "picture.bin"
    path.write_bytes(data)
    url = "data:image/x;base64," + base64.b64encode(data).decode()
    unread, loaded = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data))
    loaded.load()
    got = [
        decode(data, LIMITS, "image"),
        decode(parse_data_url(url, LIMITS, "image"), LIMITS, "image"),
        from_path(path, LIMITS, "image"),
        from_pil(unread, LIMITS, "image"),
        from_pil(loaded, LIMITS, "image"),
        from_pil(want, LIMITS, "image"),
        from_array(np.asarray(want), LIMITS, "image"),
    ]
    assert {(g.width, g.height) for g in got} == {(16, 24) if orientation > 4 else (24, 16)}
    assert len({g.digest for g in got}) == 1
    assert np.array_equal(got[0].pixels, np.asarray(want))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("block", ["zero", "nine", "long", "cut", "short", "far", "text", "empty"])
def test_orientation_that_says_nothing_is_upright(block: str, order: str) -> None:
    good = exif(6, order)
    blocks = {
        "zero": exif(0, order),
        "nine": exif(9, order),
        "long": exif(6, order, kind=4),
        "cut": good[: 6 + 8 + 2 + 12 + 11],
        "short": good[:12],
        "far": good[:10] + b"\xff\xff\xff\xff" + good[14:],
        "text": b"Exif\0\0hello world, this is no block",
        "empty": b"Exif\0\0",
    }
    data = saved(Image.fromarray(noise(5, 9)), "PNG")
    turned = data[:33] + chunk(b"eXIf", good[6:]) + data[33:]
    assert decode(turned, LIMITS, "image").pixels.shape == (9, 5, 3)
    plain = data[:33] + chunk(b"eXIf", blocks[block][6:]) + data[33:]
    assert decode(plain, LIMITS, "image").digest == decode(data, LIMITS, "image").digest


def test_relations() -> None:
    """The manifest's pairs: the same upright pictures agree within JPEG's error, twins differ."""
    for relation in MANIFEST["relations"]:
        images = [decoded(name) for name in relation["ids"]]
        if relation["kind"] == "must_differ":
            assert len({i.digest for i in images}) == len(images)
        else:
            first = images[0].pixels.astype(int)
            assert all(np.abs(i.pixels - first).max() <= 28 for i in images)


def test_c02_digest_covers_the_shape_and_every_pixel() -> None:
    one, two = decoded("twin_raw_30x150"), decoded("twin_raw_150x30")
    assert one.pixels.tobytes() == two.pixels.tobytes()
    assert one.digest != two.digest
    array = noise(7, 5)
    digests = {from_array(array, LIMITS, "image").digest}
    for at in np.ndindex(array.shape):
        changed = array.copy()
        changed[at] ^= 1
        digests.add(from_array(changed, LIMITS, "image").digest)
    assert len(digests) == 1 + array.size


@EXAMPLES
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_c02_equal_pixels_agree_whatever_the_file(height: int, width: int, seed: int) -> None:
    array = noise(height, width, seed=seed)
    image = Image.fromarray(array)
    files = [saved(image, kind) for kind in ("PNG", "BMP", "TIFF")]
    files += [saved(image, "WEBP", lossless=True), saved(image.convert("RGBA"), "PNG")]
    got = [decode(data, LIMITS, "image") for data in files]
    assert {g.digest for g in got} == {from_array(array, LIMITS, "image").digest}
    assert all(np.array_equal(g.pixels, array) for g in got)


def test_palettes_of_other_colours_differ() -> None:
    """The same indices under another palette: what a hash of the raw buffer would miss."""
    image = Image.fromarray(noise(8, 8)[:, :, 0] % 2, "L").convert("P")
    image.putpalette([0, 0, 0, 9, 9, 9])
    other = image.copy()
    other.putpalette([9, 9, 9, 0, 0, 0])
    assert image.tobytes() == other.tobytes()
    assert from_pil(image, LIMITS, "i").digest != from_pil(other, LIMITS, "i").digest


def test_a11_cut_off_and_garbage_bytes_are_refused() -> None:
    jpeg = saved(Image.fromarray(noise(48, 64)), "JPEG")
    for data, saw in (
        (b"", "0 bytes"),
        (b"Hello World", "text"),
        (jpeg[:-128], "64 x 48 pixels, that is cut off"),
        (jpeg[: len(jpeg) // 2], "cut off"),
        (read("header_only_png"), "header is broken"),
        (read("zero_dim_png"), "header is broken"),
        (bytes(range(200, 230)), "unknown format, starting c8c9cacb"),
    ):
        with pytest.raises(Refused, match=saw) as caught:
            decode(data, LIMITS, "messages[3].content[0]")
        assert caught.value.findings[0].where == "messages[3].content[0]"
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a11_no_file_cut_anywhere_passes_as_whole(kind: str) -> None:
    """Cut at any length: refused, or (where only a trailer is missing) equal to the whole."""
    data = saved(Image.fromarray(noise(9, 11)), kind)
    whole = decode(data, LIMITS, "image").digest
    passed = 0
    for end in range(len(data)):
        try:
            assert decode(data[:end], LIMITS, "image").digest == whole
            passed += 1
        except Refused:
            continue
    assert passed <= 24  # IEND of a PNG, the terminator of a GIF, padding


def test_a12_formats_are_used_or_refused_by_name() -> None:
    for name, said in (
        ("avif", "AVIF"),
        ("heic_stub", "HEIC"),
        ("svg_plain", "SVG"),
        ("jp2", "JPEG 2000"),
        ("ico", "ICO"),
        ("pdf_as_png", "PDF"),
        ("html_404_as_jpg", "HTML"),
        ("mz_as_png", "executable"),
    ):
        message = refused(name)
        assert said in message
        assert all(kind in message for kind in ACCEPTED)
    assert decoded("webp_animated").pixels.shape == (30, 40, 3)


def test_first_frame_of_animations() -> None:
    frames = [Image.new("RGB", (12, 7), colour) for colour in ((200, 0, 0), (0, 0, 200))]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decode(data, LIMITS, "image").pixels[3, 4].tolist() == [200, 0, 0]


def test_limits_hold_at_their_edge() -> None:
    data = saved(Image.fromarray(noise(30, 20)), "PNG")
    edge = ImageLimits(max_bytes=len(data), max_pixels=600)
    assert decode(data, edge, "image").pixels.shape == (30, 20, 3)
    small = ImageLimits(max_bytes=len(data) - 1, max_pixels=600)
    with pytest.raises(Refused, match=f"at most {len(data) - 1} bytes"):
        decode(data, small, "image")
    with pytest.raises(Refused, match=f"at most {len(data) - 1} bytes"):
        parse_data_url("data:;base64," + base64.b64encode(data).decode(), small, "image")
    few = ImageLimits(max_bytes=len(data), max_pixels=599)
    with Image.open(io.BytesIO(data)) as opened:
        for call in (
            lambda: decode(data, few, "image"),
            lambda: from_pil(opened, few, "image"),
            lambda: from_array(noise(30, 20), few, "image"),
        ):
            with pytest.raises(Refused, match="20 x 30 = 600 pixels"):
                call()


BOMBS = """
import resource, struct, sys, time
import vitrail.models.kimi_vl.processor, vitrail.vision.placeholders, vitrail.vision.preprocess
from pathlib import Path
from PIL import Image, ImageFile
from vitrail.config.finding import Refused
from vitrail.vision.image import ImageLimits, decode

side = 60000
bombs = [Path(name).read_bytes() for name in sys.argv[1:]]
bombs += [
    b"RIFF\\x16\\0\\0\\0WEBPVP8X" + struct.pack("<II", 10, 0) + b"\\xfe\\x3f\\0" * 2,
    b"GIF89a" + struct.pack("<HHBBB", side, side, 0, 0, 0) + b",\\0\\0\\0\\0\\1\\0\\1\\0\\0\\2\\0;",
    b"BM" + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0),
    b"\\xff\\xd8\\xff\\xc0" + struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\\1\\x11\\0"
    + b"\\xff\\xda\\0\\x08\\1\\1\\0\\0\\x3f\\0",
]
limits = ImageLimits(max_bytes=32 << 20, max_pixels=64_000_000)
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
for bomb in bombs:
    try:
        decode(bomb, limits, "image")
    except Refused as error:
        assert error.findings[0].code == "image_too_large", error
    else:
        raise SystemExit("decoded a bomb")
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
assert time.process_time() - start < 1, time.process_time() - start
assert grown < 100, grown
assert Image.MAX_IMAGE_PIXELS == 89478485 and not ImageFile.LOAD_TRUNCATED_IMAGES
assert "torch" not in sys.modules
"""


def test_f08_bombs_cost_nothing_and_pil_keeps_its_guards() -> None:
    """In a fresh process: within 1 s, less than 100 MB, PIL's globals untouched, no torch."""
    names = [FOLDER / CASES[n]["file"] for n in ("bomb_1bit_20000sq_png", "bomb_claim_65535sq_png")]
    done = subprocess.run(
        [sys.executable, "-c", BOMBS, *map(str, names)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


SMALL = [c for c in CASES if 60 < CASES[c]["bytes"] < 16_000]


@settings(max_examples=400, derandomize=True, deadline=2000)
@given(st.sampled_from(SMALL), st.integers(0, 1 << 30))
def test_broken_bytes_never_raise_anything_but_refused(name: str, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(read(name))
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.choice((0, 1, 2, 8)) if data else 0):
        reach = len(data) if rng.random() < 0.5 else min(len(data), 200)
        data[rng.randrange(reach)] = rng.randrange(256)
    try:
        image = decode(bytes(data), ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20), "image")
    except Refused:
        return
    assert image.pixels.dtype == np.uint8


def test_paths_and_arrays_that_are_no_picture(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.png", "a\0b"):
        with pytest.raises(Refused, match="cannot be read"):
            from_path(path, LIMITS, "images[2]")
    for array in (
        np.zeros((3, 5, 7), np.uint8),
        np.zeros((5, 7, 3), np.float32),
        np.zeros((5,), np.uint8),
        np.zeros((1, 5, 7, 3), np.uint8),
    ):
        with pytest.raises(Refused, match=r"channels"):
            from_array(array, LIMITS, "images[2]")
    for array in (np.zeros((0, 7, 3), np.uint8), np.zeros((7, 0), np.uint8)):
        with pytest.raises(Refused, match="at least one pixel"):
            from_array(array, LIMITS, "images[2]")


@EXAMPLES
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_arrays_are_channels_last(height: int, width: int, channels: int) -> None:
    array = noise(height, width, channels)[::-1]  # not contiguous
    got = from_array(array, LIMITS, "image").pixels
    if channels in (1, 3):
        assert np.array_equal(got, array.repeat(3 // channels, 2))
    assert got.shape == (height, width, 3)
