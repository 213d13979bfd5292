"""The flags of `vitrail repro`, and what a call does. Nothing heavy is imported before it runs."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.config.finding import Finding, Refused, printable

if TYPE_CHECKING:
    from vitrail.repro.capsule import Capsule
    from vitrail.repro.trial import Trials

HOLDS = (
    "what a failed step left: its file is named in the log. It holds sizes, the seeds and sampling "
    "numbers that clients sent, config.json and flags; no text, ids or pictures"
)
PACKAGES = ("vitrail", "torch", "triton")  # whose releases are worth a line


def add_repro(command: argparse.ArgumentParser) -> None:
    """`vitrail repro CAPSULE [flags]`."""
    add = command.add_argument
    add("capsule", type=Path, help=HOLDS)
    add("--model", help="a checkpoint's weights (default: random ones of the recorded shape)")
    add("--shrink", type=Path, metavar="OUT", help="write a smaller capsule that fails so too")
    add("--script", type=Path, metavar="OUT", help="write one script that fails so, shrunk first")
    add("--minutes", type=float, default=10.0, help="the most that it may take (default: 10)")
    command.set_defaults(run=repro, refused=2)


def repro(args: argparse.Namespace) -> int:
    """0: the recorded failure was seen again, and written where that was asked; 1: it was not; 2:
    it cannot be told here."""
    from vitrail.repro.capsule import read
    from vitrail.repro.outcome import REPRODUCED, size_of, verdict
    from vitrail.repro.script import repro_kernel
    from vitrail.repro.trial import Trials

    if (code := repro_kernel(args.capsule, args.script, 60.0 * args.minutes)) is not None:
        return code
    capsule, until = read(args.capsule), time.monotonic() + 60.0 * args.minutes
    ran = ", ".join(f"{n} {capsule.versions[n]}" for n in PACKAGES if n in capsule.versions)
    print(printable(f"recorded: {capsule.signature}"))
    print(printable(f"{size_of(capsule)}, on {capsule.gpu}; {ran}"), flush=True)
    with Trials(args.model) as trials:
        code, said = verdict(capsule, trials.run(capsule, 60.0 * args.minutes))
        print(printable(f"{('seen again', 'not seen', 'cannot tell')[code]}: {said}"), flush=True)
        if code == REPRODUCED and (args.shrink or args.script):
            _write(args, _shrunk(capsule, trials, until))
    return code


def _write(args: argparse.Namespace, capsule: "Capsule") -> None:
    from vitrail.repro.capsule import encoded
    from vitrail.repro.standalone import engine_text

    try:
        if args.shrink:
            args.shrink.write_bytes(encoded(capsule))
        if args.script:
            args.script.write_text(engine_text(capsule), encoding="utf-8")
    except OSError as error:
        saw = f"{error.filename}: {error.strerror}"
        rule, change = "a file that can be written", "give another"
        raise Refused(Finding(where="OUT", saw=saw, rule=rule, change=change)) from error
    for path in (args.shrink, args.script):
        if path:
            print(f"written: {path}")


def _shrunk(capsule: "Capsule", trials: "Trials", until: float) -> "Capsule":
    from vitrail.repro.outcome import REPRODUCED, size_of, verdict
    from vitrail.repro.shrink import shrink

    def left() -> float:
        return until - time.monotonic()

    def fails(candidate: "Capsule") -> bool:
        return verdict(candidate, trials.run(candidate, left()))[0] == REPRODUCED

    made = shrink(capsule, fails, lambda: left() > 0)
    ended = "nothing more can be left out" if made.minimal else "time was up before it was done"
    said = f"shrunk in {made.trials} replays, {ended}: {size_of(made.capsule)}"
    print(printable(said), flush=True)
    return made.capsule
