"""The towers' kernels, compiled, against their definitions on the same device and in fp32."""

import numpy as np
import pytest
import torch

from tests.vision.moonvit_reference import CONFIG
from vitrail.attention.installed import releases
from vitrail.attention.plan import PlanLimits, make_table
from vitrail.config.hardware import from_device
from vitrail.engine.encode import send
from vitrail.engine.encode_graphs import EncodeGraphs
from vitrail.engine.graphs import Recorder
from vitrail.ops.resize.naive import Resample
from vitrail.ops.resize.taps import taps
from vitrail.ops.vision import naive
from vitrail.ops.vision.naive import Grids
from vitrail.vision.moonvit import MoonVit
from vitrail.vision.preprocess import pad, patchify, resize
from vitrail.vision.rungs import rungs_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.suite("kernels", minutes=2, owner="vision", gpus=1),
]
SIZES = [(66, 66), (2, 3), (1, 1), (12, 36)]
DTYPES = [torch.float32, torch.bfloat16]


def kernels():
    from vitrail.ops.vision import triton

    return triton


def drawn(*size, seed=0, dtype=torch.float32):
    made = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return made.to("cuda", dtype)


def close(got, want, steps):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    limit = steps * torch.finfo(want.dtype).eps * (1 + want.float().abs().max())
    assert (got.float() - want.float()).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalise_and_embed(dtype):
    raw = torch.randint(0, 256, (1001, 588), dtype=torch.uint8, device="cuda")
    exact = naive.normalise(raw.cpu(), dtype)  # a GPU's division by 255 is not, in torch
    assert torch.equal(kernels().normalise(raw, dtype).cpu(), exact)
    weight, bias = drawn(1152, 588, dtype=dtype) / 24, drawn(1152, seed=1, dtype=dtype)
    close(kernels().embed(raw, weight, bias), naive.embed(raw, weight, bias), 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions(dtype):
    grids = Grids.of(SIZES, torch.device("cuda"))
    x = drawn(grids.num_patches, 1152, dtype=dtype)
    table = drawn(64, 64, 1152, seed=1, dtype=dtype)
    close(
        kernels().add_positions(x.clone(), table, grids),
        naive.add_positions(x, table, grids),
        1 if dtype == torch.bfloat16 else 16,
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype, interleaved):
    device = torch.device("cuda")
    grids = Grids.of([*SIZES, (1, 511)], device)
    tables = naive.rope_tables(grids, 72, 10000.0, device)
    for got, want in zip(kernels().rope_tables(grids, 72, 10000.0, device), tables, strict=True):
        assert (got - want).abs().max() <= 1e-4
    qkv = drawn(grids.num_patches, 48, 72, dtype=dtype)
    heads = (16, 16, 16)
    want = naive.rotate_heads(qkv, heads, *tables, interleaved)
    got = kernels().rotate_heads(qkv.clone(), heads, *tables, interleaved)
    for a, b in zip(got, want, strict=True):
        close(a, b, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x, delta = drawn(1001, 1152, dtype=dtype), drawn(1001, 1152, seed=1, dtype=dtype)
    weight, bias = drawn(1152, seed=2, dtype=dtype), drawn(1152, seed=3, dtype=dtype)
    close(kernels().layer_norm(x, weight, bias, 1e-5), naive.layer_norm(x, weight, bias, 1e-5), 4)
    normed, total = naive.add_layer_norm(x, delta, weight, bias, 1e-5)
    got = kernels().add_layer_norm(x, delta.clone(), weight, bias, 1e-5)
    assert torch.equal(got[1], total)
    close(got[0], normed, 4)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_in_the_products_epilogue(approximate):
    x, bias = drawn(1001, 1152, dtype=torch.bfloat16), drawn(4304, seed=1, dtype=torch.bfloat16)
    weight = drawn(4304, 1152, seed=2, dtype=torch.bfloat16) / 34
    want = naive.linear_gelu(x.float(), weight.float(), bias.float(), approximate)
    ours = kernels().linear_gelu(x, weight, bias, approximate)
    plain = naive.linear_gelu(x, weight, bias, approximate)
    off, theirs = ((t.float() - want).norm() for t in (ours, plain))
    assert off <= 1.2 * theirs


@pytest.mark.parametrize(
    ("old", "new"), [((1024, 1024), (897, 897)), ((300, 500), (300, 500)), ((64, 300), (120, 311))]
)
def test_pictures_become_the_processors_patches(old, new):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (*old, 3), np.uint8)
    pixels[generator.random(old) < 0.3] = 255
    grid = tuple(-(-side // 28) * 2 for side in new)
    tables = [table for pair in zip(old, new, strict=True) for table in taps(*pair)]
    sent = send([pixels, *tables], torch.device("cuda"))
    assert all(np.array_equal(t.cpu(), a) for t, a in zip(sent, [pixels, *tables], strict=True))
    from vitrail.ops.resize.triton import resized_patches

    got = resized_patches(sent[0], Resample(*sent[1:3]), Resample(*sent[3:]), grid, 14)
    want = patchify(pad(resize(pixels, *new), grid[0] * 14, grid[1] * 14), 14)
    assert np.array_equal(got.cpu().numpy(), want)


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize(
    "sizes", [[(66, 66)], [(2, 2)], [(16, 16), (2, 6), (30, 12)], [(4, 4)] * 8, [(20, 30)]]
)
def test_a_graph_is_the_tower(sizes, backend):
    """Also after another batch has left its patches in the buffers."""
    tower = MoonVit(CONFIG, torch.float32).to("cuda", torch.bfloat16)
    for name, parameter in tower.named_parameters():
        if "norm" not in name:
            parameter.copy_(drawn(*parameter.shape, seed=len(name), dtype=torch.bfloat16) * 0.05)
    limits = PlanLimits(
        dtype="bfloat16", page_size=None, max_batch=4356, max_q_len=4356, max_kv_len=4356
    )
    facts = torch.cuda.get_device_properties(0)
    gpu = from_device(
        facts.name, facts.major * 10 + facts.minor, facts.multi_processor_count, facts.total_memory
    )
    table = make_table(tower.sites(), limits, gpu, backend, releases())
    rungs = rungs_of(CONFIG, 4356, 4356, tower.sites(), table)
    assert rungs[0] == 264
    assert rungs[-1] == 4356
    graphs = EncodeGraphs(Towered(tower), table, CONFIG, rungs, torch.device("cuda"))
    graphs.capture(Recorder(torch.device("cuda"), first=False))
    count = sum(h * w for h, w in sizes)
    raw = torch.randint(0, 256, (count, 588), dtype=torch.uint8, device="cuda")
    full = torch.full((4356, 588), 255, dtype=torch.uint8, device="cuda")
    want, got = tower(raw, sizes, table), graphs.run(raw, sizes)
    close(got, want, 8)
    assert graphs.run(full, [(66, 66)]).isfinite().all()
    close(graphs.run(raw, sizes), want, 8)
    assert graphs.run(raw.float(), sizes) is None
    assert graphs.run(full[:1].expand(4420, -1), [(65, 68)]) is None
    many = [(2, 2)] * 7 + [(5, 3)] * 12
    raw = torch.randint(0, 256, (208, 588), dtype=torch.uint8, device="cuda")
    close(graphs.run(raw, many), tower(raw, many, table), 8)


class Towered:
    """A model that is a tower."""

    def __init__(self, tower):
        self.tower = tower

    def encode_patches(self, patches, grids, plans):
        return self.tower(patches, grids, plans)
