"""`bench/h200_round.py`: what runs, what is ended, what is left out and what comes back of it."""

import re
import shlex
import time
from pathlib import Path

import pytest

from bench.h200_round import CLI, JOBS, Job, main, run
from vitrail.cli import parser

ROOT = Path(__file__).parents[2]
SLEEPER = (
    '-c \'import subprocess, sys; print(subprocess.Popen(["sleep", "300"]).pid, flush=True); '
    "sys.stdout.flush(); import time; time.sleep(300)'"
)


def test_jobs_run_within_their_limits_and_the_rounds(tmp_path: Path, capfd):
    jobs = [
        Job("first", "a", 20, '-c \'print(6 * 7); open("{scratch}/f", "w").write("more")\'', "f"),
        Job("fails", "a", 20, "-c 'raise SystemExit(3)'"),
        Job("long", "a", 2, SLEEPER),
        Job("large", "b", 1000, "-c 'print(1)'"),
        Job("last", "b", 20, '-c \'import vitrail; print("x" * (5 << 20)); print("the end")\''),
    ]
    began = time.monotonic()
    done = run(jobs, 120, tmp_path / "out")
    assert time.monotonic() - began < 60, "what sleeps was waited for"
    states = [(each.job.name, each.state) for each in done]
    assert states == [
        ("first", "done"),
        ("fails", "failed"),
        ("long", "out of time"),
        ("large", "no time left"),
        ("last", "done"),
    ]
    assert done[0].tail == "42\nmore"
    assert not Path(f"/proc/{done[2].tail.splitlines()[0]}").exists(), "its child is alive"
    one, other = ((tmp_path / "out" / f"{name}.txt").read_text() for name in "ab")
    assert one.index("first: done") < one.index("42") < one.index("fails") < one.index("long")
    assert "large" not in other
    assert len(other) < 5 << 20
    assert other.endswith("the end\n\n")
    assert "== last: done" in capfd.readouterr().out


def test_nothing_begins_that_does_not_fit(tmp_path: Path):
    jobs = [Job(name, "a", 5, "-c 'import time; time.sleep(1.5)'") for name in "xy"]
    assert [each.state for each in run(jobs, 6, tmp_path)] == ["done", "no time left"]


def test_the_table_names_what_is_there(capsys, monkeypatch):
    """Scripts, and every flag that they are given; few files come back of a round."""
    assert len({job.group for job in JOBS}) <= 8
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        if job.line.startswith(CLI):
            parser().parse_args(shlex.split(job.line.removeprefix(CLI)))
            continue
        words = job.line.split()
        path = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        if words[:2] == ["-m", "pytest"]:
            assert (ROOT / words[-1]).is_dir()
            continue
        flags = re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (ROOT / path).read_text())
        assert {word for word in words if word.startswith("--")} <= set(flags), job
    monkeypatch.setattr("sys.argv", ["h200_round", "--dry-run", "--only", "moe,host"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["host", "moe"]


def test_a_job_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["h200_round", "--only", "moe,nothing"])
    with pytest.raises(SystemExit):
        main()
    assert "no job is named nothing" in capsys.readouterr().err
