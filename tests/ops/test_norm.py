"""RMS norms against the formula written out in float64."""

import pytest
import torch

from tests.ops.kernels import interpreted
from vitrail.ops.norm import triton
from vitrail.ops.norm.naive import add_rms_norm, rms_norm

EPS = 1e-5


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (0, 33)])
def test_rms_norm_is_the_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    torch.testing.assert_close(
        rms_norm(x, weight, EPS).double(), exact(x, weight), atol=1e-6, rtol=1e-6
    )


def test_eps_is_added_to_the_mean_square() -> None:
    x = torch.full((1, 4), 1e-3)
    got = rms_norm(x, torch.ones(4), 1e-6)
    torch.testing.assert_close(got, torch.full((1, 4), 0.5**0.5), atol=1e-6, rtol=0)


def test_bf16_is_rounded_once() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(7, 65).bfloat16(), torch.randn(65).bfloat16()
    want = exact(x, weight).bfloat16()
    assert (rms_norm(x, weight, EPS) != want).float().mean() < 0.002


def test_add_rms_norm_is_addition_then_norm() -> None:
    torch.manual_seed(2)
    x, residual, weight = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), exact(total, weight), atol=1e-6, rtol=1e-6)


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 1100), (0, 33)])
def test_the_kernels_are_the_definitions(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    tokens, channels = shape
    x = torch.randn(tokens, channels + 5)[:, :channels] * 3  # rows of a wider tensor
    residual, weight = torch.randn(tokens, channels + 2)[:, 2:], torch.randn(channels)
    want = rms_norm(x, weight, EPS)
    torch.testing.assert_close(triton.rms_norm(x, weight, EPS), want, atol=2e-6, rtol=2e-6)
    got, total = triton.add_rms_norm(x, residual, weight, EPS)
    want, sum_ = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, sum_)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@interpreted
def test_the_kernel_rounds_as_the_definition() -> None:
    """The sum before its norm, the norm once."""
    torch.manual_seed(4)
    x, residual = torch.randn(2, 9, 129).half().unbind(0)
    weight = torch.randn(129).half()
    got, total = triton.add_rms_norm(x, residual, weight, EPS)
    want, sum_ = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, sum_)
    assert (got != want).float().mean() < 0.002
