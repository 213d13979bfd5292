"""Compiles every kernel that a table of plans names before anything is served: what does not
compile here is refused, and no request waits for a compiler. What was compiled is kept on disk, by
Triton and by `backends/kept`, which makes two things cheap: the next start, and compilers in
processes of their own that begin while this one still loads (`missing`, `engine/ahead`). Those only
fill the disk: what is found wrong, and in which order, is decided here."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vitrail.attention.decode_spec import Spec, spec
from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

if TYPE_CHECKING:
    from vitrail.attention.backends.triton import Launch

log = logging.getLogger("vitrail.attention")


class Question(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a compiler's process: the kernel `name` of those that `plan` names."""

    plan: AttentionPlan
    name: str
    gpu: Hardware


def missing(plans: Iterable[AttentionPlan], gpu: Hardware) -> list[Question]:
    """What is not on disk yet of what `plans` name, each kernel once, in their order."""
    found: dict[str, Question] = {}
    for plan in plans:
        for name, job in _jobs(plan, gpu):
            if name not in found and not job.kept():
                found[name] = Question(plan=plan, name=name, gpu=gpu)
    return list(found.values())


def answer(question: Question) -> None:
    """The process's side: compile what was asked for. Raises what a compiler raises."""
    for name, job in _jobs(question.plan, question.gpu):
        if name == question.name:
            job.make()


class Job(NamedTuple):
    """`make` compiles a kernel, or finds it; `kept`: whether it is known to be on disk."""

    make: Callable[[], object]
    kept: Callable[[], bool]


def prepare(plans: Iterable[AttentionPlan]) -> None:
    """Import what kernels on disk are loaded with: seconds, which compilers at work hide."""
    if any(plan.backend in ("cute", "fa4") for plan in plans):
        from vitrail.attention.backends.kept import preload

        with suppress(ImportError):  # `warm` says so
            preload()


def warm(plans: Iterable[AttentionPlan], gpu: Hardware) -> list[Finding]:
    """For the GPU at hand, each distinct kernel once. Empty, or the errors of those that failed."""
    jobs: dict[str, tuple[AttentionPlan, Job]] = {}
    for plan in plans:
        for name, job in _jobs(plan, gpu):
            jobs.setdefault(name, (plan, job))
    found: list[Finding] = []
    for plan, job in jobs.values():
        began = time.perf_counter()
        try:
            job.make()
        except Exception as error:  # noqa: BLE001  whatever a compiler raises is a refusal
            found.append(_failed(plan, gpu, error))
        log.debug("%s %s: %.2f s", plan.backend, plan.kernel, time.perf_counter() - began)
    return found


def _jobs(plan: AttentionPlan, gpu: Hardware) -> Iterator[tuple[str, Job]]:
    """What is compiled for a plan, by a name that equal kernels share."""
    if plan.backend == "reference":
        return
    from vitrail.attention.backends.kept import is_kept, noted
    from vitrail.attention.compile import triton_launches

    for launch in triton_launches(plan):
        name = f"triton {launch}"
        make = partial(_triton, launch, gpu.cc, name)
        yield repr(launch), Job(make, partial(noted, name))
    if plan.backend == "cute":
        made = spec(plan)
        kept = partial(is_kept, f"cute {made}", ("decode",))
        yield repr(made), Job(partial(_cute, made), kept)
    if plan.backend == "fa4":
        from vitrail.attention.backends.fa4 import kernels_of, launches, parts_of

        for one in launches(plan):
            kept = partial(is_kept, f"fa4 {one}", parts_of(one))
            yield repr(one), Job(partial(kernels_of, one), kept)


def _triton(launch: "Launch", cc: int, name: str) -> None:
    from vitrail.attention.backends.kept import note
    from vitrail.attention.compile import compile_launch

    compile_launch(launch, cc)
    note(name)


def _cute(made: Spec) -> object:
    from vitrail.attention.backends.cute import kernel_of  # imports the compiler: seconds

    return kernel_of(made)


def _failed(plan: AttentionPlan, gpu: Hardware, error: Exception) -> Finding:
    site = plan.shape.site
    return Finding(
        where=f"attention {plan.shape.phase}: backend {plan.backend} on {gpu.name}",
        saw=f"{type(error).__name__}: {error} for heads of {site.head_dim} and {site.head_dim_v}",
        rule="every kernel that a plan names compiles before anything is served",
        change="pass --attention triton, or install the backend's package again",
        code="kernel_not_compiled",
    )
