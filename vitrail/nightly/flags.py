"""The flags of `vitrail nightly`, and what a call does: collect, run, triage, write. Nothing heavy
is imported before it runs."""

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vitrail.config.finding import Finding, Refused, accept
from vitrail.nightly.known import FILE
from vitrail.nightly.records import Job, JobRecord, Night
from vitrail.nightly.register import SUITES, shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from vitrail.nightly.bisect import Search
    from vitrail.nightly.triage import Group, Triage


def add_nightly(command: argparse.ArgumentParser) -> None:
    """`vitrail nightly [flags] [-- arguments of pytest]`."""
    add = command.add_argument
    add("--suite", action="append", choices=SUITES, help="repeatable (default: all)")
    add("--only", action="append", help="jobs whose name has this in it; repeatable")
    add("--root", type=Path, default=Path(), help="the checkout (default: the folder here)")
    add("--list", action="store_true", help="say what would run, and run nothing")
    add("--shard", default="1/1", metavar="I/N", help="the I-th of N parts of about equal minutes")
    add("--out", type=Path, default=Path("night"), help="folder for results, logs and digest")
    add("--against", type=Path, help="results.json of the night before: what is new, what fixed")
    add("--baseline", type=Path, help="results.json that speed is held to (default: --against)")
    add("--known", type=Path, default=FILE, help="known issues (default: the package's)")
    add("--read", type=Path, action="append", help="run nothing: results of shards; repeatable")
    add("--bisect", metavar="GOOD..BAD", help="find the commit that brought each new failure")
    add("--repro", action=argparse.BooleanOptionalAction, default=True, help="one file a failure")
    add("--commits", type=Path, help="bisect over these instead: one a line, oldest first")
    add("--model", help="accuracy: a checkpoint besides the demo; with --questions")
    add("--questions", type=Path, help="accuracy: multiple-choice questions, JSONL")
    add("--style", choices=("letters", "words"), default="letters", help="accuracy: how to ask")
    add("--at-least", type=float, default=0.0, help="accuracy: the share of right answers")
    add("pytest", nargs="*", help="after --: handed to pytest")
    command.set_defaults(run=nightly, refused=2)


def nightly(args: argparse.Namespace) -> int:
    """0: nothing failed but what is known; 1: something did."""
    from vitrail.nightly.digest import html_page, markdown, page
    from vitrail.nightly.known import read_known
    from vitrail.nightly.records import load, merge, save
    from vitrail.nightly.triage import triage

    root = args.root.resolve()
    if args.bisect:
        _range(args.bisect)
    issues = read_known(args.known)  # before hours are spent
    before = load(args.against) if args.against else None
    baseline = load(args.baseline) if args.baseline else before
    if args.read:
        night = merge([load(path) for path in args.read])
    else:
        jobs = chosen(args, root)
        if args.list:
            return _listed(jobs)
        night = _run(args, root, jobs, baseline)
    args.out.mkdir(parents=True, exist_ok=True)
    save(night, args.out / "results.json")
    made = triage(night, before, issues, datetime.now(UTC).date(), root)
    if args.repro and (made.new or made.still):
        made = _with_repros(made, args, root, baseline)
    if args.bisect or args.commits:
        made = _bisected(made, args, root, baseline)
    blocks = page(made)
    (args.out / "digest.md").write_text(markdown(blocks))
    (args.out / "digest.html").write_text(html_page(blocks))
    for group in (*made.new, *made.still):
        print(f"{group.key} {group.name}" + (f" ({group.first_bad})" if group.first_bad else ""))
    print(f"{'green' if made.green else 'red'}: {args.out / 'digest.md'}")
    return 0 if made.green else 1


def chosen(args: argparse.Namespace, root: Path) -> list[Job]:
    """The jobs that the flags ask for. Raises `Refused` where there are none, or a mark is
    wrong."""
    from vitrail.nightly.collect import collect

    if not (root / "tests").is_dir():
        raise Refused(_bad("--root", f"no tests in {root}", "a checkout of Vitrail", "give one"))
    found: list[Job] = [
        job
        for job in accept(collect(root))
        if (not args.suite or job.suite in args.suite)
        and (not args.only or any(part in job.name for part in args.only))
    ]
    part, count = _shard(args.shard)
    if not found:
        saw = f"no job of {args.suite or 'any suite'} with {args.only or 'any name'}"
        raise Refused(_bad("--suite", saw, "at least one job", "see --list"))
    return shards(found, count)[part - 1]


def _shard(text: str) -> tuple[int, int]:
    part, _, count = text.partition("/")
    if part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count):
        return int(part), int(count)
    raise Refused(_bad("--shard", repr(text), "I/N with 1 <= I <= N", "for example 1/4"))


def _listed(jobs: list[Job]) -> int:
    for job in jobs:
        gpus = f", {job.gpus} GPU {job.kind}".rstrip() if job.gpus else ""
        chance = ", statistical" if job.statistical else ""
        print(f"{job.minutes:6.1f} min  {job.name}  ({job.owner}{gpus}{chance})")
    print(f"{sum(job.minutes for job in jobs):6.1f} min  {len(jobs)} jobs")
    return 0


def _run(args: argparse.Namespace, root: Path, jobs: list[Job], baseline: Night | None) -> Night:
    from vitrail.nightly.run import Setting, baseline_of, gpus_here, machine, run_night

    gpus = gpus_here()
    measures, held_to = baseline_of(baseline, machine(gpus))
    setting = Setting(
        root=root,
        out=args.out.resolve(),
        extra=(*args.pytest, *_checkpoint(args)),
        gpus=gpus,
        baseline=measures,
        held_to=held_to,
    )

    def tell(record: JobRecord) -> None:
        seconds = sum(a.seconds for a in record.attempts)
        print(f"{record.outcome:8} {seconds:6.0f} s  {record.job.name}: {record.why}", flush=True)

    return run_night(jobs, setting, tell)


def _checkpoint(args: argparse.Namespace) -> list[str]:
    if bool(args.model) != bool(args.questions):
        saw = f"model {args.model}, questions {args.questions}"
        raise Refused(_bad("--model", saw, "both or neither", "give the other one too"))
    if not args.model:
        return []
    return [
        f"--checkpoint={args.model}",
        f"--questions={args.questions.resolve()}",
        f"--style={args.style}",
        f"--at-least={args.at_least}",
    ]


def _with_repros(
    made: "Triage", args: argparse.Namespace, root: Path, baseline: Night | None
) -> "Triage":
    from vitrail.nightly.repro import Writer

    search = _searches(args, baseline)
    folders = [args.out, *(path.parent for path in args.read or ())]
    write = Writer(root, args.out.resolve() / "repro", [f.resolve() for f in folders], made.night)

    def told(groups: tuple["Group", ...]) -> tuple["Group", ...]:
        repros = [write(group, search(group)) for group in groups]
        return tuple(map(lambda g, said: msgspec.structs.replace(g, repro=said), groups, repros))

    return msgspec.structs.replace(made, new=told(made.new), still=told(made.still))


def _searches(args: argparse.Namespace, baseline: Night | None) -> "Callable[[Group], Search]":
    from vitrail.nightly.bisect import search_of
    from vitrail.nightly.run import baseline_of, gpus_here, machine

    held_to, _ = baseline_of(baseline, machine(gpus_here()))
    return lambda group: search_of(group, tuple(args.pytest), held_to)


def _bisected(
    made: "Triage", args: argparse.Namespace, root: Path, baseline: Night | None
) -> "Triage":
    from vitrail.nightly.bisect import brought_with, first_bad, first_bad_in_list

    search_for, groups = _searches(args, baseline), list["Group"]()
    for group in made.new:
        search = search_for(group)
        found = brought_with(search, root, dict.fromkeys(g.first_bad for g in groups if g.commit))
        if not found and args.commits:
            found = first_bad_in_list(search, root, args.commits.read_text().split())
        found = found or first_bad(search, root, *_range(args.bisect))
        groups.append(msgspec.structs.replace(group, first_bad=found))
    return msgspec.structs.replace(made, new=tuple(groups))


def _range(text: str) -> tuple[str, str]:
    good, dots, bad = text.partition("..")
    if not (good and dots and bad):
        raise Refused(_bad("--bisect", repr(text), "GOOD..BAD", "give two commits"))
    return good, bad


def _bad(where: str, saw: str, rule: str, change: str) -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change=change)
