"""What the night asks of plans of kernels for the models we serve, on any GPU: a backend may refuse
what does not fit it or what it does not take; a tile whose rows, copies or work do not add up is a
fault of the planner."""

import pytest

from vitrail.attention.fa4 import RELEASE
from vitrail.attention.plan import CUTLASS_RELEASE, KERNEL_BACKENDS, plan_on
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import Finding, accept
from vitrail.config.hardware import GPUS, Hardware

pytestmark = pytest.mark.suite("kernels", minutes=0.5, owner="attention")
INSTALLED = {"fa4": RELEASE, "cute": CUTLASS_RELEASE}
FAULTS = [f"attention_{rule}" for rule in ("rows", "bulk", "box", "dims", "splits", "items")]


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more) -> AttentionSite:
    return AttentionSite(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        scale=dim**-0.5,
        **{"causal": True, **more},
    )


LATENT = site(16, 1, 576, 512, latent_rank=512)
SITES = {
    "tower": (site(16, 16, 72, 72, causal=False), Phase.ENCODE),
    "expanded": (site(16, 16, 192, 128), Phase.PREFILL),
    "latent": (LATENT, Phase.DECODE),
    "grouped": (site(32, 8, 128, 128), Phase.DECODE),
    "eight to one": (site(8, 1, 192, 128), Phase.DECODE),
}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name.replace(" ", "-"))
@pytest.mark.parametrize("name", SITES)
def test_no_plan_breaks_a_law(name: str, gpu: Hardware):
    where, phase = SITES[name]
    for page in (16, 128) if phase in PAGED else (None,):
        shape = AttentionShape(
            site=where,
            phase=phase,
            dtype="bfloat16",
            page_size=page,
            batch=4,
            max_q_len=1 if phase is Phase.DECODE else 300,
            max_kv_len=8192,
        )
        planned = [plan_on(backend, shape, gpu, INSTALLED) for backend in KERNEL_BACKENDS]
        faults: list[Finding] = [
            finding
            for made in planned
            if isinstance(made, list)
            for finding in made
            if finding.code in FAULTS
        ]
        if faults:
            accept(faults)
