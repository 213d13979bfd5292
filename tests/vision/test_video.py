"""Videos: which frames are taken, every way a file can be wrong, and what one costs."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from vitrail.config.finding import Refused
from vitrail.vision import video
from vitrail.vision.image import DecodedImage, ImageLimits
from vitrail.vision.preprocess import even_frames
from vitrail.vision.video import Frame, VideoRoom

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)
STEP = 7


def sample(data: bytes, count: int, limits: ImageLimits, where: str) -> list[DecodedImage]:
    """The frames themselves, for a request with nothing else."""
    return video.sample(data, count, limits, where, VideoRoom(), lambda frame: frame)


def encoded(
    count: int = 20,
    kind: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (64, 48),
    rate: int = 10,
    options: dict[str, str] | None = None,
) -> bytes:
    """A file whose frame i is grey of STEP i + 20, modulo 256."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind, options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 0 if codec == "libsvtav1" else 400_000
        for i in range(count):
            pixels = np.full((size[1], size[0], 3), (STEP * i + 20) % 256, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def slow(count: int) -> bytes:
    """4096 x 4096 pixels that never change: few bytes, and a copy of 25 MB for each frame."""
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as container:
        stream: Any = container.add_stream("mpeg4", rate=100)
        stream.width, stream.height, stream.pix_fmt = 4096, 4096, "yuv420p"
        stream.gop_size = 600
        grey = av.VideoFrame.from_ndarray(np.full((4096, 4096, 3), 90, np.uint8), format="rgb24")
        made: list[Any] = []
        for i in range(2):
            grey.pts = i
            made += stream.encode(grey)
        key, same = [*made, *stream.encode()]
        container.mux(key)
        for i in range(1, count):
            packet = av.Packet(bytes(same))
            packet.pts = packet.dts = i
            packet.time_base, packet.stream = stream.time_base, stream
            container.mux(packet)
    return out.getvalue()


def numbers(frames: list[DecodedImage]) -> list[int]:
    """Which frame each picture is, by its grey."""
    return [round((float(f.pixels.mean()) - 20) / STEP) for f in frames]


def refusal(data: bytes, limits: ImageLimits = LIMITS, count: int = 8) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        sample(data, count, limits, "messages[0].content[0].video_url")
    (finding,) = caught.value.findings
    assert finding.where == "messages[0].content[0].video_url"
    return finding.code, finding.saw


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("mov", "mjpeg"), ("matroska", "mpeg4"), ("avi", "mjpeg")]
)
def test_frames_are_spread_evenly_over_every_container(kind: str, codec: str) -> None:
    got = sample(encoded(20, kind, codec), 8, LIMITS, "video")
    assert numbers(got) == [0, 3, 5, 8, 11, 14, 16, 19]
    assert {(f.height, f.width) for f in got} == {(48, 64)}


def test_the_published_indices() -> None:
    """numpy's round of linspace, halves to even; a short video's frames come again."""
    assert even_frames(20, 8) == [0, 3, 5, 8, 11, 14, 16, 19]
    assert even_frames(3, 8) == [0, 0, 1, 1, 1, 1, 2, 2]
    assert even_frames(1, 8) == [0] * 8
    assert even_frames(6, 3) == [0, 2, 5]
    assert even_frames(100, 1) == [0]


def test_a_short_video_and_one_frame() -> None:
    assert numbers(sample(encoded(3), 8, LIMITS, "video")) == [0, 0, 1, 1, 1, 1, 2, 2]
    assert numbers(sample(encoded(1), 2, LIMITS, "video")) == [0, 0]


@pytest.mark.parametrize("data", [b"", b"hello world, this is text", b"\x89PNG" + b"0" * 90])
def test_what_is_no_video_is_refused(data: bytes) -> None:
    code, saw = refusal(data)
    assert code == "unsupported_video"
    assert f"{len(data)} bytes" in saw


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_a11_a_truncated_file_is_refused_with_numbers(kind: str, share: float) -> None:
    """The index at the end is missing, or at the front promises what is not there."""
    whole = encoded(30, kind, size=(160, 128))
    data = whole[: int(len(whole) * share)]
    code, saw = refusal(data)
    assert code == "broken_video"
    assert str(len(data)) in saw


def test_damage_inside_is_refused_or_shown_never_another_error() -> None:
    whole = bytearray(encoded(20))
    for at in range(40, len(whole), max(1, len(whole) // 30)):
        broken = bytes(whole[:at]) + b"\xff" * 8 + bytes(whole[at + 8 :])
        codes = ["broken_video", "unsupported_video"]
        try:
            assert len(sample(broken, 4, LIMITS, "video")) == 4
        except Refused as refused:
            codes.remove(refused.findings[0].code)


def test_f08_limits_are_told_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(20)
    small = ImageLimits(max_bytes=len(data) - 1, max_pixels=1 << 20)
    assert refusal(data, small) == ("video_too_large", f"a video of {len(data)} bytes")
    few = ImageLimits(max_bytes=1 << 20, max_pixels=64 * 48 - 1)
    assert refusal(data, few) == ("video_too_large", "frames of 64 x 48 = 3072 pixels")
    monkeypatch.setattr(video, "MAX_FRAMES", 19)
    assert refusal(data)[1] == "at least 20 frames"
    monkeypatch.setattr(video, "MAX_FRAMES", 100)
    monkeypatch.setattr(video, "MAX_SECONDS", 1)
    assert refusal(data) == ("video_too_large", "a video of 2 seconds")
    monkeypatch.setattr(video, "MAX_SECONDS", 100)
    monkeypatch.setattr(video, "MAX_REQUEST_PIXELS", 8 * 3072 - 1)
    assert refusal(data) == (
        "video_too_large",
        "8 frames of 64 x 48 pixels after 0 pixels of others",
    )


def test_f06_a_reader_opens_nothing_but_the_bytes(tmp_path: Path) -> None:
    """Playlists and scripts, which name other files, are no video here, whatever they are called
    by."""
    secret = tmp_path / "secret.ts"
    secret.write_bytes(encoded(5, "mp4"))
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns={secret}\nm=video 1 RTP/AVP 96\n",
    ):
        assert refusal(text.encode())[0] == "unsupported_video"
        assert refusal(b"\0\0\0\x18ftyp" + text.encode())[0] == "broken_video"


def test_a_codec_that_is_not_listed_is_refused_by_name() -> None:
    code, saw = refusal(encoded(3, "avi", "ffv1"))
    assert code == "unsupported_video"
    assert "ffv1" in saw


def test_an_audio_file_has_no_frames() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    assert refusal(out.getvalue())[1].endswith("without a video stream")


def test_a_path_is_read_and_its_frames_taken_once_each(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(encoded(10))
    frame = Frame(video=path, index=2, count=4)
    taken: list[DecodedImage] = []
    frame.all(LIMITS, "video", VideoRoom(), taken.append)
    assert numbers(taken) == [0, 3, 6, 9]
    gone = Frame(video=tmp_path / "b.mp4", index=0, count=1)
    with pytest.raises(Refused, match="cannot be read"):
        gone.all(LIMITS, "video", VideoRoom(), taken.append)
