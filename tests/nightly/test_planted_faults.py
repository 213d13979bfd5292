"""The night finds what is planted in it (`plant.py`): each kind of fault is named in the digest,
with its kind, where it lies and one file. That file fails alone in a new environment, and passes
with the fault gone: with `--fixed`, or with the commit before. Whole nights of the demo model:
minutes each, so of the night itself."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import fresh
from tests.nightly.plant import git, plant
from vitrail.nightly.records import Night, load

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]
ROOT = Path(__file__).parents[2]
ENGINE = ["vitrail", "pytest", "pytest-timeout", "beartype", "hypothesis"]


def nightly(root: Path, out: Path, *flags: str) -> tuple[int, str, Night]:
    """Exit code, digest and results of one call."""
    command = [sys.executable, "-m", "vitrail.cli", "nightly", f"--root={root}", f"--out={out}"]
    done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
    assert (out / "digest.html").exists(), done.stderr
    return done.returncode, (out / "digest.md").read_text(), load(out / "results.json")


def finds(
    folder: Path,
    name: str,
    jobs: list[str],
    said: list[str],
    *more: str,
    before: bool = False,
):
    """Red, and new against the night before where there is one, which is green. `more` are flags.
    Returns the scripts that the digest names, and the checkout."""
    root, only = plant(name, folder / "root"), [f"--only={job}" for job in jobs]
    against: list[str] = []
    if before:
        git(root, "checkout", "-q", "HEAD~1")
        code, text, _ = nightly(root, folder / "before", *only)
        assert code == 0, text
        git(root, "checkout", "-q", "-")
        against = [f"--against={folder / 'before' / 'results.json'}"]
    code, text, _ = nightly(root, folder / "night", *only, *against, *more)
    print(text)
    assert code == 1
    assert "## New" in text
    for part in said:
        assert part in text
    told = re.findall(r"one-file repro: `(.*?)`$", text, re.M)
    scripts = [found[1] for line in told if (found := re.match(r"(\S+\.py): fails alone", line))]
    assert len(scripts) == len(told), told
    return [Path(script) for script in scripts], root


def fails_alone_until_the_commit_before(scripts: list[Path], root: Path, folder: Path):
    """Each script, by itself in an empty folder, in an environment with the package of each of the
    two commits."""
    python = fresh.make(folder / "venv", ENGINE, package=root)
    (folder / "alone").mkdir()
    for script in scripts:
        path = Path(shutil.copy(script, folder / "alone"))
        done = fresh.run(python, path)
        print(done.stdout)
        assert done.returncode == 1, done.stdout + done.stderr
        git(root, "checkout", "-q", "HEAD~1")
        done = fresh.run(python, path)
        assert done.returncode == 0, done.stdout + done.stderr
        git(root, "checkout", "-q", "-")


@pytest.mark.suite("faults", minutes=3, owner="nightly")
def test_a_tile_of_zero_rows(tmp_path: Path):
    said = ["0 rows for each of 128 loader threads of a tile of 64 keys", "crash: Refused"]
    scripts, _ = finds(tmp_path, "tile", ["test_demo_kernels.py"], said, before=True)
    python = fresh.make(tmp_path / "venv", [])
    for script in scripts:
        assert "vitrail" not in re.sub(r"#.*", "", script.read_text())
        path = Path(shutil.copy(script, tmp_path))
        done = fresh.run(python, path)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "rows_per_thread = 0" in done.stdout
        assert fresh.run(python, path, "--fixed").returncode == 0


@pytest.mark.suite("faults", minutes=35, owner="nightly")
def test_a_wrong_rope(tmp_path: Path):
    """Many tests, each by numbers of its own: the commit says that they are one."""
    jobs = ["tests/ops/test_rope.py", "tests/models/test_kimi_vl_parity.py"]
    said = ["numerics: AssertionError", "tests/ops/test_rope.py:test_", "planted: rope\n"]
    scripts, root = finds(tmp_path, "rope", jobs, said, "--bisect=HEAD~1..HEAD")
    text = (tmp_path / "night" / "digest.md").read_text()
    assert re.findall(r"^### (.*) by commit", text, re.M) == [str(len(scripts))]
    fails_alone_until_the_commit_before(scripts, root, tmp_path)


@pytest.mark.suite("faults", minutes=3, owner="nightly")
def test_a_renamed_weight(tmp_path: Path):
    said = ["lm_head.renamed", "cause: `vitrail/", "crash: Refused"]
    scripts, root = finds(tmp_path, "weight", ["test_the_demo_model_s_choices"], said)
    fails_alone_until_the_commit_before(scripts, root, tmp_path)


@pytest.mark.suite("faults", minutes=6, owner="nightly")
def test_a_step_that_fails(tmp_path: Path):
    """Its capsule, shrunk: no test, no picture and no weights are in the script."""
    said = ["crash: ValueError: no layout for", "cause: `vitrail/engine/batch.py:pack`", "capsule-"]
    scripts, root = finds(tmp_path, "step", ["test_the_demo_model_s_choices"], said)
    (script,) = scripts
    text = script.read_text()
    assert "from vitrail.repro.standalone import" in text
    assert "def test_" not in text
    fails_alone_until_the_commit_before(scripts, root, tmp_path)


@pytest.mark.suite("faults", minutes=15, owner="nightly")
def test_a_hang(tmp_path: Path):
    said = ["hang: no end within its limit", "cause: `vitrail/engine/runner.py:launch`"]
    scripts, root = finds(tmp_path, "hang", ["test_the_demo_model_s_choices"], said)
    fails_alone_until_the_commit_before(scripts, root, tmp_path)


@pytest.mark.suite("faults", minutes=12, owner="nightly")
def test_a_slow_step(tmp_path: Path):
    said = ["speed: slower: demo, cpu: Scheduler.schedule", "times what it took"]
    scripts, root = finds(tmp_path, "slow", ["test_demo_speed.py"], said, before=True)
    fails_alone_until_the_commit_before(scripts, root, tmp_path)


@pytest.mark.suite("faults", minutes=5, owner="nightly")
def test_a_leak(tmp_path: Path):
    said = ["memory: AssertionError: memory grew, kept by vitrail/engine/engine.py"]
    scripts, root = finds(tmp_path, "leak", ["test_demo_soak.py"], said)
    fails_alone_until_the_commit_before(scripts, root, tmp_path)
