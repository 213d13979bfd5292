"""Compilers beside a start, in processes of their own (`compilers`): the first begins before this
one has imported torch, is told what is missing when plans have been made, and forks one for each
part of it. They fill the disk and decide nothing; one that fails costs time."""

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from vitrail.attention.warm import Question
from vitrail.config.engine import EngineConfig

log = logging.getLogger("vitrail.engine")
PACKAGES = ("vitrail.attention.backends.cute", "flash_attn.cute.interface")
MODULE = "vitrail.engine.compilers"
DRIVER = Path("/dev/nvidiactl")  # where there is none, nothing is begun before it is asked for
LIMIT_SECONDS = 60.0
END_SECONDS = 10.0  # for those that are killed to be gone
PROC = Path("/proc")
KERNELS, STEPS = "k", "s"  # said for each part that is done, in capitals where it failed


class Steps(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Operations of decode steps: `EngineConfig`'s fields, and the batch sizes that are run."""

    config: dict[str, str | int | float | bool | None]
    sizes: list[int]


Part = Question | Steps


class Ahead:
    """The compilers of one start. They end with the block that asks them, all of them: a start that
    is refused leaves none behind."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: Path | None = None
        self._left = Counter[str]()

    @classmethod
    def begin(cls, config: EngineConfig) -> "Ahead":
        """With what takes no plan: imports, of compilers in CuTe DSL where the plans may want
        them."""
        ahead = cls()
        if config.device != "cpu" and DRIVER.exists():
            ahead._process = _start(() if config.deterministic or config.attention else PACKAGES)
        return ahead

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end()

    def ask(self, kernels: Sequence[Question], steps: Sequence[Steps]) -> None:
        """Once, for all there is; the first are begun with first. Waits for nothing: a pipe takes
        64 KiB before somebody reads, a file takes all."""
        if not kernels and not steps:
            self._end()
            return
        process = self._process = self._process or _start(())
        assert process.stdin is not None, "asked for"
        with tempfile.NamedTemporaryFile(delete=False) as asked:
            self._asked = Path(asked.name)
            asked.write(msgspec.json.encode([*kernels, *steps]))
        self._left = Counter({KERNELS: len(kernels), STEPS: len(steps)})
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(os.fsencode(self._asked))

    def finish_kernels(self) -> None:
        """Wait for the kernels, so that none is compiled here once more; end what takes longer."""
        self._wait((KERNELS,), LIMIT_SECONDS)

    def finish(self, seconds: float = LIMIT_SECONDS) -> None:
        """Wait for all, so that the device's memory is the engine's alone; end what takes
        longer."""
        self._wait((KERNELS, STEPS), seconds)
        self._end()

    def _wait(self, kinds: Sequence[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._process is not None and sum(self._left[kind] for kind in kinds) > 0:
            assert self._process.stdout is not None, "asked for"
            pipe = self._process.stdout.fileno()
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            said = os.read(pipe, 4096).decode() if ready else ""
            self._left.subtract(said.lower())
            if not said or not said.islower():
                log.warning("kernels are compiled by the engine: a process for them ended")
            if not said:
                self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):  # it leads a group of all that it forked
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), process:  # closes its pipes and waits for it
            pass
        if not end_of_group(process.pid, END_SECONDS):
            log.warning("a compiler that was killed has not ended: it may hold memory of the GPU")
        if self._asked is not None:
            self._asked.unlink(missing_ok=True)


def end_of_group(group: int, seconds: float) -> bool:
    """Wait for all of a killed group. What a process holds of a device is free when it has ended,
    not when it was killed, and pages are sized by what is free. Forks are no children of this
    process, so they are found by /proc; a system without it has no GPU of ours."""
    until = time.monotonic() + seconds
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it ended while it was looked at
            # pid (name) state ppid pgrp ...; a name may hold anything, so from the last bracket on
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            ended = os.pidfd_open(int(folder.name))  # to be read when the last thread is gone
            left = max(0.0, until - time.monotonic())
            try:
                if not select.select([ended], [], [], left)[0]:
                    return False
            finally:
                os.close(ended)
    return True


def _start(packages: Sequence[str]) -> subprocess.Popen[bytes]:
    # packages that ask at their import whether there is a GPU must not wake the driver, which no
    # fork survives: torch then asks the management library
    command = ["env", "PYTORCH_NVML_BASED_CUDA_CHECK=1", sys.executable, "-m", MODULE, *packages]
    pipe, said = subprocess.PIPE, None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)
