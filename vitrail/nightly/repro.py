"""One file for each new failure, named in the digest once it was run alone and failed in the same
way: from the capsule that the test left, else the failing test itself, with the parts of the tests'
sources and the files that it needs, which runs against whatever `vitrail` is installed."""

import ast
import base64
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path

import msgspec

from vitrail.config.env import of_child
from vitrail.config.finding import Finding, Refused
from vitrail.nightly import cage
from vitrail.nightly.bisect import Search
from vitrail.nightly.pieces import Pieces
from vitrail.nightly.records import Night
from vitrail.nightly.run import Setting, gpus_here, machine, run_job, run_once
from vitrail.nightly.triage import Group, grouped

SEEN, GONE, UNTOLD = 1, 0, 2
SHRINKING_MIN = 5
MAX_DATA_BYTES = 8 << 20

TEXT = '''
import sys

# What the test needs of the tests' folder, cut to it; binary files are at the end.
FILES = {files}

{search}

def main():
    """1: the failure is there; 0: the test passes; 2: it cannot be told."""
    try:
        from vitrail.nightly.repro import again
    except ImportError as error:
        print(f"cannot tell: {{error}}")
        return 2
    return again(SEARCH, LIMIT_S, FILES, DATA, MACHINE)

DATA = {data}

if __name__ == "__main__":
    sys.exit(main())
'''


class Writer:
    """Of a night's scripts. `root` is the checkout that ran, `folders` are where capsules lie."""

    def __init__(self, root: Path, out: Path, folders: Sequence[Path], night: Night):
        self._root, self._out, self._folders, self._night = root, out, folders, night

    def __call__(self, group: Group, search: Search) -> str:
        """Where a group's script is and what it did when it was run, or why there is none."""
        if group.kind == "infrastructure":
            return "none: what lies outside of the package is not made to fail again"
        self._out.mkdir(parents=True, exist_ok=True)
        path = self._out / f"{group.key}.py"
        limit_s = 3 * group.sightings[0].record.limit_s + 60
        for capsule in self._capsules(group, search):  # by the package that failed: its sources
            path.unlink(missing_ok=True)
            words = ["-m", "vitrail.cli", "repro", str(capsule), "--script", str(path)]
            self._run([*words, f"--minutes={SHRINKING_MIN}"], 60 * SHRINKING_MIN + limit_s)
            if path.exists() and self._run([str(path)], limit_s)[0] == SEEN:
                mended = self._run([str(path), "--fixed"], limit_s)[0] == GONE
                more = ", and passes with --fixed" if mended else ""
                return f"{path}: fails alone (exit code 1){more}"
        try:
            path.write_text(script_of(group, search, self._night, self._root))
        except Refused as refused:
            return f"none: {refused.findings[0]}"
        code, said = self._run([str(path)], limit_s)
        if code == SEEN:
            return f"{path}: fails alone (exit code 1)"
        return f"{path}: run alone it does not fail: exit code {code}: {said}"

    def _capsules(self, group: Group, search: Search) -> Iterator[Path]:
        """Those that the tests left; of wrong numbers, then that of the first op which differs
        from its definition when the test runs once more."""
        left = [s.capsule for s in group.sightings if s.capsule]
        yield from self._found(left)
        if group.kind == "numerics" and not left:
            setting = Setting(root=self._root, out=self._out, extra=search.extra)
            cases = run_once(search.job, setting, f"{group.key}-ops", ops=True).cases
            yield from self._found([c.properties.get("capsule", "") for c in cases])

    def _found(self, names: Sequence[str]) -> list[Path]:
        """The first that is there: of a night's other shards, beside their results, where a step's
        lie in a folder of their test's."""
        given = [Path(name) for name in names if name]
        ends = [Path(*path.parts[-depth:]) for path in given for depth in (1, 2)]
        paths = [*given, *(folder / end for folder in self._folders for end in ends)]
        return [path for path in paths if path.exists()][:1]

    def _run(self, words: list[str], limit_s: float) -> tuple[int | None, str]:
        """Python in a folder of its own with the package that failed: its exit code, None if it
        takes longer, and the last line that it says. In a cage: a replay that hangs is a process
        below it, and may hold the GPU."""
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
            ended = Path(beside) / "ended.json"
            done = subprocess.run(
                [
                    *(sys.executable, "-P", cage.__file__, f"{limit_s}", str(ended)),
                    *(sys.executable, *words),
                ],
                cwd=folder,
                env=of_child(self._root),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            code = msgspec.json.decode(ended.read_bytes(), type=cage.Report).code
        if code is None:
            return None, "it did not end"
        return code, (done.stdout.strip().splitlines() or ["it said nothing"])[-1]


def script_of(group: Group, search: Search, night: Night, root: Path) -> str:
    """The file of a test. Raises `Refused` where what it reads is too much for one file."""
    cause, opened = group.sightings[0].cause, _opened(group, search)
    pieces = Pieces(root, search.job)
    texts, data = pieces.texts(), pieces.data(opened)
    for name in [name for name in data if name.endswith(".py")]:
        texts[name] = data.pop(name).decode()
    size = sum(map(len, data.values()))
    if size > MAX_DATA_BYTES:
        raise Refused(
            Finding(
                where=search.job.name,
                saw=f"{len(data)} files of {size} bytes that it reads",
                rule=f"a script holds at most {MAX_DATA_BYTES} bytes of files",
                change="run it by hand in a checkout",
            )
        )
    limit = group.sightings[0].record.limit_s
    lines = (
        f"{cause.signature}\n\n"
        f"test:     {search.job.name}\n"
        f"seen:     vitrail @ {night.commit}, {night.machine}\n"
        f"needs:    vitrail @ {night.commit} (or another commit, to see whether it fails there)\n"
        f"          {' '.join(_needs(texts))}\n"
        f"expected: the test passes within {limit:.0f} s: exit code 0; 1 while it fails in this\n"
        "          way, 2 where it cannot be told\n"
    )
    head = "".join(f"# {_plain(line)}".rstrip() + "\n" for line in lines.split("\n"))
    packed = {name: base64.b85encode(zlib.compress(b, 9)).decode() for name, b in data.items()}
    facts = (
        f"LIMIT_S, MACHINE = {limit:.0f}, {night.machine!r}\n"
        f"SEARCH = {json.loads(msgspec.json.encode(search))!r}\n"
    )
    return head + TEXT.format(files=_dict(texts), data=_dict(packed), search=facts)


def again(
    search: dict[str, object],
    limit_s: float,
    files: Mapping[str, str],
    data: Mapping[str, str],
    seen_on: str,
) -> int:
    """What a script does: its test once more, in a folder with nothing but its files."""
    asked = msgspec.convert(search, Search)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        blobs = {name: zlib.decompress(base64.b85decode(text)) for name, text in data.items()}
        for name, content in {**{n: t.encode() for n, t in files.items()}, **blobs}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        setting = Setting(
            root=root,
            out=Path(folder),
            extra=asked.extra,
            gpus=("any",) * 8,  # they were there when it was seen
            baseline=asked.baseline,
            factor=0,
            grace_s=limit_s,
        )
        record = run_job(msgspec.structs.replace(asked.job, kind=""), setting, "repro")
    if asked.baseline and seen_on != (here := machine(gpus_here())):
        print(f"its times are held to those of {seen_on}; this is {here}")
    groups = grouped(Night(commit="", began="", machine="", jobs=(record,)))
    for group in groups:
        word = "seen" if group.key == asked.key else "something else"
        print(f"{group.sightings[0].cause.trace}\n{word}: {group.name}")
    if asked.key in {group.key for group in groups}:
        return SEEN
    print(f"{record.outcome}: {record.why}")
    return GONE if record.outcome == "passed" else UNTOLD


def _opened(group: Group, search: Search) -> set[str]:
    """What was opened by the test, and outside of any: by modules and fixtures."""
    found: set[str] = set()
    tests = search.job.tests
    for line in group.sightings[0].record.attempts[-1].opened:
        test, _, file = line.partition("\t")
        if not test or not tests or any(test.partition("::")[2] == name for name in tests):
            found.add(file)
    return found


def _needs(texts: Mapping[str, str]) -> list[str]:
    """Distributions of what they import and of pytest's plugins, at the releases here."""
    plugins = {"timeout = ": "pytest_timeout", "beartype": "beartype"}
    found = {plugins[word] for word in plugins for text in texts.values() if word in text}
    for text in (text for name, text in texts.items() if name.endswith(".py")):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).split(".")[0])
    known = packages_distributions()
    names = {known[module][0] for module in found if module in known} - {"vitrail"}
    return sorted(f"{name}=={version(name)}" for name in names)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)[:2000]


def _dict(texts: Mapping[str, str]) -> str:
    return (
        "{\n" + "".join(f"    {name!r}: {_quoted(text)},\n" for name, text in texts.items()) + "}"
    )


def _quoted(text: str) -> str:
    """As it is, where quotes and backslashes allow."""
    plain = all(c.isprintable() or c == "\n" for c in text) and "'''" not in text
    return f"r'''{text}'''" if plain and text.endswith("\n") else repr(text)
