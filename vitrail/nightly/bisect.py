"""Which commit brought a cause: the job run at commits between one where it is not seen and one
where it is, each in a worktree of its own. git does the bisecting of a range (`git bisect run`); a
list is halved here. A commit at which it cannot be told (no such test, lost) is passed over."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vitrail.config.finding import Finding, Refused
from vitrail.nightly.records import Job, Night
from vitrail.nightly.run import Setting, run_job
from vitrail.nightly.triage import Group, grouped

GOOD, SEEN, UNTOLD = 0, 1, 125  # what `git bisect run` understands
PACKAGE_ROOT = Path(__file__).parents[2]


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe needs: the job, the cause's key, pytest's further arguments, and what speed is
    held to."""

    job: Job
    key: str
    extra: tuple[str, ...] = ()
    baseline: dict[str, list[float]] = {}


def search_of(
    group: Group, extra: tuple[str, ...], baseline: dict[str, list[float]] | None = None
) -> Search:
    """The shortest way to see a cause again: its first test alone, or its job where no test of it
    reported."""
    first = group.sightings[0]
    file, found, test = first.test.partition("::")
    job = first.record.job
    if found and file == job.file:
        job = msgspec.structs.replace(job, tests=(test,), without=())
    return Search(job=job, key=group.key, extra=extra, baseline=baseline or {})


def probe(search: Search, tree: Path) -> int:
    """Is the cause there in this tree? An exit code of `git bisect run`."""
    with tempfile.TemporaryDirectory() as out:
        setting = Setting(
            root=tree,
            out=Path(out),
            extra=search.extra,
            gpus=("any",) * 8,  # they were there when it was seen: not a probe's business
            baseline=search.baseline,
        )
        job = msgspec.structs.replace(search.job, kind="")
        record = run_job(job, setting, "probe")
    keys = {g.key for g in grouped(Night(commit="", began="", machine="", jobs=(record,)))}
    if search.key in keys:
        return SEEN
    return GOOD if record.outcome == "passed" else UNTOLD


def first_bad(search: Search, root: Path, good: str, bad: str) -> str:
    """The first commit of good..bad with the cause, by `git bisect run`. Says why where it cannot
    tell."""
    with worktree(root, bad) as tree, tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "search.json"
        spec.write_bytes(msgspec.json.encode(search))
        start = _git(tree, "bisect", "start", bad, good)
        if start.returncode:
            return f"git bisect start: {start.stderr.strip()}"
        code = (
            f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); "
            "from vitrail.nightly.bisect import main; sys.exit(main(sys.argv[1:]))"
        )
        ran = _git(tree, "bisect", "run", sys.executable, "-P", "-c", code, str(spec))
        found = re.search(r"^([0-9a-f]{40}) is the first bad commit$", ran.stdout, re.M)
        _git(tree, "bisect", "reset")
        if found is None:
            return f"not found: {(ran.stdout + ran.stderr).strip().splitlines()[-1]}"
        return _named(root, found[1])


def brought_with(search: Search, root: Path, others: Iterable[str]) -> str:
    """Of commits that brought other failures, as `first_bad` says them, the one at which this cause
    is there and before which it is not; "" where none is. Two runs instead of a search."""
    for said in others:
        commit = said.split(" ")[0]
        parent = _git(root, "rev-parse", "-q", "--verify", f"{commit}~1").stdout.strip()
        asked = ((commit, SEEN), (parent, GOOD)) if parent else ()
        if asked and all(_answer(search, root, at) == answer for at, answer in asked):
            return said
    return ""


def _answer(search: Search, root: Path, commit: str) -> int:
    with worktree(root, commit) as tree:
        return probe(search, tree)


def first_bad_of(commits: Sequence[str], ask: Callable[[str], int]) -> str | None:
    """The first of `commits` (oldest first, the last has the cause) of which `ask` says SEEN, if
    once there it stays; None where commits that cannot be told lie before it, or the last has it
    not. At most about log2 questions but for those."""
    if not commits or ask(commits[-1]) != SEEN:
        return None
    answers = {len(commits) - 1: SEEN}
    low, high = -1, len(commits) - 1  # good (or before all), seen
    while True:
        open_ones = [i for i in range(low + 1, high) if i not in answers]
        if not open_ones:
            break
        middle = min(open_ones, key=lambda i: (abs(2 * i - low - high), i))
        answers[middle] = ask(commits[middle])
        if answers[middle] == SEEN:
            high = middle
        elif answers[middle] == GOOD:
            low = middle
    return commits[high] if high - low == 1 else None


def first_bad_in_list(search: Search, root: Path, commits: Sequence[str]) -> str:
    """`first_bad_of` with a probe in a worktree of each commit asked for."""

    found = first_bad_of(commits, lambda commit: _answer(search, root, commit))
    return "not found: no first one in the list" if found is None else _named(root, found)


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """A checkout of a commit beside the repository's own, gone afterwards. Raises `Refused` for an
    unknown commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        made = _git(root, "worktree", "add", "--detach", str(tree), commit)
        if made.returncode:
            raise Refused(
                Finding(
                    where="bisect",
                    saw=f"commit {commit}: {made.stderr.strip()}",
                    rule="commits of this repository",
                    change="give GOOD..BAD, or a file with one commit a line, oldest first",
                )
            )
        try:
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def main(argv: Sequence[str]) -> int:
    """The probe as `git bisect run` calls it, in the tree to look at."""
    return probe(msgspec.json.decode(Path(argv[0]).read_bytes(), type=Search), Path.cwd())


def _named(root: Path, commit: str) -> str:
    return _git(root, "show", "-s", "--format=%h %s", commit).stdout.strip()


def _git(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
