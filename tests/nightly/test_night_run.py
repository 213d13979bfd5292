"""One night over a tree of files that do all that a file can do: each ends as what it is."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import msgspec
import pytest

from tests.nightly.tree import job, setting, write_tree
from vitrail.nightly import cage
from vitrail.nightly.cage import Report
from vitrail.nightly.digest import markdown, page
from vitrail.nightly.records import Case, JobRecord, Night, load, merge, save
from vitrail.nightly.run import baseline_of, judge, measured, run_job, run_night
from vitrail.nightly.triage import grouped, triage

HANG = """
import subprocess, sys, time

CODE = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"

def test_waits(request):
    where = request.config.rootpath / "pids"
    # a child, one of another session, and an orphan
    run = [sys.executable, "-c", CODE, str(where)]
    subprocess.Popen(run)
    subprocess.Popen(run, start_new_session=True)
    start = f"import subprocess; subprocess.Popen({run!r})"
    subprocess.run([sys.executable, "-c", start])
    while len(where.read_text().split() if where.exists() else ()) < 3:
        time.sleep(0.05)
    forever()

def forever():
    time.sleep(600)
"""
FILES = {
    "test_good.py": "import subprocess\ndef test_a(record_property):\n"
    "    record_property('measure step', '[0.1, 0.2, 0.1, 0.2, 0.1]')\n"
    "    record_property('capsule', 'x.json')\n    subprocess.Popen(['sleep', '600'])\n",
    "test_bad.py": "def test_a(record_property):\n    record_property('capsule', 'c.json')\n"
    "    assert 1 + 1 == 3\ndef test_b(): pass\n",
    "test_hang.py": HANG,
    "test_segfault.py": "import ctypes, faulthandler\ndef test_a(): ctypes.string_at(0)\n",
    "test_exit.py": "import os\ndef test_a(): os._exit(0)\n",
    "test_import.py": "import no_such_module_of_others\n",
    "test_none.py": "x = 1\n",
    "test_skip.py": "import pytest\ndef test_a(): pytest.skip('no weights here')\n",
    "test_chance.py": "from pathlib import Path\ndef test_a():\n    p = Path('tries')\n"
    "    p.write_text(p.read_text() + 'x' if p.exists() else 'x')\n"
    "    assert len(p.read_text()) != 1\n",
}


@pytest.fixture(scope="module", autouse=True)
def bare_pytest() -> Iterator[None]:
    """Plugins of the suite cost a second of each process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        yield


@pytest.fixture(scope="module")
def night(
    tmp_path_factory: pytest.TempPathFactory, bare_pytest: None
) -> tuple[Path, dict[str, JobRecord]]:
    root = write_tree(
        tmp_path_factory.mktemp("night"), {f"tests/{n}": text for n, text in FILES.items()}
    )
    jobs = [
        job(name, 0.1 if name == "test_hang.py" else 5, statistical=name in ("test_chance.py",))
        for name in FILES
    ]
    made = run_night(jobs, setting(root, root / "out", grace_s=0, factor=1))
    save(made, root / "results.json")
    assert load(root / "results.json") == made
    assert merge([made, made]).jobs == made.jobs * 2
    return root, {Path(r.job.file).name: r for r in made.jobs}


@pytest.mark.parametrize(
    ("file", "outcome", "why"),
    [
        ("test_good.py", "passed", "1 tests"),
        ("test_bad.py", "failed", "1 of 2 tests"),
        ("test_hang.py", "hang", "not done after 6 s"),
        ("test_segfault.py", "crash", "ended by signal 11"),
        ("test_exit.py", "crash", "exit code 0, no report"),
        ("test_import.py", "failed", "1 of 1 tests"),
        ("test_none.py", "lost", "pytest: no test found"),
        ("test_skip.py", "skipped", "no weights here"),
        ("test_chance.py", "passed", "failed once in 3"),
    ],
)
def test_each_ends_as_what_it_is(night, file: str, outcome: str, why: str):
    record = night[1][file]
    assert record.outcome == outcome
    assert why in record.why
    tries = {"test_chance.py": 3}.get(file, 1)
    assert len(record.attempts) == tries, "only what is statistical is tried again"


def test_a_hang_is_ended_with_its_children_wherever_they_are(night):
    root, records = night
    pids = [int(word) for word in (root / "pids").read_text().split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    attempt = records["test_hang.py"].attempts[0]
    assert len(attempt.strays) == 4
    assert attempt.code is None
    text = markdown(page(triage(one(records["test_hang.py"]), None, (), date.today(), root)))
    assert "how it ended: `not done after 6 s; ended with 4 processes`" in text
    (group,) = grouped(one(records["test_hang.py"]))
    assert (group.kind, group.frame) == ("hang", "tests/test_hang.py:test_waits")


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_what_a_test_leaves_running_is_ended_and_named(night):
    (stray,) = night[1]["test_good.py"].attempts[0].strays
    assert stray == "sleep 600"


def test_causes_of_crash_import_and_failure(night):
    found = {
        name: (group.kind, group.frame, group.title)
        for name, record in night[1].items()
        for group in grouped(one(record))
    }
    assert set(found) == {
        *("test_bad.py", "test_hang.py", "test_segfault.py", "test_exit.py", "test_import.py"),
        "test_none.py",
    }
    assert found["test_bad.py"][:2] == ("numerics", "tests/test_bad.py:test_a")
    assert found["test_segfault.py"] == (
        "crash",
        "tests/test_segfault.py:test_a",
        "Fatal Python error: Segmentation fault",
    )
    assert found["test_exit.py"][0] == "crash"
    assert found["test_import.py"][0] == "infrastructure"
    assert "no_such_module_of_others" in found["test_import.py"][2]
    assert found["test_none.py"][0] == "infrastructure"


def test_properties_are_kept(night):
    records = night[1]
    (group,) = grouped(one(records["test_bad.py"]))
    assert group.sightings[0].capsule == "c.json"
    assert measured(one(records["test_good.py"])) == {"step": [0.1, 0.2, 0.1, 0.2, 0.1]}


def one(record: JobRecord) -> Night:
    return Night(commit="c", began="2026-01-01", machine="m", jobs=(record,))


@pytest.mark.parametrize(
    ("code", "outcomes", "want"),
    [
        (0, ["passed"], "passed"),
        (0, ["passed", "skipped"], "passed"),
        (0, ["skipped"], "skipped"),
        (0, None, "crash"),
        (1, ["passed", "failed"], "failed"),
        (1, None, "crash"),
        (2, ["error"], "failed"),
        (2, ["passed"], "lost"),
        (3, None, "lost"),
        (4, None, "lost"),
        (5, [], "lost"),
        (7, ["passed"], "crash"),
        (-11, ["passed"], "crash"),
        (-11, None, "crash"),
        (-9, ["failed"], "crash"),
        (None, None, "hang"),
        (None, ["passed"], "hang"),
    ],
)
def test_a_process_s_end_and_its_report_are_judged_together(code, outcomes, want):
    report = Report(code=code, seconds=1.0, strays=(), peak_bytes=1)
    cases = outcomes and [Case(id="a::b", outcome=o, seconds=0) for o in outcomes]
    assert judge(report, cases, 5)[0] == want


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are the system's")
def test_an_orphan_that_ends_is_gone(tmp_path: Path):
    """And no zombie of the cage, whose child it is: as of a server that was killed, whose engine
    ends by itself."""
    code = (
        "import os, subprocess, sys, time\n"
        "said = subprocess.run(['sh', '-c', 'sleep 0.3 >&- & echo $!'], capture_output=True)\n"
        "until = time.monotonic() + 20\n"
        "while os.path.exists(f'/proc/{int(said.stdout)}') and time.monotonic() < until:\n"
        "    time.sleep(0.05)\n"
        "sys.exit(7 if time.monotonic() < until else 1)\n"
    )
    report = tmp_path / "report"
    command = [sys.executable, "-P", cage.__file__, "60", str(report), sys.executable, "-c", code]
    assert subprocess.run(command).returncode == 0
    ended = msgspec.json.decode(report.read_bytes(), type=Report)
    assert (ended.code, ended.strays) == (7, ())


def test_a_watcher_that_is_gone_is_not_the_test_s_fault():
    assert judge(None, None, 5)[0] == "lost"


def test_gpus_that_are_not_here(tmp_path: Path):
    where = setting(tmp_path, tmp_path, gpus=("NVIDIA H200",))
    record = run_job(job("test_x.py", gpus=2, kind="H200"), where, "x")
    assert (record.outcome, record.attempts) == ("unsuited", ())
    assert record.why == "needs 2 of H200; here are 1"


def test_the_environment_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NIGHT_SAYS", "hello")
    text = "import os\ndef test_a(): assert os.environ['NIGHT_SAYS'] == 'hello'\n"
    root = write_tree(tmp_path / "t", {"tests/test_env.py": text})
    assert run_job(job("test_env.py"), setting(root, tmp_path), "x").outcome == "passed"
    assert os.environ["NIGHT_SAYS"] == "hello"


def test_speed_is_held_to_a_night_of_the_same_machine_or_to_nothing(night):
    record = night[1]["test_good.py"]
    before = one(record)
    measures, said = baseline_of(before, "m")
    assert measures == {"step": [0.1, 0.2, 0.1, 0.2, 0.1]}
    assert "commit c" in said
    other, said = baseline_of(before, "another")
    assert other == {}
    assert "the baseline is of m, this is another" in said
    for nothing in (None, one(night[1]["test_bad.py"])):
        assert baseline_of(nothing, "m")[0] == {}


def test_a_measure_that_is_slower_fails_its_test(tmp_path: Path):
    text = (
        "def test_a(record_property):\n"
        "    record_property('measure step', '[0.70, 0.71, 0.69, 0.70, 0.70, 0.71]')\n"
    )
    root = write_tree(tmp_path / "t", {"tests/test_speed.py": text})
    made = job("test_speed.py", statistical=True)
    before = {"step": [0.0, 0.01, -0.01, 0.0, 0.0, 0.01]}
    record = run_job(made, setting(root, tmp_path, baseline=before), "x")
    assert (record.outcome, record.why, len(record.attempts)) == (
        *("failed", "slower than the baseline"),
        3,
    )
    (group,) = grouped(one(record))
    assert (group.kind, group.title) == ("speed", "slower: step")
    assert "takes 2.01 times" in group.sightings[0].cause.trace
    same = {"step": [0.7, 0.71, 0.69, 0.7, 0.7, 0.71]}
    assert run_job(made, setting(root, tmp_path, baseline=same), "x").outcome == "passed"


def test_a_watcher_that_is_told_to_end_leaves_nothing(tmp_path: Path):
    said = tmp_path / "pid"
    code = f"import os, time; open({str(said)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    sleeper = [sys.executable, "-c", code]
    command = [sys.executable, "-P", cage.__file__, "600", str(tmp_path / "report"), *sleeper]
    watcher = subprocess.Popen(command)
    deadline = time.monotonic() + 30
    while not (said.exists() and said.read_text().endswith(" ")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    watcher.terminate()
    assert watcher.wait(timeout=15) == 1
    assert not lives(int(said.read_text()))
    assert not (tmp_path / "report").exists()
