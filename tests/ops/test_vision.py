"""The towers' kernels, in the interpreter, against their definitions: odd sizes, sizes of one,
grids smaller and larger than the table; the definitions against plain sums."""

import pytest
import torch

from vitrail.ops.rope.naive import rope_table
from vitrail.ops.vision import naive
from vitrail.ops.vision import triton as kernels
from vitrail.ops.vision.naive import Grids

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
CPU = torch.device("cpu")
SIZES = [(2, 3), (1, 1), (3, 4), (5, 1)]
COUNT = sum(h * w for h, w in SIZES)
DTYPES = (torch.float32, torch.float16)


def drawn(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, steps=1):
    """Within `steps` of the last place of values of order one; every element was written."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    limit = steps * torch.finfo(want.dtype).eps * (1 + want.float().abs().max().item())
    assert (got.float() - want.float()).abs().max().item() <= limit


@pytest.mark.parametrize("features", [12, 27, 588])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalise_is_its_definition(features, dtype):
    raw = torch.randint(0, 256, (11, features), dtype=torch.uint8)
    raw[0, :2] = torch.tensor([0, 255])
    assert torch.equal(kernels.normalise(raw, dtype), naive.normalise(raw, dtype))
    assert kernels.normalise(raw[:0], dtype).shape == (0, features)


@pytest.mark.parametrize("features", [16, 27, 588])
def test_embed_pads_what_is_not_wide(features):
    raw = torch.randint(0, 256, (11, features), dtype=torch.uint8)
    weight, bias = drawn(10, features), drawn(10, seed=1)
    close(kernels.embed(raw, weight, bias), naive.embed(raw, weight, bias), 8)
    floats = naive.normalise(raw, torch.float32)
    close(kernels.embed(floats, weight, bias), naive.embed(floats, weight, bias), 8)


@pytest.mark.parametrize(
    ("table", "dtype"), [((3, 4), DTYPES[0]), ((16, 3), DTYPES[0]), ((1, 1), DTYPES[1])]
)
def test_positions_are_torchs_bicubic(table, dtype):
    x, learned = drawn(COUNT, 21, dtype=dtype), drawn(*table, 21, seed=1, dtype=dtype)
    grids = Grids.of(SIZES, CPU)
    want = naive.add_positions(x, learned, grids)
    close(kernels.add_positions(x.clone(), learned, grids), want, 8)


@pytest.mark.parametrize("dim", [4, 72])
def test_tables_are_the_definition_up_to_the_longest_side(dim):
    grids = Grids.of([*SIZES, (1, 90) if dim == 4 else (90, 1)], CPU)
    got, want = (m.rope_tables(grids, dim, 10000.0, CPU) for m in (kernels, naive))
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-4  # of angles up to 90 in fp32
        assert (a[:COUNT] - b[:COUNT]).abs().max() <= 2e-6


def test_many_grids_and_empty_ones():
    """More than a program looks at together; empty ones anywhere, as in a graph's padding."""
    sizes = [(0, 0), (1, 2), (0, 0), *[(1, 1 + i % 3) for i in range(15)], (2, 2), (0, 0), (0, 0)]
    some = [size for size in sizes if size != (0, 0)]
    grids, full = Grids.of(sizes, CPU), Grids.of(some, CPU)
    x, learned = drawn(full.num_patches, 6), drawn(4, 4, 6, seed=1)
    want = naive.add_positions(x, learned, full)
    close(kernels.add_positions(x.clone(), learned, grids), want, 8)
    for a, b in zip(
        kernels.rope_tables(grids, 12, 1e4, CPU), naive.rope_tables(full, 12, 1e4, CPU), strict=True
    ):
        assert (a - b).abs().max() <= 2e-6


@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (3, 1, 1), (3, 3, 3)])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_turn_in_place_and_values_do_not(heads, interleaved, dtype):
    count, dim = 13, 72
    qkv = drawn(count, sum(heads), dim, dtype=dtype)
    tables = rope_table(torch.arange(count), dim, 10000.0)
    want = naive.rotate_heads(qkv, heads, *tables, interleaved)
    got = kernels.rotate_heads(qkv.clone(), heads, *tables, interleaved)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    assert torch.equal(got[2], qkv[:, -heads[2] :])


def test_pairs_in_bfloat16_are_words():
    qkv = drawn(5, 6, 12, dtype=torch.bfloat16)
    tables = rope_table(torch.arange(5), 12, 10000.0)
    want = naive.rotate_heads(qkv, (2, 2, 2), *tables, True)
    got = kernels.rotate_heads(qkv.clone(), (2, 2, 2), *tables, True)
    for a, b in zip(got, want, strict=True):
        close(a, b)  # the interpreter cuts where a GPU rounds


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_values_that_are_not_finite_become_zeros_and_their_keys_nan(dtype):
    qkv = drawn(4, 8, 12, dtype=dtype)  # 4 heads of queries, 2 of keys, 2 of values
    clean = qkv.clone()
    qkv[1, 6, 3], qkv[2, 7, 0] = torch.nan, -torch.inf
    tables = rope_table(torch.arange(4), 12, 10000.0)
    q, k, v = kernels.rotate_heads(qkv, (4, 2, 2), *tables, True)
    want = kernels.rotate_heads(clean, (4, 2, 2), *tables, True)
    assert kernels.MENDS
    assert not naive.MENDS
    assert torch.equal(q, want[0])
    for n in range(4):
        for h in range(2):
            if (n, h) in ((1, 0), (2, 1)):
                assert v[n, h].eq(0).all()
                assert k[n, h].isnan().all()
            else:
                assert torch.equal(v[n, h], want[2][n, h])
                assert torch.equal(k[n, h], want[1][n, h])


@pytest.mark.parametrize("channels", [1, 7, 144, 1152])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_torchs(channels, dtype):
    x, delta = drawn(9, channels, dtype=dtype), drawn(9, channels, seed=1, dtype=dtype) * 3 + 1
    x[3] = 5  # no variance
    weight, bias = drawn(channels, seed=2, dtype=dtype), drawn(channels, seed=3, dtype=dtype)
    want = naive.layer_norm(x, weight, bias, 1e-5)
    close(kernels.layer_norm(x, weight, bias, 1e-5), want, 4)
    normed, total = naive.add_layer_norm(x, delta, weight, bias, 1e-5)
    got = kernels.add_layer_norm(x, delta.clone(), weight, bias, 1e-5)
    assert torch.equal(got[1], total)
    close(got[0], normed, 4)
    assert kernels.layer_norm(x[:0], weight, bias, 1e-5).shape == (0, channels)


def test_a_row_that_is_not_finite_stays_alone():
    x = drawn(5, 20)
    x[2, 3] = torch.nan
    out = kernels.layer_norm(x, torch.ones(20), torch.zeros(20), 1e-5)
    assert out.isfinite().all(1).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_after_a_product(approximate, dtype):
    x, weight, bias = (drawn(*s, seed=i, dtype=dtype) for i, s in enumerate([(5, 8), (6, 8), (6,)]))
    exact = torch.nn.functional.gelu(
        torch.nn.functional.linear(x.double(), weight.double(), bias.double()),
        approximate=approximate,
    )
    got = kernels.linear_gelu(x, weight, bias, approximate)
    assert got.dtype == dtype
    limit = 8 * torch.finfo(dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= limit


def test_no_grid_is_no_work():
    grids = Grids.of([], CPU)
    assert kernels.rope_tables(grids, 12, 1e4, CPU)[0].shape == (0, 6)
    empty = torch.zeros(0, 5)
    assert kernels.add_positions(empty, drawn(2, 2, 5), grids) is empty
