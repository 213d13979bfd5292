"""Failures again from their capsules alone: in this process, in one of its own, at the command
line."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.engine.driver import GOLDEN, Golden, golden_llm
from tests.engine.test_recorder import ends
from tests.repro import planted_crash
from tests.repro.plants import PLANTS
from vitrail import SamplingParams
from vitrail.config.engine import EngineConfig
from vitrail.engine.client import EngineClient, Listener
from vitrail.engine.request import EngineRequest
from vitrail.repro.capsule import Capsule, read
from vitrail.repro.outcome import ABSENT, REPRODUCED, UNTOLD, Outcome, verdict
from vitrail.repro.replay import replay
from vitrail.repro.standalone import engine_text
from vitrail.repro.trial import Trials

Made = Callable[[], list[Path]]
PLANTED_TRIAL = "tests.repro.planted_trial"


def crashed(golden: Golden, capsules: Made, **choices: Any) -> Capsule:
    """What a run of four requests, two with pictures, leaves behind."""
    llm = golden_llm(**choices)
    prompts = [
        golden.prompt,
        {"prompt_token_ids": golden.text_ids},
        {"prompt_token_ids": [1, 505, 2], "images": [golden.images[0]]},
        {"prompt_token_ids": golden.text_ids[:5]},
    ]
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)
    with suppress(torch.AcceleratorError):
        ends(llm, prompts, params)
    (path, *_) = capsules()
    return read(path)


@pytest.mark.parametrize("name", ["rows", "norm", "picture", "device"])
@pytest.mark.parametrize("step_ahead", [True, False])
def test_the_same_failure_is_seen_again(
    golden: Golden, capsules: Made, plant: Callable[[str], None], name: str, step_ahead: bool
):
    plant(name)
    capsule = crashed(golden, capsules, step_ahead=step_ahead)
    outcome = replay(capsule)
    assert outcome.why == ""
    assert verdict(capsule, outcome) == (REPRODUCED, capsule.signature)


def test_without_the_fault_nothing_fails(golden: Golden, capsules: Made):
    """A capsule of a fault that is gone, pictures and penalties and all."""
    with pytest.MonkeyPatch.context() as patch:
        from vitrail.engine.runner import Fetched

        patch.setattr(Fetched, "read", Fetched.read)
        PLANTS["device"]()
        capsule = crashed(golden, capsules)
    assert len(capsule.steps) > 1
    outcome = replay(capsule)
    assert outcome == Outcome(gpu="cpu")
    assert verdict(capsule, outcome)[0] == ABSENT


def test_a_replay_gives_the_same_each_time(golden: Golden, capsules: Made, plant: Any):
    plant("rows")
    capsule = crashed(golden, capsules)
    assert replay(capsule) == replay(capsule)


def test_a_start_that_failed_fails_again(capsules: Made, plant: Callable[[str], None]):
    plant("start")
    with pytest.raises(RuntimeError):
        golden_llm()
    (path,) = capsules()
    capsule = read(path)
    assert verdict(capsule, replay(capsule))[0] == REPRODUCED


def test_a_start_that_is_mended_is_mended(capsules: Made):
    with pytest.MonkeyPatch.context() as patch:
        from vitrail.engine import build

        patch.setattr(build, "capture_graphs", build.capture_graphs)
        PLANTS["start"]()
        with pytest.raises(RuntimeError):
            golden_llm()
    (path,) = capsules()
    assert verdict(read(path), replay(read(path)))[0] == ABSENT


def test_images_that_were_encoded_before_the_window_are_made_up(
    golden: Golden, capsules: Made, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """Slices of entries that no step of the capsule encodes, and parts of a picture whose first
    ones are missing."""
    from vitrail.engine import recorder

    monkeypatch.setattr(recorder, "WINDOW", 2)
    plant("rows")
    llm = golden_llm(max_step_tokens=6)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    two = [golden.prompt, {"prompt_token_ids": golden.text_ids}]
    ends(llm, two, params)
    (path,) = capsules()
    capsule = read(path)
    assert len(capsule.steps) == 2
    assert verdict(capsule, replay(capsule))[0] == REPRODUCED


def test_what_needs_a_gpu_that_is_not_here_cannot_be_told(
    golden: Golden, capsules: Made, plant: Any
):
    plant("rows")
    capsule = structs.replace(crashed(golden, capsules), cc=90, gpu="NVIDIA H200")
    code, why = verdict(capsule, replay(capsule))
    assert code == UNTOLD
    assert "NVIDIA H200" in why
    elsewhere = Outcome(gpu="NVIDIA L4")
    assert verdict(capsule, elsewhere)[0] == UNTOLD


def test_the_engine_behind_a_server_leaves_one(
    golden: Golden, capsules: Made, plant: Callable[[str], None]
):
    """In its own process, as it goes on serving; and as a fault of the device ends it."""

    async def served(name: str, ended: bool) -> None:
        plant(name)
        config = EngineConfig(
            model=str(GOLDEN / "ckpt"), device="cpu", kv_cache_bytes=2 << 20, page_size=16
        )
        client, _ = await EngineClient.start(config, "tests.repro.planted_worker")
        done: asyncio.Queue[object] = asyncio.Queue()
        told = Listener(lambda o: done.put_nowait(o) if o.finish_reason else None, done.put_nowait)
        for i in range(2):
            request = EngineRequest(
                id=f"r{i}",
                prompt_token_ids=golden.text_ids,
                images=[],
                params=SamplingParams(temperature=0),
                max_tokens=40,
                stop_token_ids=frozenset(),
                seed=0,
            )
            client.submit(client.stage([request]), told)
        async with asyncio.timeout(60):
            failed = [await done.get() for _ in range(2)]
        assert ("exit code" in str(failed[0])) == ended
        assert (client.dead is not None) == ended
        await client.close()

    for name, ended, word in (("rows", False, "no kernel"), ("device", True, "illegal memory")):
        before = capsules()
        asyncio.run(served(name, ended))
        (path,) = [each for each in capsules() if each not in before]
        assert word in read(path).signature


def test_a_lost_device_is_told_before_anything_on_it_is_freed(
    golden: Golden, capsules: Made, plant: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """By a trial, and by a script of the same capsule."""
    plant("device")
    capsule = crashed(golden, capsules)
    monkeypatch.setenv("PLANTED", "freed")
    with Trials(module=PLANTED_TRIAL) as trials:
        outcome = trials.run(capsule, 60)
    assert verdict(capsule, outcome) == (REPRODUCED, outcome.signatures[0])
    script = tmp_path / "script.py"
    planted = "from tests.repro.plants import PLANTS\nPLANTS['freed']()\n"
    script.write_text(planted + engine_text(capsule))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "the fault is there" in done.stdout) == (1, True), done.stderr


@pytest.mark.parametrize("name", ["rows", "device", "start"])
def test_an_engine_with_a_fault_leaves_a_capsule_and_ends_as_failed(
    capsules: Made, plant: Any, name: str
):
    """What the tests on a GPU begin with: also where requests alone have failed."""
    plant("nothing")  # puts back what it plants
    with pytest.raises((SystemExit, RuntimeError, torch.AcceleratorError)) as ended:
        planted_crash.main(name, "cpu")
    assert getattr(ended.value, "code", "raised")
    assert len(capsules()) == 1


@pytest.mark.suite("faults", minutes=1, owner="nightly")
@pytest.mark.nightly
def test_trials_run_elsewhere_and_go_on_after_what_ends_them(
    golden: Golden, capsules: Made, plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    plant("device")
    capsule = crashed(golden, capsules)
    with Trials(module=PLANTED_TRIAL) as trials:
        assert verdict(capsule, trials.run(capsule, 60))[0] == REPRODUCED
        assert verdict(capsule, trials.run(capsule, 60))[0] == REPRODUCED
    monkeypatch.setenv("PLANTED", "nothing")
    with Trials(module=PLANTED_TRIAL) as trials:
        assert verdict(capsule, trials.run(capsule, 60))[0] == ABSENT
    monkeypatch.setenv("PLANTED", "death")
    with Trials(module=PLANTED_TRIAL) as trials:
        died = trials.run(capsule, 60)
        assert verdict(capsule, died) == (UNTOLD, "the replay's process ended by signal 11")
        monkeypatch.setenv("PLANTED", "hang")
        late = trials.run(capsule, 8)
        assert verdict(capsule, late) == (UNTOLD, "it was not done after 8 s")
