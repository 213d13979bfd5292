"""The list of kernels that steps launch beside attention: what an engine's steps launch is in it,
whatever their sizes; every kernel of the package is in it for some model, or is somebody's part."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from step_cases import Asked

from vitrail.attention.backends import fa4, triton
from vitrail.check.steps import counts
from vitrail.config.hardware import GPUS, find

ROOT = Path(__file__).parents[2]
H200 = find("H200")
# Kernels that no step launches, and why.
APART = {
    "ops.moe.triton.moe_scatter": "places slots that no router of ours placed: bench/moe.py alone",
}
# Kernels that attention's plans name: `attention.compile` compiles them.
PLANNED = {
    "attention.kernels.attend.attend",
    "attention.kernels.combine.combine",
    "attention.kernels.mend.mend",
}


def asked(*arguments: str) -> Any:
    """What `step_cases.py` says, on an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "step_cases.py"), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def jitted() -> tuple[set[str], set[str]]:
    """Kernels of the package by module, and those among them that others call: parts."""
    kernels: dict[str, str] = {}
    called: set[str] = set()
    for path in sorted((ROOT / "vitrail").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "vitrail").with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                kernels[f"{module}.{node.name}"] = node.name
                names = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
                called |= {n.id for n in names if isinstance(n, ast.Name)}
    return set(kernels), {kernel for kernel, name in kernels.items() if name in called}


def test_every_kernel_is_in_some_list_or_is_apart() -> None:
    listed: set[str] = set()
    for name, choices in (
        ("kimi_vl_a3b", {}),
        ("kimi_vl_a3b", {"deterministic": True}),
        ("qwen2_7b", {}),
        ("nvila_8b", {}),
    ):
        launches = Asked(name, H200, max_running=8, max_step_tokens=600, **choices).launches()
        listed |= {f"{k.fn.__module__}.{k.fn.__name__}" for k, _, _ in launches}
    listed = {name.removeprefix("vitrail.") for name in listed}
    kernels, parts = jitted()
    assert len(kernels) > 30, "kernels are found"
    assert listed <= kernels
    assert not kernels - parts - listed - PLANNED - set(APART), "launched by nobody's list"
    assert not listed & set(APART), "launched after all"
    assert set(APART) <= kernels
    assert {triton.attend.fn.__name__, fa4.mend.fn.__name__} <= {k.split(".")[-1] for k in PLANNED}


def test_counts_have_both_sides_of_every_edge() -> None:
    assert counts(1) == [1]
    found = counts(8192)
    assert found[:33] == list(range(1, 34))
    assert {48, 49, 64, 65, 192, 193, 768, 769, 1536, 1537, 6144, 6145, 8192} <= set(found)
    assert len(found) < 100
    assert max(counts(300)) == 300


def test_steps_of_an_engine_launch_what_is_listed() -> None:
    assert asked("H200", "engine", "kimi_vl_a3b", "20") == []


def test_steps_of_any_size_launch_what_is_listed() -> None:
    assert asked("H200", "stray", "kimi_vl_a3b", "20") == []


NIGHT = [
    ("kimi_vl_a3b", "deterministic"),
    ("kimi_vl_a3b", "fp8"),
    ("nvila_8b", ""),
    ("qwen2_7b", ""),
]


@pytest.mark.suite("kernels", minutes=3, owner="check")
@pytest.mark.nightly
@pytest.mark.parametrize("gpu", ["A100", "H200", "B300"])
@pytest.mark.parametrize(("name", "mode"), NIGHT)
def test_steps_of_every_model_launch_what_is_listed(name: str, mode: str, gpu: str) -> None:
    more = [mode] if mode else []
    assert asked(gpu, "stray", name, "200", *more) == []
    assert asked(gpu, "engine", name, "60", *more) == []


@pytest.mark.suite("kernels", minutes=6, owner="check")
@pytest.mark.nightly
@pytest.mark.parametrize("gpu", [gpu.name for gpu in {gpu.cc: gpu for gpu in GPUS}.values()])
@pytest.mark.parametrize(("name", "mode"), [("kimi_vl_a3b", ""), *NIGHT])
def test_kernels_of_every_model_compile_for_every_gpu(name: str, mode: str, gpu: str) -> None:
    made = asked(gpu, "compile", name, *([mode] if mode else []))
    assert made["unknown"] is None
    assert made["findings"] == []
    assert len(made["taken"]) > 20
