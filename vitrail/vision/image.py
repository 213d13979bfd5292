"""Whatever a client calls a picture -> upright RGB bytes and their identity.

Owns the one normalisation that every entry (data URL, bytes, path, PIL image, array) passes
through:

    format by content -> pixels by header -> full decode -> alpha over white -> RGB -> upright
    -> BLAKE3

16-bit samples are rescaled, not clipped; animations and multi-page files give their first frame;
ICC profiles are ignored, so samples are taken as sRGB. Knows nothing of models, patches or
requests, opens no connection, and changes none of PIL's global settings. Every failure is
`Refused`."""

import binascii
import io
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pybase64
from blake3 import blake3
from jaxtyping import UInt8
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from vitrail.config.finding import Refused

WHITE = (255, 255, 255)

# Plugins are called by name: `Image.open` would try every format that PIL knows on a client's
# bytes. No AVIF: its header's size does not bind the size of the coded picture that PIL would
# decode.
_READERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
ACCEPTED = tuple(_READERS)

# What PIL's readers raise for bytes they cannot read (found by fuzzing them); warnings only count
# where the process turns them into errors.
_PIL_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
    UserWarning,
)

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (8, b"WEBPVP8", "WebP"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypmsf1", "HEIF"),
    (4, b"ftyp", "MP4"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "Photoshop"),
    (0, b"qoif", "QOI"),
    (0, b"%PDF-", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"MZ", "Windows executable"),
    (0, b"\x7fELF", "ELF executable"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)

# Value of a 16-bit sample in 8 bits, rounded: 65535 -> 255, as 255 * x / 65535.
_FROM_16_BITS = ((np.arange(1 << 16, dtype=np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
_FROM_16_BITS.flags.writeable = False

# A PNG's transparent grey is written in the file's own depth; PIL widens the samples, not the key.
_GREY_SCALE = {"L;2": 85, "L;4": 17}

_UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """`max_bytes` of an encoded image, `max_pixels` (height * width) that its header may claim."""

    max_bytes: int
    max_pixels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImage:
    """An upright picture over white. `digest`: 32 bytes of BLAKE3 over height, width and `pixels`,
    so equal pictures agree whatever file they came from, and equal bytes of another shape do
    not."""

    pixels: UInt8[np.ndarray, "height width 3"]
    digest: bytes

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        return self.pixels.shape[1]


def decode(data: bytes, limits: ImageLimits, where: str) -> DecodedImage:
    """The picture in an encoded file's bytes. `where` names the field that brought them.

    Nothing is allocated for pixels before the header's size has passed `limits`. Raises `Refused`:
    too long, a format not in `ACCEPTED`, a header or body that does not decode to the end, samples
    of a kind that has no exact 8-bit meaning (float, 32-bit, 12-bit, Lab)."""
    if len(data) > limits.max_bytes:
        raise _too_long(len(data), limits, where)
    name = _format_of(data)
    if name not in _READERS:
        raise Refused.because(
            where=where,
            saw=f"not a picture we read: {name}",
            rule=f"{', '.join(ACCEPTED[:-1])} or {ACCEPTED[-1]}, told by content, not by name",
            change="convert it to PNG or JPEG",
            code="unsupported_image",
        )
    if name == "WebP":  # its reader allocates the canvas when it opens
        _check_pixels(*_webp_size(data), limits, where)
    try:
        image = _READERS[name](io.BytesIO(data))
    except _PIL_ERRORS as error:
        raise _broken(
            f"a {name} of {len(data)} bytes whose header is broken", error, where
        ) from error
    _check_pixels(*image.size, limits, where)
    raw_mode = _raw_mode(image)
    _load(image, f"a {name} of {len(data)} bytes, {_size(image)}, that is cut off or broken", where)
    orientation = _exif_orientation(image.info.get("exif"))
    return _normalise(image, raw_mode, orientation, where)


def from_path(path: str | Path, limits: ImageLimits, where: str) -> DecodedImage:
    """The picture in a local file: for the offline API and the command line, never for a client."""
    try:
        with open(path, "rb") as file:
            data = file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        raise Refused.because(
            where=where,
            saw=f"{str(path)!r} cannot be read ({error})",
            rule="a path names a readable image file",
            change="check the path",
            code="unreadable_image",
        ) from error
    return decode(data, limits, where)


def from_pil(image: Image.Image, limits: ImageLimits, where: str) -> DecodedImage:
    """The picture of a PIL image, its EXIF orientation applied; the image itself is left
    unturned."""
    if min(image.size) < 1:
        raise _empty(f"a PIL image of {_size(image)}", where)
    _check_pixels(*image.size, limits, where)
    raw_mode = _raw_mode(image)
    _load(image, f"a PIL image of {_size(image)} that is cut off or broken", where)
    try:
        orientation = image.getexif().get(0x0112, 1)
    except _PIL_ERRORS:  # a broken block says nothing
        orientation = 1
    return _normalise(image, raw_mode, orientation, where)


def from_array(array: np.ndarray, limits: ImageLimits, where: str) -> DecodedImage:
    """The picture in a uint8 array: [height, width] grey, or channels last: [height, width, 1 grey,
    2 grey and alpha, 3 RGB, 4 RGBA]. The channel axis is never guessed."""
    last = array.ndim == 3 and 1 <= array.shape[2] <= 4
    if array.dtype != np.uint8 or not (array.ndim == 2 or last):
        raise Refused.because(
            where=where,
            saw=f"an array of {array.dtype} {list(array.shape)}",
            rule="an image array is uint8 [height, width] or [height, width, 1 to 4 channels]",
            change="put channels last, scale to 0..255 and cast to uint8",
            code="unsupported_image",
        )
    height, width = array.shape[:2]
    if not height or not width:
        raise _empty(f"an array of {list(array.shape)}", where)
    _check_pixels(width, height, limits, where)
    flat = array[:, :, 0] if last and array.shape[2] == 1 else array
    return _normalise(Image.fromarray(flat), "", 1, where)


def parse_data_url(url: str, limits: ImageLimits, where: str) -> bytes:
    """The bytes in `data:[media type][;parameter ...];base64,<payload>` (RFC 2397).

    Scheme and marker in any case; the media type is optional and not believed, content decides;
    white space in the payload is skipped. Raises `Refused` for any other kind of URL, by name and
    without looking at what it points to, and for what is wrong with a data URL; the length is
    checked before decoding."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() != "data":
        raise _not_a_data_url(url, where)
    header, comma, payload = rest.partition(",")
    if not comma:
        raise _bad_data_url(f"no comma in a data URL of {len(url)} characters", where)
    _, semicolon, marker = header.rpartition(";")
    if not semicolon or marker.strip().lower() != "base64":
        raise _bad_data_url(f"no ';base64' before the comma in 'data:{header[:60]},'", where)
    payload = "".join(payload.split()) if re.search(r"\s", payload) else payload
    if not payload:
        raise _bad_data_url("an empty payload", where)
    num_bytes = len(payload) // 4 * 3 - payload[-2:].count("=")
    if num_bytes > limits.max_bytes:
        raise _too_long(num_bytes, limits, where)
    wrong = re.search(r"[^A-Za-z0-9+/=]", payload)
    if wrong:
        raise _bad_data_url(f"{wrong[0]!r} at character {wrong.start()} of the payload", where)
    try:
        return pybase64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise _bad_data_url(f"a payload of {len(payload)} characters: {error}", where) from error


def _format_of(data: bytes) -> str:
    """What the first bytes say: one of `ACCEPTED`, or words that name what it is instead."""
    if not data:
        return "0 bytes"
    for offset, magic, name in _SIGNATURES:
        if data.startswith(magic, offset):
            return name
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "SVG"
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if len(data) >= 8 and head.isascii() and b"\0" not in head:
        return "text"
    return f"{len(data)} bytes of unknown format, starting {data[:8].hex()}"


def _webp_size(data: bytes) -> tuple[int, int]:
    """(width, height) of a WebP's canvas; (0, 0) where the header is too short for the reader
    too."""
    chunk, head = data[12:16], data[:30].ljust(30, b"\0")
    if chunk == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _raw_mode(image: Image.Image) -> str:
    """PIL's name of the samples in the file, before it widened or narrowed them; '' if unknown."""
    tile = getattr(image, "tile", None)
    if not tile:
        return ""
    args = tile[0][3]
    first = args[0] if isinstance(args, tuple) and args else args
    return first if isinstance(first, str) else ""


def _load(image: Image.Image, saw: str, where: str) -> None:
    try:
        image.load()
    except _PIL_ERRORS as error:
        raise _broken(saw, error, where) from error


def _normalise(image: Image.Image, raw_mode: str, orientation: object, where: str) -> DecodedImage:
    """A loaded image -> RGB over white, upright, with its digest."""
    pixels = _rgb(image, raw_mode, where)
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    pixels = np.ascontiguousarray(turn(pixels) if turn else pixels)
    pixels.flags.writeable = False
    height, width, _ = pixels.shape
    digest = blake3(b"vitrail rgb8" + struct.pack("<QQ", height, width))
    digest.update(pixels.data)
    return DecodedImage(pixels=pixels, digest=digest.digest())


def _rgb(image: Image.Image, raw_mode: str, where: str) -> UInt8[np.ndarray, "height width 3"]:
    mode, key = image.mode, image.info.get("transparency")
    if mode in ("RGBA", "LA", "PA", "RGBa") or (mode == "P" and key is not None):
        rgba = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, WHITE)
        canvas.paste(rgba, mask=rgba)
        return np.asarray(canvas)
    if mode.startswith("I;16") and not raw_mode.startswith("I;12"):
        wide = np.asarray(image)
        return _keyed(np.repeat(_FROM_16_BITS[wide][:, :, None], 3, 2), wide[:, :, None], key)
    if mode in ("1", "L"):
        grey = np.asarray(image.convert("L"))[:, :, None]
        scaled = key * _GREY_SCALE.get(raw_mode, 1) if isinstance(key, int) else None
        return _keyed(np.repeat(grey, 3, 2), grey, scaled)
    exact = key is None or not raw_mode.startswith("RGB;16")
    if mode == "RGB" and exact:
        pixels = np.asarray(image)
        return pixels if key is None else _keyed(pixels.copy(), pixels, key)
    if mode in ("P", "CMYK", "YCbCr", "RGBX"):
        return np.asarray(image.convert("RGB"))
    kinds = {"F": "float samples", "I": "32-bit samples", "LAB": "Lab samples"}
    saw = kinds.get(mode, f"samples of kind {raw_mode or mode}")
    raise Refused.because(
        where=where,
        saw=saw if exact else "48-bit RGB with a transparent colour",
        rule="8- or 16-bit grey, RGB, CMYK or palette, or 8-bit with alpha: kinds whose 8-bit "
        "RGB is exact",
        change="convert it to 8-bit RGB PNG",
        code="unsupported_image",
    )


def _keyed(pixels: np.ndarray, samples: np.ndarray, key: object) -> np.ndarray:
    """`pixels` with white where the file's `samples` [height, width, any] equal its transparent
    colour `key`."""
    if isinstance(key, int | tuple):
        pixels[(samples == np.asarray(key)).all(2)] = 255
    return pixels


def _exif_orientation(exif: object) -> int:
    """Tag 0x0112 of the first directory of an EXIF block; 1 (upright) for anything that is not a
    SHORT of 1 to 8 in a block that holds together so far."""
    if not isinstance(exif, bytes):
        return 1
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for entry in range(min(count, (len(tiff) - start - 2) // 12)):
        at = start + 2 + 12 * entry
        tag, kind, num_values, value = struct.unpack_from(order + "HHIH", tiff, at)
        if tag == 0x0112:
            return value if (kind, num_values) == (3, 1) and value in _UPRIGHT else 1
    return 1


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height} pixels"


def _check_pixels(width: int, height: int, limits: ImageLimits, where: str) -> None:
    if width * height <= limits.max_pixels:
        return
    raise Refused.because(
        where=where,
        saw=f"{width} x {height} = {width * height} pixels",
        rule=f"at most {limits.max_pixels} pixels, by the header",
        change="scale the picture down, or raise --max-image-pixels",
        code="image_too_large",
    )


def _too_long(num_bytes: int, limits: ImageLimits, where: str) -> Refused:
    return Refused.because(
        where=where,
        saw=f"an encoded image of {num_bytes} bytes",
        rule=f"at most {limits.max_bytes} bytes",
        change="compress or scale the picture, or raise --max-image-bytes",
        code="image_too_large",
    )


def _broken(saw: str, error: BaseException, where: str) -> Refused:
    said = " ".join(str(error).split())[:120] or type(error).__name__
    return Refused.because(
        where=where,
        saw=f"{saw} ({said})",
        rule="an image decodes to its end",
        change="send the whole file, or save the picture again",
        code="broken_image",
    )


def _empty(saw: str, where: str) -> Refused:
    return Refused.because(
        where=where,
        saw=saw,
        rule="an image has at least one pixel a side",
        change="send a picture",
        code="broken_image",
    )


def _bad_data_url(saw: str, where: str) -> Refused:
    return Refused.because(
        where=where,
        saw=saw,
        rule="a data URL reads data:<media type>;base64,<base64 with padding>",
        change="encode the file's bytes as base64 in this form",
        code="invalid_image_url",
    )


def _not_a_data_url(url: str, where: str) -> Refused:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", url[:40])
    if not url:
        saw = "an empty URL"
    elif scheme:
        saw = f"a URL of scheme {scheme[1].lower()!r}"
    else:
        saw = f"{len(url)} characters without 'data:' (a path, or bare base64?)"
    return Refused.because(
        where=where,
        saw=saw,
        rule="a picture comes inside the request as a data: URL; nothing is fetched or opened",
        change="send data:<media type>;base64,<the file's bytes>",
        code="unsupported_image_url",
    )
