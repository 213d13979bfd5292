"""The workflow for forks says what GitHub understands, and calls the night as it can be called."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitrail.cli import parser

PATH = Path(__file__).parents[2] / ".github" / "workflows" / "nightly.yml"
# YAML 1.1 reads `on` as true
FLOW: dict[Any, Any] = yaml.safe_load(PATH.read_text())
JOBS: dict[str, dict[str, Any]] = FLOW["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]
RUNS = [(name, step) for name, step in STEPS if "run" in step]
JOB_KEYS = {"runs-on", "timeout-minutes", "strategy", "steps", "needs", "if"}
# the first majors that run on Node 24: runners have no older one since the autumn of 2026
NODE_24 = {
    "checkout": 5,
    "setup-python": 6,
    "cache": 5,
    "upload-artifact": 6,
    "download-artifact": 7,
}
STEP_KEYS = {"name", "uses", "with", "run", "env", "if"}


def test_jobs_and_steps_have_what_they_may():
    assert set(FLOW) == {"name", True, "permissions", "jobs"}
    assert set(FLOW[True]) == {"schedule", "workflow_dispatch"}
    for cron in FLOW[True]["schedule"]:
        assert len(cron["cron"].split()) == 5
    assert set(FLOW["permissions"].values()) == {"read"}
    for name, job in JOBS.items():
        assert set(job) <= JOB_KEYS, name
        assert job["runs-on"] == "ubuntu-latest"
        needs = job.get("needs", [])
        assert {needs} <= set(JOBS) if isinstance(needs, str) else set(needs) <= set(JOBS)
        assert job.get("timeout-minutes", 360) <= 360, "GitHub ends it after six hours"
    for name, step in STEPS:
        assert set(step) <= STEP_KEYS, (name, step)
        assert ("uses" in step) != ("run" in step), (name, step)
        if "uses" in step:
            action = re.fullmatch(r"actions/([\w-]+)(/\w+)?@v(\d+)", step["uses"])
            assert action is not None, step
            assert int(action[3]) >= NODE_24[action[1]], step


def test_expressions_name_what_is_there():
    known = {f"inputs.{name}" for name in FLOW[True]["workflow_dispatch"]["inputs"]}
    known |= {
        f"matrix.{name}"
        for job in JOBS.values()
        for name in job.get("strategy", {}).get("matrix", {})
    }
    known |= {"github.run_id"}
    found = set(re.findall(r"\$\{\{\s*(.*?)\s*\}\}", PATH.read_text()))
    assert found <= known
    assert any(name.startswith("matrix.") for name in found)


def test_jobs_can_be_run_again():
    """By "Re-run failed jobs": an artifact's name is one in a run, not in an attempt."""
    uploads = [step for _, step in STEPS if "upload-artifact" in step.get("uses", "")]
    assert len(uploads) == 2
    assert all(step["with"]["overwrite"] is True for step in uploads)


def test_what_it_writes_in_the_checkout_is_no_change_of_it():
    """Else the night is of a commit with a `+`, which no script can name, and a shard that found an
    earlier night is of another commit than one that found none."""
    if not (PATH.parents[2] / ".git").exists():
        pytest.skip("not a git checkout; nothing is ignored")
    text = PATH.read_text()
    folders = set(re.findall(r"^ +path: (\w+)$", text, re.M)) | {".venv"}
    assert folders == {"night", "last", "shards", ".venv"}
    for folder in folders:
        done = subprocess.run(["git", "check-ignore", "-q", f"{folder}/x"], cwd=PATH.parent)
        assert done.returncode == 0, folder


def test_every_shard_of_the_night_is_run():
    (count,) = set(re.findall(r"--shard \$\{\{ matrix\.shard \}\}/(\d+)", PATH.read_text()))
    assert JOBS["shard"]["strategy"]["matrix"]["shard"] == [*range(1, int(count) + 1)]
    assert JOBS["digest"]["needs"] == "shard"


@pytest.mark.parametrize(
    ("job", "step"), RUNS, ids=lambda x: x["name"] if isinstance(x, dict) else x
)
def test_scripts_are_bash_and_their_flags_are_ours(job: str, step: dict[str, Any]):
    text = re.sub(r"\$\{\{.*?\}\}", "1", step["run"])
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "vitrail nightly" not in text:
        return
    nightly = parser()._subparsers._group_actions[0].choices["nightly"]  # type: ignore[union-attr,index]
    ours = set(re.findall(r"--[a-z][a-z-]*", text))
    assert ours
    assert ours <= set(nightly._option_string_actions), ours
