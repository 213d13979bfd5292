"""Marks are read from the syntax, strictly; shards are balanced and always the same."""

import ast
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nightly.tree import job, write_tree
from vitrail.cli import main
from vitrail.config.finding import Finding, Refused
from vitrail.nightly.collect import GATES, collect, read_file
from vitrail.nightly.flags import add_nightly
from vitrail.nightly.records import Job
from vitrail.nightly.register import shards

ROOT = Path(__file__).parents[2]
MARK = '@pytest.mark.suite("kernels", minutes=2, owner="ops")\n'


def test_every_test_that_ci_skips_is_in_a_suite():
    jobs = collect(ROOT)
    assert isinstance(jobs, tuple), "\n".join(map(str, jobs))
    assert len({made.name for made in jobs}) == len(jobs)
    assert {made.suite for made in jobs} == {
        *("kernels", "parity", "accuracy", "soak", "speed", "faults")
    }
    named = {f"{made.file}::{test}" for made in jobs for test in made.tests}
    whole = {made.file for made in jobs if not made.tests}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if "mark." not in text:
            continue
        for node in ast.parse(text).body:
            nodes = [n for d in getattr(node, "decorator_list", []) for n in ast.walk(d)]
            marks = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)}
            if marks & {f"pytest.mark.{gate}" for gate in GATES}:
                assert file in whole or f"{file}::{node.name}" in named, f"{file} {node.name}"


def test_collection_imports_nothing(tmp_path: Path):
    raises = f"raise SystemExit('imported')\nimport pytest\n{MARK}def test_a(): pass\n"
    root = write_tree(tmp_path, {"tests/test_raises.py": raises})
    assert collect(root) == (
        Job(
            file="tests/test_raises.py",
            tests=("test_a",),
            suite="kernels",
            minutes=2,
            owner="ops",
        ),
    )


def test_tests_of_equal_marks_are_one_job_and_the_file_s_mark_takes_the_rest():
    text = (
        'import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.suite("kernels", minutes=3, '
        'owner="ops", gpus=1, kind="H200")]\n'
        f"{MARK}def test_a(): pass\n{MARK}def test_b(): pass\ndef test_c(): pass\n"
        '@pytest.mark.suite("speed", minutes=0.5, owner="ops", statistical=True)\n'
        "async def test_d(): pass\n"
    )
    jobs, findings = read_file("tests/test_x.py", text)
    assert findings == []
    assert [(j.suite, j.tests, j.without, j.minutes) for j in jobs] == [
        ("kernels", ("test_a", "test_b"), (), 4),
        ("speed", ("test_d",), (), 0.5),
        ("kernels", (), ("test_a", "test_b", "test_d"), 3),
    ]
    assert (jobs[2].gpus, jobs[2].kind, jobs[1].statistical) == (1, "H200", True)
    assert jobs[2].targets[:2] == ["tests/test_x.py", "--deselect=tests/test_x.py::test_a"]


@pytest.mark.parametrize(
    ("mark", "saw"),
    [
        ('suite("kernel", minutes=1, owner="a")', "Invalid enum value 'kernel'"),
        ('suite("kernels", owner="a")', "missing required field `minutes`"),
        ('suite("kernels", minutes=0, owner="a")', "0.0 minutes"),
        ('suite("kernels", minutes=1e9, owner="a")', "1000000000.0 minutes"),
        ('suite("kernels", minutes=1, owner=" ")', "no owner"),
        ('suite("kernels", minutes=1, owner="a", gpus=-1)', "-1 GPUs"),
        ('suite("kernels", minutes=1, owner="a", kind="H200")', "kind 'H200' of 0 GPUs"),
        ('suite("kernels", minutes=1, owner="a", gpus=1, kind="H900")', "kind 'H900' of 1"),
        ('suite("kernels", minutes=1, owner="a", retries=3)', "unknown field `retries`"),
        ('suite("kernels", minutes=LONG, owner="a")', "minutes=LONG"),
        ('suite("kernels", **facts)', "**facts"),
        ("suite", "pytest.mark.suite"),
        ("nightly", "skipped in CI and in no suite"),
        ("gpu", "skipped in CI and in no suite"),
        ('parametrize("n", [pytest.param(1, marks=pytest.mark.nightly)])', "in no suite"),
        ('parametrize("n", [pytest.param(1, marks=pytest.mark.suite("speed"))])', "a mark else"),
    ],
)
def test_a_mark_that_is_wrong_is_refused_with_its_place(mark: str, saw: str):
    text = f"import pytest\n@pytest.mark.{mark}\ndef test_a(n): pass\n"
    _, findings = read_file("tests/test_x.py", text)
    assert findings
    assert all(isinstance(f, Finding) and f.where.startswith("tests/test_x.py:") for f in findings)
    assert saw in findings[0].saw


def test_a_file_that_is_no_python_is_refused():
    _, (finding,) = read_file("tests/test_x.py", "def (: pytest.mark.suite")
    assert "no Python" in finding.saw


@given(
    minutes=st.lists(st.floats(0.1, 90), max_size=40),
    count=st.integers(1, 8),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_shards_are_balanced_complete_and_the_same_for_any_order(minutes, count, order):
    jobs = [job(f"test_{i}.py", m) for i, m in enumerate(minutes)]
    made = shards(jobs, count)
    assert sorted(j.name for part in made for j in part) == sorted(j.name for j in jobs)
    loads = [sum(j.minutes for j in part) for part in made]
    assert max(loads) - min(loads) <= max(minutes, default=0) + 1e-9
    for part in made:
        assert [j.minutes for j in part] == sorted((j.minutes for j in part), reverse=True)
    order.shuffle(jobs)
    assert shards(jobs, count) == made


def test_the_workflow_calls_the_night_as_it_is():
    """Every flag that it uses exists, and it names no host."""
    text = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert not re.search(r"https?://|--index", text)
    calls = re.findall(r"flags\+=\((--\S+)|vitrail nightly (.*)", text)
    used = {word for call in calls for part in call for word in re.findall(r"--[a-z-]+", part)}
    flags = {"--suite", "--against", "--shard", "--out", "--read", "--bisect", "--no-repro"}
    assert used == flags
    parser = ArgumentParser()
    add_nightly(parser)
    assert used <= set(parser._option_string_actions)


def test_a_call_lists_picks_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def marked(suite: str, minutes: int) -> str:
        mark = f'@pytest.mark.suite("{suite}", minutes={minutes}, owner="o")'
        return f"import pytest\n{mark}\ndef test_a(): pass\n"

    files = {f"tests/test_{i}.py": marked("kernels", i) for i in range(1, 6)}
    root = write_tree(tmp_path, {**files, "tests/test_9.py": marked("parity", 9)})
    parser = ArgumentParser()
    add_nightly(parser)

    def call(*flags: str) -> str:
        args = parser.parse_args(["--root", str(root), "--list", *flags])
        assert args.run(args) == 0
        return capsys.readouterr().out

    assert "parity: tests/test_9.py test_a  (o)" in call()
    kernels = call("--suite", "kernels").splitlines()
    assert kernels[0].split()[:3] == ["5.0", "min", "kernels:"]
    assert kernels[-1].split() == ["15.0", "min", "5", "jobs"]
    parts = [call("--suite", "kernels", "--shard", f"{i}/2").splitlines()[:-1] for i in (1, 2)]
    assert sorted(line for part in parts for line in part) == sorted(kernels[:-1])
    assert len(call("--only", "test_1", "--only", "test_9").splitlines()) == 3
    for flags, saw in (
        (("--only", "no such job"), "no job of any suite"),
        (("--shard", "4/3"), "'4/3'"),
        (("--bisect", "abc"), "'abc'"),
        (("--root", str(tmp_path / "nowhere")), "no tests in"),
    ):
        with pytest.raises(Refused, match=saw):
            call(*flags)
        given = ("--root", str(root)) if "--root" not in flags else ()
        assert main(["nightly", *given, "--list", *flags]) == 2, "1 is of a night that is red"
        assert saw in capsys.readouterr().err
    args = parser.parse_args(["--root", str(root), "--model", "m"])
    with pytest.raises(Refused, match="both or neither"):
        args.run(args)
