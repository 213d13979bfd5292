"""pytest, as `python -m pytest` runs it, and beside it what a repro of a failure needs:

    python -P watch.py FOLDER ARGUMENTS...

FOLDER gets `opened`, a line "TEST<tab>FILE" for each file of the folder here that is opened (TEST is
empty outside of a test's own call), and of each test that fails within a kernel a capsule, whose
path is recorded with the test. Run by its path, so that the tree under test need not have it."""

import os
import re
import sys
import uuid
from pathlib import Path
from types import TracebackType

import pytest


class Watch:
    """A plugin. Owns which test is called now."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._test = ""

    def files(self, here: str) -> None:
        """Write down what is opened below `here`, from now on: at once, a hang's too."""
        seen: set[tuple[str, str]] = set()
        out = os.open(self._folder / "opened", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def heard(event: str, arguments: tuple[object, ...]) -> None:
            if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
                return
            mode = arguments[1]
            name = os.path.abspath(os.fsdecode(arguments[0]))
            if name.startswith(here) and (self._test, name) not in seen and mode not in ("w", "wb"):
                seen.add((self._test, name))
                os.write(out, f"{self._test}\t{os.path.relpath(name, here)}\n".encode())

        sys.addaudithook(heard)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        self._test = item.nodeid
        try:
            return (yield)
        finally:
            self._test = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        recorded = {name for name, _ in item.user_properties}
        if call.excinfo is None or "capsule" in recorded or not _may_be_kernel(call.excinfo.tb):
            return
        from vitrail.repro.kernel import kernel_capsule

        made = kernel_capsule(call.excinfo.value)
        if made is not None:
            path = self._folder / f"kernel-{uuid.uuid4().hex[:12]}.json"
            path.write_bytes(made)
            item.user_properties.append(("capsule", str(path)))


def _may_be_kernel(tb: TracebackType | None) -> bool:
    """Whether the package's planner, launcher or refusals are on the stack."""
    while tb is not None:
        if re.search(r"vitrail/(ops/launch|attention/compile|config/finding)\.py$", tb.tb_frame.f_code.co_filename):
            return True
        tb = tb.tb_next
    return False


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # as `-m` does
    watch = Watch(Path(sys.argv[1]))
    watch.files(os.path.join(os.getcwd(), ""))
    sys.exit(pytest.main(sys.argv[2:], plugins=[watch]))
