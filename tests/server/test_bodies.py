"""Bodies in memory: each within its size and its time, all within a budget, none counted for longer
than it is held; a body that is being sent takes no place from a request that could run."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.served import Served, wait_until
from vitrail.config.finding import Refused
from vitrail.server.bodies import Bodies, Disconnected


def sender(*parts: bytes, ends: bool = True, leaves: bool = False) -> Callable[[], Any]:
    """ASGI's `receive` of a client that sends `parts`, and then ends, leaves, or says nothing."""
    events = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
    if ends:
        events[-1]["more_body"] = False
    elif leaves:
        events.append({"type": "http.disconnect"})
    left = iter(events)

    async def receive() -> Any:
        for event in left:
            return event
        return await asyncio.Event().wait()

    return receive


def code_of(bodies: Bodies, receive: Callable[[], Any], seconds: float = 5) -> str:
    async def read() -> None:
        async with bodies.read(receive, seconds):
            pass

    with pytest.raises(Refused) as refused:
        asyncio.run(read())
    assert bodies.held_bytes == 0
    return refused.value.findings[0].code


def test_a_body_is_whole_and_counted_while_it_is_held():
    bodies = Bodies()

    async def read() -> None:
        async with bodies.read(sender(b"ab", b"", b"cde")) as body:
            assert body == b"abcde"
            assert bodies.held_bytes == 5

    asyncio.run(read())
    assert bodies.held_bytes == 0


def test_too_large_too_slow_and_no_room_are_told_apart():
    bodies = Bodies(max_bytes=10, budget_bytes=15)
    assert code_of(bodies, sender(b"x" * 6, b"x" * 5)) == "body_too_large"
    assert code_of(bodies, sender(b"x", ends=False), seconds=0.05) == "body_too_slow"

    async def two() -> None:
        async with bodies.read(sender(b"x" * 9)):
            with pytest.raises(Refused) as refused:
                async with bodies.read(sender(b"x" * 7)):
                    pass
            assert refused.value.findings[0].code == "overloaded"
            assert bodies.held_bytes == 9
            async with bodies.read(sender(b"x" * 6)) as body:
                assert len(body) == 6

    asyncio.run(two())
    assert bodies.held_bytes == 0


def test_a_client_that_leaves_gives_its_bytes_back():
    bodies = Bodies()

    async def read() -> None:
        async with bodies.read(sender(b"abc", ends=False, leaves=True)):
            pass

    with pytest.raises(Disconnected):
        asyncio.run(read())
    assert bodies.held_bytes == 0


def test_bodies_under_way_take_no_place_and_no_more_run_than_may(kimi_folder: Path):
    """Places for two requests, six bodies half sent: another client is answered all the same. All
    six completed at once: two run, four are told to come back."""
    flags = ("--max-running", "1", "--max-waiting", "1")
    body = json.dumps({"prompt": "hi", "max_tokens": 7000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with Served(kimi_folder, "granian", *flags) as server:
        senders = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
        for each in senders:
            each.sendall(head.encode() + body[:5])
        short = {"prompt": "hi", "max_tokens": 1}
        assert server.client.post("/v1/completions", json=short).status_code == 200
        for each in senders:
            each.sendall(body[5:])
        wait_until(lambda: server.metric('vitrail_requests_total{status="503"}') == 4, 60)
        assert server.client.get("/health").json()["active"] == 2
        for each in senders:
            each.close()
        server.settled()
