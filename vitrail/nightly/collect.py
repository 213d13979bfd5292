"""The registry of a tree: every `suite` mark under its tests, read from the syntax. Imports
nothing of what it reads, so a file that raises at import is a job that fails and not a night
without jobs."""

import ast
from collections.abc import Iterator
from pathlib import Path

from vitrail.config.finding import Finding
from vitrail.nightly.records import Job
from vitrail.nightly.register import RULE, Mark, jobs_of, read_mark

GATES = ("nightly", "gpu")  # what CI skips, and so must be registered


def collect(root: Path) -> tuple[Job, ...] | list[Finding]:
    """Every job below root/tests in order of files, or everything that is wrong with the marks."""
    jobs: list[Job] = []
    findings: list[Finding] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark." not in text:
            continue
        made, bad = read_file(path.relative_to(root).as_posix(), text)
        jobs += made
        findings += bad
    return findings or tuple(jobs)


def read_file(file: str, text: str) -> tuple[list[Job], list[Finding]]:
    """Jobs and findings of one test file's text."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [], [_bad(f"{file}:{error.lineno}", "no Python", "a test file is Python")]
    findings: list[Finding] = []
    marks: dict[str, Mark] = {}
    plain: list[str] = []
    placed: set[int] = set()

    def mark_of(nodes: list[ast.expr]) -> Mark | None:
        found = [node for node in nodes if _name(node) == "suite"]
        placed.update(id(node) for node in found)
        if len(found) > 1:
            findings.append(_bad(f"{file}:{found[1].lineno}", "two marks", "one suite a test"))
        made = _read(file, found[0]) if found else None
        if isinstance(made, Finding):
            findings.append(made)
            return None
        return made

    whole_nodes = _pytestmark(tree)
    whole = mark_of(whole_nodes)
    gated = any(_name(node) in GATES for node in whole_nodes)
    for test in _tests(tree):
        mark = mark_of(test.decorator_list)
        named = {_name(n) for d in test.decorator_list for n in ast.walk(d)}
        if mark is not None:
            marks[test.name] = mark
            continue
        plain.append(test.name)
        if whole is None and "suite" not in named and (gated or named & set(GATES)):
            where = f"{file}:{test.lineno} {test.name}"
            findings.append(_bad(where, "skipped in CI and in no suite", "the night runs it"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) == "suite" and id(node) not in placed:
            rule = "a suite is a test function's decorator or the file's `pytestmark`"
            findings.append(_bad(f"{file}:{node.lineno}", "a mark elsewhere", rule))
    return jobs_of(file, whole, marks, plain), findings


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            yield node


def _pytestmark(tree: ast.Module) -> list[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
        ):
            value = node.value
            return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]
    return []


def _name(node: ast.AST) -> str | None:
    """x of `pytest.mark.x` and of `pytest.mark.x(...)`."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
        return node.attr if node.value.attr == "mark" else None
    return None


def _read(file: str, node: ast.expr) -> Mark | Finding:
    where = f"{file}:{node.lineno}"
    if not isinstance(node, ast.Call) or len(node.args) != 1:
        return _bad(where, f"`{ast.unparse(node)}`", RULE)
    values: dict[str, object] = {}
    try:
        values["suite"] = ast.literal_eval(node.args[0])
        for keyword in node.keywords:
            values[keyword.arg or "**"] = ast.literal_eval(keyword.value)
    except ValueError:
        return _bad(where, f"`{ast.unparse(node)}`", RULE)
    return read_mark(where, values)


def _bad(where: str, saw: str, rule: str) -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change="mend the mark", code="nightly_mark")
