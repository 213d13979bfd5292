"""An engine that records some of its steps does what one that does not does."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module

from vitrail import LLM, SamplingParams
from vitrail.cli import DEMO
from vitrail.config.finding import Refused
from vitrail.engine.ipc import ProfileWindow
from vitrail.engine.kernel_groups import GROUPS, LAUNCH, breakdown, read_trace
from vitrail.engine.profile import SUMMARY, TRACE, ProfiledEngine, profiled
from vitrail.models.checkpoint import open_checkpoint

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i] * 9} for i in range(3)]
PICTURE = {
    "prompt_token_ids": [5, 6],
    "images": [torch.zeros(28, 56, 3, dtype=torch.uint8).numpy()],
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Nothing is cached: every run computes the same."""
    caches = {"prefix_cache": False, "encoder_cache_bytes": 0}
    return LLM(DEMO, device="cpu", kv_cache_bytes=8_000_000, **caches)


def wrap(llm: LLM, folder: Path, skip: int, steps: int) -> ProfiledEngine:
    window = ProfileWindow(folder=str(folder), skip=skip, steps=steps)
    return profiled(llm.engine, llm.config, open_checkpoint(str(DEMO)), window)


def answers(llm: LLM) -> list[list[int]]:
    image_id = llm.preparer.facts.image_token_id
    pictured = PICTURE | {"prompt_token_ids": [5, image_id, 6]}
    return [out.outputs[0].token_ids for out in llm.generate([*PROMPTS, pictured], PARAMS)]


def num_hooks() -> int:
    return len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)


def test_the_same_tokens_and_a_window_of_the_steps_asked_for(llm: LLM, tmp_path: Path):
    plain, want = llm.engine, answers(llm)
    hooks = num_hooks()
    llm.engine = recording = wrap(llm, tmp_path / "new", 0, 3)
    try:
        assert answers(llm) == want
        assert recording.summary is not None
        assert num_hooks() == hooks
        trace = (tmp_path / "new" / TRACE).read_bytes()
        assert json.loads(trace)["traceEvents"]
        events = read_trace(trace)
        assert sum(e.name == LAUNCH for e in events) == 4, "one to settle, and three"
        found = breakdown(events)  # with the first, in which the picture is encoded
        assert set(found.groups) == set(GROUPS) - {"copies", "other"}
        assert found.launch > 0
        everything = found.idle + sum(s.seconds for s in found.groups.values())
        assert everything == pytest.approx(found.seconds, rel=1e-3)
        said = (tmp_path / "new" / SUMMARY).read_text()
        assert said.startswith("3 steps of ")
        assert "0.0 prompt tokens, 4.0 decodes, 0 patches a step" in said
        assert said == recording.summary + "\n"
        assert "measured on cpu" in said
        assert answers(llm) == want, "after the window"
    finally:
        llm.engine = plain


def test_a_window_that_work_does_not_reach_or_fill(llm: LLM, tmp_path: Path):
    plain = llm.engine
    try:
        llm.engine = never = wrap(llm, tmp_path, 50, 2)
        answers(llm)
        assert never.summary is None
        llm.engine = early = wrap(llm, tmp_path, 2, 100)
        answers(llm)
        assert early.summary is not None
        assert early.summary.startswith("3 steps of "), "6 tokens: 6 steps, of which 3 are left"
        llm.engine = last = wrap(llm, tmp_path, 5, 100)
        answers(llm)
        assert last.summary is not None
        assert "came to rest" in last.summary
    finally:
        llm.engine = plain


def test_what_is_refused(llm: LLM, tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for folder, skip, steps in ((tmp_path, 0, 0), (tmp_path, -1, 1), (file / "x", 0, 1)):
        with pytest.raises(Refused, match="--profile"):
            wrap(llm, folder, skip, steps)
