"""Plans of the mixture: the same for the same batch size, within every GPU that we name, and
compiled for one that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.attention.cubin import SPILL_BYTES
from vitrail.config.hardware import GPUS, find
from vitrail.ops.moe.plan import (
    ExpertsShape,
    default_plan,
    direct,
    experts_plan,
    max_blocks,
    router_tiles,
)
from vitrail.ops.moe.tile import ExpertsPlan, Tile

KIMI = ExpertsShape(2048, 1408, 66, 8)
SHAPES = (KIMI, ExpertsShape(2048, 704, 66, 8), ExpertsShape(7168, 2048, 257, 9))
SIZES = (1, 2, 7, 16, 17, 33, 64, 65, 100, 256, 257, 512, 769, 1024, 2048, 8192, 16384)
GPUS_WITH_BF16 = [gpu for gpu in GPUS if gpu.cc >= 80]
KERNELS = ("score", "choose", "lay", "up", "down", "join")
HERE = Path(__file__).parent


def smem_bytes(plan: ExpertsPlan, tile: Tile, products: int) -> int:
    flat = tile.bn * plan.bt if tile.flat else 0  # a tile on its way out, in two parts
    return tile.stages * tile.bk * 2 * (products * tile.bn + plan.bt) + flat


@pytest.mark.parametrize("gpu", GPUS_WITH_BF16, ids=lambda gpu: gpu.name)
def test_stages_fit_in_shared_memory(gpu):
    for shape in SHAPES:
        for tokens in SIZES:
            plan = experts_plan(tokens, shape, gpu)
            assert smem_bytes(plan, plan.up, 2) <= gpu.smem_per_block_bytes
            assert gpu.cc >= 90 or not plan.early
            assert plan.up.stages >= 2
            assert smem_bytes(plan, plan.down, 1) <= gpu.smem_per_block_bytes
            assert plan.down.stages >= 2
            assert plan.down.programs in (0, gpu.num_sms)


def test_a_plan_depends_on_its_arguments_alone_and_changes_rarely():
    gpu = find("H200")
    plans = [experts_plan(tokens, KIMI, gpu) for tokens in range(1, 17000)]
    changes = sum(a != b for a, b in zip(plans, plans[1:], strict=False))
    assert changes <= 10
    assert experts_plan(100, KIMI, gpu) == experts_plan(100, KIMI, gpu)


def test_a_gpu_without_measurements_follows_the_rule():
    for gpu in GPUS_WITH_BF16:
        measured = experts_plan(64, KIMI, gpu) != default_plan(64, KIMI, gpu)
        assert measured <= ("H200" in gpu.name)
    other = ExpertsShape(2048, 704, 66, 8)
    assert experts_plan(64, other, find("H200")) == default_plan(64, other, find("H200"))


def test_few_tokens_are_not_placed():
    tile = Tile(bn=64, bk=64, stages=3, warps=4)
    plan = ExpertsPlan(bt=16, up=tile, down=tile)
    assert [direct(t, 8 * t, 66, plan) for t in (1, 2, 8, 9, 16, 17)] == [3, 2, 2, 1, 1, 0]


def test_blocks_are_never_too_few_and_never_more_than_slots():
    for slots in range(1, 200):
        for experts in (1, 3, 8, 66):
            for bt in (16, 32):
                ones = min(slots, experts) - 1  # the worst: all but one with a single slot
                worst = ones + -(-(slots - ones) // bt)
                assert worst <= max_blocks(slots, experts, bt) <= slots


def test_a_token_s_scores_are_summed_the_same_way_in_any_batch():
    for hidden in (64, 200, 2048, 7168):
        spans = {router_tiles(tokens, hidden).span for tokens in SIZES}
        assert len(spans) == 1
        for tokens in SIZES:
            tiles = router_tiles(tokens, hidden)
            assert tiles.width % tiles.span == 0
            assert tiles.parts * tiles.width >= hidden
            assert tiles.parts == 1 or tiles.width == tiles.span


def taken(gpu: str, *tokens: int) -> list[dict]:
    run = subprocess.run(
        [sys.executable, HERE / "moe_launches.py", gpu, *map(str, tokens)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE / "../..")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def check(gpu: str, *tokens: int) -> list[dict]:
    facts, kernels = find(gpu), taken(gpu, *tokens)
    assert {k["kernel"] for k in kernels} >= {f"moe_{n}" for n in KERNELS}
    for kernel in kernels:
        assert kernel["smem_bytes"] <= facts.smem_per_block_bytes, kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= facts.registers_per_sm, kernel
        assert kernel["stack_bytes"] <= SPILL_BYTES, kernel
    return kernels


def test_a_layer_s_kernels_fit_an_h200():
    """Nothing spills, and products use the units of the whole warp group."""
    kernels = check("H200", 1, 2, 8192)
    assert all(kernel["stack_bytes"] == 0 for kernel in kernels)
    assert {"moe_up_rows", "moe_down_rows"} <= {kernel["kernel"] for kernel in kernels}
    assert all(kernel["wgmma"] for kernel in kernels if kernel["kernel"] in ("moe_up", "moe_down"))


@pytest.mark.suite("kernels", minutes=3, owner="ops")
@pytest.mark.nightly
@pytest.mark.parametrize("gpu", ["A100", "L40S", "H200", "B300", "RTX 5090"])
def test_a_layer_s_kernels_fit_every_gpu(gpu):
    check(gpu, *SIZES)
