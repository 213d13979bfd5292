"""Our CuTe kernels compiled for a GPU that is not here (`compile_process`)."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from vitrail.attention.compile_process import Answer, ask, serve, taken
from vitrail.attention.cubin import Taken
from vitrail.attention.decode_spec import Spec, spec
from vitrail.attention.plan import AttentionPlan
from vitrail.config.hardware import Hardware


def take(plans: Iterable[AttentionPlan], gpu: Hardware) -> dict[Spec, Answer]:
    """What the kernel of each distinct spec takes, or the error that its compiler raised."""
    wanted = list(dict.fromkeys(spec(plan) for plan in plans))
    target = {"CUTE_DSL_ARCH": f"sm_{gpu.cc}a"}
    return dict(zip(wanted, ask(__name__, [asdict(s) for s in wanted], target), strict=True))


def _take(question: dict[str, Any]) -> list[Taken]:
    from vitrail.attention.backends.cute import compiled

    return [taken("decode_sm90", compiled(Spec(**question)), 90)]


if __name__ == "__main__":
    serve(_take)
