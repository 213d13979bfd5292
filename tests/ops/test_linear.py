"""Products of a few rows: which way is chosen, and every way against the definition."""

import pytest
import torch

from tests.ops.kernels import interpreted
from vitrail.ops.linear import fixed, fused
from vitrail.ops.linear.naive import add_norm_linear, linear, scores
from vitrail.ops.linear.table import THREAD_VALUES, TURNS, Way, fixed_way, way

EPS = 1e-5
WAYS = [Way(2, 64, 1), Way(8, 64, 4)]


def operands(tokens: int, outputs: int, channels: int, seed: int = 0) -> list[torch.Tensor]:
    """x and residual, rows of wider tensors; a matrix; a norm's weight."""
    g = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(tokens, channels + n, generator=g)[:, n:] for n in (3, 1))
    matrix = torch.randn(outputs, channels, generator=g) / channels**0.5
    return [x, residual, matrix, torch.randn(channels, generator=g)]


def test_scores_are_fp32_whatever_the_weights_are() -> None:
    x, _, matrix, _ = operands(3, 7, 11)
    got = scores(x.bfloat16(), matrix.bfloat16())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x @ matrix.T, atol=3e-2, rtol=3e-2)


def test_a_norm_before_a_product_is_both() -> None:
    x, residual, matrix, norm = operands(3, 7, 11)
    got, total = add_norm_linear(x, residual, norm, EPS, matrix)
    assert torch.equal(total, x + residual)
    want = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * norm @ matrix.T
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    alone, same = add_norm_linear(total, None, norm, EPS, matrix)
    assert same is total
    assert torch.equal(alone, got)


@interpreted
@pytest.mark.parametrize("chosen", WAYS, ids=str)
@pytest.mark.parametrize("outputs", [1, 33])
@pytest.mark.parametrize("tokens", [1, 3])
def test_every_way_is_the_definition(chosen: Way, outputs: int, tokens: int) -> None:
    x, _, matrix, _ = operands(tokens, outputs, 53)
    want = linear(x, matrix, None)
    got = fused.product(chosen, x, matrix, torch.float32)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    half = fused.product(chosen, x.half(), matrix.half(), torch.float16)
    torch.testing.assert_close(half.float(), want, atol=5e-3, rtol=5e-3)
    wide = fused.product(chosen, x.half(), matrix.half(), torch.float32)
    assert (wide - want).abs().max() <= (half.float() - want).abs().max() + 1e-6


@interpreted
@pytest.mark.parametrize("chosen", WAYS, ids=str)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_norm_in_front_is_the_definition(chosen: Way, added: bool, tokens: int) -> None:
    x, residual, matrix, norm = operands(tokens, 35, 53)
    add = residual if added else None
    want, sum_ = add_norm_linear(x, add, norm, EPS, matrix)
    got, total = fused.norm_product(chosen, x, add, norm, EPS, matrix)
    assert torch.equal(total, sum_)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    x, norm, matrix = x.half(), norm.half(), matrix.half()
    add = None if add is None else add.half()
    want, sum_ = add_norm_linear(x, add, norm, EPS, matrix)
    got, total = fused.norm_product(chosen, x, add, norm, EPS, matrix)
    assert torch.equal(total, sum_)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@interpreted
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_without_a_gpu_the_library_computes(tokens: int) -> None:
    x, residual, matrix, norm = operands(tokens, 19, 53)
    assert torch.equal(fused.linear(x, matrix, None), linear(x, matrix, None))
    bias = torch.arange(19.0)
    assert torch.equal(fused.linear(x, matrix, bias), linear(x, matrix, bias))
    assert torch.equal(fused.scores(x, matrix), scores(x, matrix))
    got, _ = fused.add_norm_linear(x, residual, norm, EPS, matrix)
    want, _ = add_norm_linear(x, residual, norm, EPS, matrix)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_a_way_is_one_that_the_kernel_can_go(normed: bool) -> None:
    for tokens in (0, 1, 2, 3, 4, 5, 8, 16, 17, 32, 256, 8192):
        for outputs in (1, 96, 576, 2048, 3648, 163840):
            for channels in (8, 576, 896, 1408, 2048, 4096, 11264):
                got = way(tokens, outputs, channels, normed)
                if got is None:
                    continue
                assert 1 <= tokens <= TURNS[-1][0]
                assert got.channels & (got.channels - 1) == got.outputs & (got.outputs - 1) == 0
                assert got.channels >= channels
                held = got.outputs * got.channels // (32 * got.warps)
                assert held <= THREAD_VALUES, f"{held} values of the matrix a thread"


def test_what_was_measured_decides() -> None:
    """On an H200: ours for one token; for two and four while the matrix is small."""
    assert way(1, 163840, 2048, False) == Way(4, 2048, 8)
    assert way(1, 3648, 2048, True) == Way(8, 2048, 8)
    assert way(2, 3648, 2048, True) is not None
    assert way(2, 163840, 2048, False) is None
    assert way(4, 3648, 2048, True) is None
    assert way(4, 2048, 2048, False) is not None
    assert way(5, 2048, 2048, False) is None


def test_channels_that_are_no_wide_loads_are_the_library_s() -> None:
    assert way(1, 2048, 2047, False) is None


@interpreted
@pytest.mark.parametrize(("outputs", "channels"), [(33, 53), (70, 128)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_fixed_product_is_the_definition_and_its_rows_are_alike(
    outputs: int, channels: int, biased: bool
) -> None:
    """Of rows of a wider tensor, in one tile and in two, whatever is behind them: in the
    interpreter the bits of a tile follow from what it holds and where, on a GPU not even from
    where."""
    x, _, matrix, _ = operands(131, outputs, channels)
    bias = torch.randn(outputs) if biased else None
    got = fixed.linear(x, matrix, bias)
    torch.testing.assert_close(got, linear(x, matrix, bias), atol=1e-5, rtol=1e-5)
    for rows in (slice(0, 1), slice(0, 70), slice(128, 131)):  # at the edge of a tile
        assert torch.equal(fixed.linear(x[rows], matrix, bias), got[rows])
    assert torch.equal(fixed.linear(x[None, :3], matrix, bias), got[None, :3])
    assert fixed.linear(x[:0], matrix, bias).shape == (0, outputs)
    wide = fixed.scores(x[:2].half(), matrix.half())
    assert wide.dtype == torch.float32


@interpreted
def test_a_norm_before_a_fixed_product_is_the_definition() -> None:
    x, residual, matrix, norm = operands(5, 33, 53)
    for added in (residual, None):
        got, total = fixed.add_norm_linear(x, added, norm, EPS, matrix)
        want, expected = add_norm_linear(x, added, norm, EPS, matrix)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_the_fixed_way_asks_for_nothing_but_the_matrix() -> None:
    assert fixed_way(8192).outputs == 2 * fixed_way(8191).outputs
