"""One tiny checkpoint and one server of each kind for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checkpoint import write_kimi
from tests.server.served import HTTP_KINDS, Served


@pytest.fixture(scope="session")
def kimi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="session")
def servers(kimi_folder: Path) -> Iterator[dict[str, Served]]:
    """Started when first asked for, ended with the session; each must end with exit code 0."""
    started = {kind: Served(kimi_folder, kind) for kind in HTTP_KINDS}
    try:
        yield {kind: server.ready() for kind, server in started.items()}
        for server in started.values():
            assert server.stop() == 0, server.output()
            assert "Traceback" not in server.output(), server.output()
    finally:
        for server in started.values():
            server.end()


@pytest.fixture(params=HTTP_KINDS)
def each_server(request: pytest.FixtureRequest, servers: dict[str, Served]) -> Served:
    return servers[request.param]


@pytest.fixture
def server(servers: dict[str, Served]) -> Iterator[Served]:
    """The default kind; after each test it is healthy and holds nothing."""
    yield servers["granian"]
    servers["granian"].settled()
