"""The night finds what is planted in it (`plant.py`): each kind of fault is named in the digest,
with its kind and where it lies. Whole nights of the demo model: minutes each, so of the night
itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.nightly.records import Night, load

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]
ROOT = Path(__file__).parents[2]


def nightly(out: Path, *flags: str, plant: str = "") -> tuple[int, str, Night]:
    """Exit code, digest and results of one call."""
    command = [sys.executable, "-m", "vitrail.cli", "nightly", "--out", str(out), *flags]
    planted = ["--", "-p", "tests.nightly.plant", f"--plant={plant}"] if plant else []
    done = subprocess.run([*command, *planted], cwd=ROOT, capture_output=True, text=True)
    assert (out / "digest.html").exists(), done.stderr
    return done.returncode, (out / "digest.md").read_text(), load(out / "results.json")


def finds(out: Path, plant: str, jobs: list[str], said: list[str], *, before: bool = False):
    """Without the fault green; with it red, and new against the night without."""
    only = [f"--only={job}" for job in jobs]
    against: list[str] = []
    if before:
        code, text, _ = nightly(out / "clean", *only)
        assert code == 0, text
        against = [f"--against={out / 'clean' / 'results.json'}"]
    code, text, _ = nightly(out / plant, *only, *against, plant=plant)
    assert code == 1
    assert "## New" in text
    for part in said:
        assert part in text, text
    print(text)


@pytest.mark.suite("faults", minutes=2, owner="nightly")
def test_a_tile_of_zero_rows(tmp_path: Path):
    said = ["0 rows for each of 128 loader threads of a tile of 64 keys", "crash: Refused"]
    finds(tmp_path, "tile", ["test_demo_kernels.py"], said, before=True)


@pytest.mark.suite("faults", minutes=4, owner="nightly")
def test_a_wrong_rope(tmp_path: Path):
    jobs = ["tests/ops/test_rope.py", "tests/models/test_kimi_vl_parity.py"]
    said = ["numerics: AssertionError", "tests/ops/test_rope.py:test_"]
    finds(tmp_path, "rope", jobs, said)


@pytest.mark.suite("faults", minutes=2, owner="nightly")
def test_a_renamed_weight(tmp_path: Path):
    said = ["planted.renamed.weight", "cause: `vitrail/", "crash: Refused"]
    finds(tmp_path, "weight", ["test_the_demo_model_s_choices"], said)


@pytest.mark.suite("faults", minutes=6, owner="nightly")
def test_a_hang(tmp_path: Path):
    said = ["hang: no end within its limit", "cause: `vitrail/engine/engine.py:_launch`"]
    finds(tmp_path, "hang", ["test_the_demo_model_s_choices"], said)


@pytest.mark.suite("faults", minutes=6, owner="nightly")
def test_a_slow_step(tmp_path: Path):
    said = ["speed: slower: demo, cpu: Scheduler.schedule", "times what it took"]
    finds(tmp_path, "slow", ["test_demo_speed.py"], said, before=True)


@pytest.mark.suite("faults", minutes=8, owner="nightly")
def test_a_leak(tmp_path: Path):
    said = ["memory: AssertionError: memory grew, kept by tests/nightly/plant.py"]
    finds(tmp_path, "leak", ["test_demo_soak.py"], said, before=True)
