"""A server on a GGUF file: real weights answer over HTTP; a broken file ends it in one sentence."""

from pathlib import Path

from tests.server.served import Served
from tests.smollm2 import smollm2_path


def test_real_weights_answer_over_http():
    with Served(smollm2_path(), "granian", "--max-model-len", "160") as server:
        plain = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 1}
        got = server.client.post("/v1/completions", json=plain | {"temperature": 0}).json()
        assert got["choices"][0]["text"] == " Paris"
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        request = {"model": "tiny", "messages": chat, "temperature": 0}
        got = server.client.post("/v1/chat/completions", json=request).json()
        assert got["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert got["choices"][0]["finish_reason"] == "stop"
        assert server.stop() == 0


def test_a_broken_file_ends_the_server_with_one_sentence(tmp_path: Path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    said = Served(path, "granian").refused()
    assert "broken.gguf" in said
    assert "version 2 or 3" in said
    assert "Traceback" not in said
