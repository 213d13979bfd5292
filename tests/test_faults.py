"""The table of reported faults: its tests exist, and it is complete."""

import ast
import re
from pathlib import Path

from tests.faults import FAULTS

ROOT = Path(__file__).parent.parent
# Those of class A that were reported; the numbers between them were not.
CLASS_A = {f"A{n:02}" for n in (1, 3, 4, 6, 8, 10, 11, 12, 15, 16, 19, 20, 21, 24, 26, 28, 32, 34)}
LEFT = re.compile(r"(issue \d+|later): .{5,}")


def named_tests() -> dict[str, list[str]]:
    """Every test of the suite that has fault ids in its name: `path::name` -> ids."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                ids = re.match(r"test_((?:[a-i]\d\d_)*)", node.name)
                assert ids is not None
                name = f"{path.relative_to(ROOT)}::{node.name}"
                found[name] = re.findall(r"[a-i]\d\d", ids[1])
    return found


def test_every_named_test_exists_and_carries_a_fault():
    tests = named_tests()
    for fault, entries in FAULTS.items():
        assert entries, fault
        for entry in entries:
            if LEFT.fullmatch(entry) is None:
                assert entry in tests, f"{fault}: no test {entry}"
                assert tests[entry], f"{fault}: {entry} names no fault"


def test_every_fault_in_a_tests_name_is_in_the_table():
    named = {i.upper() for ids in named_tests().values() for i in ids}
    assert not named - set(FAULTS)


def test_class_a_is_complete():
    assert set(FAULTS) >= CLASS_A
    only_left = {f for f in CLASS_A if all(LEFT.fullmatch(e) for e in FAULTS[f])}
    assert only_left == set()
