"""Compiles every kernel that a table of plans names before anything is served: what does not
compile here is refused, and no request waits for a compiler. What was compiled is kept on disk, by
Triton and by `backends/kept`, which makes two things cheap: the next start, and compilers in
processes of their own that begin while this one still loads (`warm_ahead`). Those only fill the
disk: what is found wrong, and in which order, is decided here."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from vitrail.attention.decode_spec import Spec, spec
from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

log = logging.getLogger("vitrail.attention")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """To a compiler's process: kernels `names` of what these plans name."""

    plans: list[AttentionPlan]
    names: list[str]
    gpu: Hardware


def warm_ahead(plans: Iterable[AttentionPlan], gpu: Hardware) -> list[subprocess.Popen[bytes]]:
    """Compile what is not on disk yet in processes of their own, as many as there are cores for,
    and do not wait: the caller does. What fails in one is found by `warm`."""
    wanted: dict[str, AttentionPlan] = {}
    for plan in plans:
        wanted |= {name: plan for name, job in _jobs(plan, gpu) if not job.kept()}
    most = min(len(wanted), max(1, (os.cpu_count() or 1) - 2))
    started: list[subprocess.Popen[bytes]] = []
    for number in range(most if len(wanted) > 1 else 0):
        names = list(wanted)[number::most]
        question = Question(plans=[wanted[n] for n in names], names=names, gpu=gpu)
        started.append(ask_beside("vitrail.attention.warm_process", question))
    return started


def ask_beside(module: str, question: msgspec.Struct) -> subprocess.Popen[bytes]:
    """Run `module` as a program with `question` on its standard input, and wait for nothing: a pipe
    takes no more than 64 KiB before somebody reads, a file takes all."""
    with tempfile.TemporaryFile() as asked:
        asked.write(msgspec.json.encode(question))
        asked.seek(0)
        command = [sys.executable, "-m", module]
        return subprocess.Popen(command, stdin=asked, stderr=subprocess.DEVNULL)


def answer(question: Question) -> None:
    """The process's side: compile what was asked for. Raises what a compiler raises."""
    for plan, wanted in zip(question.plans, question.names, strict=True):
        for name, job in _jobs(plan, question.gpu):
            if name == wanted:
                job.make()


class Job(NamedTuple):
    """`make` compiles a kernel, or finds it; `kept`: whether it is known to be on disk."""

    make: Callable[[], object]
    kept: Callable[[], bool]


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
    from vitrail.attention.backends.kept import is_kept, note, noted
    from vitrail.attention.compile import compile_launch, triton_launches

    for launch in triton_launches(plan):
        name = f"triton {launch}"
        yield (
            repr(launch),
            Job(
                lambda launch=launch, name=name: (compile_launch(launch, gpu.cc), note(name)),
                lambda name=name: noted(name),
            ),
        )
    if plan.backend == "cute":
        made = spec(plan)
        yield repr(made), Job(lambda: _cute(made), lambda: is_kept(f"cute {made}", ("decode",)))
    if plan.backend == "fa4":
        from vitrail.attention.backends.fa4 import kernels_of, launches, parts_of

        for one in launches(plan):
            yield (
                repr(one),
                Job(
                    lambda one=one: kernels_of(one),
                    lambda one=one: is_kept(f"fa4 {one}", parts_of(one)),
                ),
            )


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
