"""What runs where CI does not (benchmarks, the demo's training, tests of a GPU) names what the
package has: a name that moved is found here, not on the GPU."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    p for folder in ("bench", "demo", "tests/gpu") for p in (ROOT / folder).rglob("*.py")
)


def lacking(source: str) -> list[str]:
    """Names that are imported of the package and not there."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vitrail"):
            continue
        module = importlib.import_module(str(node.module))
        for name in (alias.name for alias in node.names):
            inner = f"{node.module}.{name}"
            is_package = hasattr(module, "__path__")
            if not hasattr(module, name) and not (is_package and importlib.util.find_spec(inner)):
                found.append(f"line {node.lineno}: {inner}")
    return found


def test_the_law_can_fail() -> None:
    assert lacking("from vitrail.engine.step import StepPlan, NoSuchPlan") == [
        "line 1: vitrail.engine.step.NoSuchPlan"
    ]
    assert lacking("from vitrail.ops import moe, nothing") == ["line 1: vitrail.ops.nothing"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_name_is_there(path: Path) -> None:
    assert lacking(path.read_text()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda p: p.name)
def test_how_it_is_started_finds_what_it_imports(path: Path) -> None:
    """`python bench/x.py` has bench/ on its path, not the root; `python -m bench.x` the root."""
    source = path.read_text()
    tree = ast.parse(source)
    modules = [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    of_root = any(m.split(".")[0] in ("tests", "bench") for m in modules)
    said = ast.get_docstring(tree) or ""
    assert not (of_root and f"python bench/{path.name}" in said), f"{path.name} needs python -m"
