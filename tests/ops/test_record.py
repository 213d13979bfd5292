"""A recording: the meta device stands for a GPU within it, and for nothing outside."""

import pytest
import torch

from vitrail.config.hardware import find
from vitrail.ops import dispatch
from vitrail.ops.launch import may_start_early
from vitrail.ops.norm import naive
from vitrail.ops.record import gpu_of, on_gpu, recording

META, CPU = torch.device("meta"), torch.device("cpu")


def test_operations_choose_their_kernels_within_and_definitions_outside() -> None:
    x, weight = torch.empty(3, 64, device="meta"), torch.empty(64, device="meta")
    for _ in range(2):  # what was chosen within is not remembered outside
        assert not on_gpu(META)
        assert dispatch.select_norm(META).rms_norm is naive.rms_norm
        with recording(find("H200")) as made:
            assert on_gpu(META)
            assert not on_gpu(CPU)
            assert gpu_of(META).name == "H200"
            assert dispatch.select_norm(CPU).rms_norm is naive.rms_norm
            assert dispatch.select_norm(META).rms_norm(x, weight, 1e-6).shape == x.shape
        (launch,) = made.launches
        assert launch.kernel.fn.__name__ == "norm_kernel"
        assert launch.arguments[0] is x
        assert launch.constants["M"] == 64


def test_a_gpu_starts_early_where_it_can() -> None:
    for gpu, early in (("H200", True), ("A100", False), ("B300", True)):
        with recording(find(gpu)):
            assert may_start_early(META) is early
    assert not may_start_early(META)
    assert not may_start_early(CPU)


def test_recordings_do_not_nest_and_end_with_an_error() -> None:
    with recording(find("H200")), pytest.raises(AssertionError), recording(find("A100")):
        pass
    with pytest.raises(ValueError, match="stop"), recording(find("H200")):
        raise ValueError("stop")
    assert not on_gpu(META)
