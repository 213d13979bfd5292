"""Whatever a client calls a video -> evenly sampled upright pictures. Decoded with PyAV (the extra
`video`), which is imported when the first one comes.

Two passes: packets are counted without decoding, then frames are decoded in order up to the last
one that is wanted, one thread, and the wanted ones alone are kept:

    container by content -> one video stream, codec, size, length -> count packets -> decode

Nothing but the given bytes is read: the container's reader is chosen here and may open no other
file or address. Knows nothing of models and requests. Every failure is `Refused`."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config.finding import Finding, Refused
from vitrail.vision.image import DecodedImage, ImageLimits, from_array
from vitrail.vision.preprocess import even_frames

MAX_SECONDS = 1200
MAX_FRAMES = 36_000  # decoded for one video: 20 minutes at 30 a second
MAX_FRAME_PIXELS = 8192 * 4352
# Frames kept at once: what a request may make a worker hold.
MAX_KEPT_PIXELS = 512_000_000

# First bytes -> FFmpeg's reader. None of these refers to other files unless it is told to.
_CONTAINERS: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
)
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
ACCEPTED = "MP4, MOV, WebM, Matroska or AVI"
# No reader may go beyond the bytes it was given, and a codec allocates no larger frame.
_OPTIONS = {"protocol_whitelist": "none", "enable_drefs": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Frame `index` of the `count` that are taken from `video`, the bytes or path of a file."""

    video: bytes | Path
    index: int
    count: int

    def decode(
        self, decoded: dict[int, list[DecodedImage]], limits: ImageLimits, where: str
    ) -> DecodedImage:
        """The frame; all frames of its video are decoded once and kept in `decoded`."""
        key = id(self.video)
        if key not in decoded:
            data = self.video if isinstance(self.video, bytes) else _read(self.video, limits, where)
            decoded[key] = sample(data, self.count, limits, where)
        return decoded[key][self.index]


def sample(data: bytes, count: int, limits: ImageLimits, where: str) -> list[DecodedImage]:
    """`count` frames of the video in an encoded file's bytes, evenly spread, the first and the last
    among them (`even_frames`). `limits`: bytes of the file, pixels of one frame. Raises `Refused`,
    with the numbers: too long in bytes, frames, seconds or pixels; a container or codec that is not
    accepted; a file that is empty, cut off, or does not decode to the end."""
    if len(data) > limits.max_bytes:
        saw, rule = f"a video of {len(data)} bytes", f"at most {limits.max_bytes} bytes"
        raise _refuse(where, saw, rule, "cut or compress it", "video_too_large")
    av = _pyav(where)
    with _opened(av, data, where) as container:
        num_frames = _count(av, container, limits, where, len(data))
        width, height = container.streams.video[0].width, container.streams.video[0].height
    wanted = even_frames(num_frames, count)
    if len(set(wanted)) * width * height > MAX_KEPT_PIXELS:
        raise _refuse(
            where,
            f"{len(set(wanted))} frames of {width} x {height} pixels",
            f"the frames taken have at most {MAX_KEPT_PIXELS} pixels together",
            "scale the video down, or take fewer frames",
            "video_too_large",
        )
    with _opened(av, data, where) as container:
        kept = _decode(av, container, set(wanted), limits, where)
    if max(wanted) not in kept:
        last = max(kept, default=-1) + 1
        saw = f"{num_frames} frames by the file, of which frame {max(wanted)} does not decode"
        raise _broken(where, f"{saw} (the last that does is {last - 1})")
    return [kept[i] for i in wanted]


def _pyav(where: str) -> Any:
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _refuse(
            where,
            "a video, and PyAV is not installed",
            "videos need the extra 'video'",
            "pip install 'vitrail[video]', or send pictures",
            "no_video_decoder",
        ) from error
    return av


def _read(path: Path, limits: ImageLimits, where: str) -> bytes:
    """A local file, for the offline API."""
    try:
        with open(path, "rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        saw = f"{str(path)!r} cannot be read ({error})"
        raise _refuse(where, saw, "a path names a readable file", "check the path") from error


@contextmanager
def _opened(av: Any, data: bytes, where: str) -> Iterator[Any]:
    """The container with one video stream of an accepted codec."""
    name = next((n for at, magic, n in _CONTAINERS if data.startswith(magic, at)), None)
    if name is None:
        saw = f"{len(data)} bytes, starting {data[:12].hex() or 'with nothing'}"
        rule = f"{ACCEPTED}, told by content"
        raise _refuse(where, saw, rule, "convert it to MP4", "unsupported_video")
    if name == "matroska" and _segment_end(data) > len(data):
        saw = f"{len(data)} bytes of a file that says it has {_segment_end(data)}"
        raise _broken(where, saw)
    try:
        container = av.open(io.BytesIO(data), format=name, options=dict(_OPTIONS))
    except _errors(av) as error:
        saw = f"a {name} file of {len(data)} bytes whose header is broken ({_said(error)})"
        raise _broken(where, saw) from error
    with container:
        if not container.streams.video:
            raise _broken(where, f"a {name} file of {len(data)} bytes without a video stream")
        codec = container.streams.video[0].codec_context
        if codec is None or codec.name not in _CODECS:
            saw = f"a video of codec {None if codec is None else codec.name!r}"
            rule = f"one of {', '.join(_CODECS)}"
            raise _refuse(where, saw, rule, "convert it to H.264", "unsupported_video")
        yield container


def _segment_end(data: bytes) -> int:
    """Where a Matroska file's segment ends by its header; 0 where it does not say. Its reader takes
    a file that ends before that for whole."""
    at = data.find(b"\x18\x53\x80\x67", 0, 4096) + 4
    if at < 4 or at >= len(data) or not data[at]:
        return 0
    width = 9 - data[at].bit_length()
    size = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return 0 if size == (1 << 7 * width) - 1 else at + width + size


def _count(av: Any, container: Any, limits: ImageLimits, where: str, num_bytes: int) -> int:
    """Frames of the first video stream, by its packets. A file that ends before its header says is
    refused."""
    stream = container.streams.video[0]
    _check_size(stream.width, stream.height, limits, where)
    declared = None if container.duration is None else container.duration / av.time_base
    if declared is not None and declared > MAX_SECONDS:
        saw, rule = f"a video of {declared:.0f} seconds", f"at most {MAX_SECONDS} seconds"
        raise _refuse(where, saw, rule, "cut it", "video_too_large")
    frames, end, shown = 0, 0.0, stream.frames
    _check_frames(shown, where)
    try:
        for packet in container.demux():
            if packet.size and packet.stream is stream:
                frames += 1
                _check_frames(frames, where)
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    except _errors(av) as error:
        saw = f"{num_bytes} bytes that end or break after {frames} frames ({_said(error)})"
        raise _broken(where, saw) from error
    start = 0.0 if container.start_time is None else container.start_time / av.time_base
    short = declared is not None and end - start < declared - max(0.5, 0.02 * declared)
    if not frames or frames < shown or short:
        says = f"{shown} frames" if shown else f"{declared or 0:.1f} seconds"
        has = f"{frames} frames, {max(0.0, end - start):.1f} seconds"
        raise _broken(where, f"{num_bytes} bytes that hold {has} of {says}")
    return frames


def _decode(
    av: Any, container: Any, wanted: set[int], limits: ImageLimits, where: str
) -> dict[int, DecodedImage]:
    """The wanted frames that can be decoded, by index."""
    stream = container.streams.video[0]
    stream.thread_type = "NONE"
    stream.codec_context.options = {"max_pixels": str(min(limits.max_pixels, MAX_FRAME_PIXELS))}
    kept: dict[int, DecodedImage] = {}
    last = max(wanted)
    try:
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                _check_size(frame.width, frame.height, limits, where)
                kept[index] = from_array(_upright(frame), limits, where)
            if index == last:
                break
    except _errors(av) as error:
        saw = f"frames that decode up to {max(kept, default=-1)} of {last} ({_said(error)})"
        raise _broken(where, saw) from error
    return kept


def _upright(frame: Any) -> np.ndarray:
    """RGB, turned as the file's display matrix says."""
    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90) % 4))


def _errors(av: Any) -> tuple[type[Exception], ...]:
    """What PyAV raises for bytes that it cannot read."""
    return (av.FFmpegError, OSError, ValueError, EOFError, MemoryError)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _check_frames(frames: int, where: str) -> None:
    if frames > MAX_FRAMES:
        saw, rule = f"at least {frames} frames", f"at most {MAX_FRAMES} frames"
        raise _refuse(where, saw, rule, "cut the video, or lower its rate", "video_too_large")


def _check_size(width: int, height: int, limits: ImageLimits, where: str) -> None:
    most = min(limits.max_pixels, MAX_FRAME_PIXELS)
    if width * height > most:
        saw = f"frames of {width} x {height} = {width * height} pixels"
        rule = f"at most {most} pixels"
        raise _refuse(where, saw, rule, "scale the video down", "video_too_large")


def _broken(where: str, saw: str) -> Refused:
    rule = "a video is whole and decodes to its last frame"
    return _refuse(where, saw, rule, "send the whole file, or encode it again", "broken_video")


def _refuse(where: str, saw: str, rule: str, change: str, code: str = "invalid_value") -> Refused:
    return Refused(Finding(where=where, saw=saw, rule=rule, change=change, code=code))
