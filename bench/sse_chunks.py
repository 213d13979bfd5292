"""How many SSE chunks a second one frontend process writes, in front of an engine process that
computes nothing (`tests/server/parrot.py`), to concurrent clients that read and count.

    python -m bench.sse_chunks [--streams 64 256] [--pace 20 50 100] [--seconds 4] [--profile]

`pace`: steps a second, each of which gives every stream one token; 0 is as fast as the engine can,
where most of a step's tokens find the last chunk still unsent and are merged into the next.
Correctness first: every stream's text and its number of tokens are checked, on this very run. The
engine and the clients are processes of their own; with fewer than three free cores they take time
from the frontend, so its own CPU time a chunk is shown as well: its inverse is what one core can
do."""

import argparse
import asyncio
import cProfile
import itertools
import json
import multiprocessing
import pstats
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.server import parrot
from tests.server.checkpoint import write_kimi
from tests.server.embedded import embedded
from tests.server.served import HTTP_KINDS

PROMPT = "Hello World"


class Load(NamedTuple):
    """`streams` of `tokens` each, at `pace` steps a second (0: unbounded)."""

    streams: int
    tokens: int
    pace: int


class Rate(NamedTuple):
    """`chunks` of content in `seconds`, for which the frontend used `cpu_seconds`, of them
    `loop_seconds` in the event loop's thread; the rest are the HTTP server's own threads."""

    chunks: int
    seconds: float
    cpu_seconds: float
    loop_seconds: float


async def _read(port: int, tokens: int, pace: int) -> tuple[int, str]:
    """One stream: its chunks and its text."""
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "seed": parrot.PACE + pace}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: "
    writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
    raw = await reader.read(-1)
    writer.close()
    frames = [part.split(b"\n\n")[0] for part in raw.split(b"data: ")[1:]]
    assert frames.pop() == b"[DONE]", raw[-200:]
    text = "".join(json.loads(f)["choices"][0]["text"] for f in frames)
    return len(frames), text


def _clients(port: int, load: "Load", out: "multiprocessing.Queue[int]") -> None:
    async def run() -> int:
        reads = (_read(port, load.tokens, load.pace) for _ in range(load.streams))
        got = await asyncio.gather(*reads)
        texts = {text for _, text in got}
        assert len(texts) == 1, "equal prompts have equal answers"
        assert (PROMPT * load.tokens).startswith(texts.pop())
        return sum(count for count, _ in got)

    out.put(asyncio.run(run()))


async def measure(folder: Path, kind: str, load: Load) -> Rate:
    """One run against a server of this kind, timed from the first submission on."""
    context = multiprocessing.get_context("spawn")
    async with embedded(folder, kind, max_waiting=load.streams) as server:  # pyright: ignore
        out: multiprocessing.Queue[int] = context.Queue()
        process = context.Process(target=_clients, args=(server.port, load, out))
        process.start()
        while server.client.num_live < load.streams and not server.app.metrics.generated:
            await asyncio.sleep(0.001)
        began = time.perf_counter(), time.process_time(), time.thread_time()
        while server.app.num_active:
            await asyncio.sleep(0.005)
        ended = time.perf_counter(), time.process_time(), time.thread_time()
        chunks = await asyncio.to_thread(out.get, True, 120)
        await asyncio.to_thread(process.join)
        assert server.app.metrics.generated == load.streams * load.tokens
    return Rate(chunks, *(b - a for a, b in zip(began, ended, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--pace", type=int, nargs="+", default=[20, 50, 100, 0])
    parser.add_argument("--seconds", type=float, default=4, help="of tokens at each pace")
    parser.add_argument("--http", choices=HTTP_KINDS, nargs="+", default=HTTP_KINDS)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_kimi(Path(name))
        for kind, streams, pace in itertools.product(args.http, args.streams, args.pace):
            load = Load(streams, int((pace or 100) * args.seconds), pace)
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            rate = asyncio.run(measure(folder, kind, load))
            profile.disable()
            tokens = streams * load.tokens
            print(
                f"{kind:8} {streams:3} streams, pace {pace:3}: {tokens / rate.seconds:.0f} token/s "
                f"in {rate.chunks / rate.seconds:5.0f} chunks/s; frontend "
                f"{100 * rate.cpu_seconds / rate.seconds:3.0f} % of a core, "
                f"{1e6 * rate.cpu_seconds / rate.chunks:.1f} us a chunk "
                f"({1e6 * rate.loop_seconds / rate.chunks:.1f} in the loop), "
                f"{1e6 * rate.cpu_seconds / tokens:.1f} us a token",
                flush=True,
            )
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
