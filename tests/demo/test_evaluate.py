"""The measuring script: pictures that other processes draw, in rounds and in parts, are scored as
those that are drawn and asked here at once."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from vitrail import LLM, SamplingParams
from vitrail.cli import DEMO

ROOT = Path(__file__).resolve().parents[2]
PER_TASK = 27  # two chunks, of which the second is short


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with tasks that need no font and few chunks a round."""
    monkeypatch.syspath_prepend(ROOT / "demo")
    import evaluate

    monkeypatch.setattr(evaluate, "TASKS", ("count", "side"))
    monkeypatch.setattr(evaluate, "TEXT_TASKS", ())
    monkeypatch.setattr(evaluate, "TOGETHER", 3)
    return evaluate


def test_rounds_of_workers_score_what_one_process_does(evaluate: Any, tmp_path: Path):
    args = Namespace(
        fonts=tmp_path, model=DEMO, device="cpu", dtype="float32", per_task=PER_TASK, seed=3,
        part="0/1", workers=2,
    )  # fmt: skip
    drawn = [s for c in evaluate.chunks(PER_TASK) for s in evaluate.draw_chunk(tmp_path, 3, c)]
    llm = LLM(DEMO, device="cpu", kv_cache_bytes=16 << 20, max_running=16)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    said = llm.chat([evaluate.as_messages(sample) for _, sample in drawn], params)
    expected = evaluate.score(drawn, [g.outputs[0].text for g in said])
    assert evaluate.measure(args) == expected
    assert [s.total for s in expected] == [PER_TASK, PER_TASK]
    assert all(s.right > 0.7 * PER_TASK for s in expected)


def test_parts_are_the_whole_once(evaluate: Any):
    whole = evaluate.chunks(PER_TASK)
    parts = [evaluate.chunks(PER_TASK, (i, 3)) for i in range(3)]
    assert sorted(c for part in parts for c in part) == sorted(whole)
    assert sum(c.many for c in whole) == 2 * PER_TASK
