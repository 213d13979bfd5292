"""Does anything of the engine grow? Two minutes of few requests over a small cache, once 600 have
filled it. On a machine with much else to do too few follow to tell, which is chance."""

import pytest

from tests.nightly.soak import soak

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(0),
    pytest.mark.suite("soak", minutes=4, owner="engine", statistical=True),
]


def test_a_short_soak():
    soak(2, running=12, cache_mb=4, warm_up=600)
