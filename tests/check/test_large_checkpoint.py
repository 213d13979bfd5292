"""300 GB of tensors, tens of thousands of them in many shards: sparse files, of which the headers
alone are real."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ask

from tests.models.cases import DEEPSEEK
from vitrail.check.weights import map_of
from vitrail.config.finding import accept
from vitrail.config.hardware import find
from vitrail.models.checkpoint import open_checkpoint
from vitrail.models.registry import load_entry
from vitrail.weights.load import parameters_of
from vitrail.weights.mapping import Match, Names, Source, filled, numel

LARGE: dict[str, Any] = DEEPSEEK | {
    "vocab_size": 163_840,
    "hidden_size": 4096,
    "intermediate_size": 11_264,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 131_072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHARDS = 96


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    checkpoint = open_checkpoint(str(folder))
    entry = load_entry(checkpoint.architecture)
    config = accept(entry.read_config(checkpoint.config, {}))
    with torch.device("meta"):
        parameters = parameters_of(entry.build(config, "bfloat16"))
    weight_map = map_of(checkpoint, config)
    names, done, made = Names(weight_map), set[Match](), dict[object, tuple[Source, ...]]()
    held: list[tuple[str, tuple[int, ...], str]] = []
    for name, spec in parameters.items():
        match = names.match_parameter(name)
        assert match is not None
        if match in done:
            continue
        done.add(match)
        row = weight_map.rows[match.row]
        dtype = "F32" if spec.dtype == "float32" else "BF16"
        sources = made.setdefault((match.row, spec.shape), ()) or row.sources(spec.shape)
        made[match.row, spec.shape] = sources
        held += [(filled(s.checkpoint, match.holes), s.shape, dtype) for s in sources]
    write_sparse(folder, held)
    return folder


def write_sparse(folder: Path, held: list[tuple[str, tuple[int, ...], str]]) -> None:
    index: dict[str, str] = {}
    for shard in range(SHARDS):
        file, header, end = f"model-{shard:05}-of-{SHARDS:05}.safetensors", dict[str, Any](), 0
        for name, shape, dtype in held[shard::SHARDS]:
            size = numel(shape) * (4 if dtype == "F32" else 2)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            index[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def test_headers_of_300_gb_are_checked_in_seconds(large: Path) -> None:
    began = time.process_time()
    report = ask(large, find("B300"), sizes=(1, 8))
    seconds = time.process_time() - began
    facts = report.row("weights").facts
    assert facts["bytes"] > 300e9  # pyright: ignore
    assert facts["tensors"] > 30_000  # pyright: ignore
    assert report.row("weights").status == "ok"
    assert report.row("memory tp=1").status == "error", "by how much it does not fit is said"
    assert "bytes left for pages" in report.row("memory tp=1").findings[0].saw
    assert report.row("memory tp=8").status == "ok"
    assert seconds < 10, "about 2 on an idle machine"
