"""The kernels on a CUDA device, ours and FlashAttention-4's: half precision, over pages of the same
and of e4m3, against float64; page pools past 2^31 elements, graphs whose records are replaced,
memory that held NaN."""

import pytest
import torch

from tests.attention.dense_attention import dense, dense_packed, paged
from tests.attention.packed import varlen_metadata
from tests.attention.padded import padded_work
from vitrail.attention.backend import UNSCALED, load_backend
from vitrail.attention.fa4 import RELEASE
from vitrail.attention.installed import releases
from vitrail.attention.metadata import PagedMetadata, paged_metadata
from vitrail.attention.plan import DISTRIBUTIONS, AttentionPlan, plan
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.cache.kv_pool import dequantized, quantized
from vitrail.config.finding import accept
from vitrail.config.hardware import from_device
from vitrail.config.model import KvScales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.suite("kernels", minutes=5, owner="attention", gpus=1),
]
CUDA = torch.device("cuda")


def site(heads: int, kv_heads: int, dim: int, dim_v: int, **more) -> AttentionSite:
    facts = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


def latent(heads: int) -> AttentionSite:
    return site(heads, 1, 576, 512, latent_rank=512, scale=192**-0.5)


def backend(made: AttentionPlan):
    return load_backend(made.backend)


def on_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


needs_fa4 = pytest.mark.skipif(
    releases().get("fa4") != RELEASE, reason=f"needs flash-attn-4 {RELEASE} (the extra fa4)"
)
BACKENDS = ["triton", pytest.param("fa4", marks=needs_fa4)]


def planned(
    where: AttentionSite,
    phase: Phase,
    q_lens,
    kv_lens,
    page: int = 16,
    dtype: str = "bfloat16",
    name: str = "triton",
    kv_dtype: str | None = None,
) -> AttentionPlan:
    if name == "cute" and not on_hopper():
        pytest.skip("the kernel is made of Hopper's instructions")
    if name in DISTRIBUTIONS and name not in releases():
        pytest.skip(f"{DISTRIBUTIONS[name]} is not installed")
    facts = torch.cuda.get_device_properties(0)
    cc = facts.major * 10 + facts.minor
    gpu = from_device(facts.name, cc, facts.multi_processor_count, facts.total_memory)
    shape = AttentionShape(
        site=where,
        phase=phase,
        dtype=dtype,
        page_size=page if phase in PAGED else None,
        batch=len(q_lens),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        kv_dtype=kv_dtype,
    )
    return accept(plan(shape, gpu, name, releases()))


def inputs(where: AttentionSite, q_lens, kv_lens, dtype: torch.dtype):
    """q, k, v on the CPU, of values that `dtype` holds."""
    g = torch.Generator().manual_seed(0)
    sizes = (
        (sum(q_lens), where.num_q_heads, where.head_dim),
        (sum(kv_lens), where.num_kv_heads, where.head_dim),
        (sum(kv_lens), where.num_kv_heads, where.head_dim_v),
    )
    q, k, v = (torch.randn(*size, generator=g).to(dtype) for size in sizes)
    return q, k, (k[..., : where.head_dim_v] if where.latent_rank else v)


def plain(q, k, v, where: AttentionSite, q_lens, kv_lens, sink):
    """Plain torch in the inputs' dtype: products rounded to it, softmax in it."""
    group = where.num_q_heads // where.num_kv_heads
    parts = []
    for a, b, c in zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True):
        kk, vv = (t.transpose(0, 1).repeat_interleave(group, 0) for t in (b, c))
        scores = a.transpose(0, 1) @ kk.transpose(1, 2) * where.scale
        if where.softcap is not None:
            scores = where.softcap * torch.tanh(scores / where.softcap)
        n, t = len(b), len(a)
        gap = torch.arange(n - t, n, device=q.device)[:, None] - torch.arange(n, device=q.device)
        hidden = gap < 0 if where.causal else torch.zeros_like(gap, dtype=torch.bool)
        if where.window is not None:
            hidden |= gap.abs() > where.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sink is not None:
            logit = sink.to(q.dtype)[:, None, None].expand(-1, t, 1)
            scores = torch.cat([scores, logit], -1)
        parts.append((scores.softmax(-1)[..., :n] @ vv).transpose(0, 1))
    return torch.cat(parts)


def held(got, q, k, v, where, q_lens, kv_lens, sink=None) -> None:
    """Error at most twice that of plain torch in the same dtype; lse to 1e-3."""
    q, k, v = (t.to(CUDA) for t in (q, k, v))
    rough = plain(q, k, v, where, q_lens, kv_lens, sink).double().cpu()
    q, k, v = (t.cpu() for t in (q, k, v))
    out, lse = dense_packed(q, k, v, where, q_lens, kv_lens, None if sink is None else sink.cpu())
    ours = (got.out.double().cpu() - out).abs().max()
    assert got.out.dtype == q.dtype
    assert got.out.isfinite().all()
    assert ours <= 2 * (rough - out).abs().max(), (ours, (rough - out).abs().max())
    assert (got.lse.double().cpu() - lse).abs().max() <= 1e-3


def run_paged(made: AttentionPlan, q, k, v, meta: PagedMetadata, sink=None, scales=UNSCALED):
    if made.shape.site.latent_rank:
        return backend(made).latent(made, q, k[:, :, 0], meta, scales)
    return backend(made).paged(made, q, k, v, meta, sink, scales)


def on_gpu(k, v, q_lens, kv_lens, page: int):
    pages = paged(k, v, q_lens, kv_lens, page)
    table = pages.meta.block_table.to(CUDA)
    return pages.k.to(CUDA), pages.v.to(CUDA), paged_metadata(page, q_lens, kv_lens, table)


@pytest.fixture(autouse=True)
def dirty_memory() -> None:
    """What the allocator hands out next holds NaN."""
    blocks = [torch.full((1 << n,), torch.nan, device=CUDA) for n in range(8, 26) for _ in "ab"]
    del blocks


DECODES = {
    "gqa": site(32, 8, 128, 128),
    "wide": site(64, 4, 192, 128),
    "one": site(8, 1, 192, 128),
    "seven": site(28, 4, 64, 64),
    "window_sink": site(16, 2, 128, 128, window=300, sink=True),
    "softcap": site(16, 8, 256, 256, softcap=30.0),
    "mla16": latent(16),
    "mla128": latent(128),
}


@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("kernels", ["triton", "cute"])
def test_decode(kernels, name, page):
    where = DECODES[name]
    kv_lens = [2500, 1, 63, 64, 65, 700]
    q_lens = [1] * len(kv_lens)
    q, k, v = inputs(where, q_lens, kv_lens, torch.bfloat16)
    sink = torch.linspace(-1, 1, where.num_q_heads, device=CUDA) if where.sink else None
    made = planned(where, Phase.DECODE, q_lens, kv_lens, page, name=kernels)
    pool_k, pool_v, meta = on_gpu(k, v, q_lens, kv_lens, page)
    held(
        run_paged(made, q.to(CUDA), pool_k, pool_v, meta, sink),
        q, k, v, where, q_lens, kv_lens, sink,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gqa", "wide", "window_sink", "mla16"])
@pytest.mark.parametrize(
    ("kernels", "phase"),
    [("triton", Phase.EXTEND), ("triton", Phase.DECODE), ("cute", Phase.DECODE)],
)
def test_several_queries(kernels, phase, name):
    where = DECODES[name]
    q_lens, kv_lens = [3, 17, 32, 1, 2], [3, 900, 300, 5, 700]
    if phase is Phase.EXTEND:
        q_lens, kv_lens = [*q_lens, 200], [*kv_lens, 333]
    q, k, v = inputs(where, q_lens, kv_lens, torch.bfloat16)
    sink = torch.linspace(-1, 1, where.num_q_heads, device=CUDA) if where.sink else None
    made = planned(where, phase, q_lens, kv_lens, 16, name=kernels)
    pool_k, pool_v, meta = on_gpu(k, v, q_lens, kv_lens, 16)
    held(
        run_paged(made, q.to(CUDA), pool_k, pool_v, meta, sink),
        q, k, v, where, q_lens, kv_lens, sink,
    )  # fmt: skip


def e4m3_gpu() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("converts no e4m3: compute capability 89 or newer does")


def held_over(kind: tuple[str, str | None], where, phase: Phase, q_lens, kv_lens, page: int):
    """`held`, for (dtype, kv_dtype). Scales are powers of two, so that what the pages stand for is
    exact in half precision and torch computes with the same values."""
    dtype, kv_dtype = kind
    q, k, v = inputs(where, q_lens, kv_lens, getattr(torch, dtype))
    sink = torch.linspace(-1, 1, where.num_q_heads, device=CUDA) if where.sink else None
    scales, stored = UNSCALED, (k, v)
    if kv_dtype is not None:
        e4m3_gpu()
        scales = KvScales(0.25, 0.25 if where.latent_rank else 2.0)
        stored = (quantized(k, scales.k), quantized(v, scales.v))
        k, v = (dequantized(t, s, q.dtype) for t, s in zip(stored, scales, strict=True))
    made = planned(where, phase, q_lens, kv_lens, page, dtype, kv_dtype=kv_dtype)
    pool_k, pool_v, meta = on_gpu(*stored, q_lens, kv_lens, page)
    got = run_paged(made, q.to(CUDA), pool_k, pool_v, meta, sink, scales)
    held(got, q, k, v, where, q_lens, kv_lens, sink)


KINDS = [("float16", None), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(filter(None, k)))
@pytest.mark.parametrize(
    ("name", "page"),
    [*((name, 64) for name in DECODES), ("gqa", 1), ("gqa", 16), ("mla16", 1), ("mla16", 16)],
)
def test_decode_in_other_dtypes(name, page, kind):
    kv_lens = [2500, 1, 63, 64, 65, 700]
    held_over(kind, DECODES[name], Phase.DECODE, [1] * len(kv_lens), kv_lens, page)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(filter(None, k)))
@pytest.mark.parametrize("name", ["gqa", "window_sink", "mla16", "mla128"])
@pytest.mark.parametrize("phase", PAGED)
def test_several_queries_in_other_dtypes(name, phase, kind):
    q_lens, kv_lens = [3, 17, 32, 1, 2], [3, 900, 300, 5, 700]
    if phase is Phase.EXTEND:
        q_lens, kv_lens = [*q_lens, 200], [*kv_lens, 333]
    held_over(kind, DECODES[name], phase, q_lens, kv_lens, 16)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_e4m3_rows_are_written_as_on_a_cpu(scale):
    """Code by code: ties, saturation, subnormal values and what is not finite."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(40, 1000, generator=g) * 2.0 ** torch.arange(-14, 12).repeat(40)[:1000]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:127]
    ties = (every[1:] + every[:-1]) / 2 * scale
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 464.0, 465.0, 3e38, 0.0, -0.0])
    x = torch.cat([x.flatten(), ties, -ties, odd])
    codes = quantized(x.to(CUDA), scale).view(torch.uint8).cpu()
    want = quantized(x, scale)
    nan = want.float().isnan()
    assert torch.equal(codes[~nan], want.view(torch.uint8)[~nan])
    assert (codes[nan] & 127 == 127).all()


@needs_fa4
@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("name", [n for n in DECODES if not n.startswith("mla")])
@pytest.mark.parametrize("phase", PAGED)
def test_flash_attention_4_in_pages(phase, name, page):
    where = DECODES[name]
    q_lens, kv_lens = [1, 0, 1, 1, 1, 1], [2500, 0, 63, 64, 65, 700]
    if phase is Phase.EXTEND:
        q_lens = [200, 0, 63, 1, 3, 33]
    q, k, v = inputs(where, q_lens, kv_lens, torch.bfloat16)
    sink = torch.linspace(-1, 1, where.num_q_heads, device=CUDA) if where.sink else None
    made = planned(where, phase, q_lens, kv_lens, page, name="fa4")
    pool_k, pool_v, meta = on_gpu(k, v, q_lens, kv_lens, page)
    held(
        run_paged(made, q.to(CUDA), pool_k, pool_v, meta, sink),
        q, k, v, where, q_lens, kv_lens, sink,
    )  # fmt: skip


@needs_fa4
@pytest.mark.parametrize("where", [site(4, 4, 192, 128), site(4, 2, 128, 128, sink=True)])
def test_flash_attention_4_in_pieces_of_a_context(where):
    """Keys before, around and after the queries, and none: rows without keys are 0 and -inf."""
    q_lens, kv_lens, starts = [70, 300, 40, 90], [500, 200, 0, 100], [800, 50, 3, -60]
    q, k, v = inputs(where, q_lens, kv_lens, torch.bfloat16)
    sink = torch.linspace(-1, 1, where.num_q_heads, device=CUDA) if where.sink else None
    made = planned(where, Phase.PREFILL, q_lens, kv_lens, name="fa4")
    meta = varlen_metadata(q_lens, CUDA, kv_lens, starts)
    got = backend(made).varlen(made, q.to(CUDA), k.to(CUDA), v.to(CUDA), meta, sink)
    logits = None if sink is None else sink.cpu()
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), starts, strict=True)
    each = [dense(a, b, c, where, start, logits) for a, b, c, start in parts]
    out, lse = torch.cat([a for a, _ in each]), torch.cat([b for _, b in each])
    assert (got.out.double().cpu() - out).abs().max() <= 2e-2
    blind = lse == -torch.inf
    assert torch.equal(got.lse.cpu() == -torch.inf, blind)
    assert (got.lse.double().cpu() - lse)[~blind].abs().max() <= 1e-3


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "where",
    [
        site(4, 4, 72, 72, causal=False),
        site(4, 4, 64, 64, causal=False, window=100, sink=True),
        site(4, 2, 80, 80, causal=False),
        site(4, 4, 128, 128),
        site(4, 4, 192, 128),
        site(6, 2, 128, 128, window=64, softcap=50.0),
    ],
    ids=lambda w: f"{w.head_dim}-{w.causal}-{w.window}",
)
def test_varlen(where, dtype, name):
    lens = [256, 1, 529, 300, 64, 65]
    q, k, v = inputs(where, lens, lens, getattr(torch, dtype))
    sink = torch.linspace(-1, 1, where.num_q_heads, device=CUDA) if where.sink else None
    phase = Phase.PREFILL if where.causal else Phase.ENCODE
    made = planned(where, phase, lens, lens, dtype=dtype, name=name)
    got = backend(made).varlen(
        made, q.to(CUDA), k.to(CUDA), v.to(CUDA), varlen_metadata(lens, CUDA), sink
    )
    held(got, q, k, v, where, lens, lens, sink)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("where", [site(4, 4, 72, 72, causal=False), site(4, 4, 192, 128)])
def test_a_sequence_of_nan_leaves_its_neighbours_alone(where, name):
    """Whichever comes first, and wherever tiles end."""
    lens = [150, 70, 300, 129]
    phase = Phase.PREFILL if where.causal else Phase.ENCODE
    made = planned(where, phase, lens, lens, name=name)
    q, k, v = (t.to(CUDA) for t in inputs(where, lens, lens, torch.bfloat16))
    meta = varlen_metadata(lens, CUDA)
    clean = backend(made).varlen(made, q, k.clone(), v.clone(), meta).out.split(lens)
    for faulty in range(4):
        bad_k, bad_v = k.clone(), v.clone()
        for t in (bad_k, bad_v):
            t.split(lens)[faulty].fill_(torch.nan)
        got = backend(made).varlen(made, q, bad_k, bad_v, varlen_metadata(lens, CUDA)).out
        for i, (one, want) in enumerate(zip(got.split(lens), clean, strict=True)):
            assert one.isnan().all() if i == faulty else torch.equal(one, want), (faulty, i)


@pytest.mark.parametrize("kernels", ["triton", "cute"])
@pytest.mark.parametrize("page", [16, 4])
def test_d10_a_pool_past_2_to_the_31_elements(page, kernels):
    """Pages on both sides of 2^31 elements hold the same keys."""
    where = site(32, 8, 128, 128)
    elements = page * 8 * 128
    far = 2**31 // elements
    pools = [torch.empty(far + 2, page, 8, 128, dtype=torch.bfloat16, device=CUDA) for _ in "kv"]
    for pool in pools:
        pool.fill_(torch.nan)
        pool[1] = torch.randn(page, 8, 128, device=CUDA)
        pool[far + 1] = pool[far - 1] = pool[1]
    q = torch.randn(1, 32, 128, device=CUDA, dtype=torch.bfloat16).repeat(3, 1, 1)
    table = torch.tensor([[1], [far - 1], [far + 1]], dtype=torch.int32, device=CUDA)
    lens = [page] * 3
    made = planned(where, Phase.DECODE, [1] * 3, lens, page, name=kernels)
    out, _ = backend(made).paged(made, q, *pools, paged_metadata(page, [1] * 3, lens, table))
    assert out.isfinite().all()
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


@pytest.mark.parametrize("kernels", ["triton", "cute"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_d14_no_nan_at_any_length(batch, kernels):
    """Every length from 1 to 600 over memory that held NaN; the same batch twice is bitwise so."""
    where = site(32, 8, 128, 128)
    pool_k, pool_v = (torch.randn(400, 16, 8, 128, device=CUDA).bfloat16() for _ in "kv")
    table = torch.randperm(400, device=CUDA)[: 38 * batch].view(batch, 38).int()
    q = torch.randn(batch, 32, 128, device=CUDA).bfloat16()
    made = planned(where, Phase.DECODE, [1] * batch, [600] * batch, name=kernels)
    for first in range(1, 601, 7):
        lens = [(first + 83 * i) % 600 + 1 for i in range(batch)]
        metas = [paged_metadata(16, [1] * batch, lens, table) for _ in range(2)]
        a, b = (backend(made).paged(made, q, pool_k, pool_v, meta) for meta in metas)
        assert a.out.isfinite().all()
        assert torch.equal(a.out, b.out)


@pytest.mark.parametrize("kernels", ["triton", "cute"])
def test_a_graph_serves_other_lengths_by_its_records(kernels):
    """Captured once with room for all, replayed with the records of other batches."""
    where = site(32, 8, 128, 128)
    batch, pages, longest = 4, 160, 2560
    pool_k, pool_v = (torch.randn(700, 16, 8, 128, device=CUDA).bfloat16() for _ in "kv")
    table = torch.randperm(700, device=CUDA)[: batch * pages].view(batch, pages).int()
    q = torch.randn(batch, 32, 128, device=CUDA).bfloat16()
    made = planned(where, Phase.DECODE, [1] * batch, [longest] * batch, name=kernels)

    def records(lens):
        meta = paged_metadata(16, [1] * batch, lens, table)
        return meta, padded_work(made, meta, CUDA, (made.max_items, batch))

    meta, work = records([longest] * batch)
    meta.work.put(made, work)
    backend(made).paged(made, q, pool_k, pool_v, meta)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = backend(made).paged(made, q, pool_k, pool_v, meta)
    batches = [[longest] * batch, [1, 2559, 16, 17], [700, 1, 1, 1], [2000, 1000, 500, 250]]
    for lens in (*batches, [16] * batch, [1] * batch):
        other, new = records(lens)
        work.items.copy_(new.items)
        work.combines.copy_(new.combines)
        graph.replay()
        want = backend(made).paged(
            made, q, pool_k, pool_v, paged_metadata(16, [1] * 4, lens, table)
        )
        assert torch.equal(got.out, want.out), lens
        assert torch.equal(got.lse, want.lse)
