"""The gated activation against its formula."""

import pytest
import torch

from tests.ops.kernels import interpreted
from vitrail.ops.activation import triton
from vitrail.ops.activation.naive import silu_mul


def test_silu_mul_takes_the_gate_first() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(5, 13).double(), torch.randn(5, 13).double()
    got = silu_mul(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(got, gate / (1 + (-gate).exp()) * up, atol=1e-12, rtol=1e-12)


@interpreted
@pytest.mark.parametrize("shape", [(5, 26), (1, 2), (3, 2050), (0, 26)])
def test_the_kernel_is_the_definition(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(shape[0], shape[1] + 3)[:, : shape[1]] * 4  # rows of a wider tensor
    torch.testing.assert_close(triton.silu_mul(gate_up), silu_mul(gate_up), atol=1e-6, rtol=1e-6)
    half = gate_up.half()
    differ = triton.silu_mul(half) != silu_mul(half)
    assert not len(half) or differ.float().mean() < 0.002
