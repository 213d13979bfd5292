"""The load and its clock, against servers whose times are known."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.fake import Fake, running, target
from vitrail.bench.client import ask, calls, load, served_model
from vitrail.bench.counters import cache_counters, read_counters
from vitrail.bench.http import Exchange, HttpFailed, address, request
from vitrail.bench.record import figures
from vitrail.bench.serve import Work, measure
from vitrail.bench.workload import Arrivals, Closed, Item, Noise, Poisson, Synthetic
from vitrail.config.finding import Refused

T = TypeVar("T")
SHORT = Synthetic(prompt_len=4, output_len=3)


def run(work: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(bounded())


def work(arrivals: Arrivals, requests: int, runs: int = 1, warm_up: int = 0) -> Work:
    return Work(
        workload=SHORT, arrivals=arrivals, requests=requests, runs=runs, warm_up=warm_up, seed=0
    )


def test_known_delays_are_the_times():
    async def go() -> None:
        async with running(Fake(first_s=0.08, token_s=0.02)) as fake:
            items = Synthetic(prompt_len=4, output_len=6).items(0, 0, 4)
            to = target(fake)
            records = await load(to, calls(to, items), Closed(concurrency=4), [])
        found = figures(records, 0.0)
        assert found.failures == {}
        # never less than what was slept; more by what a busy machine adds
        for have, slept, more in (
            (found.first.p50, 80, 40),
            (found.token.p50, 20, 12),
            (found.gap.p50, 20, 12),
            (found.whole.p50, 180, 90),
        ):
            assert have is not None
            assert slept - 1 <= have < slept + more
        assert (found.output_tokens, found.prompt_tokens, found.pieces) == (24, 28, 24)
        assert (found.cached_tokens, found.short, found.counted) == (12, 0, True)

    run(go())


def test_a_chats_role_is_no_token():
    async def go() -> None:
        async with running(Fake(first_s=0.06)) as fake:
            item = Item(max_tokens=2, messages=({"role": "user", "content": "x"},))
            to = target(fake)
            (record,) = await load(to, calls(to, [item]), Closed(concurrency=1), [])
        assert record.failure is None
        assert 0.059 < record.first < 0.16
        assert len(record.arrivals) == 2

    run(go())


def test_every_failure_has_its_reason_and_half_errors_are_half():
    kinds = {0: "500", 2: "cut", 4: "error", 6: "hang"}
    reasons = ("status 500", "a broken connection", "an error in the stream", "no end within 0.5 s")
    details = ("broken", "the connection was lost", "no memory", "")

    async def go() -> None:
        async with running(Fake(fail=kinds)) as fake:
            to = target(fake, timeout_s=0.5)
            records = await load(to, calls(to, SHORT.items(0, 0, 8)), Closed(concurrency=1), [])
        found = figures(records, 0.0)
        assert found.failures == dict.fromkeys(reasons, 1)
        for number, reason, detail in zip(kinds, reasons, details, strict=True):
            assert records[number].failure == reason
            assert detail in found.examples[reason]
        assert found.first.count == found.whole.count == 4
        assert found.output_tokens == 12

    run(go())


def test_a_server_that_is_not_there():
    async def go() -> None:
        fake = Fake(url="http://127.0.0.1:9")  # the discard port: nobody listens
        to = target(fake)
        record = await ask(to, calls(to, SHORT.items(0, 0, 1))[0], time.perf_counter())
        assert str(record.failure).startswith("no connection")
        assert figures([record], 0.0).requests == 1
        with pytest.raises(Refused, match="names its models"):
            await served_model(to.where, None)
        assert await cache_counters(to.where, None) is None

    run(go())


def test_pieces_are_counted_where_the_server_does_not_count():
    async def go() -> None:
        async with running(Fake(usage=False)) as fake:
            to = target(fake)
            records = await load(to, calls(to, SHORT.items(0, 0, 2)), Closed(concurrency=2), [])
        found = figures(records, 0.0)
        assert (found.counted, found.output_tokens, found.failures) == (False, 6, {})

    run(go())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_holds_its_number(concurrency: int):
    async def go() -> None:
        async with running(Fake(first_s=0.01)) as fake:
            await measure([target(fake)], work(Closed(concurrency=concurrency), 9))
            assert fake.most_active == concurrency
            assert len(fake.bodies) == 9

    run(go())


def test_poisson_requests_are_sent_when_due_whatever_the_server_does():
    """At 100 a second a server of 0.3 s is never waited for."""

    async def go() -> None:
        async with running(Fake(first_s=0.3)) as fake:
            asked = work(Poisson(rate=100.0), 20)
            ((done,),) = await measure([target(fake)], asked)
            due = asked.run(0)[1]
            sent = [r.began - done.records[0].due + due[0] for r in done.records]
            assert sent == pytest.approx(due, abs=0.15)
            assert done.figures.late.p50 is not None
            assert done.figures.late.p50 < 30
            assert fake.most_active > 10

    run(go())


def test_two_servers_take_turns_and_get_the_same_requests():
    async def go() -> None:
        async with running(Fake()) as a, running(Fake(first_s=0.02)) as b:
            found = await measure([target(a), target(b)], work(Closed(concurrency=2), 3, 3, 1))
            prompts = [[body["prompt"] for body in each.bodies] for each in (a, b)]
            assert [sorted(p) for p in prompts][0] == sorted(prompts[1])
            assert len({tuple(p) for p in prompts[0]}) == 12, "no run repeats another"
            order = sorted([(t, "A") for t in a.at] + [(t, "B") for t in b.at])
            assert "".join(name for _, name in order) == "AAABBB" * 4
            assert [len(side) for side in found] == [3, 3], "the warm-up is not shown"
        async with running(Fake()) as a:
            await measure([target(a), target(a)], work(Closed(concurrency=1), 2, 2))
            assert len({tuple(body["prompt"]) for body in a.bodies}) == 8, "itself: other requests"

    run(go())


def test_the_clients_own_share_is_measured():
    async def go() -> None:
        async with running(Fake(first_s=0.2)) as fake:
            ((idle,),) = await measure([target(fake)], work(Closed(concurrency=2), 2))
            assert 0 < idle.figures.client_cpu < 0.5

    run(go())


def test_bodies():
    fake = Fake(url="http://h:1/base/v1/")
    to = target(fake)
    assert (to.where.host, to.where.port, to.where.base) == ("h", 1, "/base")
    noise = Noise(height=2, width=2, seed=(1,))
    text = Item(max_tokens=3, shared_ids=(1, 2), ids=(3,))
    pictured = Item(max_tokens=3, shared_ids=(1,), ids=(3,), pictures=(noise,))
    plain, chat = (call.data for call in calls(to, [text, pictured]))
    assert plain.startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b'"prompt":[1,2,3]' in plain
    for field in (b'"stream":true', b'"ignore_eos":true', b'"include_usage":true'):
        assert field in plain
    assert chat.startswith(b"POST /base/v1/chat/completions ")
    assert chat.index(b"data:image/png;base64,") < chat.index(b'"text":"to"')
    assert b'{"role":"system","content":"of"}' in chat
    assert b"Bearer k\r\n" in request(to.where, "GET", "/", b"", "k")
    many = [Item(max_tokens=1, pictures=(Noise(height=60_000, width=60_000, seed=(1,)),))] * 2
    with pytest.raises(Refused, match="made before it"):
        calls(to, many)


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h/?a=1"])
def test_a_url_that_is_none(url: str):
    with pytest.raises(Refused, match="http://HOST:PORT"):
        address(url)


@pytest.mark.parametrize(
    "names",
    [
        ("vitrail_cache_hit_tokens_total", "vitrail_cache_query_tokens_total"),
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
    ],
)
def test_cache_counters_of_three_engines(names: tuple[str, str]):
    hits, queries = names
    text = (
        f"# HELP {hits} words 12\n# TYPE {hits} counter\n"
        f'{hits}{{engine="0",source="a b"}} 3.0\n{hits}{{engine="1"}} 4.0\n'
        f"{hits.removesuffix('_total')}_created 1e9\n{queries} 1.2e+01\nother NaN\n"
    )
    assert read_counters(text) == (7, 12)
    assert read_counters("other 1\n") is None

    async def go() -> None:
        async with running(Fake(metrics=text)) as fake:
            assert await cache_counters(target(fake).where, None) == (7, 12)
            ((done,),) = await measure([target(fake)], work(Closed(concurrency=1), 1))
            assert (done.figures.hits, done.figures.queries) == (0, 0)
            fake.metrics = None
            ((done,),) = await measure([target(fake)], work(Closed(concurrency=1), 1))
            assert done.figures.hits is None

    run(go())


# HTTP, cut anywhere


def responses() -> list[tuple[bytes, bytes, bool]]:
    """(bytes, body, whether the connection's end is the body's)."""
    head = b"HTTP/1.1 200 OK\r\nA: b\r\n"
    chunked = b"4\r\nwiki\r\n6;x=y\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\nT: u\r\n\r\n"
    return [
        (head + b"Content-Length: 5\r\n\r\nhello", b"hello", False),
        (head + b"content-length: 0\r\n\r\n", b"", False),
        (head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked,
         b"wikipedia in \r\n\r\nchunks.", False),
        (head + b"\r\nuntil the end", b"until the end", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"Content-Length: 2\r\n\r\nok", b"ok", False),
    ]  # fmt: skip


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def abort(self) -> None:
        pass


async def feed(raw: bytes, cuts: list[int]) -> tuple[Exchange, bytes]:
    parts: list[bytes] = []
    exchange = Exchange(lambda data, _: parts.append(data))
    exchange.connection_made(Wire())
    edges = sorted({0, len(raw), *(c % (len(raw) + 1) for c in cuts)})
    for start, stop in zip(edges, edges[1:], strict=False):
        exchange.data_received(raw[start:stop])
    exchange.connection_lost(None)
    return exchange, b"".join(parts)


@pytest.mark.parametrize("case", range(5))
@given(st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_response_is_the_same_however_it_is_cut(case: int, cuts: list[int]):
    raw, body, _ = responses()[case]

    async def go() -> None:
        exchange, found = await feed(raw, cuts)
        await exchange.done
        assert exchange.status == 200
        assert found == body

    asyncio.run(go())


def test_what_ends_early_or_is_no_http_fails():
    async def go() -> None:
        cut = [raw[:-1] for raw, _, until_close in responses() if not until_close]
        bad = [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"",
               b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
               b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
               b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
               b"x" * 70_000]  # fmt: skip
        for raw in (*cut, *bad):
            exchange, _ = await feed(raw, [])
            with pytest.raises(HttpFailed):
                await exchange.done

    run(go())
