"""Does anything of the engine grow? Some rounds of equal work over small caches."""

import pytest

from tests.nightly.soak import soak_by_rounds

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(0),
    pytest.mark.suite("soak", minutes=1, owner="engine"),
]


def test_a_short_soak():
    soak_by_rounds()
