"""Runs jobs, one after the other, each file in a process of its own under a cage with a time limit,
and keeps what came of them. Knows nothing of causes."""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from vitrail.config.env import of_child
from vitrail.nightly import cage
from vitrail.nightly.cage import Report
from vitrail.nightly.junit import KEPT, read_cases
from vitrail.nightly.records import BAD, Attempt, Case, Job, JobRecord, Night, Outcome
from vitrail.nightly.speed import slower

MORE_TRIES = 2  # of what is statistical: both must pass
# pytest's own exit codes beside 0 and 1
PYTEST_CODES = {2: "interrupted", 3: "an internal error", 4: "a wrong call", 5: "no test found"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how jobs run: `root` the checkout, `out` a folder for logs; `extra` arguments for
    pytest; `gpus` names of those here; `baseline` log ratios by measure of an earlier night, and
    `held_to` which night that was; the limit of a job is `factor` times its minutes and
    `grace_s`."""

    root: Path
    out: Path
    extra: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    baseline: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    held_to: str = ""
    factor: float = 3.0
    grace_s: float = 60.0

    def limit_s(self, job: Job) -> float:
        return self.grace_s + 60.0 * self.factor * job.minutes


def run_night(
    jobs: Sequence[Job], setting: Setting, tell: Callable[[JobRecord], None] = lambda _: None
) -> Night:
    """All jobs in the order given; `tell` hears of each when it is done."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    records: list[JobRecord] = []
    for number, job in enumerate(jobs):
        records.append(run_job(job, setting, f"{number:03}-{Path(job.file).stem}"))
        tell(records[-1])
    return Night(
        commit=commit(setting.root),
        began=began,
        machine=machine(setting.gpus),
        speed=setting.held_to,
        jobs=tuple(records),
    )


def run_job(job: Job, setting: Setting, stem: str) -> JobRecord:
    """One job with the tries that it is due."""
    attempts: list[Attempt] = []
    here = [gpu for gpu in setting.gpus if job.kind in gpu]
    if len(here) < job.gpus:
        kind = job.kind or "GPU"
        why = f"needs {job.gpus} of {kind}; here are {len(here)}"
        return _recorded(job, setting, "unsuited", why, attempts)
    attempts.append(run_once(job, setting, stem))
    if job.statistical and attempts[0].outcome == "failed":
        attempts += [run_once(job, setting, f"{stem}-{i}") for i in range(1, 1 + MORE_TRIES)]
        bad = [a for a in attempts if a.outcome in BAD]
        if len(bad) == 1:
            why = f"failed once in {len(attempts)}, which is statistical"
            return _recorded(job, setting, attempts[-1].outcome, why, attempts)
        return _recorded(job, setting, bad[-1].outcome, bad[-1].why, attempts)
    return _recorded(job, setting, attempts[0].outcome, attempts[0].why, attempts)


def _recorded(
    job: Job, setting: Setting, outcome: Outcome, why: str, attempts: list[Attempt]
) -> JobRecord:
    return JobRecord(
        job=job,
        limit_s=setting.limit_s(job),
        outcome=outcome,
        why=why,
        attempts=tuple(attempts),
    )


def run_once(job: Job, setting: Setting, stem: str, ops: bool = False) -> Attempt:
    """One process: pytest on the job's file, its report read and judged. `ops`: also hold ops to
    their definitions (`watch`)."""
    setting.out.mkdir(parents=True, exist_ok=True)
    ends = ("xml", "log", "json", "opened")
    xml, log, ended, opened = (setting.out / f"{stem}.{end}" for end in ends)
    for stale in (xml, ended, opened):
        stale.unlink(missing_ok=True)
    limit_s = setting.limit_s(job)
    command = [
        *(sys.executable, "-P", cage.__file__, f"{limit_s}", str(ended)),
        *(sys.executable, "-P", str(Path(__file__).with_name("watch.py")), str(opened)),
        *(["--ops"] if ops else []),
        *(*job.targets, "--nightly", "--tb=native"),
        *(f"--junitxml={xml}", "-o", "junit_family=xunit1", "-o", "junit_logging=all"),
        *("-o", "timeout=0"),
        *setting.extra,
    ]
    began = time.monotonic()
    capsules = setting.out / f"{stem}.capsules"
    env = of_child(VITRAIL_CAPSULES=str(capsules))
    with log.open("wb") as out:
        subprocess.run(command, cwd=setting.root, env=env, stdout=out, stderr=subprocess.STDOUT)
    report = _report(ended)
    cases = read_cases(xml) or []
    outcome, why = judge(report, None if not xml.exists() else cases, limit_s)
    if outcome == "passed" and setting.baseline:
        cases = [_timed(case, setting.baseline) for case in cases]
        if any(case.outcome == "failed" for case in cases):
            outcome, why = "failed", "slower than the baseline"
    if outcome not in BAD:
        shutil.rmtree(capsules, ignore_errors=True)
    return Attempt(
        outcome=outcome,
        why=why,
        seconds=report.seconds if report else time.monotonic() - began,
        code=report.code if report else None,
        cases=tuple(cases),
        tail=log.read_text(errors="replace")[-KEPT:] if outcome in BAD else "",
        strays=report.strays if report else (),
        opened=_lines(opened) if outcome in BAD else (),
        peak_bytes=report.peak_bytes if report else 0,
    )


def judge(
    report: Report | None, cases: Sequence[Case] | None, limit_s: float
) -> tuple[Outcome, str]:
    """What a process's end and its report say together. `cases` None: it left no report."""
    if report is None:
        return "lost", "the process that watched it was ended"
    if report.code is None:
        return "hang", f"not done after {limit_s:.0f} s; ended with {len(report.strays)} processes"
    if report.code < 0:
        return "crash", f"ended by signal {-report.code}"
    failed = [case for case in cases or () if case.outcome in ("failed", "error")]
    if failed and report.code in (1, 2):
        return "failed", f"{len(failed)} of {len(cases or ())} tests"
    if report.code in PYTEST_CODES:
        return "lost", f"pytest: {PYTEST_CODES[report.code]}"
    if not cases or report.code != 0:
        return "crash", f"exit code {report.code}, {'a' if cases else 'no'} report"
    if all(case.outcome == "skipped" for case in cases):
        return "skipped", cases[0].message
    return "passed", f"{len(cases)} tests"


def _timed(case: Case, baseline: dict[str, list[float]]) -> Case:
    """The case, failed if one of its measures is slower than it was."""
    said = [
        text
        for name, logs in measures(case).items()
        if name in baseline and (text := slower(name, logs, baseline[name])) is not None
    ]
    if not said:
        return case
    return msgspec.structs.replace(case, outcome="failed", message=said[0], trace="\n".join(said))


def measures(case: Case) -> dict[str, list[float]]:
    """What a test recorded as `measure NAME`: logarithms of ratios to its yardstick."""
    return {
        name.removeprefix("measure "): msgspec.json.decode(value, type=list[float])
        for name, value in case.properties.items()
        if name.startswith("measure ")
    }


def measured(night: Night) -> dict[str, list[float]]:
    """Every measure of a night, of the last attempt that took it."""
    return {
        name: logs
        for record in night.jobs
        for attempt in record.attempts
        for case in attempt.cases
        for name, logs in measures(case).items()
    }


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text().splitlines()) if path.exists() else ()


def _report(path: Path) -> Report | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError):
        return None


def commit(root: Path) -> str:
    """The checkout's commit, with `+` where files differ from it; "unknown" outside of git."""
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return head.stdout.strip()[:12] + ("+" if changed.stdout else "")


def baseline_of(night: Night | None, here: str) -> tuple[dict[str, list[float]], str]:
    """What speed is held to on this machine, and the sentence that says so: a night of another
    machine tells nothing, since a yardstick takes out its speed and not its kind."""
    if night is None or not measured(night):
        return {}, "Speed is held to nothing: no measures of an earlier night were given"
    if night.machine != here:
        return {}, f"Speed is held to nothing: the baseline is of {night.machine}, this is {here}"
    return measured(night), f"Speed is held to the night of {night.began}, commit {night.commit}"


def machine(gpus: Sequence[str]) -> str:
    """Processor, system and GPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = f"{len(names)} x {names[0]}" if names else platform.machine()
    return ", ".join((processor, platform.system(), *gpus))


def gpus_here() -> tuple[str, ...]:
    """Names of the GPUs that the driver knows; none where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(found.stdout.split("\n")[:-1]) if found.returncode == 0 else ()
