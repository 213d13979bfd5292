"""`--compile`: every attention kernel that the plans name, compiled for the target on this machine,
and what it takes held to its plan. What a compiler made is remembered on disk by content: the
kernel's source, what it is specialised for, the target and the compilers' releases. Needs Triton,
and of other backends their packages; without them nothing is told."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blake3 import blake3

from vitrail.attention.cubin import Taken, hold
from vitrail.attention.plan import AttentionPlan
from vitrail.check.report import gib
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

COMPILERS = ("triton", "nvidia-cutlass-dsl", "flash-attn-4")
CACHE = Path.home() / ".cache" / "vitrail" / "compiled"
ATTENTION = Path(__file__).parents[1] / "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What compiling said: a line a kernel, what exceeds its plan or does not compile, and why
    nothing could be told (None: it could). `reused`: kernels that were remembered."""

    lines: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    unknown: str | None = None
    reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel to be compiled: `name` says all that it is specialised for."""

    name: str
    plan: AttentionPlan
    take: Callable[[], list[Taken]]


def prove(plans: Iterable[AttentionPlan], gpu: Hardware, cache: Path = CACHE) -> Proof:
    """Each distinct kernel once."""
    made = [plan for plan in plans if plan.backend != "reference"]
    if not made:
        return Proof(lines=("nothing to compile",))
    lacking = [name for name in _needed(made) if _release(name) is None]
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
                    findings.setdefault(_failed(job.plan, gpu, error))
                    continue
                _remember(file, known)
            taken[job.name] = known
        for each in taken[job.name]:
            lines.setdefault(_line(job.plan, each))
            findings.update(dict.fromkeys(hold(each, job.plan, gpu)))
    return Proof(lines=tuple(lines), findings=tuple(findings), reused=reused)


def _needed(plans: Sequence[AttentionPlan]) -> list[str]:
    backends = {plan.backend for plan in plans}
    needed = ["triton"]
    if backends & {"cute", "fa4"}:
        needed.append("nvidia-cutlass-dsl")
    if "fa4" in backends:
        needed.append("flash-attn-4")
    return needed


def _release(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _stamp() -> bytes:
    """Of the compilers, and of every source that a kernel is made from."""
    digest = blake3()
    for name in COMPILERS:
        digest.update(f"{name}=={_release(name)}\0".encode())
    for path in sorted((*ATTENTION.glob("kernels/*.py"), *ATTENTION.glob("backends/*.py"))):
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
            yield Job(
                name=f"triton {launch!r}",
                plan=plan,
                take=lambda launch=launch: [take(launch, gpu.cc)],
            )
        if plan.backend == "cute":
            yield Job(
                name=f"cute {spec(plan)!r}",
                plan=plan,
                take=lambda plan=plan: _whole(compile_cute.take([plan], gpu).values()),
            )
        if plan.backend == "fa4":
            yield Job(
                name=f"fa4 {launches(plan)!r}",
                plan=plan,
                take=lambda plan=plan: _whole(compile_fa4.take([plan], gpu).values()),
            )


def _whole(answers: Iterable[list[Taken] | str]) -> list[Taken]:
    """Of all kernels of a plan. Raises `RuntimeError` with what a compiler said instead."""
    found: list[Taken] = []
    for answer in answers:
        if isinstance(answer, str):
            raise RuntimeError(answer)
        found += answer
    return found


def _failed(plan: AttentionPlan, gpu: Hardware, error: Exception) -> Finding:
    site = plan.shape.site
    return Finding(
        where=f"attention {plan.shape.phase}: backend {plan.backend} on {gpu.name}",
        saw=f"{' '.join(str(error).split())[:400]} for heads of {site.head_dim} and "
        f"{site.head_dim_v}, tiles of {plan.tile_m} x {plan.tile_n}",
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
