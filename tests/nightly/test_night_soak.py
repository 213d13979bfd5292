"""When has memory grown over equal rounds? Where every round kept more than it may."""

import random

import pytest

from tests.nightly.soak import LIMITS, grown

STEPS = 50


def samples(in_use_kib: list[float], objects: list[float]) -> list[dict[str, float]]:
    kept = zip(in_use_kib, objects, strict=True)
    return [dict(zip(LIMITS, values, strict=True)) for values in kept]


@pytest.mark.parametrize("a_step", [0.0, 0.5, 2.0, 64.0])
def test_a_leak_of_every_step_is_told_from_noise_of_a_third_of_it(a_step: float):
    rng = random.Random(4)
    kept = [5e4 + i * STEPS * (a_step + rng.uniform(-0.15, 0.15) * a_step) for i in range(4)]
    said = grown(samples(kept, [1e6] * 4), STEPS)
    assert bool(said) == (a_step > LIMITS["KiB in use"])
    assert not said or "more a step, limit 1" in said


def test_objects_are_counted_beside_bytes():
    said = grown(samples([5e4] * 4, [1e6 + 20 * STEPS * i for i in range(4)]), STEPS)
    assert said == "objects 1000000 -> 1003000: 20.0 to 20.0 more a step, limit 8"


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_one_round_made_for_good_is_no_leak(at: int):
    """A module that is imported late, a buffer that is as large as it will be."""
    once = [5e4 + 4096.0 * (i >= at) for i in range(4)]
    assert grown(samples(once, [1e6] * 4), STEPS) == ""
