"""Does anything grow on a GPU? Eight minutes of requests of every kind, others at work beside them
or not."""

import sys

import pytest

from bench import growth

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.gpu,
    pytest.mark.timeout(0),
    pytest.mark.suite("soak", minutes=10, owner="engine", gpus=1),
]


def test_nothing_grows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["growth.py", "--seconds=480", "--rate=4"])
    assert growth.main() == 0
