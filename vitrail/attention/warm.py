"""Compiles every kernel that a table of plans names before anything is served: what does not
compile here is refused, and no request waits for a compiler. Triton keeps what it made on disk."""

from collections.abc import Callable, Iterable, Iterator

from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware


def warm(plans: Iterable[AttentionPlan], gpu: Hardware) -> list[Finding]:
    """For the GPU at hand, each distinct kernel once. Empty, or the errors of those that failed."""
    jobs: dict[str, tuple[AttentionPlan, Callable[[], object]]] = {}
    for plan in plans:
        for name, job in _jobs(plan, gpu):
            jobs.setdefault(name, (plan, job))
    found: list[Finding] = []
    for plan, job in jobs.values():
        try:
            job()
        except Exception as error:  # noqa: BLE001  whatever a compiler raises is a refusal
            found.append(_failed(plan, gpu, error))
    return found


def _jobs(plan: AttentionPlan, gpu: Hardware) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is compiled for a plan, by a name that equal kernels share."""
    if plan.backend == "reference":
        return
    from vitrail.attention.compile import compile_launch, triton_launches

    for launch in triton_launches(plan):
        yield repr(launch), lambda launch=launch: compile_launch(launch, gpu.cc)
    if plan.backend == "cute":
        from vitrail.attention.backends.cute import kernel_of
        from vitrail.attention.decode_spec import spec

        yield repr(spec(plan)), lambda: kernel_of(spec(plan))
    if plan.backend == "fa4":
        from vitrail.attention.backends.fa4 import kernels_of, launches

        for one in launches(plan):
            yield repr(one), lambda one=one: kernels_of(one)


def _failed(plan: AttentionPlan, gpu: Hardware, error: Exception) -> Finding:
    site = plan.shape.site
    return Finding(
        where=f"attention {plan.shape.phase}: backend {plan.backend} on {gpu.name}",
        saw=f"{type(error).__name__}: {error} for heads of {site.head_dim} and {site.head_dim_v}",
        rule="every kernel that a plan names compiles before anything is served",
        change="pass --attention triton, or install the backend's package again",
        code="kernel_not_compiled",
    )
