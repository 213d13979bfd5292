"""`--compile`: every kernel that the attention's plans name and that steps launch, compiled for the
target on this machine, and what it takes held to its plan and to the target's limits. What a
compiler made is remembered on disk by content: the kernel's source, what it is specialised for, the
target and the compilers' releases. Needs Triton, and of other backends their packages; without them
nothing is told."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from vitrail.attention.cubin import SPILL_BYTES, Taken, hold
from vitrail.attention.installed import release
from vitrail.attention.plan import AttentionPlan
from vitrail.check.report import gib
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware
from vitrail.ops.record import Recorded

if TYPE_CHECKING:
    from vitrail.ops.compile import Special

COMPILERS = ("triton", "nvidia-cutlass-dsl", "flash-attn-4")
CACHE = Path.home() / ".cache" / "vitrail" / "compiled"
ATTENTION = Path(__file__).parents[1] / "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What compiling said: a line a kernel, what exceeds its plan or does not compile, and why
    nothing could be told (None: it could). `reused`: kernels that were remembered. `taken`: each
    distinct kernel."""

    lines: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    unknown: str | None = None
    reused: int = 0
    taken: tuple[Taken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel to be compiled: `name` says all that it is specialised for. `hold`: what it takes
    too much; `failed`: the finding of a compiler's error; `line`: of the report."""

    name: str
    take: Callable[[], list[Taken]]
    hold: Callable[[Taken], Iterable[Finding]]
    failed: Callable[[Exception], Finding]
    line: Callable[[Taken], str]


def planned(name: str, plan: AttentionPlan, gpu: Hardware, take: Callable[[], list[Taken]]) -> Job:
    """Of an attention plan, which says what it may take."""
    return Job(
        name=name,
        take=take,
        hold=lambda taken: hold(taken, plan, gpu),
        failed=lambda error: failed(plan, gpu, error),
        line=lambda taken: _line(plan, taken),
    )


def prove(plans: Iterable[AttentionPlan], gpu: Hardware, cache: Path = CACHE) -> Proof:
    """Each distinct kernel once."""
    made = [plan for plan in plans if plan.backend != "reference"]
    if not made:
        return Proof(lines=("nothing to compile",))
    lacking = [name for name in _needed(made) if release(name) is None]
    if lacking:
        return Proof(unknown=f"not compiled: {', '.join(lacking)} not installed on this machine")
    return run(_jobs(made, gpu), gpu, cache)


def run(jobs: Iterable[Job], gpu: Hardware, cache: Path) -> Proof:
    """Each distinct name once, or as it is remembered."""
    lines: dict[str, None] = {}
    findings: dict[Finding, None] = {}
    reused, taken = 0, dict[str, list[Taken]]()
    stamp = _stamp()
    for job in jobs:
        if job.name not in taken:
            file = cache / f"{_key(job.name, gpu, stamp)}.json"
            known = _recall(file)
            reused += known is not None
            if known is None:
                try:
                    known = job.take()
                except Exception as error:  # noqa: BLE001  whatever a compiler raises
                    findings.setdefault(job.failed(error))
                    continue
                _remember(file, known)
            taken[job.name] = known
        for each in taken[job.name]:
            lines.setdefault(job.line(each))
            findings.update(dict.fromkeys(job.hold(each)))
    return Proof(
        lines=tuple(lines),
        findings=tuple(findings),
        reused=reused,
        taken=tuple(each for made in taken.values() for each in made),
    )


def _needed(plans: Sequence[AttentionPlan]) -> list[str]:
    backends = {plan.backend for plan in plans}
    needed = ["triton"]
    if backends & {"cute", "fa4"}:
        needed.append("nvidia-cutlass-dsl")
    if "fa4" in backends:
        needed.append("flash-attn-4")
    return needed


def _stamp() -> bytes:
    """Of the compilers, and of every source that attention's kernels are made from, or that reads
    what they take."""
    digest = blake3()
    for name in COMPILERS:
        digest.update(f"{name}=={release(name)}\0".encode())
    sources = ("kernels/*.py", "backends/*.py", "compile*.py", "cubin.py")
    for path in sorted(path for pattern in sources for path in ATTENTION.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _key(name: str, gpu: Hardware, stamp: bytes) -> str:
    target = f"{gpu.cc} {gpu.num_sms} {name}"
    return blake3(stamp + target.encode()).hexdigest()


def _recall(file: Path) -> list[Taken] | None:
    """What was remembered; None for nothing, or for a file that is not whole."""
    try:
        entries: list[Mapping[str, Any]] = json.loads(file.read_text())
        return [Taken(**entry) for entry in entries]
    except (OSError, ValueError, TypeError):
        return None


def _remember(file: Path, taken: Sequence[Taken]) -> None:
    """Written beside and renamed, so that no reader sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{id(taken)}")
    beside.write_text(json.dumps([asdict(each) for each in taken]))
    beside.replace(file)


def _jobs(plans: Sequence[AttentionPlan], gpu: Hardware) -> Iterable[Job]:
    from vitrail.attention import compile_cute, compile_fa4
    from vitrail.attention.backends.fa4 import launches
    from vitrail.attention.compile import take, triton_launches
    from vitrail.attention.decode_spec import spec

    for plan in plans:
        for launch in triton_launches(plan):
            yield planned(
                f"triton {launch!r}", plan, gpu, lambda launch=launch: [take(launch, gpu.cc)]
            )
        if plan.backend == "cute":
            cute = partial(_answered, compile_cute.take, plan, gpu)
            yield planned(f"cute {spec(plan)!r}", plan, gpu, cute)
        if plan.backend == "fa4":
            fa4 = partial(_answered, compile_fa4.take, plan, gpu)
            yield planned(f"fa4 {launches(plan)!r}", plan, gpu, fa4)


def _answered(
    ask: Callable[[Sequence[AttentionPlan], Hardware], Mapping[Any, list[Taken] | str]],
    plan: AttentionPlan,
    gpu: Hardware,
) -> list[Taken]:
    """Of all kernels of a plan. Raises `RuntimeError` with what a compiler said instead."""
    found: list[Taken] = []
    for answer in ask([plan], gpu).values():
        if isinstance(answer, str):
            raise RuntimeError(answer)
        found += answer
    return found


def failed(plan: AttentionPlan, gpu: Hardware, error: Exception | str) -> Finding:
    """That a kernel of the plan does not compile, with all that the plan made it for."""
    site = plan.shape.site
    return Finding(
        where=f"attention {plan.shape.phase}: backend {plan.backend} on {gpu.name}",
        saw=f"{' '.join(str(error).split())[:400]} for tiles of {plan.tile_m} x {plan.tile_n}, "
        f"heads of {site.head_dim} and {site.head_dim_v}, {site.num_q_heads} to "
        f"{site.num_kv_heads}, pages of {plan.shape.page_size or 0}, {plan.max_splits} splits",
        rule="every kernel that a plan names compiles for its GPU",
        change="pass --attention triton, or install the release that this backend is tested with",
        code="compile_failed",
    )


def _line(plan: AttentionPlan, taken: Taken) -> str:
    spilled = f", {taken.stack_bytes} bytes spilled" if taken.stack_bytes else ""
    return (
        f"compiled {taken.kernel} ({plan.shape.phase}, {plan.backend}): {taken.registers} registers"
        f" of {plan.registers}, {gib(taken.smem_bytes)} shared of {gib(plan.smem_bytes)}{spilled}"
    )


def prove_steps(launches: Sequence[Recorded], gpu: Hardware, cache: Path = CACHE) -> Proof:
    """Each distinct kernel of recorded launches, once."""
    if release("triton") is None:
        return Proof(unknown="not compiled: triton not installed on this machine")
    from vitrail.ops.compile import is_compiled, specialised

    if not all(is_compiled(launch.kernel) for launch in launches):
        return Proof(unknown="not compiled: Triton's interpreter is on (TRITON_INTERPRET)")
    jobs = (_job(each, gpu) for each in specialised(launches, gpu.cc))
    proof = run(jobs, gpu, cache)
    return replace(proof, lines=tuple(_summed(proof.taken)))


def _job(special: "Special", gpu: Hardware) -> Job:
    def take() -> list[Taken]:
        from vitrail.attention.compile import taken

        name = special.name.removeprefix("vitrail.ops.")
        return [taken(name, special.compile(gpu.cc), gpu.cc)]

    return Job(
        name=f"{special.name} {special.facts}",
        take=take,
        hold=lambda taken: hold_kernel(taken, gpu),
        failed=lambda error: Finding(
            where=f"kernel {special.name} on {gpu.name}",
            saw=f"{' '.join(str(error).split())[:400]} ({special.facts[:400]})",
            rule="every kernel that steps launch compiles for its GPU",
            change="report this kernel: its plan does not suit this GPU",
            code="compile_failed",
        ),
        line=lambda taken: taken.kernel,
    )


def hold_kernel(taken: Taken, gpu: Hardware) -> Iterator[Finding]:
    """What a compiled kernel takes beyond its GPU: then no launch of it succeeds. Registers that
    spill slow it down."""
    threads = 32 * taken.num_warps
    limits = (
        ("shared_memory", taken.smem_bytes, gpu.smem_per_block_bytes, "bytes of shared memory"),
        ("registers", threads * taken.registers, gpu.registers_per_sm, "registers a program"),
        ("tensor_memory", taken.tmem_columns, gpu.tmem_columns, "columns of tensor memory"),
        ("stack", taken.stack_bytes, SPILL_BYTES, "bytes of spilled registers a thread"),
    )
    for code, saw, limit, unit in limits:
        if saw > limit:
            yield Finding(
                where=f"kernel {taken.kernel} on {gpu.name}",
                saw=f"{saw} {unit}",
                rule=f"at most {limit}",
                change="report this kernel: its plan does not suit this GPU",
                code=f"compiled_{code}",
                severity="warning" if code == "stack" else "error",
            )


def _summed(taken: Iterable[Taken]) -> Iterator[str]:
    """A line for all forms of a kernel."""
    forms: dict[str, list[Taken]] = {}
    for each in taken:
        forms.setdefault(each.kernel, []).append(each)
    for name, many in forms.items():
        registers = max(each.registers for each in many)
        smem, spilled = max(e.smem_bytes for e in many), max(e.stack_bytes for e in many)
        spills = f", {spilled} bytes spilled" if spilled else ""
        plural = "s" if len(many) > 1 else ""
        yield (
            f"compiled {name}: {len(many)} form{plural}, at most {registers} registers, "
            f"{gib(smem)} shared{spills}"
        )
