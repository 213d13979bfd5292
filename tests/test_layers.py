"""The house's walls: who may import whom, read from ARCHITECTURE.md; what lives without torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vitrail"
EMPTY_INITS = ("engine", "models", "vision", "attention", "cache")
TORCH_FREE = (
    "vitrail",
    "vitrail.cli",
    "vitrail.server.app",
    *(f"vitrail.models.{m}" for m in ("assets", "checkpoint", "gguf", "reading", "registry")),
    *(f"vitrail.bench.{m}" for m in ("flags", "serve", "workload")),
    *(f"vitrail.nightly.{p.stem}" for p in sorted((PACKAGE / "nightly").glob("[a-z]*.py"))),
    "vitrail.repro.capsule",
    *(f"vitrail.repro.{m}" for m in ("kernel_script", "kernel_source")),
    "vitrail.models.kimi_vl.processor",
    "vitrail.ops.resize.taps",
    "vitrail.models.nvila.processor",
    *(f"vitrail.vision.{m}" for m in ("image", "preprocess", "placeholders", "video")),
    *(f"vitrail.vision.video_{m}" for m in ("container", "process", "worker")),
    *(
        f"vitrail.attention.{m}"
        for m in (
            *("shape", "tiles", "legality", "fa4", "plan", "fault", "installed"),
            *("decode_spec", "warm"),
        )
    ),
    *(f"vitrail.weights.{m}" for m in ("gguf", "mapping", "sharding", "headers", "layout", "plan")),
    *(
        f"vitrail.check.{m}"
        for m in ("encoder_peak", "flags", "remote", "report", "sizes", "weights")
    ),
    *(
        f"vitrail.engine.{m}"
        for m in (
            "ahead",
            "answer",
            "capsule",
            "client",
            "conversation",
            "floors",
            "ipc",
            "kernel_groups",
            "policy",
            "prepare",
            "request",
            "scheduler",
            "step",
        )
    ),
    *(
        f"vitrail.{p.parent.name}.{p.stem}"
        for room in ("config", "tokenizer", "server", "cache")
        for p in sorted((PACKAGE / room).glob("*.py"))
        if not p.stem.endswith("_pool") and p.stem != "__init__"
    ),
)
KERNEL_ONLY = {"triton", "cutlass"}
KERNEL_HOMES = ("ops/", "attention/kernels/", "attention/backends/", "attention/compile.py")


def allowed() -> dict[str, dict[str, set[str] | None]]:
    """room -> room it may import -> the modules it may import of it (None: all)."""
    table: dict[str, dict[str, set[str] | None]] = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        cells = [c.strip() for c in line.split("|")]
        if len(cells) != 4 or cells[1] in ("room", "---", ""):
            continue
        entries = re.findall(r"(\w+)(?:\[([^\]]*)\])?", cells[2])
        table[cells[1]] = {
            room: set(re.split(r",\s*", only)) if only else None for room, only in entries
        }
    return table


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that `path` imports anywhere, with the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                is_module = (ROOT / (module.replace(".", "/") + ".py")).exists()
                is_room = (ROOT / module.replace(".", "/")).is_dir()
                found.append((module if is_module or is_room else str(node.module), node.lineno))
    return found


def breaches(path: Path, room: str, table: dict[str, dict[str, set[str] | None]]) -> list[str]:
    bad = []
    for module, line in imports(path):
        parts = module.split(".")
        if parts[0] != "vitrail" or len(parts) < 2 or parts[1] == room:
            continue
        rule = table[room].get(parts[1], "absent") if parts[1] in table[room] else "absent"
        if rule == "absent" or (rule is not None and not (len(parts) > 2 and parts[2] in rule)):
            bad.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return bad


def test_every_import_follows_the_table():
    table = allowed()
    bad = []
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        if room in ("__init__", "__main__", "demo"):
            continue
        assert room in table, f"{relative}: room {room} is not in ARCHITECTURE.md"
        bad += breaches(path, room, table)
    assert not bad, "\n".join(bad)


def test_the_table_is_acyclic():
    table = allowed()
    done: set[str] = set()
    while len(done) < len(table):
        ready = {r for r in table if r not in done and set(table[r]) <= done}
        assert ready, f"cycle among {set(table) - done}"
        done |= ready


def test_a_breach_is_seen():
    """The checker against a table that allows less: an import at the top is reported, and so are
    one inside a function and one of a module that a bracket leaves out."""
    table = allowed()
    path = PACKAGE / "engine" / "llm.py"
    assert breaches(path, "engine", table) == []
    table["engine"] = {"config": None, "engine": None}
    reported = breaches(path, "engine", table)
    assert any("vitrail.tokenizer.chat" in line for line in reported)
    local = PACKAGE / "cli.py"
    table["cli"] = {"config": None}
    assert any("vitrail.server.run" in line for line in breaches(local, "cli", table))
    table["cli"] = {"config": None, "engine": {"prepare"}, "server": None}
    assert any("vitrail.engine.terminal" in line for line in breaches(local, "cli", table))


@pytest.mark.parametrize("room", EMPTY_INITS)
def test_init_imports_nothing(room: str):
    assert not imports(PACKAGE / room / "__init__.py")


def test_every_folder_says_what_it_owns():
    for init in PACKAGE.rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(init.read_text()))
        assert len(doc or "") > 60, f"{init.relative_to(ROOT)} needs a docstring"


def test_kernel_languages_stay_in_their_homes():
    for path in PACKAGE.rglob("*.py"):
        used = {m.split(".")[0] for m, _ in imports(path)} & KERNEL_ONLY
        home = str(path.relative_to(PACKAGE)).startswith(KERNEL_HOMES)
        assert not used or home, f"{path} imports {used}"


IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if "torch" in sys.modules:
        sys.exit(f"{module} imports torch")
"""


def importing(modules: Iterable[str]) -> str:
    """What is wrong with importing them in a fresh process, one after the other: if torch is not
    there at the end, none of them imports it."""
    code = [sys.executable, "-c", IMPORT_ALL, *modules]
    return subprocess.run(code, capture_output=True, text=True).stderr


def test_torch_free_modules_import_no_torch():
    assert importing(TORCH_FREE) == ""


def test_a_module_that_imports_torch_is_named():
    assert (
        importing([*TORCH_FREE[:2], "vitrail.ops.dispatch"])
        == "vitrail.ops.dispatch imports torch\n"
    )
