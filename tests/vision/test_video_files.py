"""Files as encoders, editors and phones write them: every codec, cuts off keyframes, edit lists,
turned and mirrored tracks, files that do not say how long they are."""

import importlib
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vision.test_video import LIMITS, encoded, numbers, refusal, sample
from vitrail.vision import video
from vitrail.vision.video import VideoRoom, upright
from vitrail.vision.video_container import promised_bytes, reader_of

av: Any = importlib.import_module("av")
CODECS = [
    ("h264", "libx264", "mp4"),
    ("hevc", "libx265", "mp4"),
    ("vp8", "libvpx", "webm"),
    ("vp9", "libvpx-vp9", "webm"),
    ("av1", "libsvtav1", "mp4"),
    ("mpeg4", "mpeg4", "mp4"),
    ("mjpeg", "mjpeg", "mov"),
]


def with_encoder(name: str) -> None:
    try:
        av.codec.Codec(name, "w")
    except ValueError:
        pytest.skip(f"this PyAV cannot encode with {name}")


@pytest.mark.parametrize(("codec", "encoder", "kind"), CODECS)
def test_every_accepted_codec_is_decoded(codec: str, encoder: str, kind: str) -> None:
    with_encoder(encoder)
    data = encoded(20, kind, encoder)
    with av.open(io.BytesIO(data)) as container:
        context = container.streams.video[0].codec_context
        assert context is not None
        assert context.codec.canonical_name == codec
    assert numbers(sample(data, 8, LIMITS, "video")) == [0, 3, 5, 8, 11, 14, 16, 19]


def recut(
    data: bytes, keep: Callable[[int, Any], bool], kind: str = "mp4", shift: int = 0
) -> bytes:
    """The packets of `data` that are kept, copied; times moved by `shift` ticks."""
    out = io.BytesIO()
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(out, "w", format=kind) as target,
    ):
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        for i, packet in enumerate(source.demux(stream)):
            if packet.size and keep(i, packet):
                packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                packet.stream = copied
                target.mux(packet)
    return out.getvalue()


def h264(count: int, params: str) -> bytes:
    with_encoder("libx264")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream(
            "libx264", rate=10, options={"x264-params": params, "qp": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(count):
            pixels = np.full((48, 64, 3), 7 * i + 20, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def test_an_edit_list_hides_the_frames_before_it() -> None:
    """What `-ss 0.6 -c copy` writes: all packets from the keyframe on, and an edit list that starts
    six frames later; those six are decoded and never shown."""
    whole = h264(20, "keyint=30:bframes=0:scenecut=0")
    with av.open(io.BytesIO(whole)) as source:
        base = source.streams.video[0].time_base
        assert base is not None
        shift = -round(0.6 / base)
    cut = recut(whole, lambda i, p: True, shift=shift)
    assert b"elst" in cut
    assert numbers(sample(cut, 3, LIMITS, "video")) == [6, 12, 19]


def test_a_cut_off_a_keyframe_shows_what_decodes() -> None:
    """Frames 10 to 14 need those before 10; from the next keyframe on everything decodes."""
    whole = h264(30, "keyint=15:min-keyint=15:bframes=0:scenecut=0")
    cut = recut(whole, lambda i, p: i >= 10, "matroska")
    shown = numbers(sample(cut, 4, LIMITS, "video"))
    assert shown[-1] == 29
    assert 10 <= shown[0] <= 15
    assert shown == sorted(set(shown))


def test_an_open_gop_cut_at_its_i_frame_shows_what_decodes() -> None:
    """The pictures shown before the first I frame need those of the group that was cut off."""
    whole = h264(30, "keyint=10:min-keyint=10:bframes=3:b-adapt=0:open-gop=1:scenecut=0")
    with av.open(io.BytesIO(whole)) as source:
        frames = list(source.decode(source.streams.video[0]))
    second = [i for i, f in enumerate(frames) if f.pict_type == av.video.frame.PictureType.I][1]
    start = frames[second].pts
    seen = False

    def from_second(i: int, packet: Any) -> bool:
        nonlocal seen
        seen = seen or packet.pts == start
        return seen

    cut = recut(whole, from_second, "matroska")
    shown = numbers(sample(cut, 4, LIMITS, "video"))
    assert shown[-1] == 29
    assert second - 3 <= shown[0] <= second


def test_vp8_pictures_that_are_never_shown_are_no_frames() -> None:
    """Its alternate references are packets of their own, with the bit `show_frame` unset (RFC
    6386, 9.1). Here they are 8 and 12, so the tenth of those that are shown is 9."""
    with_encoder("libvpx")
    out = io.BytesIO()
    with (
        av.open(io.BytesIO(encoded(20, "webm", "libvpx"))) as source,
        av.open(out, "w", format="webm") as target,
    ):
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        for i, packet in enumerate(p for p in source.demux(stream) if p.size):
            data = bytes(packet)
            hidden = av.Packet(bytes([data[0] & ~0x10]) + data[1:]) if i in (8, 12) else packet
            hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
            hidden.stream = copied
            target.mux(hidden)
    room = VideoRoom()
    got = video.sample(out.getvalue(), 3, LIMITS, "video", room, lambda frame: frame)
    assert numbers(got) == [0, 9, 19]
    paid = video.MAX_REQUEST_PIXELS - room.pixels
    assert paid == 3 * 64 * 48, "frames that were taken in vain are not paid"


# No list of all frames in front, no duration, no sizes of what is still to come.
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
LIVE = {"live": "1", "cluster_time_limit": "300"}
CORNERS = np.array([[10, 70], [130, 190]], np.uint8)  # upper left, upper right, lower ...


def cornered(matrix: tuple[int, int, int, int]) -> bytes:
    """A video whose quarters are `CORNERS`, with a display matrix a b c d."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuvj420p"
        grey = CORNERS.repeat(16, 0).repeat(32, 1)
        frame = av.VideoFrame.from_ndarray(np.stack([grey] * 3, 2), format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    data = bytearray(out.getvalue())
    one = 1 << 16
    at = data.index(struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    a, b, c, d = (each * one for each in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(data)


@pytest.mark.parametrize(
    ("matrix", "seen"),
    [
        ((1, 0, 0, 1), CORNERS),
        ((0, 1, -1, 0), np.rot90(CORNERS, -1)),  # 90 degrees clockwise: a phone held upright
        ((-1, 0, 0, -1), np.rot90(CORNERS, 2)),
        ((0, -1, 1, 0), np.rot90(CORNERS, 1)),
        ((-1, 0, 0, 1), CORNERS[:, ::-1]),  # a selfie
        ((1, 0, 0, -1), CORNERS[::-1]),
        ((0, 1, 1, 0), CORNERS.T),
        ((0, -1, -1, 0), CORNERS.T[::-1, ::-1]),
    ],
)
def test_turns_and_mirrors_are_applied(matrix: tuple[int, int, int, int], seen: np.ndarray) -> None:
    (frame,) = sample(cornered(matrix), 1, LIMITS, "video")
    height, width, _ = frame.pixels.shape
    got = frame.pixels[height // 4 :: height // 2, width // 4 :: width // 2, 0]
    assert np.abs(got.astype(int) - seen).max() < 8
    assert (height, width) == ((32, 64) if matrix[0] else (64, 32))


def test_any_other_matrix_is_refused() -> None:
    code, saw = refusal(cornered((1, 1, -1, 1)))
    assert code == "unsupported_video"
    assert "display matrix [65536, 65536, 0, -65536, 65536" in saw
    assert upright(np.zeros((2, 2, 3)), [0] * 9) is None


@pytest.mark.parametrize("kind", [b"wide", b"free", b"skip"])
def test_quicktime_files_may_start_with_room(kind: bytes) -> None:
    data = struct.pack(">I4s", 16, kind) + bytes(8)
    with_room = data + encoded(20, "mov", "mjpeg", options=FRAGMENTED)
    assert numbers(sample(with_room, 2, LIMITS, "video")) == [0, 19]


@pytest.mark.parametrize(
    ("kind", "codec", "options"), [("mp4", "mjpeg", FRAGMENTED), ("matroska", "mjpeg", LIVE)]
)
def test_a11_files_without_a_length_are_refused_where_cut_inside(
    kind: str, codec: str, options: dict[str, str]
) -> None:
    """And only there: between two of their elements, they are whole files."""
    whole = encoded(30, kind, codec, options=options)
    assert numbers(sample(whole, 2, LIMITS, "video")) == [0, 29]
    reader = reader_of(whole)
    assert reader is not None
    assert promised_bytes(whole, reader) == len(whole)
    cuts = range(len(whole) // 3, len(whole), len(whole) // 9)
    inside = [c for c in cuts if promised_bytes(whole[:c], reader) > c]
    assert len(inside) >= len(cuts) - 1
    for cut in inside:
        code, saw = refusal(whole[:cut])
        assert code == "broken_video"
        assert f"{cut} bytes of a file that says it has" in saw


def test_a11_an_index_in_front_tells_what_is_missing(tmp_path: Path) -> None:
    """The samples' box may say that it goes on to the end, wherever that is: each cut is seen, also
    one between two samples, within the time that is left to rounding."""
    path = tmp_path / "a.mp4"
    path.write_bytes(encoded(30, "mp4", "mjpeg", rate=100))
    with (
        av.open(path) as source,
        av.open(tmp_path / "b.mp4", "w", options={"movflags": "faststart"}) as target,
    ):
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        sizes = []
        for packet in source.demux(stream):
            if packet.size:
                sizes.append(packet.size)
                packet.stream = copied
                target.mux(packet)
    data = bytearray((tmp_path / "b.mp4").read_bytes())
    at = data.index(b"mdat")
    assert data.index(b"moov") < at
    data[at - 4 : at] = bytes(4)
    assert numbers(sample(bytes(data), 2, LIMITS, "video")) == [0, 29]
    for cut in (1, sizes[-1] - 1, sizes[-1], sizes[-1] + 1, sum(sizes[-5:])):
        code, saw = refusal(bytes(data[:-cut]))
        assert code == "broken_video", cut
        assert saw.startswith(f"{len(data) - cut} bytes that hold")
