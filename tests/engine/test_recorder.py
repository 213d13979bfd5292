"""What a failed step leaves behind: everything that a replay needs, nothing that anybody asked."""

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.engine.driver import Golden, golden_llm
from tests.server.checkpoint import write_kimi
from vitrail import LLM, Refused, SamplingParams
from vitrail.config.env import read_env
from vitrail.engine import recorder
from vitrail.engine.capsule import Capsule
from vitrail.engine.request import FinishReason
from vitrail.engine.step import NO_DECODES, Decodes, SequenceStep, StepInputs, StepPlan
from vitrail.repro.capsule import read

Made = Callable[[], list[Path]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


def ends(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    made = [llm.preparer.requests(llm.prepare(p), params, f"r{i}") for i, p in enumerate(prompts)]
    answers = {}
    for answer, _ in llm.stream([r for each in made for r in each]):
        answers[answer.request.id] = answer
    return list(answers.values())


def break_forward(llm: LLM, at: int, error: Exception) -> None:
    """The `at`-th forward pass raises."""
    model = llm.engine.runner.parts.model
    forward, calls = model.forward, iter(range(1000))

    def faulty(*args: Any) -> Any:
        if next(calls) == at:
            raise error
        return forward(*args)

    model.forward = faulty


@pytest.mark.parametrize("step_ahead", [True, False])
def test_a_failed_step_leaves_a_capsule(
    golden: Golden, capsules: Made, caplog: pytest.LogCaptureFixture, step_ahead: bool
):
    llm = golden_llm(step_ahead=step_ahead, seed=11)
    break_forward(llm, 4, ValueError("a kernel said no to 17 rows"))
    with caplog.at_level(logging.ERROR, "vitrail.engine"):
        (answer,) = ends(llm, [golden.prompt])
    assert answer.finish_reason is FinishReason.ERROR
    (path,) = capsules()
    assert str(path) in caplog.text
    capsule = read(path)
    assert capsule.kind == "step"
    assert capsule.error == "ValueError: a kernel said no to <n> rows"
    assert capsule.signature == f"crash {capsule.error} @ vitrail/engine/runner.py:launch"
    assert capsule.trace[-1].startswith("vitrail/engine/runner.py:")
    assert [step.plan.index for step in capsule.steps] == [0, 1, 2, 3, 4]
    assert capsule.failed == 4
    assert capsule.steps[0].setups[0].num_prompt == len(golden.ids)
    assert capsule.steps[0].pixels[0].dtype in ("uint8", "float32")
    assert {p.shape.phase for p in capsule.plans} == {"decode"}
    assert (capsule.gpu, capsule.cc, capsule.seed) == ("cpu", 0, 11)
    assert capsule.flags["page_size"] == 16
    assert capsule.flags["kv_cache_bytes"] is not None
    assert capsule.held.num_pages == llm.engine.stats().num_pages
    assert capsule.config["architectures"] == [capsule.architecture]
    assert {"vitrail", "torch"} <= set(capsule.versions)


def test_nothing_that_was_asked_or_answered_is_in_it(golden: Golden, capsules: Made):
    """No run of a prompt's ids, of an answer's, or of a picture's bytes, in any writing, not even
    where the error says them."""
    rng = np.random.default_rng(0)
    secret = [int(i) for i in rng.integers(100, 500, 40)]
    picture = golden.images[0]["patches"]
    llm = golden_llm()
    break_forward(llm, 6, ValueError(f"ids {secret}, {secret[:3]} and {tuple(secret)}; {picture}"))
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=5, logit_bias={401: 2.0, 402: 1.0})
    prompts = [{"prompt_token_ids": secret}, golden.prompt]
    answers = ends(llm, prompts, params)
    (path,) = capsules()
    data = path.read_bytes()
    numbers = [int(n) for n in _integers(data)]
    for ids in (secret, golden.ids, *(a.token_ids for a in answers), [401, 402]):
        assert len(ids) >= 2
        for run in (ids[i : i + 2] for i in range(len(ids) - 1)):
            if len(set(run)) == 2 and min(run) >= 100:
                assert not _has_run(numbers, run), run
    raw = np.ascontiguousarray(picture).tobytes()
    for i in range(0, len(raw) - 16, 16):
        piece = raw[i : i + 16]
        assert len(set(piece)) < 4 or piece not in data
    text = " ".join(map(str, picture.reshape(-1)[:4].tolist()))
    assert text.encode() not in data


def test_no_text_is_in_it(tmp_path: Path, capsules: Made):
    """Of a prompt, a stop string, a system message, or the name of the model's folder's parents."""
    folder = write_kimi(tmp_path / "somebody" / "tiny")
    llm = LLM(folder, device="cpu", dtype="float32", kv_cache_bytes=4 << 20, page_size=16)
    break_forward(llm, 3, ValueError("x"))
    params = SamplingParams(max_tokens=9, temperature=0, stop=("zebra",), ignore_eos=True)
    says = [
        {"role": "system", "content": "only whisper"},
        {"role": "user", "content": "hello walrus"},
    ]
    ends(llm, [says, "goodbye penguin"], params)
    (path,) = capsules()
    data = path.read_bytes()
    for word in ("zebra", "whisper", "walrus", "penguin", "user", "somebody"):
        assert word.encode() not in data
    assert read(path).flags["model"] == "tiny"


def _integers(data: bytes) -> list[str]:
    return re.findall(r"-?\d+", data.decode())


def _has_run(numbers: list[int], run: list[int]) -> bool:
    n = len(run)
    return any(numbers[i : i + n] == run for i in range(len(numbers) - n + 1))


def test_the_law_sees_what_is_there(golden: Golden, capsules: Made):
    """The search itself, on a capsule that was made to hold a prompt."""
    llm = golden_llm()
    break_forward(llm, 0, ValueError("x"))
    ends(llm, [golden.prompt])
    (path,) = capsules()
    leaky = structs.replace(read(path), entries=((golden.ids[1], golden.ids[2]),))
    numbers = [int(n) for n in _integers(recorder.encoded(leaky))]
    assert _has_run(numbers, golden.ids[1:3])


def test_the_window_leans_on_nothing_before_it(golden: Golden, capsules: Made):
    """After many steps: every sequence comes with all its pages and its setup, those that it had,
    and pictures that were encoded before are named."""
    llm = golden_llm(max_step_tokens=7)
    steps: list[StepPlan] = []
    launch = llm.engine.runner.launch

    def watched(plan: StepPlan, inputs: StepInputs) -> Any:
        steps.append(plan)
        return launch(plan, inputs)

    llm.engine.runner.launch = watched
    long = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    break_forward(llm, 70, ValueError("late"))
    ends(llm, [golden.prompt, {"prompt_token_ids": golden.text_ids}], long)
    (path,) = capsules()
    capsule = read(path)
    assert len(capsule.steps) == recorder.WINDOW
    assert capsule.steps[0].plan.index > 0
    held: dict[int, list[int]] = {}
    for plan in steps:
        for s in (*plan.prefills, *plan.decodes):
            held.setdefault(s.seq, []).extend(s.new_pages)
    seen: dict[int, list[int]] = {}
    for step in capsule.steps:
        for s in (*step.plan.prefills, *step.plan.decodes):
            assert s.pages_before == len(seen.setdefault(s.seq, []))
            seen[s.seq] += s.new_pages
            assert len(seen[s.seq]) * 16 >= s.start + s.length
    assert seen == held
    assert {s.seq for step in capsule.steps for s in step.setups} >= set(seen)


def test_pages_of_rows_that_others_took_are_made_up_and_distinct(tmp_path: Path):
    """A sequence whose row was given away within the window: its earlier pages are known to
    nobody."""
    llm = golden_llm()
    kept = llm.engine.recorder
    assert kept is not None
    parts = llm.engine.runner.parts
    first = SequenceStep(1, 0, 40, 1, 3, (), True)
    later = SequenceStep(2, 0, 0, 16, 0, (5, 6), True)
    for i, plan in enumerate(
        (
            StepPlan(0, (), Decodes.of((first,)), (), (), ()),
            StepPlan(1, (later,), NO_DECODES, (), (), ()),
        )
    ):
        parts.builder.turn_pages(plan)
        kept.note(plan, _no_inputs(i))
    try:
        raise ValueError("x")
    except ValueError as error:
        capsule = kept._capsule(error, recorder.cause_of(error), 1)
    (row,) = capsule.steps[0].plan.decodes
    assert row.pages_before == 0
    assert len(set(row.new_pages)) == 3
    assert not set(row.new_pages) & {5, 6}
    assert max(row.new_pages) < capsule.held.num_pages
    assert capsule.steps[1].plan.prefills == (later,)


def _no_inputs(i: int) -> StepInputs:
    return StepInputs(
        token_ids=np.zeros(16 * i, np.int64),
        next_ids=np.zeros(16 * i, np.int64),
        seeds=np.zeros(1, np.uint64),
        output_index=np.zeros(1, np.int64),
        setups=[],
        pixels=[],
    )


def test_a_picture_that_fails_alone_leaves_a_capsule(golden: Golden, capsules: Made):
    llm = golden_llm()
    model = llm.engine.runner.parts.encoder._model
    encode = model.encode_patches

    def faulty(patches: Any, grids: Any, plans: Any) -> Any:
        if tuple(golden.images[1]["grid"]) in [tuple(g) for g in grids]:
            raise IndexError("row 3")
        return encode(patches, grids, plans)

    model.encode_patches = faulty
    (answer,) = ends(llm, [golden.prompt])
    assert "row 3" in answer.error
    (path,) = capsules()
    capsule = read(path)
    assert capsule.error == "IndexError: row <n>"
    assert capsule.frame == "vitrail/engine/encode.py:_encode"
    assert capsule.failed == capsule.steps[-1].plan.index
    assert {p.shape.phase for p in capsule.plans} >= {"encode"}


def test_what_a_kernel_raises_is_a_kernels(
    golden: Golden, capsules: Made, monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: Any, **names: Any) -> Any:
        raise ValueError("no such tile")

    llm = golden_llm()
    monkeypatch.setattr(torch, "rsqrt", broken)
    ends(llm, [{"prompt_token_ids": golden.text_ids}])
    (path,) = capsules()
    capsule = read(path)
    assert capsule.kind == "kernel"
    assert capsule.frame.startswith("vitrail/ops/")


@pytest.mark.timeout(30)
def test_a_fault_of_the_device_leaves_one_before_it_ends_the_process(
    golden: Golden, capsules: Made
):
    llm = golden_llm()
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)
    break_forward(llm, 2, error)
    with pytest.raises(torch.AcceleratorError):
        ends(llm, [golden.prompt, {"prompt_token_ids": golden.text_ids}])
    assert llm.engine.idle
    llm.engine.rest()
    (path,) = capsules()
    assert read(path).failed == 2


@pytest.mark.timeout(30)
def test_a_fault_of_the_device_that_shows_while_another_step_fails_leaves_the_engine_at_rest(
    golden: Golden,
):
    llm = golden_llm()
    engine = llm.engine
    launch = engine.runner.launch

    def lost() -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)

    def faulty(plan: Any, inputs: Any) -> Any:
        if plan.index == 3:
            raise ValueError("the host's")
        launched = launch(plan, inputs)
        if plan.index == 2:
            launched.read = lost
        return launched

    engine.runner.launch = faulty
    with pytest.raises(torch.AcceleratorError):
        ends(llm, [golden.prompt, {"prompt_token_ids": golden.text_ids}])
    assert engine.idle
    engine.rest()


def test_one_signature_is_written_once_and_a_folder_is_bounded(
    golden: Golden, capsules: Made, tmp_path: Path
):
    llm = golden_llm()
    model = llm.engine.runner.parts.model

    def faulty(*args: Any) -> Any:
        raise ValueError(f"at {time.perf_counter_ns()} rows")

    model.forward = faulty
    for _ in range(3):
        ends(llm, [golden.prompt])
    (path,) = capsules()
    capsule = read(path)
    other = tmp_path / "other.json"
    other.write_text("kept")
    for _ in range(recorder.MAX_FILES + 5):
        last = recorder.write(capsule, tmp_path)
    files = sorted(tmp_path.glob("capsule-*"))
    assert len(files) == recorder.MAX_FILES
    assert files[-1] == last
    assert other.exists()
    assert last.stat().st_mode & 0o077 == 0


def test_a_capsule_is_bounded_in_size(
    golden: Golden, capsules: Made, monkeypatch: pytest.MonkeyPatch
):
    """It holds fewer steps instead; the failed one always, or there is none."""
    whole = _capsule_of(golden, capsules)
    monkeypatch.setattr(recorder, "MAX_BYTES", whole[1] * 3 // 4)
    fewer = _capsule_of(golden, capsules)
    assert fewer[1] <= whole[1] * 3 // 4
    assert 0 < len(fewer[0].steps) < len(whole[0].steps)
    assert fewer[0].steps[-1].plan.index == fewer[0].failed == whole[0].failed
    monkeypatch.setattr(recorder, "MAX_BYTES", 1000)
    before = capsules()
    llm = golden_llm()
    break_forward(llm, 8, ValueError("x"))
    (answer,) = ends(llm, [golden.prompt])
    assert answer.finish_reason is FinishReason.ERROR
    assert capsules() == before


def _capsule_of(golden: Golden, capsules: Made) -> tuple[Capsule, int]:
    llm = golden_llm()
    break_forward(llm, 8, ValueError("x"))
    ends(llm, [golden.prompt])
    path = capsules()[-1]
    return read(path), path.stat().st_size


def test_a_configuration_that_json_cannot_say_leaves_no_file(
    golden: Golden, capsules: Made, tmp_path: Path
):
    """A lone surrogate, which config.json may spell."""
    capsule, _ = _capsule_of(golden, capsules)
    with pytest.raises(UnicodeEncodeError):
        recorder.write(structs.replace(capsule, config={"x": "\ud800"}), tmp_path)
    assert not list(tmp_path.glob("capsule-*"))


@pytest.mark.parametrize("way", ["file", "full"])
def test_where_it_cannot_be_written_the_request_fails_as_it_would_have(
    golden: Golden,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
):
    folder = tmp_path / "capsules"
    if way == "file":
        folder.write_text("in the way")
    monkeypatch.setenv("VITRAIL_CAPSULES", str(folder))
    if way == "full":

        def full(*args: Any, **names: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(recorder.os, "fdopen", full)
    llm = golden_llm()
    break_forward(llm, 1, ValueError("the cause"))
    with caplog.at_level(logging.WARNING, "vitrail.engine"):
        (answer,) = ends(llm, [golden.prompt])
    assert answer.finish_reason is FinishReason.ERROR
    assert "the cause" in answer.error
    assert "no capsule of this failure" in caplog.text
    assert way == "file" or not list(folder.iterdir())
    (again,) = ends(llm, [golden.prompt])
    assert again.token_ids == golden.greedy[:12]


def test_a_launch_that_cannot_be_read_costs_that_alone(
    golden: Golden, capsules: Made, monkeypatch: pytest.MonkeyPatch
):
    def unreadable(error: BaseException) -> None:
        raise KeyError("grid")

    monkeypatch.setattr(recorder, "kernel_fault", unreadable)
    llm = golden_llm()
    break_forward(llm, 1, ValueError("the cause"))
    ends(llm, [golden.prompt])
    (path,) = capsules()
    assert read(path).kernel is None


def test_off_is_off(golden: Golden, capsules: Made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VITRAIL_CAPSULES", "off")
    llm = golden_llm()
    break_forward(llm, 1, ValueError("the cause"))
    ends(llm, [golden.prompt])
    assert llm.engine.recorder is None
    assert not capsules()


def test_where_capsules_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for said, folder in (
        (None, tmp_path / ".local/state/vitrail/capsules"),
        ("some/where", Path("some/where")),
        ("off", None),
    ):
        if said is None:
            monkeypatch.delenv("VITRAIL_CAPSULES")
        else:
            monkeypatch.setenv("VITRAIL_CAPSULES", said)
        assert read_env().capsules == folder
    monkeypatch.setenv("VITRAIL_CAPSULES", "")
    with pytest.raises(Refused, match="VITRAIL_CAPSULES"):
        read_env()


def test_a_start_that_raises_leaves_one_and_a_refusal_does_not(
    capsules: Made, monkeypatch: pytest.MonkeyPatch
):
    from vitrail.engine import build

    with pytest.raises(Refused):
        golden_llm(page_size=0)
    with pytest.raises(Refused):
        golden_llm(max_model_len=10**9)
    assert not capsules()

    def broken(*args: Any, **names: Any) -> Any:
        raise RuntimeError("no graph of 8 rows")

    monkeypatch.setattr(build, "capture_graphs", broken)
    with pytest.raises(RuntimeError):
        golden_llm()
    (path,) = capsules()
    capsule = read(path)
    assert (capsule.kind, capsule.steps, capsule.failed) == ("start", (), -1)
    assert capsule.error == "RuntimeError: no graph of <n> rows"
    assert capsule.frame == "vitrail/engine/build.py:_assemble"


def test_a_healthy_step_costs_little():
    """A step of 256 decodes, noted: well under 10 us, whatever it holds."""
    llm = golden_llm(max_running=256, kv_cache_bytes=64 << 20)
    kept = llm.engine.recorder
    assert kept is not None
    decodes = tuple(SequenceStep(i, i, 900, 1, 57, (), True) for i in range(256))
    plan = StepPlan(0, (), Decodes.of(decodes), (), (), ())
    inputs = StepInputs(
        token_ids=np.zeros(0, np.int64),
        next_ids=np.zeros(0, np.int64),
        seeds=np.zeros(256, np.uint64),
        output_index=np.zeros(256, np.int64),
        setups=[],
        pixels=[],
    )
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            kept.note(plan, inputs)
        best = min(best, (time.perf_counter() - began) / 100)
    print(f"{best * 1e6:.2f} us")
    assert best < 10e-6


def test_the_file_is_json_that_others_read(golden: Golden, capsules: Made):
    _capsule_of(golden, capsules)
    data = json.loads(capsules()[-1].read_text())
    assert data["version"] == 1
    assert data["steps"][-1]["plan"]["decodes"][0]["length"] == 1
