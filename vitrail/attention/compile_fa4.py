"""FlashAttention-4's kernels compiled for a GPU that is not here (`compile_process`): its host code
reads its target from the environment."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from vitrail.attention.backends.fa4 import Launch, compile_launch, launches
from vitrail.attention.compile_process import Answer, ask, serve, taken
from vitrail.attention.cubin import Taken
from vitrail.attention.plan import AttentionPlan
from vitrail.config.hardware import Hardware


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


def _take(question: dict[str, Any]) -> list[Taken]:
    kernels = compile_launch(Launch(**question["launch"]))
    made = {"flash-attn-4": kernels.forward, "flash-attn-4 combine": kernels.combine}
    return [taken(name, made[name], question["cc"]) for name in made if made[name] is not None]


if __name__ == "__main__":
    serve(_take)
