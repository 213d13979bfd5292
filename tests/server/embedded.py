"""The app and a scripted engine in this process's loop, behind a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.server.served import free_port, wait_for_port
from vitrail.config.engine import EngineConfig
from vitrail.engine.client import EngineClient
from vitrail.engine.prepare import Preparer
from vitrail.models.assets import load_assets
from vitrail.models.checkpoint import open_checkpoint
from vitrail.server.app import App
from vitrail.server.run import HTTP_SERVERS, Http

PARROT = "tests.server.parrot"


class Embedded(NamedTuple):
    """`http`: a client with the server's base URL."""

    app: App
    client: EngineClient
    http: httpx.AsyncClient
    port: int


@asynccontextmanager
async def embedded(folder: Path, kind: Http, **choices: Any) -> AsyncIterator[Embedded]:
    """A server of `kind` that answers from the parrot."""
    config = EngineConfig(model=str(folder), **choices)
    checkpoint = open_checkpoint(config.model)
    client, facts = await EngineClient.start(config, PARROT)
    preparer = Preparer(config, checkpoint, load_assets(checkpoint), facts)
    app = App(config, client, preparer, name="tiny", api_key=None)
    port = free_port()
    listening = HTTP_SERVERS[kind](app, "127.0.0.1", port)
    serving = asyncio.create_task(listening.serve())
    try:
        await asyncio.to_thread(wait_for_port, port)
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=30) as http:
            yield Embedded(app, client, http, port)
    finally:
        await client.close()
        app.close()
        listening.stop()
        await serving
