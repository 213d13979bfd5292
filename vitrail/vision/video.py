"""Whatever a client calls a video -> evenly sampled upright pictures. Decoded with PyAV (the extra
`video`), in a process of its own (`video_process`, `video_worker`).

Two passes: packets are counted without decoding, then frames are decoded in order up to the last
one that is wanted, by one thread, and the wanted ones alone come here, one after the other:

    bytes -> container by content -> process: header -> count packets -> decode -> `take` a frame

Where fewer frames decode than packets say, and nothing is broken (a cut off a keyframe, pictures
that are never shown), the frames are spread over those that do, in a further pass.

What one video may take: `MEMORY_BYTES` of address space beside its own bytes, `MAX_SECONDS_EACH`
of waiting and of CPU, whatever its header says; what all videos of a request may take is in
`VideoRoom`. Frames are decoded from the start, without seeking: one CPU core's time for all frames
up to the last is what bounds a video's length, often before `MAX_FRAMES` and `MAX_SECONDS` do.

A file that was cut off is refused where that can be known: by the sizes of its boxes, elements or
chunks, by an MP4's index, by its duration, by a packet that ends early. It cannot be known of a
fragmented MP4 or a live WebM that was cut exactly between two fragments or elements, if it gives no
duration.

Nothing but the given bytes is read: the container's reader is chosen here and may open no other
file or address. Knows nothing of models. Every failure is `Refused`."""

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitrail.config.finding import Refused
from vitrail.vision.image import DecodedImage, ImageLimits, from_array
from vitrail.vision.preprocess import even_frames
from vitrail.vision.video_container import promised_bytes, reader_of
from vitrail.vision.video_process import Bounds, Ended, Gone, Process, TimedOut

MAX_SECONDS = 1200
MAX_FRAMES = 36_000  # decoded for one video: 20 minutes at 30 a second
MAX_FRAME_PIXELS = 8192 * 4352
MAX_REQUEST_PIXELS = 512_000_000
MAX_SECONDS_EACH = 20.0
MAX_REQUEST_SECONDS = 60.0
# Of one process; a server runs up to --image-workers of them. An 8-bit frame of the most pixels is
# 53 MB; a decoder holds up to 17, and one goes out as RGB.
MEMORY_BYTES = 2 << 30

# By FFmpeg's canonical names: a decoder's own may differ (libdav1d).
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
ACCEPTED = "MP4, MOV, WebM, Matroska or AVI"
# No reader may go beyond the bytes it was given.
_OPTIONS = {"protocol_whitelist": "none", "enable_drefs": "0"}

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class VideoRoom:
    """What the videos of one request have left, all together: pixels of the frames that are taken,
    seconds of waiting for decoders. `gone` is set by whoever asked when they leave."""

    gone: threading.Event = field(default_factory=threading.Event)
    pixels: int = field(default_factory=lambda: MAX_REQUEST_PIXELS)
    seconds: float = field(default_factory=lambda: MAX_REQUEST_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Frame `index` of the `count` that are taken from `video`, the bytes or path of a file."""

    video: bytes | Path
    index: int
    count: int

    def all(
        self, limits: ImageLimits, where: str, room: VideoRoom, take: Callable[[DecodedImage], T]
    ) -> list[T]:
        """`sample` of this frame's video: this one is at `index`."""
        data = self.video if isinstance(self.video, bytes) else _read(self.video, limits, where)
        return sample(data, self.count, limits, where, room, take)


def sample(
    data: bytes,
    count: int,
    limits: ImageLimits,
    where: str,
    room: VideoRoom,
    take: Callable[[DecodedImage], T],
) -> list[T]:
    """What `take` makes of `count` frames of the video in an encoded file's bytes, evenly spread,
    the first and the last among them (`even_frames`). It is called once for a frame, which is
    dropped before the next one comes. `limits`: bytes of the file, pixels of one frame. Raises
    `Refused`, with the numbers: too long in bytes, frames, seconds, pixels or time to decode; a
    container or codec that is not accepted; a file that is empty, cut off, or does not decode."""
    if len(data) > limits.max_bytes:
        saw, rule = f"a video of {len(data)} bytes", f"at most {limits.max_bytes} bytes"
        raise Refused.because(where, saw, rule, "cut or compress it", "video_too_large")
    reader = reader_of(data)
    if reader is None:
        saw = f"{len(data)} bytes, starting {data[:12].hex() or 'with nothing'}"
        rule = f"{ACCEPTED}, told by content"
        raise Refused.because(where, saw, rule, "convert it to MP4", "unsupported_video")
    if promised_bytes(data, reader) > len(data):
        saw = f"{len(data)} bytes of a file that says it has {promised_bytes(data, reader)}"
        raise _broken(where, saw)
    if importlib.util.find_spec("av") is None:
        saw, change = "a video, and PyAV is not installed", "pip install 'vitrail[video]'"
        rule = "videos need the extra 'video'"
        raise Refused.because(where, saw, rule, f"{change}, or send pictures", "no_video_decoder")
    bounds = Bounds(
        memory_bytes=MEMORY_BYTES + len(data),
        seconds=min(MAX_SECONDS_EACH, room.seconds),
        max_frames=MAX_FRAMES,
        max_pixels=min(limits.max_pixels, MAX_FRAME_PIXELS),
    )
    with Process(data, reader, _OPTIONS, bounds, room.gone) as process:
        video = _Video(process, bounds, where, len(data))
        try:
            return video.frames(count, limits, room, take)
        except TimedOut as error:
            raise _slow(where, bounds) from error
        except Ended as error:
            raise _broken(where, f"{len(data)} bytes whose decoder ended with {error}") from error
        except Gone as error:
            saw = "a client that has left"
            raise Refused.because(
                where, saw, "a request is waited for", "ask again", "cancelled"
            ) from error
        finally:
            room.seconds -= process.waited


def _read(path: Path, limits: ImageLimits, where: str) -> bytes:
    """A local file, for the offline API."""
    try:
        with open(path, "rb") as file:
            return file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        saw = f"{str(path)!r} cannot be read ({error})"
        raise Refused.because(
            where, saw, "a path names a readable file", "check the path"
        ) from error


@dataclass(slots=True)
class _Video:
    """What a process says of one video, held against the limits."""

    process: Process
    bounds: Bounds
    where: str
    num_bytes: int

    def frames(
        self,
        count: int,
        limits: ImageLimits,
        room: VideoRoom,
        take: Callable[[DecodedImage], T],
    ) -> list[T]:
        """As `sample`."""
        header = self._said("opened")
        self._check_header(header)
        num_frames, paid = self._count(header), room.pixels
        while True:
            room.pixels = paid
            wanted = even_frames(num_frames, count)
            self._check_room(len(set(wanted)), header["width"], header["height"], room)
            self.process.want(sorted(set(wanted)))
            taken: dict[int, T] = {}
            while (told := self._said("frame", "ended"))["kind"] == "frame":
                pixels = self._pixels(told, room)
                taken[told["index"]] = take(from_array(pixels, limits, self.where))
            if taken.keys() >= set(wanted):
                return [taken[i] for i in wanted]
            if not 0 < told["frames"] < num_frames:
                saw = f"{self.num_bytes} bytes of {num_frames} frames, of which"
                raise _broken(self.where, f"{saw} {told['frames']} decode")
            num_frames = told["frames"]

    def _said(self, *kinds: str) -> dict[str, Any]:
        """The next message, of one of these kinds; `Refused` for what FFmpeg could not read."""
        told = self.process.message()
        if told["kind"] == "failed":
            stages = {
                "open": "whose header is broken",
                "count": "that end or break before the last frame",
                "decode": "of which a frame does not decode",
            }
            saw = f"{self.num_bytes} bytes {stages[told['stage']]} ({told['said']})"
            raise _broken(self.where, saw)
        if told["kind"] not in kinds:
            raise RuntimeError(f"the video process said {told} where {kinds} was due")
        return told

    def _check_header(self, header: dict[str, Any]) -> None:
        if not header["streams"]:
            raise _broken(self.where, f"a file of {self.num_bytes} bytes without a video stream")
        if header["codec"] not in _CODECS:
            saw, rule = f"a video of codec {header['codec']!r}", f"one of {', '.join(_CODECS)}"
            raise Refused.because(self.where, saw, rule, "convert it to H.264", "unsupported_video")
        self._check_size(header["width"], header["height"])
        seconds = header["seconds"]
        if seconds is not None and seconds > MAX_SECONDS:
            saw, rule = f"a video of {seconds:.0f} seconds", f"at most {MAX_SECONDS} seconds"
            raise Refused.because(self.where, saw, rule, "cut it", "video_too_large")
        self._check_frames(header["frames"])

    def _count(self, header: dict[str, Any]) -> int:
        """Frames by their packets. A file that ends before its header says is refused."""
        counted = self._said("counted")
        frames, seconds = counted["frames"], header["seconds"]
        self._check_frames(frames)
        # A Matroska file's duration counts from 0, whenever its first frame comes.
        start = 0.0 if self.process.reader == "matroska" else header["start"]
        shown = max(0.0, counted["end"] - start)
        short = seconds is not None and shown < seconds - max(0.5, 0.02 * seconds)
        if not frames or short or counted["is_cut"]:
            cut = ", others cut off" if counted["is_cut"] else ""
            has = f"{frames} frames{cut}, {shown:.1f} seconds of {seconds or 0:.1f}"
            raise _broken(self.where, f"{self.num_bytes} bytes that hold {has}")
        return frames

    def _pixels(self, told: dict[str, Any], room: VideoRoom) -> np.ndarray:
        """A frame as it was sent -> RGB [height, width, 3], upright; it is paid from `room`, which
        a later frame may find too small: a stream may change its size."""
        width, height, stride = told["width"], told["height"], told["stride"]
        self._check_size(width, height)
        self._check_room(1, width, height, room)
        room.pixels -= width * height
        assert 3 * width <= stride <= 3 * width + 4096, "rows are padded for vector registers only"
        rows = np.frombuffer(self.process.payload(stride * height), np.uint8)
        pixels = rows.reshape(height, stride)[:, : 3 * width].reshape(height, width, 3)
        turned = upright(pixels, told["matrix"])
        if turned is None:
            saw = f"frames with the display matrix {told['matrix']}"
            rule = "a display matrix turns by quarters, and mirrors"
            raise Refused.because(self.where, saw, rule, "encode it upright", "unsupported_video")
        return turned

    def _check_room(self, num_frames: int, width: int, height: int, room: VideoRoom) -> None:
        if num_frames * width * height > room.pixels:
            before = MAX_REQUEST_PIXELS - room.pixels
            saw = (
                f"{num_frames} frames of {width} x {height} pixels after {before} pixels of others"
            )
            rule = f"the frames of a request have at most {MAX_REQUEST_PIXELS} pixels together"
            change = "scale the videos down, or send fewer"
            raise Refused.because(self.where, saw, rule, change, "video_too_large")

    def _check_frames(self, frames: int) -> None:
        if frames > MAX_FRAMES:
            saw, rule = f"at least {frames} frames", f"at most {MAX_FRAMES} frames"
            change = "cut the video, or lower its rate"
            raise Refused.because(self.where, saw, rule, change, "video_too_large")

    def _check_size(self, width: int, height: int) -> None:
        most = self.bounds.max_pixels
        if width * height > most:
            saw = f"frames of {width} x {height} = {width * height} pixels"
            rule = f"at most {most} pixels"
            raise Refused.because(self.where, saw, rule, "scale the video down", "video_too_large")


def upright(pixels: np.ndarray, matrix: list[int] | None) -> np.ndarray | None:
    """`pixels` [height, width, any] as a display matrix shows them: nine fixed-point numbers by
    rows, of which the upper left four map (x, y) to (x, y) @ [[a, b], [c, d]] with y downwards
    (ISO/IEC 14496-12, 6.2.2). Their signs alone count. None for any other turn or shear."""
    if matrix is None:
        return pixels
    a, b, _, c, d = matrix[:5]
    if a and d and not b and not c:
        across, down = a, d
    elif b and c and not a and not d:
        pixels, across, down = pixels.swapaxes(0, 1), c, b
    else:
        return None
    return pixels[:: 1 if down > 0 else -1, :: 1 if across > 0 else -1]


def _slow(where: str, bounds: Bounds) -> Refused:
    saw = f"a video that is not decoded after {bounds.seconds:.3g} seconds"
    rule = f"at most {MAX_SECONDS_EACH:g} seconds a video, {MAX_REQUEST_SECONDS:g} a request"
    return Refused.because(
        where, saw, rule, "cut it, scale it down or lower its rate", "video_too_slow"
    )


def _broken(where: str, saw: str) -> Refused:
    rule = "a video is whole and decodes to its last frame"
    return Refused.because(
        where, saw, rule, "send the whole file, or encode it again", "broken_video"
    )
