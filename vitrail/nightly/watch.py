"""pytest, as `python -m pytest` runs it, and beside it what a repro of a failure needs:

    python -P watch.py OPENED ARGUMENTS...

OPENED gets a line "TEST<tab>FILE" for each file of the tests that is opened (TEST is empty outside
of a test's own call); a test that fails within a kernel leaves a capsule beside it, and records its
path. Run by its path, so that the tree under test need not have it."""

import os
import sys
import uuid
from pathlib import Path

import msgspec
import pytest

FOLDERS = ("tests/", "bench/", "demo/")


class Watch:
    """A plugin. Owns which test is called now."""

    def __init__(self, opened: Path):
        self._opened = opened
        self._test = ""
        self._capsules: dict[str, Path] = {}  # by signature

    def listen(self, here: str) -> None:
        """Write down what is opened below `here` from now on; at once, so that a hang's is there
        too."""
        seen: set[str] = set()
        out = os.open(self._opened, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def heard(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
                name = os.path.relpath(os.path.abspath(os.fsdecode(arguments[0])), here)
                line = f"{self._test}\t{name}\n"
                if name.startswith(FOLDERS) and line not in seen:
                    seen.add(line)
                    os.write(out, line.encode())

        sys.addaudithook(heard)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._test = item.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        self._test = ""
        recorded = {name for name, _ in item.user_properties}
        if call.excinfo is None or "capsule" in recorded or "vitrail" not in sys.modules:
            return
        try:
            from vitrail.repro.kernel import kernel_capsule
        except ImportError:  # a tree of another time
            return
        made = kernel_capsule(call.excinfo.value)
        if made is None:
            return
        if made.signature not in self._capsules:
            path = self._opened.parent / f"kernel-{uuid.uuid4().hex[:12]}.json"
            path.write_bytes(msgspec.json.encode(made))
            self._capsules[made.signature] = path
        item.user_properties.append(("capsule", str(self._capsules[made.signature])))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # as `-m` does
    watch = Watch(Path(sys.argv[1]))
    watch.listen(os.getcwd())
    sys.exit(pytest.main(sys.argv[2:], plugins=[watch]))
