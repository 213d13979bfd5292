"""pytest, as `python -m pytest` runs it, and beside it what a repro of a failure needs:

    python -P watch.py OPENED [--ops] ARGUMENTS...

OPENED gets a line "TEST<tab>FILE" for each file of the tests that is opened (TEST is empty outside
of a test's own call); a test that fails within a kernel leaves a capsule beside it, and records its
path. --ops: so does one that calls an op of kernels whose results are not its definition's. Run by
its path, so that the tree under test need not have it."""

import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

if TYPE_CHECKING:
    from vitrail.repro.kernel import KernelCapsule

FOLDERS = ("tests/", "bench/", "demo/")


class Watch:
    """A plugin. Owns which test is called now."""

    def __init__(self, opened: Path, ops: bool):
        self._opened, self._ops = opened, ops
        self._test = ""
        self._wrong: KernelCapsule | None = None  # the first op of the test at hand that is
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

    def pytest_sessionstart(self) -> None:
        """Before tests import what is watched."""
        if not self._ops:
            return
        from vitrail.repro.kernel import op_capsule
        from vitrail.repro.kernel_check import watch_ops

        watch_ops(lambda fault, wrong: self._keep(op_capsule(fault, wrong)))

    def _keep(self, made: "KernelCapsule") -> None:
        self._wrong = self._wrong or made

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._test, self._wrong = item.nodeid, None

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
        try:  # tensors of a device that has failed cannot be read
            made = kernel_capsule(call.excinfo.value) or self._wrong
        except Exception:  # noqa: BLE001  it costs the capsule, and the night nothing
            made = self._wrong
        if made is not None:
            if made.signature not in self._capsules:
                path = self._opened.parent / f"kernel-{uuid.uuid4().hex[:12]}.json"
                path.write_bytes(msgspec.json.encode(made))
                self._capsules[made.signature] = path
            item.user_properties.append(("capsule", str(self._capsules[made.signature])))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # as `-m` does
    opened, ops = sys.argv[1], sys.argv[2:3] == ["--ops"]
    watch = Watch(Path(opened), ops)
    watch.listen(os.getcwd())
    sys.exit(pytest.main(sys.argv[3 if ops else 2 :], plugins=[watch]))
