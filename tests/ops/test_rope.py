"""Rotary tables and rotations against complex numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.ops.rope.naive import rope_table, rope_table_2d, rotate

CPU = torch.device("cpu")


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
