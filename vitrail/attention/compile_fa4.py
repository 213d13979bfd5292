"""FlashAttention-4's kernels compiled for a GPU that is not here (`compile_process`): its host code
reads its target from the environment. Registers, stack and threads are read from the binary, shared
memory from the launch in the compiled host code. What its compiler refuses is a `Finding`."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from vitrail.attention.backends.fa4 import Launch, compile_launch, launches
from vitrail.attention.compile_process import Answer, ask, launch_smem_bytes, refused, serve
from vitrail.attention.cubin import Taken, hold, read_cubin, read_threads
from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware


def prove(plans: Iterable[AttentionPlan], gpu: Hardware) -> Iterator[Finding]:
    """What exceeds its plan or does not compile, of those `plans` that are this backend's."""
    mine = [plan for plan in plans if plan.backend == "fa4"]
    if mine:
        yield from judge(mine, gpu, take(mine, gpu))


def judge(
    plans: Iterable[AttentionPlan], gpu: Hardware, results: dict[Launch, Answer]
) -> Iterator[Finding]:
    for plan in plans:
        for launch in launches(plan):
            result = results[launch]
            if isinstance(result, str):
                yield refused(plan, gpu, "flash-attn-4", result)
                continue
            for taken in result:
                yield from hold(taken, plan, gpu)


def take(plans: Iterable[AttentionPlan], gpu: Hardware) -> dict[Launch, Answer]:
    """What the kernels of each distinct launch take, or the error that its compiler raised."""
    wanted = list(dict.fromkeys(launch for plan in plans for launch in launches(plan)))
    name = f"sm_{gpu.cc}"
    target = {
        "FLASH_ATTENTION_ARCH": name,
        "CUTE_DSL_ARCH": f"{name}{'a' if gpu.cc >= 90 else ''}",
        "FLASH_ATTENTION_NUM_SMS": str(gpu.num_sms),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    }
    questions = [{"cc": gpu.cc, "launch": asdict(launch)} for launch in wanted]
    return dict(zip(wanted, ask(__name__, questions, target), strict=True))


def _taken(name: str, kernel: Any, cc: int) -> Taken:
    registers, stack_bytes = read_cubin(kernel.__cubin__)
    return Taken(
        kernel=name,
        cc=cc,
        num_warps=read_threads(kernel.__cubin__) // 32,
        registers=registers,
        stack_bytes=stack_bytes,
        smem_bytes=launch_smem_bytes(str(kernel.ir_module)),
    )


def _take(question: dict[str, Any]) -> list[Taken]:
    kernels = compile_launch(Launch(**question["launch"]))
    made = {"flash-attn-4": kernels.forward, "flash-attn-4 combine": kernels.combine}
    return [_taken(name, made[name], question["cc"]) for name in made if made[name] is not None]


if __name__ == "__main__":
    serve(_take)
