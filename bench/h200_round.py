"""The open work of one GPU in one command: jobs in order of worth, each with a limit of its own,
those left out for which there is no time; an output a group and a digest.

    python -m bench.h200_round [--seconds 590] [--out FOLDER] [--only host,moe] [--dry-run]

A job that runs past its limit is ended with all that it started (nightly/cage.py): the next one has
the device to itself. Ends with the jobs that were not run, as the next call's --only. `--dry-run`
says what would run, in which order, and needs no GPU. The demo's fp32 answers are read from TRUTH,
or made first, which takes a CPU minutes (--only-truth). Exit code 1 where a job failed."""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.kimi_vl_shape import write_published
from vitrail.nightly.cage import Report

ROOT = Path(__file__).parent.parent
CAGE = ROOT / "vitrail/nightly/cage.py"
CLI = "-c 'import sys; from vitrail.cli import main; sys.exit(main())'"
KIMI = "--model {scratch}/kimi --weights random"
TRUTH = "build/truth"
SHOWN_LINES, KEPT_BYTES = 14, 4 << 20


class Job(NamedTuple):
    """`group`: its output's file, of which few come back. `seconds`: its limit, and what has to be
    left for it to begin. `line`: what follows `python`; {scratch}: a folder of the round's, with
    Kimi-VL's shape in it. `shows`: a file that it writes there."""

    name: str
    group: str
    seconds: float
    line: str
    shows: str = ""


JOBS = (
    Job("host", "engine", 150, "bench/engine.py --batches 1,32,256 --runs 1 --no-check"),
    Job("tests", "tests", 240, "-m pytest -m gpu -n 12 -rA tests/gpu"),
    Job("moe", "kernels", 60, "bench/moe.py --tokens 1,256"),
    Job("mla", "kernels", 70, "-m bench.attention --backends cute --only MLA --seconds 45"),
    Job("demo", "accuracy", 120, f"bench/accuracy.py --no-shape --truth {TRUTH}"),
    Job("vision", "engine", 60, f"{CLI} bench vision {KIMI}"),
    Job(
        "profile",
        "engine",
        90,
        f"{CLI} bench offline {KIMI} --concurrency 32 --profile {{scratch}}/profile",
        "profile/summary.txt",
    ),
    Job("memory", "start", 60, "-m bench.memory --shape kimi_vl"),
    Job("timeline", "engine", 90, "bench/step_timeline.py --batch 256"),
)


class Done(NamedTuple):
    """`state`: done, failed, out of time, or no time left."""

    job: Job
    state: str
    seconds: float
    tail: str


def run(jobs: Sequence[Job], seconds: float, out: Path) -> list[Done]:
    """Every job for which there is time, in order; output a group in `out`."""
    until = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    done: list[Done] = []
    with tempfile.TemporaryDirectory() as scratch:
        write_published(Path(scratch, "kimi"))
        for job in jobs:
            fits = until - time.monotonic() >= job.seconds
            done.append(_run(job, Path(scratch), out) if fits else Done(job, "no time left", 0, ""))
            _, state, took, tail = done[-1]
            print(f"== {job.name}: {state} [{took:.0f} s]\n{tail}", flush=True)
    return done


def _run(job: Job, scratch: Path, out: Path) -> Done:
    report, output = scratch / "report.json", scratch / "output"
    line = [sys.executable, *shlex.split(job.line.replace("{scratch}", str(scratch)))]
    cage = [sys.executable, "-P", str(CAGE), str(job.seconds), str(report), *line]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path}
    with output.open("wb") as file:
        subprocess.run(cage, cwd=ROOT, env=env, stdout=file, stderr=file, check=True)
    made = msgspec.json.decode(report.read_bytes(), type=Report)
    shown = scratch / job.shows
    more = shown.read_text() if job.shows and shown.is_file() else ""
    text = output.read_bytes()[-KEPT_BYTES:].decode(errors="replace") + more
    state = {0: "done", None: "out of time"}.get(made.code, "failed")
    with (out / f"{job.group}.txt").open("a", encoding="utf-8") as file:
        file.write(f"== {job.name}: {state} [{made.seconds:.0f} s] python {job.line}\n{text}\n")
    return Done(job, state, made.seconds, "\n".join(text.splitlines()[-SHOWN_LINES:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=590)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "round")))
    parser.add_argument("--only", default=",".join(job.name for job in JOBS))
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if unknown := set(names := args.only.split(",")) - {job.name for job in JOBS}:
        parser.error(f"--only: no job is named {', '.join(sorted(unknown))}")
    jobs = [job for job in JOBS if job.name in names]
    if args.dry_run:
        for job in jobs:
            print(f"{job.name:9} {job.seconds:4.0f} s  python {job.line}")
        return 0
    done = run(jobs, args.seconds, args.out)
    print("round: " + ", ".join(f"{each.job.name} {each.state}" for each in done))
    if left := [each.job.name for each in done if each.state == "no time left"]:
        print(f"next: --only {','.join(left)}")
    return int(any(each.state in ("failed", "out of time") for each in done))


if __name__ == "__main__":
    sys.exit(main())
