"""`bench/growth.py`: what grows is named, each kind by its tolerance, and what does not is not."""

import pytest

from bench.growth import COUNTED, SAMPLES, TOLERANCES, Sample, grown, sample


def samples(name: str = "", each: float = 0.0) -> list[Sample]:
    """Of a quarter's warm-up, then level but for `name`, which gets `each` more every time."""
    level = dict.fromkeys((*TOLERANCES, *COUNTED), 1000.0)
    found = [
        {k: v * (0.5 if i < SAMPLES // 4 else 1) for k, v in level.items()} for i in range(SAMPLES)
    ]
    for number, one in enumerate(found):
        if name:
            one[name] += each * number
    return found


def test_what_is_level_after_a_warm_up_has_not_grown():
    assert grown(samples()) == []


@pytest.mark.parametrize("name", [*TOLERANCES, *COUNTED])
def test_what_grows_is_named(name: str):
    assert [line.split(":")[0] for line in grown(samples(name, 3.0))] == [name]


@pytest.mark.parametrize("name", TOLERANCES)
def test_within_its_tolerance_nothing_is_said(name: str):
    """Half of it between the quarters' middles, which lie half of all samples apart."""
    assert grown(samples(name, 500 * TOLERANCES[name] / (SAMPLES // 2))) == []


def test_a_sample_has_all_that_is_judged_but_the_devices():
    assert set(sample("cpu")) == {*TOLERANCES, *COUNTED} - {"allocated", "reserved"}
