"""The compilers' process: `python -m vitrail.engine.compilers PACKAGE...`, begun and asked by
`ahead`. What takes seconds to import is imported once, the packages named among it; then each part
is compiled by a fork, as many at once as there are cores for. Nothing here touches a device before
it is forked, which no driver would survive."""

import ctypes
import os
import signal
import sys
import traceback
from collections import deque
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import msgspec
import torch

from vitrail.attention import compile as _  # Triton's compiler  # noqa: F401
from vitrail.attention.warm import Question, answer
from vitrail.config.engine import EngineConfig
from vitrail.engine.ahead import KERNELS, MODULE, STEPS, Part
from vitrail.engine.warm_steps import run_steps
from vitrail.models.checkpoint import open_checkpoint

PR_SET_PDEATHSIG = 1


def main(packages: list[str]) -> int:
    """Says on the standard output what is done (`ahead`); what compilers print is lost."""
    _end_with_parent()
    said = os.dup(1)
    os.dup2(2, 1)
    for package in packages:
        with suppress(ImportError):  # `warm` says so where a plan names it
            import_module(package)
    if packages and _woken():  # again without them: each fork imports what it needs
        os.dup2(said, 1)
        os.execv(sys.executable, [sys.executable, "-m", MODULE])
    path = sys.stdin.readline()
    if not path:  # nothing is missing
        return 0
    asked = Path(path)
    todo = deque(msgspec.json.decode(asked.read_bytes(), type=list[Part]))
    asked.unlink(missing_ok=True)
    most, running = max(1, (os.cpu_count() or 1) - 2), dict[int, str]()
    while todo or running:
        while todo and len(running) < most:
            part = todo.popleft()
            running[_fork(part)] = KERNELS if isinstance(part, Question) else STEPS
        pid, status = os.wait()
        letter = running.pop(pid)
        os.write(said, (letter.upper() if status else letter).encode())
    return 0


def _woken() -> bool:
    """Whether an import has woken the driver after all, which a fork finds out."""
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))  # pyright: ignore[reportPrivateUsage]
    return bool(os.waitpid(pid, 0)[1])


def _end_with_parent() -> None:
    """A start that is killed ends nobody itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _fork(part: Part) -> int:
    """The process that compiles it, which ends with 1 where a compiler raised."""
    main_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _end_with_parent()
        if os.getppid() != main_pid:  # it ended before
            os._exit(code)
        compile_part(part)
        code = 0
    except Exception:  # noqa: BLE001  the entry point of a process
        traceback.print_exc()  # where somebody listens: with VITRAIL_LOG=debug
    finally:
        os._exit(code)


def compile_part(part: Part) -> None:
    """Raises whatever its compiler raises."""
    if isinstance(part, Question):
        answer(part)
        return
    os.nice(5)  # attention is waited for first
    config = EngineConfig(**part.config)  # pyright: ignore[reportArgumentType]
    run_steps(config, open_checkpoint(config.model, config.revision), part.sizes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
