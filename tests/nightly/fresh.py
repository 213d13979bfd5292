"""An environment of its own, with some packages and what they require and nothing else: a new venv
of links to what is installed here, so that it needs no network."""

import re
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

MARKER = re.compile(r"\bextra\s*==")


def closure(names: list[str]) -> dict[str, None]:
    """Distributions that `names` require, directly or not, of those that are installed."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # for another system
            continue
        if name not in found:
            found[name] = None
            plain = [r for r in required if not MARKER.search(r)]
            waiting += [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in plain]
    return found


def make(folder: Path, names: list[str], package: Path | None = None) -> Path:
    """The interpreter of the environment. `package`: a checkout whose `vitrail` is installed in
    it."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in closure(names):
        made = distribution(name)
        for top in {
            f.parts[0] for f in made.files or () if f.parts[0] not in ("..", "__pycache__")
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(made.locate_file(top))).resolve())
    if package is not None:
        (site / "vitrail").symlink_to(package / "vitrail")
    return folder / "bin" / "python"


def run(python: Path, script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A script in an empty folder, with nothing of this process's environment."""
    words = [str(python), str(script), *flags]
    return subprocess.run(
        words, cwd=script.parent, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
