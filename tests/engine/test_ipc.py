"""Messages between the two processes: every one survives any cut, arrays arrive as they were and
leave nothing behind, what is no frame is refused."""

import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.engine import ipc
from vitrail.engine.ipc import (
    HEADER,
    LEAST_SHARED,
    MAX_FRAME,
    Abort,
    EngineChannel,
    FrontendCodec,
    Loading,
    Refusal,
    Start,
    Stats,
    Stepped,
    Submit,
    cut_frames,
    frame,
)
from vitrail.engine.request import (
    EngineRequest,
    FinishReason,
    ImageInput,
    Output,
    SamplingParams,
    TokenLogprob,
)

PARAMS = SamplingParams(n=2, stop=("a",), logit_bias={5: -1.0}, seed=2**63 - 1, logprobs=3)
FINDING = Finding(where="a", saw="b", rule="c", change="d")


def request(name: str, *pictures: np.ndarray) -> EngineRequest:
    return EngineRequest(
        id=name,
        prompt_token_ids=[1, 2, 3],
        images=[
            ImageInput(
                identity=bytes(range(32)), offset=i, num_tokens=1, height=2, width=2, patches=p
            )
            for i, p in enumerate(pictures)
        ],
        params=PARAMS,
        max_tokens=7,
        stop_token_ids=frozenset((4, 9)),
        seed=3,
        group="g",
    )


@pytest.fixture
def codec() -> Iterator[FrontendCodec]:
    made = FrontendCodec()
    yield made
    made.close()
    assert not made.folder.exists()


@pytest.fixture
def ends(codec: FrontendCodec) -> Iterator[tuple[socket.socket, EngineChannel]]:
    """The frontend's socket and the engine's channel, started."""
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    config = asdict(EngineConfig(model="m"))
    ours.sendall(codec.encode(Start(config=config, pixels=str(codec.folder))))
    assert channel.start().config == config
    with ours, theirs:
        yield ours, channel


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_survive_any_cut(bodies: list[bytes], data: st.DataObject):
    sent = b"".join(map(frame, bodies))
    buffer, got = bytearray(), []
    at = 0
    while at < len(sent):
        size = data.draw(st.integers(1, 30))
        buffer += sent[at : at + size]
        got += cut_frames(buffer)
        at += size
    assert got == bodies
    assert not buffer


def test_a_length_that_nobody_writes_is_refused():
    with pytest.raises(ValueError, match=str(MAX_FRAME + 1)):
        cut_frames(bytearray(HEADER.pack(MAX_FRAME + 1) + b"x"))


def test_requests_arrive_as_they_were(
    codec: FrontendCodec, ends: tuple[socket.socket, EngineChannel]
):
    ours, channel = ends
    rng = np.random.default_rng(0)
    bytes_picture = rng.integers(0, 256, (4, 12), np.uint8)
    float_picture = rng.standard_normal((4, 12)).astype(np.float32)
    strided = rng.integers(0, 256, (4, 24), np.uint8)[:, ::2]
    sent = request("a", bytes_picture, float_picture, strided)
    staged = codec.stage([sent, request("b")])
    assert [r.images for r in staged.requests] == [[], []]
    ours.sendall(staged.frame + codec.encode(Abort(ids=["x"])))
    submit, abort = receive(channel, 2)
    assert isinstance(submit, Submit)
    got, second = submit.requests
    for mine, theirs in zip(sent.images, got.images, strict=True):
        np.testing.assert_array_equal(mine.patches, theirs.patches)
        assert theirs.patches.dtype == mine.patches.dtype
    plain = msgspec.structs.replace(got, images=[])
    assert plain == staged.requests[0]
    assert second == request("b")
    assert abort == Abort(ids=["x"])
    assert not list(codec.folder.iterdir()), "files go as soon as they are mapped"


def receive(channel: EngineChannel, count: int) -> list[object]:
    got: list[object] = []
    while len(got) < count:
        got += channel.receive(wait=True)
    assert channel.receive(wait=False) == []
    return got


def test_choices_of_one_prompt_share_its_pictures(
    codec: FrontendCodec, ends: tuple[socket.socket, EngineChannel]
):
    ours, channel = ends
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 12)
    staged = codec.stage([request(f"a{i}", pixels) for i in range(4)])
    assert len(staged.files) == 1
    ours.sendall(staged.frame)
    (submit,) = receive(channel, 1)
    assert isinstance(submit, Submit)
    arrays = [r.images[0].patches for r in submit.requests]
    assert len({id(a) for a in arrays}) == 1
    np.testing.assert_array_equal(arrays[0], pixels)


def test_what_is_not_sent_is_discarded(codec: FrontendCodec):
    staged = codec.stage([request("a", np.zeros((4, 12), np.uint8))])
    assert len(list(codec.folder.iterdir())) == 1
    staged.discard()
    staged.discard()
    assert not list(codec.folder.iterdir())


def test_c27_no_room_for_pictures_is_an_overload(codec: FrontendCodec):
    """A full disk, as the kernel tells it: files may not grow beyond a limit."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    small, large = np.zeros((4, 12), np.uint8), np.zeros((4, 1200), np.uint8)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
        with pytest.raises(Refused) as caught:
            codec.stage([request("a", small, large)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.findings[0].code == "overloaded"
    assert not list(codec.folder.iterdir()), "nothing half-written stays"
    assert codec.stage([request("a", small)]).files


def test_the_engine_says(codec: FrontendCodec):
    row = TokenLogprob(token_id=5, logprob=float("-inf"), top=[(5, -0.5), (6, -1.5)])
    output = Output(
        request_id="a",
        token_ids=[5],
        finish_reason=FinishReason.STOP,
        stop_token_id=5,
        logprobs=[row],
        prompt_logprobs=[row],
        cached_tokens=16,
    )
    stats = Stats(**dict.fromkeys(Stats.__struct_fields__, 3))
    messages = (
        Loading(done=1, total=2, name="w"),
        Refusal(findings=[FINDING]),
        Refusal(findings=[FINDING, FINDING], request_id="a"),
        Stepped(outputs=[output], stats=stats),
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = EngineChannel(theirs)
        for message in messages:
            channel.send(message)
        theirs.shutdown(socket.SHUT_WR)
        got = [m for data in iter(lambda: ours.recv(3), b"") for m in codec.feed(data)]
    assert got == list(messages)


def test_waiting_and_looking(codec: FrontendCodec, ends: tuple[socket.socket, EngineChannel]):
    ours, channel = ends
    assert channel.receive(wait=False) == []
    sent = codec.encode(Abort(ids=["a"]))
    ours.sendall(sent[:5])
    rest = threading.Timer(0.1, ours.sendall, [sent[5:]])
    rest.start()
    assert receive(channel, 1) == [Abort(ids=["a"])]
    rest.join()
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        channel.receive(wait=True)


def test_f17_bytes_that_are_no_message_are_refused(
    codec: FrontendCodec, ends: tuple[socket.socket, EngineChannel], tmp_path: Path
):
    """Above all a pickle, and a file name that leaves the folder."""
    marker = tmp_path / "marker"
    pickled = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for body in (pickled, b"", b"\xc1", msgspec.msgpack.encode({"type": "Nope"})):
        ours, channel = ends
        ours.sendall(frame(body))
        with pytest.raises(msgspec.MsgspecError):
            channel.receive(wait=True)
        with pytest.raises(msgspec.MsgspecError):
            codec.feed(frame(body))
    assert not marker.exists()
    staged = codec.stage([request("a", np.zeros((4, 12), np.uint8))])
    name = staged.files[0].name.encode()
    evil = b"../" + b"x" * (len(name) - 3)
    ours.sendall(staged.frame.replace(name, evil))
    with pytest.raises((AssertionError, msgspec.MsgspecError)):
        channel.receive(wait=True)


def test_folders_of_the_living_stay_and_those_of_the_dead_go():
    """A killed frontend closes nothing; its lock goes with it."""
    code = (
        "import os\nfrom vitrail.engine.ipc import FrontendCodec\n"
        "print(FrontendCodec().folder, flush=True)\nos._exit(1)"
    )
    first = FrontendCodec()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    orphan = Path(said.stdout.strip())
    assert orphan.is_dir()
    second = FrontendCodec()
    assert not orphan.exists()
    assert first.folder.exists()
    first.close()
    second.close()
    assert not first.folder.exists()


def test_a_small_shared_memory_is_left_for_the_temporary_folder(tmp_path, monkeypatch, caplog):
    """Two photographs fill a container's 64 MiB."""
    taken = namedtuple("Usage", "total used free")
    sizes = {LEAST_SHARED - 1: Path(tempfile.gettempdir()), LEAST_SHARED: tmp_path}
    for size, parent in sizes.items():
        monkeypatch.setattr(ipc.shutil, "disk_usage", lambda _, size=size: taken(size, 0, size))
        assert ipc._pixel_parent(tmp_path) == parent
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "--shm-size" in caplog.text
    assert ipc._pixel_parent(tmp_path / "absent") == Path(tempfile.gettempdir())
