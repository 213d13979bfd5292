"""The proof by compilation: every kernel of our sites, compiled for GPUs that are not here, takes
no more than its plan allows; what takes more is found. Kernels are compiled in processes of their
own, because this one runs them in the interpreter."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from triton_plans import tiny

from vitrail.attention.cubin import SPILL_BYTES, Taken, hold, read_cubin
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.hardware import find

SITE = AttentionSite(
    num_q_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, scale=0.09, causal=True
)


def compiled(names: list[str], gpu: str) -> dict:
    """`compile_cases.py` on a fresh interpreter: {"findings": [...], "taken": {...}}."""
    here = os.path.dirname(__file__)
    run = subprocess.run(
        [sys.executable, os.path.join(here, "compile_cases.py"), gpu, *names],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.path.join(here, "../..")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


# Which sites CI compiles; the nightly run compiles all of them for every GPU.
CI = ["gqa", "wide", "mla16", "mla128", "vision", "prefill", "extend", "gqa_e4m3", "mla128_e4m3"]


@pytest.mark.parametrize("gpu", ["H200", "B300"])
def test_kernels_take_no_more_than_planned(gpu):
    result = compiled(CI, gpu)
    assert result["findings"] == []
    kernels = {name.split()[0] for name in result["taken"]}
    assert kernels == {"attend", "combine"}
    assert all(taken["registers"] > 0 for taken in result["taken"].values())


@pytest.mark.suite("kernels", minutes=10, owner="attention")
@pytest.mark.nightly
@pytest.mark.parametrize("gpu", ["A100", "L40S", "H200", "B200", "B300", "RTX 5090"])
def test_kernels_of_every_site_and_gpu(gpu):
    assert compiled([], gpu)["findings"] == []


def test_what_takes_more_than_planned_is_found():
    made = replace(tiny(SITE, Phase.DECODE), registers=128, smem_bytes=50_000)
    fits = Taken(
        kernel="attend",
        cc=90,
        num_warps=4,
        registers=128,
        stack_bytes=SPILL_BYTES,
        smem_bytes=50_000,
    )
    gpu = find("H200")
    assert list(hold(fits, made, gpu)) == []
    for change, saw in (
        ({"registers": 129}, "129 registers a thread"),
        ({"smem_bytes": 50_001}, "50001 bytes of shared memory"),
        ({"stack_bytes": SPILL_BYTES + 4}, f"{SPILL_BYTES + 4} bytes of spilled registers"),
    ):
        (found,) = hold(replace(fits, **change), made, gpu)
        assert saw in found.saw
        assert "H200" in found.where


def test_the_plan_that_ran_out_of_shared_memory_on_an_h200_is_caught_here():
    """64 rows of a latent, 64 keys, two stages: 294,920 bytes of an SM's 232,448."""
    result = compiled(["too_big"], "H200")
    found = [f for f in result["findings"] if "294920 bytes of shared memory" in f]
    assert len(found) == 1
    assert "heads of 576 and 512" in found[0]


def test_a_file_that_is_no_kernel_is_refused():
    with pytest.raises(ValueError, match="no ELF file"):
        read_cubin(b"PTX, perhaps, but not a binary at all" * 4)
