"""The least that a step moves and computes, against the modules' own parameters, counted pairs, and
figures worked out by hand for Kimi-VL's published shape."""

import pytest
import torch
from torch import nn

from bench.kimi_vl_shape import IMAGE, TEXT, VISION, config_of
from tests.models.cases import CASES, Case
from vitrail.config.finding import accept
from vitrail.config.model import ModelConfig, MoonVitConfig
from vitrail.engine.floors import (
    Rates,
    Shapes,
    Work,
    distinct_experts,
    expert_parameters,
    floor_seconds,
    linear_parameters,
    step_work,
)
from vitrail.engine.floors import _pairs as pairs  # pyright: ignore[reportPrivateUsage]
from vitrail.engine.kernel_groups import Group
from vitrail.engine.step import Decodes, EncodeJob, SequenceStep, StepPlan
from vitrail.models.registry import load_entry


def read(case: Case) -> ModelConfig:
    entry = load_entry(case.config["architectures"][0])
    return accept(entry.read_config(case.config, case.generation))


def sequence(start: int, length: int = 1) -> SequenceStep:
    return SequenceStep(
        seq=start, slot=0, start=start, length=length, pages_before=0, new_pages=(), sample=True
    )


def plan(
    prefills: tuple[SequenceStep, ...] = (),
    decodes: tuple[SequenceStep, ...] = (),
    encodes: tuple[EncodeJob, ...] = (),
) -> StepPlan:
    return StepPlan(
        index=0,
        prefills=prefills,
        decodes=Decodes.of(decodes),
        encodes=encodes,
        slices=(),
        drop_entries=(),
    )


@pytest.mark.parametrize("name", list(CASES))
def test_parameters_are_the_modules(name: str):
    """Every matrix of the decoder is in exactly one count: products, experts, head or embedding."""
    config = read(CASES[name])
    with torch.device("meta"):
        model = load_entry(config.architecture).build(config, "float32")
    assert isinstance(model, nn.Module)
    counted = dict.fromkeys(("linear", "experts", "router", "vocabulary"), 0)
    for key, parameter in model.named_parameters():
        if any(part in key for part in ("tower", "projector")) or parameter.dim() < 2:
            continue
        kind = "experts" if parameter.dim() == 3 else "linear"
        if "embed" in key or "head" in key:
            kind = "vocabulary"
        if "router" in key:
            kind = "router"
        counted[kind] += parameter.numel()
    text = config.text
    assert linear_parameters(text) == counted["linear"]
    moe = text.moe
    sparse = 0 if moe is None else text.num_layers - moe.first_moe_layer
    stacked = 0 if moe is None else moe.num_experts + moe.num_shared
    experts = 0 if moe is None else sparse * stacked * expert_parameters(text, moe)
    assert experts == counted["experts"]
    routers = 0 if moe is None else sparse * moe.num_experts * text.hidden_size
    assert routers == counted["router"]


@pytest.mark.parametrize("name", ["kimi_vl", "nvila"])
def test_the_towers_products_are_the_modules(name: str):
    """Bytes of an encoding in fp32: its matrices but the position table and the projector, and of
    SigLIP no layer that is not built."""
    config = read(CASES[name])
    with torch.device("meta"):
        model = load_entry(config.architecture).build(config, "float32")
    assert isinstance(model, nn.Module)
    matrices = {
        key: parameter.numel()
        for key, parameter in model.named_parameters()
        if "tower" in key and parameter.dim() == 2 and "pos" not in key
    }
    shapes = Shapes(model=config, dtype="float32", kv_dtype="float32")
    job = EncodeJob(entry=0, height=2, width=4, num_tokens=2)
    found = step_work(shapes, plan(encodes=(job,)))
    assert set(found) == {"encode"}
    assert found["encode"].num_bytes == 4 * sum(matrices.values())
    assert found["encode"].flops > 2 * 8 * sum(matrices.values())


@pytest.mark.parametrize("window", [None, 0, 1, 3, 7, 50])
def test_pairs_are_those_counted(window: int | None):
    for start in (0, 1, 5, 12):
        for length in (1, 2, 9):
            counted = sum(
                1
                for q in range(start, start + length)
                for k in range(q + 1)
                if window is None or q - k <= window
            )
            assert pairs(start, length, window) == counted


def test_distinct_experts_are_what_drawing_gives():
    config = read(CASES["kimi_vl"])
    moe = config.text.moe
    assert moe is not None
    assert distinct_experts(moe, 0) == 0
    assert distinct_experts(moe, 1) == pytest.approx(moe.top_k)
    generator = torch.Generator().manual_seed(1)
    draws = [
        len({int(i) for _ in range(3) for i in torch.randperm(7, generator=generator)[:3]})
        for _ in range(3000)
    ]
    assert distinct_experts(moe, 3) == pytest.approx(sum(draws) / len(draws), rel=0.02)


def test_kimi_vls_steps_cost_what_was_worked_out():
    """Decode of 1, 32 and 256 at a context of 1,024: 5.15, 31 and 40 GB; prefills of 1 x 8,192 and
    64 x 1,024: 46 and 304 TFLOP. A picture of 1024 x 1024 is 74 x 74 patches, of which layers and
    products are 4.0 GFLOP each a thousand."""
    config = read(Case(config_of(TEXT, VISION, IMAGE)))
    shapes = Shapes(model=config, dtype="bfloat16", kv_dtype="bfloat16")

    def total(step: StepPlan) -> Work:
        found = Work(0, 0)
        for work in step_work(shapes, step).values():
            found = found.plus(work)
        return found

    for batch, gigabytes in ((1, 5.15), (32, 31), (256, 40)):
        moved = total(plan(decodes=(sequence(1023),) * batch)).num_bytes
        assert moved / 1e9 == pytest.approx(gigabytes, rel=0.015)
    for batch, length, tera in ((1, 8192, 46), (64, 1024, 304)):
        flops = total(plan(prefills=(sequence(0, length),) * batch)).flops
        assert flops / 1e12 == pytest.approx(tera, rel=0.01)
    vision = config.vision
    assert isinstance(vision, MoonVitConfig)
    job = EncodeJob(entry=0, height=74, width=74, num_tokens=1369)
    by_hand = 27 * (2 * 5476 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 5476**2 * 1152)
    by_hand += 2 * 5476 * 588 * 1152 + 2 * 1369 * (4608**2 + 4608 * 2048)
    assert step_work(shapes, plan(encodes=(job,)))["encode"].flops == pytest.approx(by_hand)


def test_a_floor_is_whichever_takes_longer():
    rates = Rates(bytes_per_s=100.0, flops_per_s=1000.0, source="here")
    assert rates.seconds(Work(50, 100)) == 0.5
    assert rates.seconds(Work(50, 2000)) == 2.0
    config = read(CASES["deepseek_v3"])
    shapes = Shapes(model=config, dtype="float32", kv_dtype="float32")
    steps = [plan(decodes=(sequence(5), sequence(9))), plan(prefills=(sequence(0, 7),))]
    both = floor_seconds(shapes, steps, rates)
    groups: set[Group] = {"gemm", "attention", "elementwise", "moe", "sampling"}
    assert set(both) == groups
    for group in groups:
        each = [floor_seconds(shapes, [step], rates)[group] for step in steps]
        assert both[group] == pytest.approx(sum(each))
    assert floor_seconds(shapes, [plan()], rates) == {}
    byte = Shapes(model=config, dtype="float32", kv_dtype="float8_e4m3fn")
    moved = [step_work(s, steps[0])["attention"].num_bytes for s in (shapes, byte)]
    assert moved[0] == 4 * moved[1], "the cache's own type"
