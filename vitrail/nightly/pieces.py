"""What a test needs of the tests' folder: of its module, of those that it imports from there and of
the conftests above it, the statements that it leans on and no others; and files that were opened.
Reads the syntax; imports nothing of it."""

import ast
import re
from pathlib import Path

from vitrail.nightly.records import Job

LOCAL = ("tests", "bench", "demo")
INI = "[tool.pytest.ini_options]"


class Pieces:
    """Of the tests of one job."""

    def __init__(self, root: Path, job: Job):
        self._root, self._job = root, job
        self._trees: dict[str, ast.Module] = {}
        self._wanted: dict[str, set[str] | None] = {}  # None: all of it
        folders = Path(job.file).parents
        conftests = [(folder / "conftest.py").as_posix() for folder in folders]
        self._conftests = [name for name in conftests if (root / name).exists()]

    def texts(self) -> dict[str, str]:
        """Sources by their path, the test's own first."""
        names = {test.partition("[")[0].partition("::")[0] for test in self._job.tests}
        self._wanted = {self._job.file: names or None, **{name: set() for name in self._conftests}}
        before = None
        while before != (before := str(self._wanted)):
            for file in list(self._wanted):
                kept = self._kept(file)
                names = {name for node in kept for name in _uses(node)}
                for node in kept:
                    self._follow(node, names if self._wanted[file] is not None else None)
        made = {file: self._cut(file) for file in self._wanted}
        pyproject = self._root / "pyproject.toml"
        if pyproject.exists():
            found = re.search(
                rf"^{re.escape(INI)}$.*?(?=^\[|\Z)", pyproject.read_text(), re.M | re.S
            )
            made["pyproject.toml"] = found[0] if found else ""
        elif (ini := self._root / "pytest.ini").exists():
            made["pytest.ini"] = ini.read_text()
        return made

    def data(self, opened: set[str]) -> dict[str, bytes]:
        """Files by their path: what was opened, and beside a checkpoint's config.json all that
        readers of other languages open unseen."""
        names: set[str] = set()
        for name in opened:
            cached = re.sub(r"__pycache__/(\w+)\.[\w-]+\.pyc(\.\d+)?$", r"\1.py", name)
            # tests lean on each other by imports, which are read
            if not cached.startswith("tests/") or not cached.endswith(".py"):
                names.add(cached)
                if cached.endswith("/config.json"):
                    beside = (self._root / cached).parent.iterdir()
                    names.update(p.relative_to(self._root).as_posix() for p in beside)
        paths = {name: self._root / name for name in sorted(names)}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse((self._root / file).read_text())
        return self._trees[file]

    def _kept(self, file: str) -> list[ast.stmt]:
        """Statements of a file that are wanted, and all that they name."""
        body, wanted = self._tree(file).body, self._wanted[file]
        if wanted is None:
            return body
        kept = {id(node) for node in body if _always(node)}
        names = set(wanted)
        while True:
            more = [n for n in body if id(n) not in kept and names & set(_binds(n))]
            kept.update(map(id, more))
            found = {name for node in body if id(node) in kept for name in _uses(node)}
            if not more and found <= names:
                return [node for node in body if id(node) in kept]
            names |= found

    def _follow(self, node: ast.stmt, names: set[str] | None) -> None:
        """What a kept statement wants of other files; of what the top imports only `names`."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and str(inner.module).split(".")[0] in LOCAL:
                base = str(inner.module).replace(".", "/")
                for alias in inner.names:
                    if inner is node and names and (alias.asname or alias.name) not in names:
                        continue
                    if not self._want(f"{base}/{alias.name}.py", None):
                        self._want(f"{base}.py", alias.name)
        for name in _uses(node):
            for file in self._conftests:
                if any(name in _binds(n) for n in self._tree(file).body):
                    self._want(file, name)

    def _want(self, file: str, name: str | None) -> bool:
        if not (self._root / file).exists():
            return False
        wanted = self._wanted.setdefault(file, set())
        if name is None:
            self._wanted[file] = None
        elif wanted is not None:
            wanted.add(name)
        return True

    def _cut(self, file: str) -> str:
        """The text without what is not kept, and without the comments above that."""
        text = (self._root / file).read_text()
        kept = self._kept(file)
        if self._wanted[file] is None:
            return text
        lines: list[str | None] = [*text.splitlines()]
        named = {name for node in kept for name in _uses(node)} | (self._wanted[file] or set())
        for node in self._tree(file).body:
            first, last = _span(node)
            if node not in kept:
                while first > 1 and (text.splitlines()[first - 2]).startswith("#"):
                    first -= 1
                lines[first - 1 : last] = [None] * (last - first + 1)
            elif isinstance(node, ast.ImportFrom):
                aliases = [a for a in node.names if (a.asname or a.name) in named]
                if len(aliases) < len(node.names):
                    less = ast.ImportFrom(node.module, aliases, node.level)
                    lines[first - 1 : last] = [ast.unparse(less), *[None] * (last - first)]
        out = "\n".join(line for line in lines if line is not None)
        return re.sub(r"\n{4,}", "\n\n\n", out).strip("\n") + "\n"


def _span(node: ast.stmt) -> tuple[int, int]:
    above = [d.lineno for d in getattr(node, "decorator_list", ())]
    return min([node.lineno, *above]), node.end_lineno or node.lineno


def _always(node: ast.stmt) -> bool:
    """What acts by being there: hooks, marks, fixtures of every test, statements."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        said = " ".join(ast.unparse(d) for d in node.decorator_list)
        return node.name.startswith("pytest_") or "autouse=True" in said
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return any(name in ("pytestmark", "pytest_plugins") for name in _binds(node))
    return not isinstance(node, ast.ClassDef | ast.Import | ast.ImportFrom)


def _binds(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [a.asname or a.name.split(".")[0] for a in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []


def _uses(node: ast.stmt) -> set[str]:
    """Names, parameters (which may be fixtures) and words that may name one."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.arg):
            found.add(inner.arg)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            if inner.value.isidentifier():
                found.add(inner.value)
            # a signature's annotation in quotes
            found.update(re.findall(r"[A-Za-z_]\w*", inner.value) if len(inner.value) < 80 else ())
    if isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    return found - (set(_binds(node)) if isinstance(node, ast.FunctionDef) else set())
