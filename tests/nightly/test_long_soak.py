"""Does anything of the engine grow? 20 minutes of 200 requests at once."""

import pytest

from tests.nightly.soak import soak

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(0),
    pytest.mark.suite("soak", minutes=22, owner="engine"),
]


def test_a_long_soak():
    soak(20, running=200, cache_mb=64)
