"""Laws of shrinking: what is left fails in the same way, nothing more can be taken from it alone,
twice gives the same; with conditions on a capsule's sizes, and with faults of a running engine."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from tests.engine.driver import Golden
from tests.repro.plants import PLANTS
from tests.repro.test_replay import PLANTED_TRIAL, Made, crashed
from vitrail.cli import main
from vitrail.engine.batch import BatchBuilder
from vitrail.repro.capsule import Capsule, decoded, encoded, findings, read
from vitrail.repro.form import apart, together
from vitrail.repro.outcome import REPRODUCED, verdict
from vitrail.repro.replay import replay
from vitrail.repro.shrink import REDUCTIONS, Shrunk, _Search, shrink

Plant = Callable[[str], None]


@pytest.fixture(scope="module")
def capsule(golden: Golden, capsule_folder: Path) -> Capsule:
    """Of four requests, two with pictures, sampled; nothing of it is planted any more."""
    before = set(capsule_folder.glob("*.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchBuilder, "turn_pages", BatchBuilder.turn_pages)
        PLANTS["rows"]()
        return crashed(
            golden,
            lambda: sorted(set(capsule_folder.glob("*.json")) - before),
            max_step_tokens=40,
        )


def rows_at_once(capsule: Capsule) -> int:
    return max((len(step.plan.decodes) for step in capsule.steps), default=0)


def tokens_at_once(capsule: Capsule) -> int:
    return max((sum(s.length for s in step.plan.rows) for step in capsule.steps), default=0)


def patches_at_once(capsule: Capsule) -> int:
    return max((sum(j.num_patches for j in s.plan.encodes) for s in capsule.steps), default=0)


def layers(capsule: Capsule) -> int:
    return capsule.config["text_config"]["num_hidden_layers"]


def longest(capsule: Capsule) -> int:
    return max((s.start + s.length for step in capsule.steps for s in step.plan.rows), default=0)


# what a failure may depend on, and what is left of a capsule then
CONDITIONS: dict[str, Callable[[Capsule], bool]] = {
    "always": lambda c: True,
    "two decodes": lambda c: rows_at_once(c) >= 2,
    "seven tokens": lambda c: tokens_at_once(c) >= 7,
    "two layers and a position": lambda c: layers(c) >= 2 and longest(c) > 21,
    "a picture": lambda c: patches_at_once(c) >= 5,
    "a slice of a picture": lambda c: any(step.plan.slices for step in c.steps),
    "a page beyond the third": lambda c: (
        max((p for s in c.steps for r in s.plan.rows for p in r.new_pages), default=0) > 3
    ),
    "two steps": lambda c: len(c.steps) >= 2,
    "sampling": lambda c: any(s.temperature > 0 for step in c.steps for s in step.setups),
    "tokens by fours": lambda c: any(
        sum(s.length for s in step.plan.rows) in range(8, 99, 4) for step in c.steps
    ),
}


def shrunk(capsule: Capsule, name: str) -> Shrunk:
    assert CONDITIONS[name](capsule), "it fails as it was recorded"
    return shrink(capsule, CONDITIONS[name])


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_is_left_fails_so_too_and_nothing_more_can_go(capsule: Capsule, name: str):
    made = shrunk(capsule, name)
    assert made.minimal
    assert CONDITIONS[name](made.capsule)
    assert made.capsule.signature == capsule.signature
    assert not findings(made.capsule)
    assert decoded(encoded(made.capsule)) == made.capsule
    tried: list[Capsule] = []

    def fails(candidate: Capsule) -> bool:
        tried.append(candidate)
        return CONDITIONS[name](candidate)

    search = _Search(made.capsule, fails, lambda: True)
    for reduce in REDUCTIONS:
        reduce(search)
    assert search.best == made.capsule, "a reduction goes on"
    assert not any(map(CONDITIONS[name], tried))


@pytest.mark.parametrize("name", ["two decodes", "a slice of a picture"])
def test_it_is_deterministic(capsule: Capsule, name: str):
    assert shrunk(capsule, name) == shrunk(capsule, name)


def test_what_is_left_is_what_the_failure_needs(capsule: Capsule):
    always = shrunk(capsule, "always").capsule
    (step,) = always.steps
    assert (step.plan.rows, step.plan.encodes, step.plan.slices, step.setups) == ((),) * 4
    assert (always.entries, step.plan.drop_entries) == ((), ())
    assert layers(always) == 1
    two = shrunk(capsule, "two decodes").capsule
    (step,) = two.steps
    assert [(s.start, s.length, s.new_pages) for s in step.plan.decodes] == [
        (0, 1, (0,)),
        (0, 1, (1,)),
    ]
    assert not step.plan.prefills
    assert {s.slot for s in step.plan.decodes} == {0, 1}
    assert (two.flags["max_running"], two.held.num_pages) == (2, 2)
    seven = shrunk(capsule, "seven tokens").capsule
    assert (tokens_at_once(seven), longest(seven)) == (7, 7)
    deep = shrunk(capsule, "two layers and a position").capsule
    assert (layers(deep), longest(deep)) == (2, 22)
    picture = shrunk(capsule, "a picture").capsule
    assert patches_at_once(picture) < patches_at_once(capsule)
    assert 5 <= patches_at_once(picture) <= 8


def test_apart_and_together_is_the_same(capsule: Capsule):
    """But for pages that were sent before they were needed."""
    again = together(apart(capsule))
    assert together(apart(again)) == again
    for old, new in zip(capsule.steps, again.steps, strict=True):
        assert (old.setups, old.pixels, old.seeds) == (new.setups, new.pixels, new.seeds)
        assert old.output_index == new.output_index
        assert old.plan.slices == new.plan.slices
        for a, b in zip(old.plan.rows, new.plan.rows, strict=True):
            assert (a.seq, a.slot, a.start, a.length) == (b.seq, b.slot, b.start, b.length)
    pages = apart(capsule).pages
    for seq, used in apart(again).pages.items():
        assert used == pages[seq][: len(used)]


def test_time_ends_it_where_it_is(capsule: Capsule):
    left = iter(range(8))
    made = shrink(capsule, CONDITIONS["two decodes"], lambda: next(left, None) is not None)
    assert (made.trials, made.minimal) == (8, False)
    assert CONDITIONS["two decodes"](made.capsule)
    assert not findings(made.capsule)


@pytest.mark.suite("faults", minutes=3, owner="repro")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["rows", "norm", "picture"])
def test_a_fault_of_an_engine_shrinks_to_its_condition(
    golden: Golden,
    capsules: Made,
    plant: Plant,
    name: str,
):
    plant(name)
    big = crashed(golden, capsules)

    def fails(candidate: Capsule) -> bool:
        return verdict(candidate, replay(candidate))[0] == REPRODUCED

    made = shrink(big, fails)
    small = made.capsule
    assert made.minimal
    assert fails(small)
    assert small.signature == big.signature
    print(f"{name}: {made.trials} replays")
    plans = [step.plan for step in small.steps]
    if name == "rows":
        (plan,) = plans
        assert [s.start for s in plan.decodes] in ([0, 30], [30, 0])
        assert not plan.prefills
        assert layers(small) == 1
    elif name == "norm":
        assert tokens_at_once(small) == 21
        assert layers(small) == 2
        assert len(small.steps) == 1
    else:
        (plan,) = plans
        assert not plan.rows
        assert 40 < patches_at_once(small) <= 80


@pytest.mark.suite("faults", minutes=3, owner="repro")
@pytest.mark.nightly
def test_at_the_command_line(
    golden: Golden,
    capsules: Made,
    plant: Plant,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A fault that would end its process: replayed, shrunk, a script; that with the fault, without
    it, and for a GPU."""
    plant("device")
    crashed(golden, capsules)
    (path, *_) = capsules()
    monkeypatch.setattr("vitrail.repro.trial.MODULE", PLANTED_TRIAL)
    small, script = tmp_path / "small.json", tmp_path / "repro.py"
    assert main(["repro", str(path), "--shrink", str(small), "--script", str(script)]) == 0
    said = capsys.readouterr().out
    assert "seen again: crash AcceleratorError: ('CUDA error: an illegal memory access'" in said
    assert "nothing more can be left out" in said
    assert "1 steps of up to 2 requests and 2 tokens, 0 pictures" in said
    assert len(read(small).steps) == 1
    assert small.stat().st_size < path.stat().st_size
    text = script.read_text()
    assert text.isascii()
    assert "# needs: vitrail @ " in text
    for name, code, word in (("device", 1, "the fault is there"), ("nothing", 0, "gone")):
        run = (
            f"import runpy; from tests.repro.plants import PLANTS; PLANTS[{name!r}](); "
            f"runpy.run_path({str(script)!r}, run_name='__main__')"
        )
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
        assert (done.returncode, word in done.stdout) == (code, True), done
    monkeypatch.setenv("PLANTED", "nothing")
    assert main(["repro", str(path)]) == 1
    assert "not seen: nothing failed" in capsys.readouterr().out
    other = structs.replace(read(path), cc=90, gpu="NVIDIA H200")
    small.write_bytes(encoded(other))
    assert main(["repro", str(small)]) == 2
    assert "cannot tell: it failed on a NVIDIA H200" in capsys.readouterr().out
    assert main(["repro", str(tmp_path / "none.json")]) == 2
