"""Layers of a few channels: one thread is the quickest."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread(poisoned_memory: None) -> None:
    torch.set_num_threads(1)
