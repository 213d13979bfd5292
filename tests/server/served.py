"""`vitrail serve` as its own process, on a port of its own, until the test is done with it."""

import base64
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

PICTURES = Path(__file__).parents[1] / "cases" / "images"
SMALL = ("--device", "cpu", "--dtype", "float32", "--page-size", "16", "--max-running", "16")
POOL = ("--kv-cache-bytes", str(8 << 20), "--max-step-tokens", "256")
HTTP_KINDS = ("granian", "uvicorn")
NOT_KEPT = ("VITRAIL_LOG", "VITRAIL_API_KEY")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int) -> None:
    """Until somebody listens there."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, 60)


def environment(**more: str) -> dict[str, str]:
    """This process's, with one thread for the engine."""
    kept = {k: v for k, v in os.environ.items() if k not in NOT_KEPT}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


class Served:
    """A server's process; as a context it is ready, and killed if it has not ended. `client`: httpx
    with its base URL."""

    def __init__(self, folder: Path, http: str, *flags: str, port: int = 0, **env: str):
        self.port = port or free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        where = ("--model", str(folder), "--port", str(self.port), "--http", http)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "vitrail.cli", "serve", *where, *SMALL, *POOL]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", "tiny", *flags],
            env=environment(**env),
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        self.client = httpx.Client(base_url=self.base, timeout=60)

    def __enter__(self) -> "Served":
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Whatever state it is in."""
        self.client.close()
        self.process.kill()
        self.process.wait()
        self._said.close()

    def refused(self) -> str:
        """What a server said that did not start, with exit code 1."""
        code = self.process.wait(30)
        said = self.output()
        self.end()
        assert code == 1, said
        assert "Traceback" not in said, said
        return said

    def ready(self) -> "Served":
        """Wait until /health says so."""

        def healthy() -> bool:
            assert self.process.poll() is None, self.output()
            try:
                return self.client.get("/health").status_code == 200
            except httpx.ConnectError:
                return False

        wait_until(healthy, 200)  # torch alone takes a minute to import on a busy machine
        return self

    def engine(self) -> dict[str, Any]:
        """The engine's numbers in /health."""
        return self.client.get("/health").json()["engine"]

    def metric(self, name: str) -> float:
        """A number of /metrics; 0 where it was never counted."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.client.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    def settled(self, seconds: float = 30) -> None:
        """Nothing runs, no page is held, nobody is answered."""

        def idle() -> bool:
            health = self.client.get("/health").json()
            engine = health["engine"]
            is_free = engine["free_pages"] == engine["num_pages"]
            return not (health["active"] or engine["running"] or engine["waiting"]) and is_free

        wait_until(idle, seconds)

    def pixel_folder(self) -> Path:
        """Where this server puts pixels for its engine."""
        held = [os.readlink(f) for f in Path(f"/proc/{self.process.pid}/fd").iterdir()]
        (folder,) = {Path(f) for f in held if Path(f).name.startswith("vitrail-pixels-")}
        return folder

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(30)

    def output(self) -> str:
        """What it has printed."""
        self._said.seek(0)
        return self._said.read().decode()

    def bare(self) -> socket.socket:
        """A connection on which nothing was sent."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def connect(self, body: bytes, path: str, headers: str = "") -> socket.socket:
        """A socket on which a POST was sent, which the server is asked to close after it."""
        sock = self.bare()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}"
        sock.sendall(head.encode("latin-1") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return sock


def picture(data: bytes | str, kind: str = "image/png") -> dict[str, Any]:
    """An image part: a data URL of a file's bytes, or of the case of that name."""
    data = (PICTURES / data).read_bytes() if isinstance(data, str) else data
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until it holds; fail after so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
