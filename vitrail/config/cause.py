"""The cause in a traceback: of which kind, which error, what it says once everything that changes
from night to night is left out, and in which frame of ours. Pure; equal causes have equal keys.
The night's digest and capsules name a failure by it."""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["numerics", "crash", "hang", "memory", "speed", "infrastructure", "known"]
MAX_TITLE = 300
# where refusals are raised that were found elsewhere, and what a night starts pytest by
CARRIERS = ("vitrail/config/finding.py", "vitrail/nightly/watch.py")

# `File "x.py", line 1, in f` (traceback), without the comma (faulthandler), and pytest's short form
# of what could not be collected: `x.py:1: in f`
FRAME = re.compile(r'^\s*(?:File "([^"\n]+)", line \d+,?|(\S+\.py):\d+:) in (\S+)', re.M)
# a column of its own: the exception's line of a traceback, `pkg.Type: message`
ERROR = re.compile(r"^(?:E\s+)?((?:\w+\.)*[A-Z]\w*)(?:: (.*))?$")
CHAINED = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"

MEMORY = re.compile(r"MemoryError|out of memory|cannot allocate memory|\bgrew\b", re.I)
LATE = re.compile(r"^(Timeout(Error|Expired)?\b|Failed: Timeout)|timed out", re.I)
OUTSIDE = re.compile(
    r"No space left on device|Read-only file system|Too many open files|gaierror"
    r"|name resolution|Name or service not known|ModuleNotFoundError|cannot open shared object"
    r"|driver version is insufficient|no CUDA-capable device",
    re.I,
)


class Frame(NamedTuple):
    file: str  # relative to the checkout where it lies in one
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


def frames_of(text: str) -> list[Frame]:
    """Every frame in the order of the text."""
    return [Frame(relative(m[1] or m[2]), m[3]) for m in FRAME.finditer(text)]


class Cause(NamedTuple):
    """`title` is what was said, cut; `frame` the innermost of ours, "" where none is."""

    kind: Kind
    title: str
    frame: str
    trace: str

    @property
    def signature(self) -> str:
        """KIND TITLE @ FRAME without what changes from night to night."""
        return f"{self.kind} {normalised(self.title)} @ {self.frame}"

    @property
    def key(self) -> str:
        """Ten hex digits of the signature."""
        return hashlib.sha256(self.signature.encode()).hexdigest()[:10]


NUMBER = r"\d[\d_]*(?:,\d{3})*(?:\.\d+)*(?:[eE][-+]?\d+)?"
# In this order: what an earlier rule leaves, a later one must not break.
RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"(?:/[^\s'\",:;)\]/]+)+/(?=(?:vitrail|tests|bench|demo)/)"), ""),
    (re.compile(r"(?:/private)?/(?:tmp|var/folders|var/tmp)/[^\s'\",:;)\]]*"), "<tmp>"),
    (re.compile(r"(?:/[^\s'\",:;)\]/]+)+/site-packages/"), ""),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"(?<![\w.])(?=[a-f]*\d)[0-9a-f]{7,}(?!\w)"), "<id>"),
    (re.compile(r"\b(tmp|pytest-)[a-z0-9_]{6,}\b"), "<tmp>"),
    # a number that stands alone or after a dash; those in names (layers.3, sm_90, int8) stay
    (re.compile(rf"(?<![\w.])[-+]?{NUMBER}(?=$|[^\w.]|\.(?!\w))"), "<n>"),
    (re.compile(r"(?<=\w-)\d+\b"), "<n>"),
    (re.compile(r"<n>(?: ?(?:ms|us|µs|s|MB|GB|kB|MiB|GiB|B|%))?(?=\W|$)"), "<n>"),
    (re.compile(r"(?:<n>(?:, |, ?\n)){2,}<n>"), "<n>, ..."),
    (re.compile(r"\s+"), " "),
)  # fmt: skip


def normalised(text: str) -> str:
    """Without addresses, numbers, temporary paths, ids and where the checkout lies."""
    for pattern, put in RULES:
        text = pattern.sub(put, text)
    return text.strip()


def read(trace: str) -> Cause:
    """Of a traceback as the interpreter, pytest or faulthandler writes it."""
    block = _root(trace)
    frames = frames_of(block)
    error, message = _error(block)
    frame = ours(frames)
    title = " ".join(f"{error}: {message}".split())[:MAX_TITLE] if message else error
    raised_by_us = bool(frames) and frames[-1].file.startswith("vitrail/")
    trace = trimmed(trace)
    return Cause(_kind(error, f"{error}: {message}", raised_by_us), title, str(frame or ""), trace)


def trimmed(trace: str) -> str:
    """Without pytest's own frames above the first of ours, in each traceback of a chain."""
    lines = trace.splitlines()
    kept: list[str] = []
    waiting = False
    for line in lines:
        frame = FRAME.match(line)
        if line.startswith("Traceback ("):
            waiting = True
        elif waiting:
            ours = frame and frames_of(line)[0].file.startswith(("vitrail/", "tests/"))
            if line.startswith("  ") and not ours:
                continue
            waiting = False
        kept.append(line)
    return "\n".join(kept)


def _root(trace: str) -> str:
    """The traceback where it began: what an exception was raised from. Of one that was raised
    while another was handled, the later: the earlier was expected."""
    last = trace.split(HANDLING)[-1]
    return last.split(CHAINED)[0]


def _error(block: str) -> tuple[str, str]:
    """(type, first line of its message) of the exception at the end of a traceback; of a message
    whose first line only announces the others, the next one too."""
    lines = block.strip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if FRAME.match(line)), default=-1)
    for i in range(last_frame + 1, len(lines)):
        found = ERROR.match(lines[i])
        if found:
            first = (found[2] or "").strip()
            more = [line.strip() for line in lines[i + 1 :] if line.strip()]
            announces = not first or first.endswith((":", "!"))
            return found[1].split(".")[-1], " ".join([first, *more[:1]] if announces else [first])
    return (lines[-1].strip(), "") if lines else ("no traceback", "")


def _kind(error: str, text: str, raised_by_us: bool) -> Kind:
    if MEMORY.search(text):
        return "memory"
    if LATE.search(text):
        return "hang"
    if OUTSIDE.search(text) and "'vitrail" not in text:
        return "infrastructure"
    if error == "AssertionError" and not raised_by_us:
        return "numerics"  # what came out is not what is right
    return "crash"


def ours(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the package; else of a test function, never of its helper; else of
    any test file. `frames` from the outermost."""
    package = [f for f in frames if f.file.startswith("vitrail/") and f.file not in CARRIERS]
    tests = [f for f in frames if f.file.startswith("tests/")]
    named = [f for f in tests if f.function.startswith("test_")]
    for some in (package, named, tests):
        if some:
            return some[-1]
    return None


def relative(file: str) -> str:
    """A file of a checkout from its root; of an installed package from site-packages."""
    if "/site-packages/" in file:
        file = file.rpartition("/site-packages/")[2]
        return file if file.startswith("vitrail/") else f"site-packages/{file}"
    found = re.search(r"(?:^|.*/)((?:vitrail|tests|bench|demo)/.+)$", file)
    if found is None:
        return file
    # the innermost `vitrail/` may be the checkout's own name: /home/me/vitrail/tests/x.py
    inner = re.search(r"(?:^|.*/)(tests/.+|bench/.+)$", file)
    return inner[1] if inner and "/vitrail/" not in f"/{inner[1]}" else found[1]
