"""A small checkout of its own for tests of the night: a package `vitrail`, and tests that pass,
fail, hang, crash."""

from pathlib import Path

from vitrail.nightly.records import Job
from vitrail.nightly.run import Setting

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true")
"""
INI = "[pytest]\nmarkers = suite\naddopts = -q -p no:cacheprovider\npythonpath = .\n"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Files by their path below `root`."""
    (root / "tests").mkdir(parents=True)
    for name, text in {"pytest.ini": INI, "tests/conftest.py": CONFTEST, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def job(file: str, minutes: float = 1.0, **more) -> Job:
    facts = {"suite": "faults", "owner": "me", **more}
    return Job(file=f"tests/{file}", minutes=minutes, **facts)


def setting(root: Path, out: Path, **more) -> Setting:
    return Setting(root=root, out=out, **more)
