"""Numbers in kernels mean one type to every release of Triton. One below fp32's normal numbers
that fp32 still has is fp32 to some and float64 to others, and what it meets is promoted with it: a
kernel of sampling compiled where CI runs and not where the GPU is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "vitrail"
KERNELS = [*sorted(ROOT.glob("ops/*/triton.py")), *sorted(ROOT.glob("attention/kernels/*.py"))]
LEAST, LEAST_NORMAL = 2.0**-149, 2.0**-126


def ambiguous(source: str) -> list[str]:
    return [
        f"line {node.lineno}: {node.value}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and LEAST <= abs(node.value) < LEAST_NORMAL
    ]


def test_the_law_can_fail():
    assert ambiguous("x = tl.maximum(p, 1e-38)") == ["line 1: 1e-38"]
    assert not ambiguous("x = tl.maximum(p, 2e-38) + 0.0 + tl.maximum(q, 1e-300)")


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_number_is_of_a_type_that_releases_differ_about(path: Path):
    assert not ambiguous(path.read_text())
