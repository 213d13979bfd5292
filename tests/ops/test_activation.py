"""The gated activation against its formula."""

import torch

from vitrail.ops.activation.naive import silu_mul


def test_silu_mul_takes_the_gate_first() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(5, 13).double(), torch.randn(5, 13).double()
    got = silu_mul(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(got, gate / (1 + (-gate).exp()) * up, atol=1e-12, rtol=1e-12)
