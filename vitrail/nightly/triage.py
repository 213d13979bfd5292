"""From records to causes: failures grouped by signature, held against those of the night before and
against what is known. Pure but for the sources that `risk` reads."""

import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import msgspec

from vitrail.config.cause import Cause, Kind
from vitrail.nightly.known import Issue, expired, known_as
from vitrail.nightly.records import BAD, Attempt, Case, JobRecord, Night
from vitrail.nightly.risk import area, users_of
from vitrail.nightly.signature import cause_of_attempt, cause_of_case


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One failure: which test (or job) of which record. `capsule` and `repro` are paths that the
    test recorded under these names, "" where it did not."""

    test: str
    record: JobRecord
    cause: Cause
    capsule: str = ""
    repro: str = ""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All failures of one cause. `risk` of a change where it lies; `first_bad` the commit that
    brought it, where it was looked for; `repro` a file that fails alone, or why there is none."""

    key: str
    kind: Kind
    title: str
    frame: str
    sightings: tuple[Sighting, ...]
    issue: Issue | None = None
    risk: str = ""
    first_bad: str = ""
    repro: str = ""

    @property
    def name(self) -> str:
        where = f" @ {self.frame}" if self.frame else ""
        return f"{self.cause_kind} {self.title}{where}"

    @property
    def commit(self) -> str:
        """The commit that brought it, "" where none was found."""
        found = re.match(r"[0-9a-f]{7,40}(?= )", self.first_bad)
        return found[0] if found else ""

    @property
    def cause_kind(self) -> Kind:
        """Its own kind, also where the group is shown as known."""
        return self.sightings[0].cause.kind


class Triage(msgspec.Struct, frozen=True, kw_only=True):
    """`fixed` are names of causes of the night before whose tests all passed tonight; `unseen`
    those of whose tests some were not run. Of `expired` issues each makes the night red."""

    night: Night
    new: tuple[Group, ...]
    still: tuple[Group, ...]
    known: tuple[Group, ...]
    fixed: tuple[str, ...]
    unseen: tuple[str, ...]
    expired: tuple[Issue, ...]

    @property
    def green(self) -> bool:
        return not (self.new or self.still or self.expired)


def triage(
    night: Night, before: Night | None, issues: Sequence[Issue], today: date, root: Path
) -> Triage:
    """`before`: the night that tonight's is held against; without one every failure is new."""
    users = users_of(root)
    groups = [_judged(group, issues, today, users) for group in grouped(night)]
    old = grouped(before) if before is not None else []
    old_keys = {group.key for group in old}
    open_groups = [group for group in groups if group.issue is None]
    gone = [group for group in old if group.key not in {g.key for g in groups}]
    passed = set(_passed(night))
    fixed = [g for g in gone if {s.test for s in g.sightings} <= passed]
    return Triage(
        night=night,
        new=tuple(g for g in open_groups if g.key not in old_keys),
        still=tuple(g for g in open_groups if g.key in old_keys),
        known=tuple(g for g in groups if g.issue is not None),
        fixed=tuple(g.name for g in fixed),
        unseen=tuple(g.name for g in gone if g not in fixed),
        expired=tuple(expired(issues, today)),
    )


def grouped(night: Night) -> list[Group]:
    """One group a signature, the most sightings first."""
    found: dict[str, list[Sighting]] = {}
    for sighting in sightings(night):
        found.setdefault(sighting.cause.key, []).append(sighting)
    groups = [
        Group(
            key=key,
            kind=some[0].cause.kind,
            title=some[0].cause.title,
            frame=some[0].cause.frame,
            sightings=tuple(some),
        )
        for key, some in found.items()
    ]
    return sorted(groups, key=lambda g: (-len(g.sightings), g.kind, g.title))


def together(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Groups that have one thing to mend, under what it is: the commit that brought them; where
    none was found, the function of the package in which all of them end (a test's own joins
    nothing). Under "" each that stands alone. In the order of each one's first."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        ends = f"in {group.frame}" if group.frame.startswith("vitrail/") else group.key
        brought = f"by commit {group.first_bad}" if group.commit else ends
        found.setdefault(brought, []).append(group)
    return [(f"{len(g)} {what}" if g[1:] else "", g) for what, g in found.items()]


def sightings(night: Night) -> Iterator[Sighting]:
    """Every failure of the night; of a job that was tried again, those of its last bad try."""
    for record in night.jobs:
        if record.outcome in BAD:
            yield from _of(record, [a for a in record.attempts if a.outcome in BAD][-1])


def _of(record: JobRecord, attempt: Attempt) -> Iterator[Sighting]:
    bad = [case for case in attempt.cases if case.outcome in ("failed", "error")]
    for case in bad:
        yield Sighting(
            test=case.id,
            record=record,
            cause=cause_of_case(case),
            capsule=case.properties.get("capsule", ""),
            repro=case.properties.get("repro", ""),
        )
    if not bad or attempt.outcome != "failed":
        yield Sighting(test=record.job.name, record=record, cause=cause_of_attempt(attempt))


def _passed(night: Night) -> Iterator[str]:
    """Tests that passed, whatever became of their job, and jobs that did."""
    for record in night.jobs:
        yield from (c.id for c in _last(record) if c.outcome == "passed")
        if record.outcome == "passed":
            yield record.job.name


def _last(record: JobRecord) -> tuple[Case, ...]:
    return record.attempts[-1].cases if record.attempts else ()


def _judged(
    group: Group, issues: Sequence[Issue], today: date, users: dict[str, set[str]]
) -> Group:
    issue = known_as(group.sightings[0].cause, issues, today)
    reach = area(group.frame.rpartition(":")[0], users)
    return msgspec.structs.replace(
        group,
        kind=group.kind if issue is None else "known",
        issue=issue,
        risk=str(reach) if reach else "",
    )
