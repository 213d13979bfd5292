"""The prediction of what encoding takes, byte for byte what is alive when the definitions run: at
the published shapes, on the meta device."""

import pytest
import torch

from vitrail.attention.plan import make_table
from vitrail.check import sizes
from vitrail.check.encoder_peak import Part, encoder_peak, product_bytes, worst_steps
from vitrail.check.steps import HollowTable
from vitrail.check.trace import Shapes
from vitrail.config.hardware import GPUS, find
from vitrail.config.model import MoonVitConfig, SiglipConfig, VisionConfig
from vitrail.vision.moonvit import MoonVit
from vitrail.vision.projector import MergeProjector
from vitrail.vision.siglip import Siglip
from vitrail.vision.tiles import TileProjector

LAYERS = 2  # which the peak does not depend on
KIMI = MoonVitConfig(
    patch_size=14,
    hidden_size=1152,
    num_layers=LAYERS,
    num_heads=16,
    intermediate_size=4304,
    pos_height=64,
    pos_width=64,
    merge=2,
)


def siglip(merge: int, scales: tuple[int, ...]) -> SiglipConfig:
    return SiglipConfig(
        patch_size=14,
        image_size=448,
        hidden_size=1152,
        num_layers=LAYERS + 1,
        num_heads=16,
        intermediate_size=4304,
        layer_norm_eps=1e-6,
        merge=merge,
        scales=scales,
    )


S2, LITE, TILE = siglip(2, (1, 2)), siglip(3, ()), 1024
CASES: list[tuple[VisionConfig, int, int, int | None]] = [
    (KIMI, 2048, 4356, 4356),
    (KIMI, 2048, 1024, None),
    (S2, 3584, 17 * TILE, 17 * TILE),
    (S2, 3584, 40 * TILE, 17 * TILE),
    (S2, 3584, TILE, None),
    (LITE, 3584, 13 * TILE, 13 * TILE),
    (LITE, 1536, TILE, None),
]


def counted(vision: VisionConfig, hidden: int, kind: torch.dtype, step: list[Part]) -> int:
    """Bytes alive at the worst moment of a step, as the engine encodes it."""
    name = str(kind).removeprefix("torch.")
    moon = isinstance(vision, MoonVitConfig)
    with torch.device("meta"):
        tower = MoonVit(vision, kind) if moon else Siglip(vision, kind)
        projector = (MergeProjector if moon else TileProjector)(vision, hidden, kind)
    budget = sum(p.count * p.height * p.width for p in step)
    limits = sizes.image_limits(vision, name, budget)  # pyright: ignore
    assert not isinstance(limits, list)
    plans = HollowTable(make_table(tower.sites(), limits, find("H200"), None, {}))
    grids = [(p.height, p.width) for p in step for _ in range(p.count)]
    with torch.inference_mode(), torch.device("meta"), Shapes() as live:
        held = [torch.empty(p.first * p.height * p.width, 1152, dtype=kind) for p in step]
        patches = torch.empty(budget, 588, dtype=torch.uint8)
        features = tower(patches, *([grids] if moon else []), plans)
        made = list(features.split([p.count * p.height * p.width for p in step]))
        for i, part in enumerate(step):
            made[i] = torch.cat([held[i], made[i]]) if part.first else made[i]
        whole = made[0] if len(made) == 1 else torch.cat(made)
        projector(whole, grids if moon else [part.block for part in step])
    return live.peak


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_prediction_is_what_the_definitions_hold(case: int, kind: torch.dtype) -> None:
    vision, hidden, budget, largest = CASES[case]
    name = str(kind).removeprefix("torch.")
    steps = worst_steps(vision.rules, budget, largest)
    peak = max(counted(vision, hidden, kind, step) for step in steps)
    assert encoder_peak(vision, hidden, name, budget, largest, fused=False) == peak  # pyright: ignore


def test_kernels_hold_less_and_more_patches_more() -> None:
    for vision, hidden, budget, largest in CASES:
        fused, plain = (
            encoder_peak(vision, hidden, "bfloat16", budget, largest, fused=f)
            for f in (True, False)
        )
        assert 0 < fused <= plain
        more = encoder_peak(vision, hidden, "bfloat16", 2 * budget, largest)
        assert more > fused


def test_what_products_work_in_is_known_for_every_gpu() -> None:
    assert {product_bytes(gpu.cc) >> 20 for gpu in GPUS} == {9, 33}
