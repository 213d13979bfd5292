"""What one video and one request may take: memory, time, pixels; what is left when it ends."""

import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.vision.test_video import LIMITS, encoded, numbers, refusal
from vitrail.config.finding import Finding, Refused
from vitrail.vision import video, video_process
from vitrail.vision.image import DecodedImage
from vitrail.vision.video import VideoRoom


def refused(data: bytes, room: VideoRoom) -> Finding:
    with pytest.raises(Refused) as caught:
        video.sample(data, 8, LIMITS, "video", room, lambda frame: frame)
    (finding,) = caught.value.findings
    return finding


def bomb(samples: int) -> bytes:
    """A small file whose one track says that it has so many samples of one byte each, as one
    chunk."""
    data = bytearray(encoded(3, "mp4", "mjpeg"))
    for box, at, values in (
        (b"stsz", 8, (1, samples)),
        (b"stts", 12, (samples,)),
        (b"stsc", 16, (samples,)),
    ):
        struct.pack_into(f">{len(values)}I", data, data.index(box) + at, *values)
    return bytes(data)


IN_A_FRESH_PROCESS = """
import resource
from tests.vision.test_video_bounds import bomb, refusal, video
video.MEMORY_BYTES = {most}
print(*refusal(bomb(20_000_000)), sep="|")
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""


def test_a_small_file_cannot_make_its_reader_take_gigabytes() -> None:
    """FFmpeg builds an index of all samples when it opens a file: here 640 MB. With less than that
    the frames are refused all the same, and the memory is not taken."""
    assert len(bomb(20_000_000)) < 4096
    most = 400 << 20
    script = IN_A_FRESH_PROCESS.format(most=most)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    said, taken = done.stdout.splitlines()
    assert said.split("|")[0] in ("video_too_large", "broken_video"), done.stderr
    assert int(taken) < most


def test_many_samples_that_fit_are_refused_by_their_number() -> None:
    code, saw = refusal(bomb(1_000_000))
    assert (code, saw) == ("video_too_large", "at least 1000000 frames")


@pytest.mark.alone
def test_time_is_bounded_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what the process takes to start."""
    monkeypatch.setattr(video, "MAX_SECONDS_EACH", 0.01)
    start = time.monotonic()
    code, saw = refusal(encoded(20))
    assert (code, saw) == ("video_too_slow", "a video that is not decoded after 0.01 seconds")
    assert time.monotonic() - start < 1


def test_the_videos_of_a_request_share_its_seconds() -> None:
    room, data = VideoRoom(seconds=30.0), encoded(10)
    video.sample(data, 2, LIMITS, "video", room, numbers_of([]))
    used = 30 - room.seconds
    assert 0.01 < used < 20
    room.seconds = 0.0
    assert refused(data, room).code == "video_too_slow"


def numbers_of(seen: list[int]):
    def take(frame: DecodedImage) -> None:
        seen.extend(numbers([frame]))

    return take


def test_the_videos_of_a_request_share_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_REQUEST_PIXELS", 12 * 64 * 48)
    room, data = VideoRoom(), encoded(20)
    seen: list[int] = []
    video.sample(data, 8, LIMITS, "video", room, numbers_of(seen))
    assert seen == [0, 3, 5, 8, 11, 14, 16, 19]
    finding = refused(data, room)
    assert finding.code == "video_too_large"
    assert finding.saw == "8 frames of 64 x 48 pixels after 24576 pixels of others"
    assert "36864" in finding.rule


def test_a_frame_is_taken_before_the_next_one_is_here() -> None:
    """When one is taken, those before it are gone."""
    pixels: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def take(frame: DecodedImage) -> None:
        pixels.append(weakref.ref(frame.pixels))
        alive.append(sum(each() is not None for each in pixels))

    video.sample(encoded(20), 8, LIMITS, "video", VideoRoom(), take)
    assert alive == [1] * 8


def test_a_client_that_leaves_ends_the_decoding() -> None:
    gone = threading.Event()
    room = VideoRoom(gone=gone)
    threading.Timer(0.02, gone.set).start()
    assert refused(encoded(20), room).code == "cancelled"


@pytest.mark.parametrize(
    ("ends", "said"),
    [("import os; os.kill(os.getpid(), 11)", "signal 11"), ("raise SystemExit(3)", "code 3")],
)
def test_a_decoder_that_crashes_is_a_broken_video(
    ends: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "crashes.py"
    script.write_text(ends)
    monkeypatch.setattr(video_process, "_WORKER", script)
    data = encoded(3)
    assert refusal(data) == ("broken_video", f"{len(data)} bytes whose decoder ended with {said}")


def test_no_process_and_no_descriptor_is_left() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for data in (encoded(20), bomb(1_000_000), encoded(20)[:200], b"\0\0\0\x18ftypnothing"):
        try:
            video.sample(data, 2, LIMITS, "video", VideoRoom(), lambda frame: frame)
        except Refused:
            continue
    assert descriptors() == before
    children = Path("/proc/self/task").glob("*/children")
    left = [pid for each in children for pid in each.read_text().split()]
    assert not [p for p in left if "video_worker" in Path(f"/proc/{p}/cmdline").read_text()]
