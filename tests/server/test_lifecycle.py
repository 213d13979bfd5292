"""From the start of `vitrail serve` to its end, whoever ends it."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import openai
import psutil
import pytest

from tests.server.served import HTTP_KINDS, Served, wait_until
from tests.server.sse import ask, chat_body, frames

pytestmark = pytest.mark.suite("faults", minutes=2, owner="server")

LONG = {"ignore_eos": True, "max_tokens": 7000}
WRONG_KEYS = (
    "",
    "Bearer",
    "s3cret-key",
    "Basic s3cret-key",
    "Bearer s3cret-keY",
    "Bearer s3cret-key2",
    "Bearer s3cret-ke",
)
CLOSED = (
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/"),
    ("GET", "/docs"),
    ("POST", "/health/../v1/completions"),
)


def engine_of(server: Served) -> psutil.Process:
    (child,) = psutil.Process(server.process.pid).children()
    return child


@pytest.mark.parametrize("http", HTTP_KINDS)
def test_b40_an_engine_that_dies_mid_stream(kimi_folder: Path, http: str):
    """One error frame ends the stream, the client raises, the server ends with an exit code."""
    with Served(kimi_folder, http) as server:
        pixels = server.pixel_folder()
        long = json.dumps(chat_body(stream=True, **LONG)).encode()
        sock = server.connect(long, "/v1/chat/completions")
        client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=7000
        )
        next(iter(stream))
        head = sock.recv(1 << 12)
        os.kill(engine_of(server).pid, signal.SIGKILL)
        raw = head + b"".join(iter(lambda: sock.recv(1 << 16), b""))
        sock.close()
        assert raw.count(b'data: {"error":') == 1
        assert raw.count(b"HTTP/1.1") == 1
        assert b"exit code -9" in raw
        assert b"[DONE]" not in raw
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)
        client.close()
        assert server.process.wait(15) == 1, server.output()
        assert not pixels.exists()


@pytest.mark.parametrize(
    ("http", "number"),
    [
        ("uvicorn", signal.SIGTERM),
        ("granian", signal.SIGINT),
        pytest.param("uvicorn", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("granian", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_everything(kimi_folder: Path, http: str, number: signal.Signals):
    """The answer in progress may end, longer ones are told, nothing is left behind."""
    with Served(kimi_folder, http) as server:
        engine, pixels = engine_of(server), server.pixel_folder()
        # which a server has 5 s for, however busy the machine
        short = json.dumps(chat_body(stream=True, ignore_eos=True, max_tokens=40)).encode()
        long = json.dumps(chat_body(stream=True, **LONG)).encode()
        socks = [server.connect(b, "/v1/chat/completions") for b in (short, long)]
        for sock in socks:
            sock.recv(10)
        began = time.monotonic()
        os.kill(server.process.pid, number)
        whole, cut = (b"".join(iter(lambda s=s: s.recv(1 << 16), b"")) for s in socks)
        assert server.process.wait(20) == 0, server.output()
        assert time.monotonic() - began < 12
        for sock in socks:
            sock.close()
        assert b"[DONE]" in whole
        assert cut.count(b'data: {"error":') == 1
        assert b"closing" in cut
        assert not engine.is_running()
        assert not pixels.exists()
        assert "Traceback" not in server.output()


@pytest.mark.nightly
def test_a_server_killed_outright_takes_its_engine_along_and_the_next_one_tidies(
    kimi_folder: Path,
):
    with Served(kimi_folder, "granian") as server:
        engine, pixels = engine_of(server), server.pixel_folder()
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not engine.is_running(), 30)
        assert pixels.exists()
    with Served(kimi_folder, "granian") as again:
        assert not pixels.exists()
        assert again.stop() == 0


def test_a_signal_while_the_engine_loads(kimi_folder: Path):
    server = Served(kimi_folder, "granian")
    wait_until(lambda: bool(psutil.Process(server.process.pid).children()), 60)
    code, said = server.stop(), server.output()
    server.end()
    assert code == 0, said
    assert "Traceback" not in said


def test_an_engine_that_refuses_to_start_says_why(kimi_folder: Path, tmp_path: Path):
    """The engine's own findings, on stderr, with exit code 1."""
    folder = shutil.copytree(kimi_folder, tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-300])
    said = Served(folder, "granian").refused()
    assert "vitrail: model.safetensors" in said
    assert "Rule:" in said


def test_a_cache_of_e4m3_holds_a_token_a_byte_a_value(kimi_folder: Path):
    """8 pages of 16 tokens, 3 layers, 17 + 6 channels: as fp32 they are two pages, and refused."""
    small = ("--kv-cache-bytes", str(8 * 16 * 3 * 23), "--max-model-len", "128")
    said = Served(kimi_folder, "granian", *small).refused()
    assert "hold 2 pages of 16 tokens" in said
    with Served(kimi_folder, "granian", *small, "--kv-cache-dtype", "fp8_e4m3") as server:
        assert ask(server, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
        assert server.stop() == 0


def test_a_port_in_use_is_refused_at_once(server: Served, kimi_folder: Path):
    for http in HTTP_KINDS:
        said = Served(kimi_folder, http, port=server.port).refused()
        assert f"127.0.0.1:{server.port}" in said
        assert "Change: pass another --port" in said


def test_f14_f16_every_route_but_the_open_ones_needs_the_key(kimi_folder: Path):
    right = {"authorization": "Bearer s3cret-key"}
    wrong = (
        {},
        *({"authorization": v} for v in WRONG_KEYS),
        {"authorization": b"Bearer \xff\xfe\xc3\xa9"},
    )
    with Served(kimi_folder, "granian", VITRAIL_API_KEY="s3cret-key") as server:
        for headers, (method, path) in itertools.product(wrong, CLOSED):
            response = server.client.request(method, path, headers=headers, json={})
            assert response.status_code == 401, (headers, path, response.text)
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert "s3cret" not in response.text
        for path in ("/health", "/metrics"):
            assert server.client.get(path).status_code == 200
        assert server.client.get("/v1/models", headers=right).status_code == 200
        right["authorization"] = "bearer s3cret-key"
        answer = server.client.post(
            "/v1/chat/completions", json=chat_body(max_tokens=1), headers=right
        )
        assert answer.status_code == 200
        assert server.stop() == 0


def test_an_address_that_is_not_ours_is_refused(kimi_folder: Path):
    assert "203.0.113.7" in Served(kimi_folder, "granian", "--host", "203.0.113.7").refused()


def test_no_port_but_the_http_one_is_listened_on(server: Served):
    """F17: what the processes say to each other goes through inherited sockets."""
    processes = (psutil.Process(server.process.pid), engine_of(server))
    listening = [
        c.laddr.port
        for p in processes
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {server.port}


def test_a_stream_over_curl(server: Served):
    """The README's way, byte for byte as curl shows it."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps(chat_body(stream=True, max_tokens=4))
    command = ["curl", "-sN", f"{server.base}/v1/chat/completions", "-d", body]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert frames(said)[-1] == "[DONE]"
