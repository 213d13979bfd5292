"""What a test of the night says of itself, and the jobs that come of it. Pure.

    @pytest.mark.suite("kernels", minutes=2, owner="attention")
    pytestmark = pytest.mark.suite("kernels", minutes=4, owner="ops", gpus=1, kind="H200")

`minutes` is what it takes where it is quick; its limit is three times that and a minute.
`statistical`: it may fail by chance, and is run twice more when it does. A job is what runs in one
process: tests of one file with equal marks."""

import math
from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from vitrail.config.finding import Finding
from vitrail.config.hardware import GPUS
from vitrail.nightly.records import Job, Suite

SUITES: tuple[Suite, ...] = get_args(Suite)
MAX_MINUTES = 360.0
RULE = 'suite(NAME, minutes=, owner=, gpus=0, kind="", statistical=False), all of them literals'


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One registration. `gpus` 0: runs on any machine; `kind` "": on any GPU."""

    suite: Suite
    minutes: float
    owner: str
    gpus: int = 0
    kind: str = ""
    statistical: bool = False


def read_mark(where: str, values: Mapping[str, object]) -> Mark | Finding:
    """The mark whose arguments are `values`, or what is wrong with it."""
    try:
        mark = msgspec.convert(dict(values), Mark)
    except msgspec.ValidationError as error:
        return _bad(where, str(error))
    if not (math.isfinite(mark.minutes) and 0 < mark.minutes <= MAX_MINUTES):
        return _bad(where, f"{mark.minutes} minutes", f"more than 0, at most {MAX_MINUTES:.0f}")
    if not mark.owner.strip():
        return _bad(where, "no owner")
    if not 0 <= mark.gpus <= 8:
        return _bad(where, f"{mark.gpus} GPUs", "0 to 8")
    names = [gpu.name for gpu in GPUS]
    if mark.kind and (mark.kind not in names or not mark.gpus):
        saw = f"kind {mark.kind!r} of {mark.gpus} GPUs"
        return _bad(where, saw, f"one of {', '.join(names)}, with gpus=1 or more")
    return mark


def jobs_of(
    file: str, whole: Mark | None, tests: Mapping[str, Mark], plain: Sequence[str] = ()
) -> list[Job]:
    """The jobs of one file: tests of equal marks together, their minutes added up; what is under
    the file's own mark is a job without those. `plain` tests have no mark of their own."""
    together: dict[tuple[object, ...], list[str]] = {}
    for name, mark in tests.items():
        key = (mark.suite, mark.owner, mark.gpus, mark.kind, mark.statistical)
        together.setdefault(key, []).append(name)
    jobs = [
        _job(file, tests[names[0]], sum(tests[n].minutes for n in names), tuple(names))
        for names in together.values()
    ]
    if whole is not None and (plain or not tests):
        jobs.append(_job(file, whole, whole.minutes, (), tuple(tests)))
    return jobs


def _job(
    file: str, mark: Mark, minutes: float, tests: tuple[str, ...], without: tuple[str, ...] = ()
) -> Job:
    return Job(
        file=file,
        tests=tests,
        without=without,
        suite=mark.suite,
        minutes=minutes,
        owner=mark.owner,
        gpus=mark.gpus,
        kind=mark.kind,
        statistical=mark.statistical,
    )


def shards(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """`count` lists of about equal minutes, each longest first: the longest job left goes to the
    shard with the least. No two differ by more than the longest job; equal input, equal shards."""
    made: list[list[Job]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for job in sorted(jobs, key=lambda j: (-j.minutes, j.name)):
        least = loads.index(min(loads))
        made[least].append(job)
        loads[least] += job.minutes
    return made


def _bad(where: str, saw: str, rule: str = RULE) -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change="mend the mark", code="nightly_mark")
