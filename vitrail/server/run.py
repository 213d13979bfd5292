"""`vitrail serve`: the engine's process, the frontend's app, and an HTTP server for it (granian, or
uvicorn), until a signal."""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

import uvicorn
from granian.constants import Interfaces
from granian.server.embed import Server

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.engine.client import EngineClient
from vitrail.engine.ipc import ProfileWindow
from vitrail.engine.prepare import Preparer
from vitrail.models.assets import load_assets
from vitrail.models.checkpoint import open_checkpoint
from vitrail.server.app import App

log = logging.getLogger("vitrail.server")
BACKLOG = 2048
GRACE_SECONDS = 5.0  # for answers in progress, once the server has to end
Http = Literal["granian", "uvicorn"]


class Listening(NamedTuple):
    """An HTTP server: `serve` until `stop`."""

    serve: Callable[[], Awaitable[None]]
    stop: Callable[[], None]


def serve(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    name: str | None,
    http: Http,
    api_key: str | None,
    profile: ProfileWindow | None = None,
) -> int:
    """Exit code 0 after a signal, 1 if the engine or the HTTP server ended by itself. `profile`:
    what the engine records of its steps. Raises `Refused` for what cannot be served."""
    return asyncio.run(_serve(config, host, port, name or config.model, http, api_key, profile))


async def _serve(
    config: EngineConfig,
    host: str,
    port: int,
    name: str,
    http: Http,
    api_key: str | None,
    profile: ProfileWindow | None,
) -> int:
    address = free_address(host, port)
    checkpoint = open_checkpoint(config.model, config.revision)
    assets = load_assets(checkpoint)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(EngineClient.start(config, profile=profile))
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return 0
    client, facts = await starting
    preparer = Preparer(config, checkpoint, assets, facts)
    app = App(config, client, preparer, name=name, api_key=api_key)
    try:
        free_address(host, port)  # still: loading may have taken minutes
        listening = HTTP_SERVERS[http](app, address, port)
        serving = asyncio.create_task(_run(listening))
        log.info("serving %s at http://%s:%d/v1 (%s)", name, host, port, http)
        ended = asyncio.create_task(client.ended())
        await asyncio.wait((serving, stopped, ended), return_when=asyncio.FIRST_COMPLETED)
        failed = not stopped.done()
        await app.drain(GRACE_SECONDS)
    finally:
        await client.close()  # who still waits for it is told
        app.close()
    listening.stop()
    await asyncio.wait((serving,), timeout=GRACE_SECONDS)
    return int(failed)


async def _run(listening: Listening) -> None:
    await listening.serve()


def free_address(host: str, port: int) -> str:
    """The numeric address of `host` where `port` can be listened on. Raises `Refused` where it
    cannot; granian alone would share a port with whoever allows it."""
    try:
        if not 1 <= port <= 65535:
            raise OSError("ports are 1 to 65535")
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise Refused.because(
            where="host and port",
            saw=f"{host}:{port} ({error})",
            rule="the address is this machine's and nobody listens there",
            change="pass another --port or --host, or stop the other server",
            code="address",
        ) from error
    return str(where[0])


def _granian(app: App, host: str, port: int) -> Listening:
    server = Server(
        app,
        address=host,
        port=port,
        interface=Interfaces.ASGINL,
        backlog=BACKLOG,
        backpressure=BACKLOG,
        log_enabled=False,
        websockets=False,
    )
    return Listening(server.serve, server.stop)


def _uvicorn(app: App, host: str, port: int) -> Listening:
    settings = uvicorn.Config(
        app,
        host=host,
        port=port,
        interface="asgi3",
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=2 * int(GRACE_SECONDS),
    )
    server = uvicorn.Server(settings)

    def stop() -> None:
        server.should_exit = True

    return Listening(server.serve, stop)


HTTP_SERVERS: dict[Http, Callable[[App, str, int], Listening]] = {
    "granian": _granian,
    "uvicorn": _uvicorn,
}
