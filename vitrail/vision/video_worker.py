"""The process that decodes one video, run as a script by `video_process`: PyAV and FFmpeg live here
alone, so that what a file makes them take or break ends with the process. Imports no module of
this package, no numpy and no torch.

    argv: fd of the file, FFmpeg's reader, its options, and limits as JSON
    stdout: one line of JSON a message; after a `frame`, its bytes: rgb24 rows of `stride` bytes
    stdin: a line of the frames' indices that are wanted, as JSON, after `counted` and `ended`;
        nothing more ends the process

Messages, by `kind`: `opened` (the container and its first video stream), `counted` (packets),
`frame`, `ended` (every frame that is wanted was sent, or the stream ended without an error after
`frames` of them), `failed` (`stage`, and what FFmpeg said), `fault` (of ours)."""

import importlib
import json
import os
import resource
import sys
from typing import Any

GRACE_SECONDS = 2  # of CPU, so that the parent's clock comes first


def main() -> None:
    """Everything from the process's arguments; returns when the parent wants nothing more."""
    task = json.loads(sys.argv[1])
    _bound(task["memory_bytes"], task["seconds"])
    av: Any = importlib.import_module("av")  # under the bounds

    # What PyAV raises for bytes that it cannot read.
    errors = (av.FFmpegError, OSError, ValueError, EOFError, MemoryError)
    stage, file = "open", os.fdopen(task["fd"], "rb")
    try:
        with _opened(av, file, task) as container:
            if not _describe(av, container):
                return
            stage = "count"
            _tell(kind="counted", **_count(container, task["max_frames"]))
        while wanted := _wanted():
            stage = "decode"
            with _opened(av, file, task) as container:
                frames = _decode(container, set(wanted), task["max_pixels"], errors)
            _tell(kind="ended", frames=frames)
    except errors as error:
        said = " ".join(str(error).split())[:120] or type(error).__name__
        _tell(kind="failed", stage=stage, said=said)


def _bound(memory_bytes: int, seconds: float) -> None:
    """Bounds that the kernel keeps: address space, CPU time, no file written, no core dumped."""
    cpu = int(seconds) + GRACE_SECONDS
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _opened(av: Any, file: Any, task: dict[str, Any]) -> Any:
    file.seek(0)
    return av.open(file, format=task["reader"], options=dict(task["options"]))


def _describe(av: Any, container: Any) -> bool:
    """Tell what the header says; whether there is a video stream that some decoder takes."""
    streams = container.streams.video
    codec = streams[0].codec_context if streams else None
    _tell(
        kind="opened",
        streams=len(streams),
        codec=None if codec is None else codec.codec.canonical_name,
        width=streams[0].width if codec else 0,
        height=streams[0].height if codec else 0,
        frames=streams[0].frames if streams else 0,
        seconds=_seconds(container.duration, av.time_base),
        start=_seconds(container.start_time, av.time_base) or 0.0,
    )
    return codec is not None


def _seconds(value: int | None, base: int) -> float | None:
    return None if value is None else value / base


def _count(container: Any, max_frames: int) -> dict[str, Any]:
    """Packets of the first video stream that are shown, up to one more than `max_frames`; whether
    one was cut off or, by the index of an MP4, is missing; where the last packet of any stream
    ends, in seconds. A packet that an edit list leaves out is decoded for the sake of others and
    never shown."""
    stream = container.streams.video[0]
    frames, hidden, end, is_cut = 0, 0, 0.0, False
    for packet in container.demux():
        if packet.size and packet.stream is stream:
            frames += not packet.is_discard
            hidden += packet.is_discard
            is_cut = is_cut or packet.is_corrupt
            if frames > max_frames:
                return {"frames": frames, "end": end, "is_cut": False}
        if packet.pts is not None and packet.time_base is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    if container.format.name.startswith("mov"):
        is_cut = is_cut or frames + hidden < sum(e.size > 0 for e in stream.index_entries)
    return {"frames": frames, "end": end, "is_cut": is_cut}


def _wanted() -> list[int]:
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else []


def _decode(
    container: Any, wanted: set[int], max_pixels: int, errors: tuple[type[Exception], ...]
) -> int:
    """Send the wanted frames, one thread; returns how many were decoded when the last wanted one
    was sent or the stream ended. A stream may start off a keyframe: what does not decode before the
    first frame is passed over."""
    stream = container.streams.video[0]
    context = stream.codec_context
    context.thread_type, context.thread_count = "NONE", 1
    context.options = {"max_pixels": str(max_pixels)}
    index, last = 0, max(wanted)
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except errors:
            if index or packet.is_keyframe:
                raise
            continue
        for frame in frames:
            if index in wanted:
                _send(index, frame)
            index += 1
            if index > last:
                return index
    return index


def _send(index: int, frame: Any) -> None:
    matrix = next((s for s in frame.side_data if s.type.name == "DISPLAYMATRIX"), None)
    turn = None if matrix is None else memoryview(bytes(matrix)).cast("i").tolist()
    (plane,) = frame.reformat(format="rgb24").planes
    stride = plane.line_size
    _tell(
        kind="frame",
        index=index,
        width=frame.width,
        height=frame.height,
        stride=stride,
        matrix=turn,
    )
    sys.stdout.buffer.write(memoryview(plane)[: stride * frame.height])
    sys.stdout.buffer.flush()


def _tell(**message: Any) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # nobody listens
        os._exit(1)
    # A process's entry: a fault of ours reaches the parent's log.
    except Exception as fault:  # noqa: BLE001
        _tell(kind="fault", said=f"{type(fault).__name__}: {fault}"[:400])
