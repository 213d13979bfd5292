"""How far a change in one module reaches: who leans on it, directly or through others, by the
imports in the syntax. Pure but for reading the sources."""

import ast
from pathlib import Path
from typing import NamedTuple

WIDE = 20  # modules that lean on one from which on a change in it is called risky


class Area(NamedTuple):
    file: str
    modules: int  # of the package, that lean on it
    rooms: tuple[str, ...]  # which of theirs

    def __str__(self) -> str:
        word = "high" if self.modules >= WIDE else "moderate" if self.modules else "low"
        rooms = f" in {', '.join(self.rooms)}" if self.rooms else ""
        return f"{word}: {self.modules} modules{rooms} lean on {self.file}"


def area(file: str, users: dict[str, set[str]]) -> Area | None:
    """The reach of a file of the package, by `users` as `users_of` has them; None for others."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    if module not in users:
        return None
    reached: set[str] = set()
    edge = {module}
    while edge:
        reached |= edge
        edge = {user for one in edge for user in users.get(one, ())} - reached
    reached.discard(module)
    rooms = sorted({name.split(".")[1] for name in reached if "." in name})
    return Area(file, len(reached), tuple(rooms))


def users_of(root: Path) -> dict[str, set[str]]:
    """module -> the modules of the package that import it, anywhere in them."""
    paths = {_module(path, root): path for path in sorted((root / "vitrail").rglob("*.py"))}
    users: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for target in found:
                if target in users and target != name:
                    users[target].add(name)
    return users


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
