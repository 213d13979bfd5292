"""The cause of a test that failed, or of a process that did not end well, out of what it left.
Pure; what a traceback says is `config/cause`."""

import itertools
import re

from vitrail.config.cause import ERROR, Cause, Frame, Kind, frames_of, ours, read
from vitrail.nightly.records import Attempt, Case

# frames of a stack that say how a test was called
RUNNER = re.compile(r'^\s*File "([^"\n]*/(_pytest|pluggy|jaxtyping|pytest)/|<frozen runpy>)')


def cause_of_case(case: Case) -> Cause:
    """Of a test that failed. Where its own traceback has no frame of the package, one that it
    logged and that has (a step's, which the engine isolates) is the cause."""
    if case.message.startswith("slower: "):
        name = case.message.removeprefix("slower: ").split(" takes ")[0]
        return Cause("speed", f"slower: {name}", case.id.split("[")[0], case.trace)
    own = read(case.trace or case.message)
    if not own.frame.startswith("vitrail/"):
        logged = [read(block) for block in _logged(case.said)]
        inside = [cause for cause in logged if cause.frame.startswith("vitrail/")]
        if inside:
            return inside[0]._replace(trace=f"{inside[0].trace}\n\n{case.trace}")
    return own if own.frame else own._replace(frame=case.id.split("[")[0])


def cause_of_attempt(attempt: Attempt) -> Cause:
    """Of a process that hung, crashed or was lost: its stacks, if it wrote any, are in its tail."""
    stack = _dumped(attempt.tail)
    frame = str(ours(stack) or "")
    shown = "\n".join(line for line in attempt.tail.splitlines() if not RUNNER.match(line))
    if attempt.outcome == "hang":
        return Cause("hang", "no end within its limit", frame, shown)
    if attempt.outcome == "lost":
        said = read(attempt.tail)
        title = said.title if ERROR.match(said.title) else attempt.why
        return Cause("infrastructure", title, said.frame, shown)
    # SIGKILL that the cage did not send is the kernel's, out of memory
    kind: Kind = "memory" if attempt.code == -9 else "crash"
    said = [line for line in attempt.tail.splitlines() if line.startswith("Fatal Python error")]
    title = said[-1] if said else f"{attempt.why}"
    return Cause(kind, title if said else title.replace(", no report", ""), frame, shown)


def _logged(said: str) -> list[str]:
    """Tracebacks in what a test logged, each to the end of its paragraph."""
    starts = [m.start() for m in re.finditer(r"^Traceback \(most recent call last\):$", said, re.M)]
    return [said[a:b] for a, b in itertools.pairwise([*starts, len(said)])]


def _dumped(tail: str) -> list[Frame]:
    """The stack of the thread that says most, from the outermost, of those that faulthandler wrote
    last: the one of a package's frame, else of a test's."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", tail, flags=re.M)[1:]
    stacks = [frames_of(block)[::-1] for block in blocks]
    telling = [s for s in stacks if any(f.function.startswith("test_") for f in s)]
    return (telling or stacks or [[]])[-1]
