"""Where the time of recorded steps went: events of a Chrome trace, as torch.profiler writes them ->
seconds by group of kernels. Pure; knows names and ranges, no device. No torch.

A kernel's group is read from its name, and where that does not tell, from the ranges that were open
on the host when it was launched (a replayed CUDA graph has none but the step's). Without kernels,
on a CPU, the operations of the stepping thread are grouped, each by its own time without that of
the operations it called."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import msgspec

Group = Literal["attention", "moe", "gemm", "elementwise", "sampling", "encode", "copies", "other"]
GROUPS: tuple[Group, ...] = get_args(Group)

# Ranges that the profiler opens; the first three hold whole parts of a step, the others layers.
STEP, LAUNCH, ABSORB = "vitrail.step", "vitrail.launch", "vitrail.absorb"
ATTENTION, MOE, SAMPLE = "vitrail.attention", "vitrail.moe", "vitrail.sample"
ENCODE = "vitrail.encode"


def _any(*words: str) -> "re.Pattern[str]":
    return re.compile("|".join(words), re.IGNORECASE)


# Kernels of ours whose names say what they do and not for whom; a test finds new ones.
_OWN: dict[str, Group] = {
    **dict.fromkeys(("attend", "combine", "mend"), "attention"),
    **dict.fromkeys(("rows_kernel", "fixed_kernel", "absorbed_kernel", "values_kernel"), "gemm"),
    **dict.fromkeys(("expanded_kernel", "keys_kernel", "table_kernel"), "elementwise"),
    "queries_kernel": "elementwise",
}
# Read in this order: what is special before what is common (a grouped product is a product too).
_NAMES: tuple[tuple[Group, "re.Pattern[str]"], ...] = (
    ("copies", _any("^memcpy", "^memset")),
    (
        "sampling",
        _any(
            "(?<!up)sampl",
            "multinomial",
            "gumbel",
            "argmax",
            r"top_?p\b",
            "penal",
            "^_(best|mass|draw)_",
        ),
    ),
    ("attention", _any("attn", "attention", "flash", "fmha", "decode_sm90")),
    ("moe", _any("moe", "expert", "grouped", "GroupProblemShape", r"rout(e|ing)")),
    ("gemm", _any("gemm", "gemv", "nvjet", "xmma", "cublas", "split_?k", "s16816", "wgmma")),
    ("gemm", _any("cutlass", r"^aten::(mm|addmm|linear|matmul)$", "matmul", "_linear")),
)
_ELEMENTWISE = _any(
    *("elementwise", "norm", "rope", "rotary", "silu", "gelu", "swiglu", "reduce", "catarray"),
    *("index", "gather", "scatter", "fill", "copy", "embed", "softmax", "arange", "sort", "scan"),
    *("permute", "interpol", "upsample", "cast", "convert", "clamp", "add", "mul", "^aten::"),
)


def group_of(name: str, ranges: Collection[str] = ()) -> Group:
    """The group of a kernel, or of an operation on a CPU ("aten::..."), launched within these
    ranges."""
    if ENCODE in ranges:
        return "copies" if _NAMES[0][1].search(name) else "encode"
    if name in _OWN:
        return _OWN[name]
    for group, words in _NAMES:
        if words.search(name):
            return group
    if MOE in ranges:
        return "moe"
    if ATTENTION in ranges and name.startswith("aten::"):  # a CPU has no kernel to name it
        return "attention"
    if SAMPLE in ranges:
        return "sampling"
    return "elementwise" if _ELEMENTWISE.search(name) else "other"


class _Args(msgspec.Struct):
    correlation: int = -1


class TraceEvent(msgspec.Struct):
    """A complete event: microseconds `ts` and `dur`, on thread or stream `tid` of `pid`."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: _Args = msgspec.field(default_factory=_Args)


class _Trace(msgspec.Struct):
    traceEvents: list[TraceEvent]  # noqa: N815


def read_trace(data: bytes) -> list[TraceEvent]:
    """The complete events of a trace file, gaps of the format filled with defaults."""
    return [e for e in msgspec.json.decode(data, type=_Trace).traceEvents if e.ph == "X"]


class Share(NamedTuple):
    """A group's part of the window: seconds of its kernels, and how many there were."""

    seconds: float
    kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A window of `steps` whole steps. `seconds`: from the first to the last thing that the device
    did (on a CPU: that the steps did). `idle`: of these, when nothing ran, on any stream; groups
    may overlap where streams do. `launch` and `absorb`: the host's seconds in these parts of all
    steps. `unknown`: names in group "other", with their seconds, longest first."""

    steps: int
    seconds: float
    idle: float
    groups: dict[Group, Share]
    launch: float
    absorb: float
    unknown: tuple[tuple[str, float], ...]
    on_device: bool


@dataclass(slots=True)
class _Tally:
    seconds: "defaultdict[Group, float]" = field(default_factory=lambda: defaultdict(float))
    count: "Counter[Group]" = field(default_factory=lambda: Counter())
    unknown: "defaultdict[str, float]" = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, ranges: Collection[str], us: float) -> None:
        group = group_of(name, ranges)
        self.seconds[group] += us / 1e6
        self.count[group] += 1
        if group == "other":
            self.unknown[name] += us / 1e6


def breakdown(events: Iterable[TraceEvent], skip: int = 0) -> Breakdown:
    """Where the time went from the launch of the first step on, `skip` steps left out. Raises
    `ValueError` for a trace without steps beyond these."""
    listed = list(events)
    ordered = sorted((e for e in listed if _is_range(e) and e.name == LAUNCH), key=lambda e: e.ts)
    steps = ordered[skip:]
    if not steps:
        raise ValueError(f"a trace of {len(ordered)} steps, {skip} of them to be left out")
    begin, threads = steps[0].ts, {(e.pid, e.tid) for e in steps}
    host = [e for e in listed if (e.pid, e.tid) in threads and e.ts >= begin]
    spans = {LAUNCH: 0.0, ABSORB: 0.0}
    for event in host:
        if event.name in spans and _is_range(event):
            spans[event.name] += event.dur / 1e6
    device = [e for e in listed if e.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    tally, busy = _Tally(), list[tuple[float, float]]()
    if device:
        within = _launched_within(host)
        for event in device:
            ranges = within.get(event.args.correlation)
            if ranges is not None:  # else launched before the window
                tally.add(event.name, ranges, event.dur)
                busy.append((event.ts, event.ts + event.dur))
    else:
        for event, ranges, own in _own_times(host):
            tally.add(event.name, ranges, own)
            busy.append((event.ts, event.ts + event.dur))
        edges = (begin, max(e.ts + e.dur for e in host if _is_range(e)))
        busy += [(edge, edge) for edge in edges]
    seconds, used = _covered(busy)
    longest = sorted(tally.unknown.items(), key=lambda item: -item[1])
    return Breakdown(
        steps=len(steps),
        seconds=seconds,
        idle=seconds - used,
        groups={g: Share(tally.seconds[g], tally.count[g]) for g in GROUPS if tally.count[g]},
        launch=spans[LAUNCH],
        absorb=spans[ABSORB],
        unknown=tuple(longest),
        on_device=bool(device),
    )


def _is_range(event: TraceEvent) -> bool:
    return event.cat == "user_annotation"


def _ordered(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """By start, what holds others before them."""
    return sorted(events, key=lambda e: (e.ts, -e.dur))


def _launched_within(host: Iterable[TraceEvent]) -> dict[int, frozenset[str]]:
    """Correlation id of each launch -> the ranges that were open."""
    found: dict[int, frozenset[str]] = {}
    open_ranges: list[TraceEvent] = []
    for event in _ordered(e for e in host if _is_range(e) or e.cat.startswith("cuda_")):
        open_ranges = [r for r in open_ranges if r.ts + r.dur > event.ts]
        if _is_range(event):
            open_ranges.append(event)
        elif event.args.correlation >= 0:
            found[event.args.correlation] = frozenset(r.name for r in open_ranges)
    return found


def _own_times(
    host: Iterable[TraceEvent],
) -> list[tuple[TraceEvent, frozenset[str], float]]:
    """Each operation with its open ranges and its microseconds without the operations within
    it."""
    own: dict[int, float] = {}
    found: list[tuple[TraceEvent, frozenset[str]]] = []
    stack: list[TraceEvent] = []
    for event in _ordered(e for e in host if _is_range(e) or e.cat == "cpu_op"):
        while stack and stack[-1].ts + stack[-1].dur <= event.ts:
            stack.pop()
        if not _is_range(event):
            own[id(event)] = event.dur
            above = next((e for e in reversed(stack) if not _is_range(e)), None)
            if above is not None:
                own[id(above)] -= event.dur
            found.append((event, frozenset(e.name for e in stack if _is_range(e))))
        stack.append(event)
    return [(event, ranges, max(0.0, own[id(event)])) for event, ranges in found]


def _covered(busy: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds from the first beginning to the last end, and of these, within any interval."""
    if not busy:
        return 0.0, 0.0
    ordered = sorted(busy)
    used, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        used += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return (reached - ordered[0][0]) / 1e6, used / 1e6
