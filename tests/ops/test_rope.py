"""Rotary tables and rotations against complex numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.kernels import interpreted
from vitrail.config.model import LinearScaling, Llama3Scaling, YarnScaling
from vitrail.ops.rope import triton
from vitrail.ops.rope.naive import rope_table, rope_table_2d, rotate

pytestmark = pytest.mark.suite("parity", minutes=0.5, owner="ops")

CPU = torch.device("cpu")
YARN = YarnScaling(
    factor=4.0,
    attention_factor=1.25,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position=4096,
    truncate=True,
)


def turned(x, angles, interleaved):
    """Each pair as one complex number times e^(i angle), in float64."""
    half = x.shape[-1] // 2
    first = torch.arange(half) * 2 if interleaved else torch.arange(half)
    second = first + (1 if interleaved else half)
    z = torch.complex(x[..., first].double(), x[..., second].double())
    z = z * torch.exp(1j * angles.double())[:, None]
    out = torch.empty(x.shape, dtype=torch.float64)
    out[..., first], out[..., second] = z.real, z.imag
    return out


@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 3),
    half=st.integers(1, 9),
    interleaved=st.booleans(),
    theta=st.sampled_from([10000.0, 800000.0]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_rotate_is_a_complex_product(tokens, heads, half, interleaved, theta):
    g = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, 3000, (tokens,), generator=g)
    x = torch.randn(tokens, heads, 2 * half, generator=g)
    powers = theta ** -(torch.arange(half).double() / half)
    want = turned(x, positions[:, None] * powers, interleaved)
    got = rotate(x, *rope_table(positions, 2 * half, theta), interleaved)
    assert got.shape == x.shape
    assert not tokens or (got.double() - want).abs().max() <= 2e-3  # fp32 angles up to 3000
    near = rotate(x, *rope_table(positions % 8, 2 * half, theta), interleaved)
    want = turned(x, (positions % 8)[:, None] * powers, interleaved)
    assert not tokens or (near.double() - want).abs().max() <= 1e-5


def frequencies(scaling, dim=64, theta=1e4):
    """What position 1 turns by, and the length of (cos, sin)."""
    cos, sin = rope_table(torch.tensor([1]), dim, theta, scaling)
    return torch.atan2(sin, cos)[0].double(), (cos**2 + sin**2).sqrt()[0]


def test_linear_scaling_divides_the_position():
    plain, _ = frequencies(None)
    scaled, length = frequencies(LinearScaling(factor=4.0))
    torch.testing.assert_close(scaled, plain / 4, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(length, torch.ones(32))


def test_llama3_scaling_keeps_the_quick_and_divides_the_slow():
    """One pair at a time, in float64, by the published branches on wavelengths."""
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    plain, _ = frequencies(None, 128, 5e5)
    scaled, _ = frequencies(scaling, 128, 5e5)
    kinds = set()
    for w, got in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / w
        if wavelength < 8192 / 4:
            kind, want = "kept", w
        elif wavelength > 8192:
            kind, want = "divided", w / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            kind, want = "between", (1 - smooth) * w / 8 + smooth * w
        kinds.add(kind)
        assert got == pytest.approx(want, rel=2e-6), kind
    assert kinds == {"kept", "divided", "between"}


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_the_quick_divides_the_slow_and_lengthens(truncate):
    scaling = YarnScaling(
        factor=4.0,
        attention_factor=1.25,
        beta_fast=32.0,
        beta_slow=1.0,
        original_max_position=4096,
        truncate=truncate,
    )
    plain, _ = frequencies(None)
    scaled, length = frequencies(scaling)
    torch.testing.assert_close(length, torch.full((32,), 1.25))
    turns = 4096 * plain / (2 * math.pi)
    kept, divided = turns > 32 * 1.4, turns < 1 / 1.4  # a channel beyond the ramp's ends
    assert kept.any()
    assert divided.any()
    torch.testing.assert_close(scaled[kept], plain[kept], atol=0, rtol=1e-6)
    torch.testing.assert_close(scaled[divided], plain[divided] / 4, atol=0, rtol=1e-6)
    share = (plain / scaled)[~kept & ~divided]
    assert (share.diff() > 0).all()
    assert ((share >= 1) & (share <= 4)).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_alone(interleaved):
    q, k = torch.randn(2, 1, 1, 24, generator=torch.Generator().manual_seed(3)).unbind(0)
    scores = []
    for shift in (0, 5, 100):
        tables = rope_table(torch.tensor([shift + 9, shift + 2]), 24, 10000.0)
        a = rotate(q[None, 0], *(t[:1] for t in tables), interleaved)
        b = rotate(k[None, 0], *(t[1:] for t in tables), interleaved)
        scores.append((a * b).sum())
    assert max(scores) - min(scores) <= 1e-4


def test_the_first_position_turns_nothing_and_dtype_is_kept():
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for interleaved in (True, False):
        got = rotate(x, *rope_table(torch.zeros(1, dtype=torch.long), 8, 1e4), interleaved)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, x)


def test_a20_pair_2i_turns_by_column_and_pair_2i_plus_1_by_row():
    height, width, dim = 3, 5, 12
    cos, sin = rope_table_2d([(1, 1), (height, width)], dim, 10000.0, CPU)
    assert cos.shape == (1 + height * width, dim // 2)
    assert torch.equal(cos[0], torch.ones(dim // 2))
    for row in range(height):
        for column in range(width):
            patch = 1 + row * width + column
            for i in range(dim // 4):
                frequency = 10000.0 ** (-4 * i / dim)
                for pair, position in ((2 * i, column), (2 * i + 1, row)):
                    angle = torch.tensor(position * frequency)
                    assert abs(cos[patch, pair] - angle.cos()) <= 1e-6
                    assert abs(sin[patch, pair] - angle.sin()) <= 1e-6


def test_d27_tables_of_nothing_are_empty():
    assert rope_table_2d([], 12, 1e4, CPU)[0].shape == (0, 6)
    assert rope_table(torch.zeros(0, dtype=torch.long), 12, 1e4)[0].shape == (0, 6)


@interpreted
@pytest.mark.parametrize("scaling", [None, LinearScaling(factor=4.0), YARN], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_the_kernel_is_the_definition(tokens, scaling):
    positions = torch.randperm(131072, generator=torch.Generator().manual_seed(7))[:tokens]
    got = triton.rope_table(positions, 22, 8e5, scaling)
    for mine, want in zip(got, rope_table(positions, 22, 8e5, scaling), strict=True):
        assert mine.shape == want.shape
        torch.testing.assert_close(mine, want, atol=1e-6, rtol=1e-6)
