"""What of the tower's graphs a CPU can say: the rungs, the padding, and that padding is inert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.moonvit import PUBLISHED
from tests.engine.test_graphs import Recorded
from tests.gpu.test_vision_gpu import Towered
from tests.nvila import KINDS, GoldenNvila
from tests.vision.moonvit_reference import CONFIG, ours, plans
from vitrail.attention.fa4 import RELEASE
from vitrail.attention.plan import CUTLASS_RELEASE, PlanLimits, make_table
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.check.encoder_peak import tower_graph_bytes
from vitrail.config.hardware import GPUS, find
from vitrail.engine.encode_graphs import EncodeGraphs
from vitrail.ops.vision.naive import Grids, grid_ints
from vitrail.vision.rungs import (
    MOST_PATCHES,
    MOST_PICTURES,
    UNIT,
    ladder,
    padded,
    rung_sizes,
    rungs_of,
)

INSTALLED = {"fa4": RELEASE, "cute": CUTLASS_RELEASE}


@pytest.mark.parametrize("unit", [UNIT, 64, 100, 196, 729, 1024])
@given(budget=st.integers(1, 50_000), pictures=st.integers(1, 9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rungs_rise_to_the_budget_and_waste_little(unit, budget, pictures):
    rungs = ladder(budget, unit, budget // pictures)
    whole = min(budget, MOST_PATCHES) // unit * unit
    assert bool(rungs) == (whole > 0)
    if rungs:
        assert rungs == sorted(set(rungs))
        assert whole <= rungs[-1] <= budget
        assert unit == UNIT or all(rung % unit == 0 for rung in rungs)
        assert len(rungs) <= 60
        for a, b in zip(rungs, rungs[1:], strict=False):
            assert b - a <= max(3 * unit, a // 6 + unit)


def test_a_picture_at_kimis_limit_wastes_under_two_percent_and_a_square_one_nothing():
    for budget in (5352, 37464):
        rungs = ladder(budget, UNIT, 5352)
        assert 4356 in rungs
        assert len(rungs) <= 36
        for patches in range(4016, 4490, 4):
            assert min(rung for rung in rungs if rung >= patches) < 1.02 * patches


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=MOST_PICTURES),
    more=st.integers(0, 300),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_padded_batch_is_the_rungs_patches_in_as_many_sequences(sizes, more):
    patches = sum(h * w for h, w in sizes) + more
    made = padded(sizes, patches)
    assert len(made) == MOST_PICTURES + 1
    assert made[: len(sizes)] == sizes
    edges = grid_ints(made)[: len(made) + 1]
    assert edges[-1] == patches
    assert edges == sorted(edges)


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("patches", [64, 320])
def test_a_rung_is_captured_with_sequences_that_are_not_empty(patches, tile):
    sizes = rung_sizes(patches, tile)
    assert sum(h * w for h, w in sizes) == patches
    assert all(h * w for h, w in sizes)
    assert tile is not None or len(sizes) == MOST_PICTURES + 1


def test_padding_is_inert():
    """Whatever lies behind the pictures, their features are those without it."""
    tower, _ = ours()
    sizes = [(2, 4), (6, 2)]
    g = torch.Generator().manual_seed(0)
    patches = torch.randint(0, 256, (64, 588), generator=g).to(torch.uint8)
    table = plans(tower, 64, MOST_PICTURES + 1)
    grids = [size for size in padded(sizes, 64) if size != (0, 0)]
    want = tower(patches[:20], sizes, table)
    for fill in (0, 255):
        patches[20:] = fill
        got = tower(patches, Grids.of(grids, torch.device("cpu")), table)
        assert (got[:20] - want).abs().max() <= 1e-5
    assert CONFIG.hidden_size == want.shape[1]


@pytest.mark.parametrize("side", range(1, 41))
def test_every_rung_is_of_whole_tiles(side):
    """Whatever the tile: 8 patches a side of the golden NVILA, 14 to 32 of published towers."""
    for budget in (side**2, 1000, 16_792, MOST_PATCHES, 40_000):
        for rung in ladder(budget, side**2, 0):
            assert sum(h * w for h, w in rung_sizes(rung, side)) == rung


@pytest.mark.parametrize("kind", KINDS)
def test_every_rung_of_tiles_is_captured_and_run(kind):
    """The golden NVILA's tower by the rungs of an H200, in fp32 and so Triton's; graphs are
    stand-ins that compute."""
    model = GoldenNvila(kind).llm().engine.runner.parts.model
    tower, budget = model.tower, 1300
    limits = PlanLimits(
        dtype="float32", page_size=None, max_batch=budget, max_q_len=budget, max_kv_len=budget
    )
    planned = make_table(tower.sites(), limits, find("H200"), None, INSTALLED)
    rungs = rungs_of(tower.config, budget, None, tower.sites(), planned)
    assert len(rungs) >= 4
    table, recorded = plans(tower, 64, budget // 64), Recorded()
    graphs = EncodeGraphs(model, table, tower.config, rungs, torch.device("cpu"))
    graphs.capture(recorded)
    assert len(recorded) == len(rungs)
    for tiles in range(1, rungs[-1] // 64 + 1):
        raw = drawn_patches(64 * tiles, tower.config.patch_size)
        got = graphs.run(raw, [(8, 8)] * tiles)
        assert (got - tower(raw, table)).abs().max() <= 1e-5
    assert sum(graph.replays for graph in recorded) == rungs[-1] // 64


def test_a_graph_of_pictures_is_run_outside_inference_mode_too():
    """Its buffers were made within: who writes there in place must be so as well. The pictures are
    as long as those of the capture: the reference has lengths from the host."""
    tower, _ = ours()
    table, recorded = plans(tower, 80, MOST_PICTURES + 1), Recorded()
    graphs = EncodeGraphs(Towered(tower), table, CONFIG, [80], torch.device("cpu"))
    graphs.capture(recorded)
    sizes, raw = list(rung_sizes(80, None))[:-1], drawn_patches(79, 14)
    assert not torch.is_inference_mode_enabled()
    for _ in range(2):
        got = graphs.run(raw, sizes)
        assert (got - tower(raw, sizes, table)).abs().max() <= 1e-5
    assert recorded[0].replays == 2


def drawn_patches(count, side):
    g = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3 * side**2), generator=g).to(torch.uint8)


LARGEST, BUDGET = 5352, 37_464


def planned(gpu, prefer=None, installed=INSTALLED, **more):
    """Kimi-VL's tower on `gpu`, as start-up plans it on one with the default budget."""
    site = AttentionSite(
        **{
            **dict.fromkeys(("num_q_heads", "num_kv_heads"), 16),
            "head_dim": 72,
            "head_dim_v": 72,
            "scale": 72**-0.5,
            "causal": False,
            **more,
        }
    )
    limits = PlanLimits(
        dtype="bfloat16", page_size=None, max_batch=BUDGET, max_q_len=BUDGET, max_kv_len=BUDGET
    )
    sites = [(site, Phase.ENCODE)]
    return sites, make_table(sites, limits, find(gpu), prefer, installed)


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
@pytest.mark.parametrize("installed", [INSTALLED, {}])
def test_every_rung_of_kimis_tower_is_captured_on_every_gpu(gpu, installed):
    """Each by its own plan: on an H200 small ones are Triton's, the others FlashAttention-4's."""
    sites, table = planned(gpu, installed=installed)
    rungs = rungs_of(PUBLISHED, BUDGET, LARGEST, sites, table)
    assert rungs == ladder(BUDGET, UNIT, LARGEST)
    assert (rungs[0], rungs[-1]) == (264, MOST_PATCHES // UNIT * UNIT)
    used = {table.select(*sites[0], MOST_PICTURES + 1, rung).backend for rung in rungs}
    assert used == ({"fa4", "triton"} if gpu == "H200" and installed else used & {"fa4", "triton"})


@pytest.mark.parametrize(
    ("prefer", "more"), [("reference", {}), (None, {"window": 8}), (None, {"causal": True})]
)
def test_none_is_captured_that_takes_its_lengths_from_the_host(prefer, more):
    sites, table = planned("H200", prefer, **more)
    assert rungs_of(PUBLISHED, BUDGET, LARGEST, sites, table) == []
    assert tower_graph_bytes(PUBLISHED, "bfloat16", []) == 0


def test_what_graphs_keep_follows_the_largest():
    few, many = (tower_graph_bytes(PUBLISHED, "bfloat16", rungs) for rungs in ([256], [256, 1024]))
    assert many == 4 * few > 0
