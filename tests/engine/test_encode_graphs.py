"""What of the tower's graphs a CPU can say: the rungs, the padding, and that padding is inert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vision.moonvit_reference import CONFIG, ours, plans
from vitrail.engine.encode_graphs import (
    MOST_PATCHES,
    MOST_PICTURES,
    UNIT,
    ladder,
    padded,
    rung_sizes,
)
from vitrail.ops.vision.naive import Grids, grid_ints


@pytest.mark.parametrize("unit", [UNIT, 1024])
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


def test_a_picture_at_kimis_limit_wastes_under_two_percent():
    for budget in (5352, 37464):
        rungs = ladder(budget, UNIT, 5352)
        assert min(rung for rung in rungs if rung >= 4356) <= 1.02 * 4356
        assert len(rungs) <= 32


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
