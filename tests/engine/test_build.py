"""Start-up: every choice that cannot be kept is refused before a weight is read, with numbers; the
pool and the longest request are what the budget holds."""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.moonvit import PUBLISHED
from tests.engine.driver import GOLDEN, golden_llm
from vitrail import LLM, Refused
from vitrail.check.encoder_peak import encoder_peak
from vitrail.check.run import check
from vitrail.check.sizes import MEMORY_SHARE, encoder_budget
from vitrail.check.subject import Question
from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import accept
from vitrail.config.hardware import CPU, Hardware, find
from vitrail.engine import build
from vitrail.models.checkpoint import open_checkpoint
from vitrail.models.kimi_vl.processor import KimiVLProcessor
from vitrail.models.registry import load_entry

TOKEN_BYTES = 3 * 40 * 4  # layers x (latent 32 + rope 8) x fp32


def refusal(**choices: Any) -> str:
    with pytest.raises(Refused) as refused:
        golden_llm(**choices)
    return str(refused.value)


def test_the_pool_is_what_the_bytes_hold():
    llm = golden_llm(kv_cache_bytes=100 * 16 * TOKEN_BYTES + 5, page_size=16)
    assert llm.engine.stats().num_pages == 100
    assert llm.preparer.facts.kv_tokens == 1600
    assert llm.preparer.facts.max_model_len == 1600


def test_the_pool_is_no_larger_than_every_request_at_full_length_can_use():
    llm = golden_llm(kv_cache_bytes=1 << 30, max_running=2, max_model_len=100, page_size=16)
    assert llm.engine.stats().num_pages == 2 * 7


def test_a_length_that_the_cache_cannot_hold_is_refused_with_both_numbers():
    text = refusal(kv_cache_bytes=10 * 16 * TOKEN_BYTES, max_model_len=161, page_size=16)
    assert "160 tokens" in text
    assert "161" in text


def test_a_length_beyond_the_model_is_refused():
    assert "2048" in refusal(max_model_len=2049)


def test_bad_choices_are_refused_by_name():
    assert "page_size: 0" in refusal(page_size=0)
    assert "'flash'" in refusal(attention="flash")


def test_a_device_that_is_not_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there, so asking for it is right")
    with pytest.raises(Refused, match="no CUDA device"):
        LLM(GOLDEN / "ckpt", device="cuda")


def test_a_model_that_is_nowhere_is_refused_by_name(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Refused, match="no such folder"):
        open_checkpoint(str(tmp_path / "none"))


def copy_of_golden(folder: Path, **changed: object) -> Path:
    shutil.copytree(GOLDEN / "ckpt", folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(changed)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["KimiVlForConditionalGeneration"]}, "the nearest is KimiVL"),
        ({"architectures": []}, "a list of one architecture name"),
        ({"surprise": 1}, "unknown key"),
        ({"media_placeholder_token_id": 5120}, "media_placeholder_token_id"),
    ],
)
def test_a_config_that_we_do_not_know_is_refused(
    tmp_path: Path, changed: dict[str, object], said: str
):
    folder = copy_of_golden(tmp_path / "ckpt", **changed)
    with pytest.raises(Refused, match=said):
        LLM(folder, device="cpu", dtype="float32")


def test_the_revision_changes_with_the_checkpoint(tmp_path: Path):
    one = open_checkpoint(str(copy_of_golden(tmp_path / "a")))
    two = open_checkpoint(str(copy_of_golden(tmp_path / "b", torch_dtype="bfloat16")))
    assert one.revision != two.revision
    assert len(one.revision) == 32


def test_random_weights_need_no_weights(tmp_path: Path):
    folder = tmp_path / "config-only"
    folder.mkdir()
    shutil.copy(GOLDEN / "ckpt" / "config.json", folder)
    llm = LLM(folder, device="cpu", weights="random", kv_cache_bytes=1 << 20, max_running=2)
    first = llm.score([1, 2, 3])
    again = LLM(folder, device="cpu", weights="random", kv_cache_bytes=1 << 20, max_running=2)
    assert (first == again.score([1, 2, 3])).all()
    assert first.std() > 0


def test_a_hub_id_is_found_in_the_hubs_cache_without_a_network(tmp_path: Path):
    """The hub's own folder layout, as a download leaves it; another id is refused by name."""
    repo = tmp_path / "models--org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(GOLDEN / "ckpt", repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    code = (
        "from vitrail.models.checkpoint import open_checkpoint as find\n"
        "from vitrail import Refused\n"
        "print(find('org/tiny').folder.name, find('org/tiny', 'main').architecture)\n"
        "try:\n    find('org/other')\nexcept Refused as refused:\n    print(refused)\n"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found, refused = done.stdout.split("\n", 1)
    assert found == f"{commit} KimiVLForConditionalGeneration"
    assert "'org/other': no such folder" in refused


def test_the_revision_sees_the_sub_folders_of_the_architecture_and_no_other(tmp_path: Path):
    """Others may be large, or not to be read at all."""
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaLlamaModel"]}')
    seen = [open_checkpoint(str(tmp_path)).revision]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "huge.json").symlink_to(tmp_path / "nowhere")
    seen.append(open_checkpoint(str(tmp_path)).revision)
    assert seen[0] == seen[1]
    (tmp_path / "llm" / "config.json").write_text('{"a": 1}')
    assert open_checkpoint(str(tmp_path)).revision != seen[0]
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    text = open_checkpoint(str(tmp_path)).revision
    (tmp_path / "llm" / "config.json").write_text('{"a": 2}')
    assert open_checkpoint(str(tmp_path)).revision == text


def test_a_gpu_encodes_the_pictures_of_a_steps_tokens_at_once_as_far_as_memory_allows():
    """Kimi-VL's: 8,192 tokens are 32,768 patches, seven of the largest pictures; a small GPU takes
    fewer, never less than one; a CPU one."""
    kimi = KimiVLProcessor(patch_size=14, in_token_limit=4096, merge=2, image_token_id=5)
    golden = load_entry("KimiVLForConditionalGeneration").read_config(
        open_checkpoint(str(GOLDEN / "ckpt")).config, {}
    )
    assert not isinstance(golden, list)
    model = replace(golden, vision=PUBLISHED, dtype="bfloat16")

    def planned(gpu: Hardware, **choices: Any) -> int:
        return encoder_budget(EngineConfig(model="", **choices), model, kimi, gpu)

    h200 = find("H200")
    assert planned(h200) == 7 * 5352
    assert planned(h200, max_step_tokens=2048) == 2 * 5352
    assert planned(h200, encoder_patches=4) == 4
    assert planned(CPU) == 5352
    assert planned(replace(h200, hbm_bytes=10**9)) == 5352
    small = replace(h200, hbm_bytes=24 * 10**9)
    budget = planned(small)
    assert 5352 < budget < 7 * 5352
    hidden, limit = model.text.hidden_size, small.hbm_bytes // MEMORY_SHARE
    assert encoder_peak(PUBLISHED, hidden, "bfloat16", budget, 5352) <= limit
    assert encoder_peak(PUBLISHED, hidden, "bfloat16", budget + 5352, 5352) > limit


def test_start_up_says_what_check_predicts_beside_what_it_measures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Of the demo on an H200, where the driver answers as predicted but for 100 MiB."""
    gpu, choices = find("H200"), EngineConfig(model=str(DEMO), cuda_graphs=0)
    report = check(Question(choices=choices, gpu=gpu))
    facts = next(row.facts for row in report.rows if row.name == "memory tp=1")
    checkpoint = open_checkpoint(choices.model)
    entry = load_entry(checkpoint.architecture)
    read = accept(entry.read_config(checkpoint.config, checkpoint.generation))
    with torch.device("meta"):
        model = entry.build(read, read.dtype)
    free = facts["total"] - facts["context"] - facts["weights"] - (100 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, facts["total"]))
    peak = build.Peak(facts["encoder_peak"], facts["encoder_peak"])
    with caplog.at_level(logging.INFO, "vitrail.engine"):
        build._sizes(choices, read, model, None, 4096, torch.device("cuda"), peak)
    predicted = facts["left"] >> 20
    assert f"left for pages: {predicted - 100} MiB, {predicted} predicted" in caplog.text
