"""What a night leaves behind, as JSON: jobs, what their processes did, what each test said. Raw:
causes are read out of it later, by whatever rules triage then has. No torch."""

from pathlib import Path
from typing import Literal

import msgspec

from vitrail.config.finding import Finding, Refused

Suite = Literal["kernels", "parity", "accuracy", "soak", "speed", "faults"]
FORMAT = 1
# failed: tests said so; crash: the process ended without its report or badly after it; lost: no
# test ran for a reason outside of it; unsuited: this machine has not the GPUs.
Outcome = Literal["passed", "failed", "hang", "crash", "lost", "skipped", "unsuited"]
BAD: tuple[Outcome, ...] = ("failed", "hang", "crash", "lost")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process runs: `tests` of `file` (none named: all but `without`)."""

    file: str
    tests: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    suite: Suite
    minutes: float
    owner: str
    gpus: int = 0
    kind: str = ""
    statistical: bool = False

    @property
    def name(self) -> str:
        """Unique among the jobs of a tree."""
        return " ".join((f"{self.suite}: {self.file}", *self.tests))

    @property
    def targets(self) -> list[str]:
        """pytest's arguments for it."""
        chosen = [f"{self.file}::{test}" for test in self.tests] or [self.file]
        return chosen + [f"--deselect={self.file}::{test}" for test in self.without]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test as pytest reported it. `trace` the traceback, `said` what it wrote and logged, cut
    to its end; `properties` what it recorded: measures, a capsule's path."""

    id: str
    outcome: Literal["passed", "failed", "error", "skipped"]
    seconds: float
    message: str = ""
    trace: str = ""
    said: str = ""
    properties: dict[str, str] = {}


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a job's process. `code` its exit code, negative a signal; `strays` are processes
    that it left behind and that were ended; `tail` the end of its output where it went wrong,
    and `opened` "TEST<tab>FILE" then, of files of the tests (`watch`)."""

    outcome: Outcome
    why: str
    seconds: float
    code: int | None
    cases: tuple[Case, ...] = ()
    tail: str = ""
    strays: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    peak_bytes: int = 0


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job and its attempts; `outcome` and `why` are of all together."""

    job: Job
    limit_s: float
    outcome: Outcome
    why: str
    attempts: tuple[Attempt, ...]


class Night(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `began` is UTC, ISO 8601; `speed` says what speed was held to, or why to
    nothing."""

    format: int = FORMAT
    commit: str
    began: str
    machine: str
    speed: str = ""
    jobs: tuple[JobRecord, ...]


def save(night: Night, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(night), indent=1))


def load(path: Path) -> Night:
    """A night from its file. Raises `Refused` if it is none."""
    try:
        night = msgspec.json.decode(path.read_bytes(), type=Night)
        if night.format == FORMAT:
            return night
        saw = f"format {night.format}"
    except (OSError, msgspec.DecodeError) as error:
        saw = f"{type(error).__name__}: {error}"
    raise Refused(
        Finding(
            where=str(path),
            saw=saw,
            rule=f"results.json of a night, format {FORMAT}",
            change="give another file, or run the night again",
        )
    )


def merge(nights: list[Night]) -> Night:
    """Shards of one night as one. Raises `Refused` if they are of different commits."""
    commits = sorted({night.commit for night in nights})
    if len(commits) > 1:
        raise Refused(
            Finding(
                where="shards",
                saw=f"commits {', '.join(commits)}",
                rule="the shards of a night are of one commit",
                change="leave out what is of another night",
            )
        )
    return Night(
        commit=commits[0],
        began=min(night.began for night in nights),
        machine="; ".join(sorted({night.machine for night in nights})),
        speed="; ".join(sorted({night.speed for night in nights if night.speed})),
        jobs=tuple(record for night in nights for record in night.jobs),
    )
