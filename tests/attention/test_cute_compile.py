"""The proof by compilation of our CuTe decode: compiled for an H200 that is not here, it takes what
its plan says, shared memory to the byte."""

from dataclasses import replace

import pytest

from tests.attention.compile_cases import GQA, MLA, MLA_128, WIDE, site
from vitrail.attention.compile_cute import take
from vitrail.attention.cubin import hold
from vitrail.attention.decode_spec import spec
from vitrail.attention.installed import releases
from vitrail.attention.plan import CUTLASS_RELEASE, AttentionPlan, plan
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.config.finding import Finding, accept
from vitrail.config.hardware import find

pytestmark = pytest.mark.skipif(
    releases().get("cute") != CUTLASS_RELEASE, reason="needs nvidia-cutlass-dsl (the extra fa4)"
)
H200 = find("H200")
EDGES = site(64, 8, 192, 128, window=128, sink=True)


def planned(where: AttentionSite, page: int = 64, q_len: int = 1, **more) -> AttentionPlan:
    shape = AttentionShape(
        site=where,
        phase=Phase.DECODE,
        dtype="bfloat16",
        page_size=page,
        batch=32,
        max_q_len=q_len,
        max_kv_len=8192,
        **more,
    )
    return accept(plan(shape, H200, "cute", releases()))


CASES = {
    "gqa": planned(GQA),
    "pages by rows": planned(GQA, 1),
    "wide": planned(WIDE),
    "latent": planned(MLA),
    "latent, two warpgroups": planned(MLA_128),
    "latent, two warpgroups by rows": planned(MLA_128, 1),
    "several queries": planned(EDGES, 16, 4),
    "soft cap": planned(replace(GQA, softcap=30.0)),
}


def exceeding(plans: list[AttentionPlan]) -> list[Finding]:
    """What kernels, all of which compile, take beyond their plans."""
    answers = take(plans, H200)
    return [f for p in plans for taken in answers[spec(p)] for f in hold(taken, p, H200)]


def test_it_takes_what_is_planned():
    taken = take(CASES.values(), H200)
    assert len(taken) == len(CASES)
    for name, made, (one,) in zip(CASES, CASES.values(), taken.values(), strict=True):
        assert one.smem_bytes == made.smem_bytes, name
        assert one.num_warps == made.num_warps, name
        assert 0 < one.registers <= made.registers, name
        assert one.stack_bytes <= 16, name


def test_a_plan_that_allows_less_is_refused():
    made = replace(CASES["gqa"], smem_bytes=CASES["gqa"].smem_bytes - 1)
    (found,) = exceeding([made])
    assert found.code == "compiled_shared_memory"
    assert f"{CASES['gqa'].smem_bytes} bytes of shared memory" in found.saw


def test_what_does_not_compile_says_so():
    made = replace(CASES["gqa"], tile_m=24)  # no swizzle has rows of 24
    (answer,) = take([made], H200).values()
    assert "KeyError: 24" in answer


@pytest.mark.suite("kernels", minutes=10, owner="attention")
@pytest.mark.nightly
@pytest.mark.parametrize("page", [1, 4, 8, 16, 32, 64, 128, 256])
def test_every_page_and_head(page: int):
    heads = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
    sites = [site(h, k, d, dv) for d, dv in heads for h, k in ((8, 8), (8, 1), (64, 4))]
    plans = [planned(where, page, q_len) for where in (*sites, MLA, MLA_128) for q_len in (1, 3)]
    plans += [planned(replace(GQA, softcap=30.0), page), planned(EDGES, page)]
    assert exceeding(plans) == []
