"""Our CuTe kernels compiled for a GPU that is not here (`compile_process`). Registers, stack and
threads are read from the binary, shared memory from the launch in the compiled host code."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from vitrail.attention.compile_process import Answer, ask, launch_smem_bytes, refused, serve
from vitrail.attention.cubin import Taken, hold, read_cubin, read_threads
from vitrail.attention.decode_spec import Spec, spec
from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware


def prove(plans: Iterable[AttentionPlan], gpu: Hardware) -> Iterator[Finding]:
    """What exceeds its plan or does not compile, of those `plans` that are this backend's."""
    mine = [plan for plan in plans if plan.backend == "cute"]
    answers = take(mine, gpu) if mine else {}
    for plan in mine:
        answer = answers[spec(plan)]
        if isinstance(answer, str):
            yield refused(plan, gpu, "nvidia-cutlass-dsl", answer)
            continue
        for taken in answer:
            yield from hold(taken, plan, gpu)


def take(plans: Iterable[AttentionPlan], gpu: Hardware) -> dict[Spec, Answer]:
    """What the kernel of each distinct spec takes, or the error that its compiler raised."""
    wanted = list(dict.fromkeys(spec(plan) for plan in plans))
    target = {"CUTE_DSL_ARCH": f"sm_{gpu.cc}a"}
    return dict(zip(wanted, ask(__name__, [asdict(s) for s in wanted], target), strict=True))


def _take(question: dict[str, Any]) -> list[Taken]:
    from vitrail.attention.backends.cute import compiled

    kernel: Any = compiled(Spec(**question))
    registers, stack_bytes = read_cubin(kernel.__cubin__)
    return [
        Taken(
            kernel="decode_sm90",
            cc=90,
            num_warps=read_threads(kernel.__cubin__) // 32,
            registers=registers,
            stack_bytes=stack_bytes,
            smem_bytes=launch_smem_bytes(str(kernel.ir_module)),
        )
    ]


if __name__ == "__main__":
    serve(_take)
