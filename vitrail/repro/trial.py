"""Replays in a process of their own, since a failure may end it: `python -m vitrail.repro.trial`
takes a `Trial` a line and answers each with an `Outcome`. `Trials` is the other end."""

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from vitrail.repro.capsule import Capsule
from vitrail.repro.outcome import Outcome, is_late

MODULE = "vitrail.repro.trial"
END_SECONDS = 10.0
SCORE = Path("/proc/self/oom_score_adj")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay; `model`: a checkpoint's weights instead of random ones."""

    capsule: Capsule
    model: str | None = None


class Trials:
    """Owns the process, which is begun with the first trial and again after one that ended it. As a
    context it is ended. `module`: what is run, `MODULE` if none is named."""

    def __init__(self, model: str | None = None, module: str | None = None):
        self._model, self._module = model, module or MODULE
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, capsule: Capsule, seconds: float) -> Outcome:
        """Replay it; one that is not done in time, or that ends the process, says nothing."""
        process = self._process or self._begin()
        assert process.stdin is not None
        try:
            trial = Trial(capsule=capsule, model=self._model)
            process.stdin.write(msgspec.json.encode(trial) + b"\n")
            process.stdin.flush()
            line = self._line(process, time.monotonic() + seconds)
        except BrokenPipeError:
            line = b""
        if line is None:
            self._end()
            return Outcome(why=f"it was not done after {seconds:.0f} s")
        if not line:
            code = process.wait()
            self._end()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return Outcome(why=f"the replay's process ended by {how}")
        outcome = msgspec.json.decode(line, type=Outcome)
        if any(map(is_late, outcome.signatures)):
            self._end()  # nothing on a GPU succeeds in that process any more: it ends itself
        return outcome

    def _begin(self) -> subprocess.Popen[bytes]:
        self._said = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], until: float) -> bytes | None:
        """The next line; b"" at the end of the stream, None where time is up."""
        assert process.stdout is not None
        while b"\n" not in self._said:
            left = until - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            more = os.read(process.stdout.fileno(), 1 << 16)
            if not more:
                return b""
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate(timeout=END_SECONDS)


def main(source: BinaryIO, out: BinaryIO) -> None:
    """Answer trials until there are no more, or until the device is lost."""
    from vitrail.repro.replay import replay

    def tell(outcome: Outcome) -> None:
        out.write(msgspec.json.encode(outcome) + b"\n")
        out.flush()

    def lost(outcome: Outcome) -> None:
        tell(outcome)
        os._exit(0)

    while line := source.readline():
        trial = msgspec.json.decode(line, type=Trial)
        tell(replay(trial.capsule, trial.model, lost))


def serve() -> None:
    """Over what stdin and stdout were; what anybody prints goes to stderr. Where the machine runs
    out of memory all the same, this process is what the system ends."""
    with suppress(OSError):  # no Linux
        SCORE.write_text("1000")
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(sys.stdin.buffer, out)


if __name__ == "__main__":
    serve()
