"""A client that leaves frees what it held, at once, whenever it leaves."""

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.server.served import Served, picture, wait_until
from tests.server.sse import ask, chat_body

LONG = {"ignore_eos": True, "max_tokens": 7000}


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
    wait_until(lambda: running(each_server) == n, 10)
    if stream:
        assert b"200" in sock.recv(1 << 12)
    if reset:
        hang_up(sock)
    else:
        sock.close()
    each_server.settled(1)
    assert each_server.metric('vitrail_choices_total{reason="abort"}') == before + n


@pytest.mark.parametrize("stream", [True, False])
def test_b41_leaving_before_prefill_ends(each_server: Served, stream: bool):
    prompt = [(7 * i) % 400 for i in range(8000)]  # 32 steps of 256 tokens
    made = each_server.metric("vitrail_generation_tokens_total")
    steps = each_server.engine()["steps_total"]
    body = json.dumps({"prompt": prompt, "stream": stream, "max_tokens": 9}).encode()
    sock = each_server.connect(body, "/v1/completions")
    wait_until(lambda: running(each_server) == 1, 5)
    hang_up(sock)
    each_server.settled(1)
    assert each_server.metric("vitrail_generation_tokens_total") == made
    assert steps < each_server.engine()["steps_total"] < steps + 30


def test_b41_leaving_in_the_middle_of_a_body(each_server: Served):
    sock = socket.create_connection(("127.0.0.1", each_server.port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    sock.sendall(head + b'{"messages":')
    time.sleep(0.1)
    sock.close()
    each_server.settled(1)


def test_b41_leaving_while_pictures_are_prepared(each_server: Served):
    """20 clients send pictures and leave while some are in a worker thread, which cannot be
    stopped: no pixel file stays behind."""
    content = [picture("size_896x896_jpg.jpg"), {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    body = json.dumps({"messages": messages, "max_tokens": 500}).encode()
    socks = [each_server.connect(body, "/v1/chat/completions") for _ in range(20)]
    wait_until(lambda: each_server.client.get("/health").json()["active"] > 10, 10)
    for sock in socks:
        hang_up(sock)
    each_server.settled(10)
    wait_until(lambda: not list(each_server.pixel_folder().iterdir()), 5)
