"""One process, bounded in time, and nothing left of it:

    python -P cage.py SECONDS REPORT COMMAND...

runs the command in a session of its own, waits at most so long, then ends whatever it started,
wherever that has moved to: on Linux orphans become this process's children (a sub-reaper's), so
none is out of reach. Writes a `Report` as JSON. Run by its path, so that the tree under test need
not have it."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE_S = 10.0  # for killed processes to be gone
POLL_S = 0.02
STACKS_S = 5.0  # for stacks to be written


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is None where the command was ended for its time; `strays` are command lines of what
    outlived it (of a hang: all that was alive)."""

    code: int | None
    seconds: float
    strays: tuple[str, ...]
    peak_bytes: int


def main(argv: list[str]) -> int:
    limit_s, report, command = float(argv[0]), Path(argv[1]), argv[2:]
    adopt()
    began = time.monotonic()
    code: int | None = None
    strays: list[str] = []
    child: subprocess.Popen[bytes] | None = None
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        code = end_of(child, began + limit_s)
        if code is None:
            strays = ask_for_stacks(child)
    finally:  # an interrupted cage leaves nothing either
        strays += end_descendants(child.pid if child else None)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = Report(
        code=code,
        seconds=time.monotonic() - began,
        strays=tuple(strays),
        peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )
    report.write_bytes(msgspec.json.encode(made))
    return 0


def adopt() -> None:
    """Orphans below this process become its children, and it ends when its parent does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_of(child: subprocess.Popen[bytes], until: float) -> int | None:
    """Its exit code, None if it has not ended in time. Whatever else of this process's ends
    meanwhile is taken leave of, as init would: a test may wait for an orphan to be gone."""
    if sys.platform != "linux":
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=max(0.0, until - time.monotonic()))
        return None
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is not None and ended.si_pid == child.pid:
            return child.wait()
        if ended is not None:
            os.waitpid(ended.si_pid, 0)
        elif time.monotonic() > until:
            return None
        else:
            time.sleep(POLL_S)


def ask_for_stacks(child: subprocess.Popen[bytes]) -> list[str]:
    """End a process by SIGABRT, at which Python's faulthandler (pytest enables it) writes the
    stacks of all threads. Returns its command line."""
    name = _command(child.pid)
    child.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=STACKS_S)
        return [name]
    return []  # it is ended, and named, with the others


def end_descendants(group: int | None) -> list[str]:
    """Kill all below this process until none is left, and say what they were. Without /proc only
    the command's own session (`group`) is within reach."""
    if sys.platform != "linux":
        if group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        return []
    seen: dict[int, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        alive = descendants()
        if not alive:
            break
        seen |= alive
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
    reap()
    return [seen[pid] for pid in sorted(seen)]


def reap() -> None:
    """Take leave of every child that is dead."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> dict[int, str]:
    """pid -> command line of all that live below this process, those of other sessions too."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            # pid (name) state ppid ...; a name may hold anything, so from the last bracket on
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {pid: _command(pid) for pid in sorted(mine - {os.getpid()})}


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace").strip()[:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
