"""A client that leaves frees what it held, at once, whenever it leaves."""

import base64
import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.server.served import Served, picture, wait_until
from tests.server.sse import ask, chat_body
from tests.vision.test_video import slow

LONG = {"ignore_eos": True, "max_tokens": 7000}
# Steps of the engine, of which it makes 300 a second and more with a core to itself: a clock
# that runs as slowly as everything else does on a loaded machine.
AT_ONCE = 200
SOON = 2.0  # seconds of a core


@pytest.fixture(autouse=True)
def nothing_is_left(each_server: Served) -> Iterator[None]:
    each_server.settled()
    yield
    assert len(ask(each_server, max_tokens=2)["choices"]) == 1
    each_server.settled()


def running(server: Served) -> int:
    health = server.client.get("/health").json()
    return health["engine"]["running"] + health["engine"]["waiting"]


def hang_up(sock: socket.socket) -> None:
    """As a killed process does: a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("reset", [True, False])
def test_b41_leaving_while_tokens_come(each_server: Served, stream: bool, n: int, reset: bool):
    before = each_server.metric('vitrail_choices_total{reason="abort"}')
    body = json.dumps(chat_body(stream=stream, n=n, **LONG)).encode()
    sock = each_server.connect(body, "/v1/chat/completions")
    wait_until(lambda: running(each_server) == n, 30)
    if stream:
        assert b"200" in sock.recv(1 << 12)
    steps = each_server.engine()["steps_total"]
    if reset:
        hang_up(sock)
    else:
        sock.close()
    each_server.settled(30)
    assert each_server.engine()["steps_total"] <= steps + AT_ONCE
    assert each_server.metric('vitrail_choices_total{reason="abort"}') == before + n


@pytest.mark.parametrize("stream", [True, False])
def test_b41_leaving_before_prefill_ends(each_server: Served, stream: bool):
    prompt = [(7 * i) % 400 for i in range(8000)]  # 32 steps of 256 tokens
    made = each_server.metric("vitrail_generation_tokens_total")
    steps = each_server.engine()["steps_total"]
    body = json.dumps({"prompt": prompt, "stream": stream, "max_tokens": 9}).encode()
    sock = each_server.connect(body, "/v1/completions")
    wait_until(lambda: running(each_server) == 1, 30)
    hang_up(sock)
    each_server.settled(30)
    assert each_server.metric("vitrail_generation_tokens_total") == made
    assert steps < each_server.engine()["steps_total"] < steps + 30


def test_b41_leaving_in_the_middle_of_a_body(each_server: Served):
    left = 'vitrail_requests_total{status="disconnected"}'
    before = each_server.metric(left)
    sock = each_server.bare()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    sock.sendall(head + b'{"messages":')
    time.sleep(0.1)
    sock.close()
    wait_until(lambda: each_server.metric(left) == before + 1, 30)  # a body's time is 60 s


def test_b41_leaving_while_pictures_are_prepared(each_server: Served):
    """20 clients send pictures and leave while some are in a worker thread, which cannot be
    stopped: no pixel file stays behind."""
    content = [picture("size_896x896_jpg.jpg"), {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"messages": messages, "max_tokens": 500}).encode()
    socks = [each_server.connect(body, "/v1/chat/completions") for _ in range(20)]
    wait_until(lambda: each_server.client.get("/health").json()["active"] > 10, 60)
    for sock in socks:
        hang_up(sock)
    each_server.settled(60)
    wait_until(lambda: not list(each_server.pixel_folder().iterdir()), 30)


def decoders(server: Served) -> dict[int, float]:
    """Processes of videos that this server has started, and the seconds of a core that each has
    taken."""
    found: dict[int, float] = {}
    for each in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("video_worker" in word for word in each.cmdline()):
                spent = each.cpu_times()
                found[each.pid] = spent.user + spent.system
    return found


def test_b41_slow_videos_hold_nobody_else_and_end_with_their_clients(each_server: Served):
    """Eight of them, of which two are decoded at once, for 6 s of a core and more; a
    picture's and a text's requests are answered meanwhile. The decoders end when the clients leave,
    by a clock that is slow where all else is: their own seconds of a core."""
    url = "data:video/x-msvideo;base64," + base64.b64encode(slow(600)).decode()
    clip = {"type": "video_url", "video_url": {"url": url}}
    messages = [{"role": "user", "content": [clip, {"type": "text", "text": "what?"}]}]
    body = json.dumps({"messages": messages, "max_tokens": 2}).encode()
    socks = [each_server.connect(body, "/v1/chat/completions") for _ in range(8)]
    wait_until(lambda: len(decoders(each_server)) == 2, 30)
    seen = [picture("size_56x56_jpg.jpg"), {"type": "text", "text": "what?"}]
    shown = {"messages": [{"role": "user", "content": seen}], "max_tokens": 2}
    assert each_server.client.post("/v1/chat/completions", json=shown).status_code == 200
    assert len(ask(each_server, max_tokens=2)["choices"]) == 1
    wait_until(lambda: len(decoders(each_server)) == 2, 5)  # they are being decoded still
    before = decoders(each_server)
    for sock in socks:
        hang_up(sock)
    after: dict[int, float] = {}

    def none_is_left() -> bool:
        now = decoders(each_server)
        after.update(now)
        return not now

    wait_until(none_is_left, 60)
    assert all(spent - before.get(pid, 0.0) < SOON for pid, spent in after.items())
    assert len(before | after) < 8
    each_server.settled()
