"""The Triton kernels, in the interpreter, against attention written out: every site, phase and page
size, whatever the lengths; the faults others shipped."""

from dataclasses import replace

import pytest
import torch
from dense_attention import CPU_DEVICE, close, dense, dense_packed, packed, paged, site
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_plans import tiny

from tests.attention.packed import varlen_metadata
from vitrail.attention.backend import load_backend
from vitrail.attention.chunked import attend_chunks
from vitrail.attention.metadata import WorkCache, gather_slots, key_slots, with_chunks
from vitrail.attention.shape import Phase

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
BACKEND = load_backend("triton")
REFERENCE = load_backend("reference")
SITES = {
    "plain": site(),
    "window": site(window=4),
    "softcap": site(softcap=1.5),
    "sink": site(sink=True, window=7),
    "heads_alone": site(heads=2, kv_heads=2, dim=7, dim_v=7),
    "wide": site(heads=4, kv_heads=2, dim=24, dim_v=36),
}
TOLERANCE = 2e-5


def sink_of(where):
    return torch.linspace(-1, 1, where.num_q_heads) if where.sink else None


def varlen(plan, q, k, v, q_lens, kv_lens, sink=None):
    meta = varlen_metadata(q_lens, CPU_DEVICE, kv_lens)
    return BACKEND.varlen(plan, q, k, v, meta, sink)


@pytest.mark.parametrize("name", SITES)
def test_varlen_is_dense(name):
    where = SITES[name]
    q_lens, kv_lens = [5, 1, 0, 17, 3], [5, 9, 2, 31, 0]
    q, k, v = packed(where, q_lens, kv_lens)
    got = varlen(tiny(where, Phase.PREFILL), q, k, v, q_lens, kv_lens, sink_of(where))
    close(got, dense_packed(q, k, v, where, q_lens, kv_lens, sink_of(where)), TOLERANCE)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dim", [72, 80])
def test_encode_sees_both_sides(window, dim, sink):
    where = site(1, 1, dim, dim, causal=False, window=window, sink=sink)
    lens = [13, 1, 39]
    q, k, v = packed(where, lens, lens)
    want = dense_packed(q, k, v, where, lens, lens, sink_of(where))
    got = varlen(tiny(where, Phase.ENCODE), q, k, v, lens, lens, sink_of(where))
    close(got, want, TOLERANCE)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_captured_work_serves_other_lengths_of_as_many_rows(heads):
    """Records made of `cu_q` alone, as a graph replays them: of the lengths that it has then."""
    where, captured = site(*heads, 24, 24, causal=False), [57, 1, 1, 1, 1]
    plan = tiny(where, Phase.ENCODE)
    meta = replace(varlen_metadata(captured, CPU_DEVICE), longest=64)
    for lens in (captured, [13, 1, 39, 8, 0], [0, 0, 61, 0, 0], [16, 16, 16, 13, 0]):
        q, k, v = packed(where, lens, lens)
        want = dense_packed(q, k, v, where, lens, lens)
        meta.cu_q.copy_(varlen_metadata(lens, CPU_DEVICE).cu_q)
        close(BACKEND.varlen(plan, q, k, v, replace(meta, work=WorkCache())), want, TOLERANCE)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("name", SITES)
def test_paged_is_dense(name, page_size, splits):
    where = SITES[name]
    q_lens, kv_lens = [1, 4, 0, 1, 9], [37, 2, 3, 65, 48]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size)
    plan = tiny(where, Phase.EXTEND, page_size, splits)
    want = dense_packed(q, k, v, where, q_lens, kv_lens, sink_of(where))
    close(BACKEND.paged(plan, q, pages.k, pages.v, pages.meta, sink_of(where)), want, TOLERANCE)


@pytest.mark.parametrize(("rank", "rope"), [(16, 6), (64, 16)])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [2, 20])
def test_latent_is_dense(rank, rope, splits, heads):
    """Keys and values of one row; more heads than a tile has rows."""
    where = site(heads, 1, rank + rope, rank, latent_rank=rank)
    q_lens, kv_lens = [1, 3], [45, 8]
    q, k, _ = packed(where, q_lens, kv_lens)
    pages = paged(k, k, q_lens, kv_lens, 8)
    plan = tiny(where, Phase.DECODE, 8, splits, max_q_len=4)
    got = BACKEND.latent(plan, q, pages.k[:, :, 0], pages.meta)
    close(got, dense_packed(q, k, k[..., :rank], where, q_lens, kv_lens), TOLERANCE)


@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_lengths_pages_and_windows(data):
    batch = data.draw(st.integers(0, 4))
    q_lens = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    kv_lens = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
    page_size = data.draw(st.integers(1, 20))
    where = site(
        heads=4,
        window=data.draw(st.none() | st.integers(0, 12)),
        softcap=data.draw(st.none() | st.just(2.0)),
    )
    splits = data.draw(st.integers(1, 4))
    q, k, v = packed(where, q_lens, kv_lens, seed=batch)
    pages = paged(k, v, q_lens, kv_lens, page_size)
    got = BACKEND.paged(
        tiny(where, Phase.EXTEND, page_size, splits), q, pages.k, pages.v, pages.meta
    )
    if batch:
        close(got, dense_packed(q, k, v, where, q_lens, kv_lens), TOLERANCE)
    close(varlen(tiny(where, Phase.PREFILL), q, k, v, q_lens, kv_lens), got, TOLERANCE)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_half_precision_is_no_worse_than_torch(phase):
    where = site(heads=4, kv_heads=2, dim=72, dim_v=72)
    n = 97 if phase is Phase.PREFILL else 1
    q, k, v = (t.half() for t in packed(where, [n], [97]))
    want, want_lse = dense(q, k, v, where, 97 - n)
    if phase is Phase.PREFILL:
        out, lse = varlen(tiny(where, phase, dtype="float16", max_q_len=97), q, k, v, [97], [97])
    else:
        pages = paged(k, v, [1], [97], 16)
        plan = tiny(where, phase, 16, 3, dtype="float16")
        out, lse = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    k, v = (t.repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * where.scale
    scores = scores.masked_fill(torch.ones(n, 97, dtype=torch.bool).triu(98 - n), -torch.inf)
    plain = (torch.softmax(scores, -1) @ v).transpose(0, 1)
    assert (out.double() - want).abs().max() <= 2 * (plain.double() - want).abs().max()
    assert (lse.double() - want_lse).abs().max() <= 1e-5


def test_chunks_of_keys_are_the_whole():
    """Sequences cut anywhere, so that queries stand past their keys or before them."""
    where = site(heads=2, kv_heads=2)
    q_lens, kv_lens = [4, 2, 9], [30, 2, 21]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, 4)
    meta = with_chunks(pages.meta, 13)
    assert len(meta.chunks) == 5

    def expand(slots):
        return gather_slots(pages.k, slots), gather_slots(pages.v, slots)

    got = attend_chunks(BACKEND, tiny(where, Phase.PREFILL), q, meta.chunks, expand)
    close(got, dense_packed(q, k, v, where, q_lens, kv_lens), TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v", "rank"), [(4, 4, 128, 128, 0), (4, 1, 576, 512, 512)]
)
def test_d01_unused_slots_of_the_last_page_never_leak(heads, kv_heads, dim, dim_v, rank):
    where = site(heads, kv_heads, dim, dim_v, latent_rank=rank)
    q, k, v = packed(where, [1], [13])
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        pages = paged(k, v, [1], [13], page_size=4, poison=poison)
        plan = tiny(where, Phase.DECODE, 4)
        if rank:
            results.append(BACKEND.latent(plan, q, pages.k[:, :, 0], pages.meta))
        else:
            results.append(BACKEND.paged(plan, q, pages.k, pages.v, pages.meta))
    for other in results[1:]:
        assert torch.equal(results[0].out, other.out)
        assert torch.equal(results[0].lse, other.lse)


def test_d02_padding_of_shorter_sequences_never_leaks():
    """In pages, and in packed keys, where the neighbour's may be NaN."""
    where = site(heads=1, kv_heads=1, dim=64, dim_v=64)
    q, k, v = (t.half() for t in packed(where, [1, 1], [1, 3]))
    pages = paged(k, v, [1, 1], [1, 3], page_size=3)
    plan = tiny(where, Phase.DECODE, 3, dtype="float16")
    got = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    want = dense_packed(q, k, v, where, [1, 1], [1, 3])
    close(got, want, 2e-3)
    k[1:], v[1:] = torch.nan, torch.nan
    prefill = tiny(where, Phase.PREFILL, dtype="float16")
    out, _ = varlen(prefill, q, k, v, [1, 1], [1, 3])
    assert (out[0].double() - want[0][0]).abs().max() <= 2e-3


@pytest.mark.parametrize("kv_len", [2, 0])
def test_d05_queries_without_keys_give_zero_and_minus_infinity(kv_len):
    where = site()
    q, k, v = packed(where, [5], [kv_len])
    pages = paged(k, v, [5], [kv_len], 16)
    for got in (
        varlen(tiny(where, Phase.PREFILL), q, k, v, [5], [kv_len]),
        BACKEND.paged(tiny(where, Phase.EXTEND), q, pages.k, pages.v, pages.meta),
    ):
        blind = 5 - kv_len
        assert torch.equal(got.out[:blind], torch.zeros_like(got.out[:blind]))
        assert (got.lse[:blind] == -torch.inf).all()
        assert got.lse[blind:].isfinite().all()
        close(got, dense(q, k, v, where, kv_len - 5), TOLERANCE)


def test_d05_a_sink_without_keys_is_its_own_denominator():
    where = site(sink=True)
    q, k, v = packed(where, [3], [0])
    out, lse = varlen(tiny(where, Phase.PREFILL), q, k, v, [3], [0], sink_of(where))
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse - sink_of(where)).abs().max() <= 1e-6


def test_d06_equal_one_page_sequences_give_equal_rows():
    where = site(heads=32, kv_heads=8, dim=64, dim_v=64)
    q, k, v = packed(where, [1], [1])
    pages = paged(k.repeat(2, 1, 1), v.repeat(2, 1, 1), [1, 1], [1, 1], page_size=2)
    plan = tiny(where, Phase.DECODE, 2)
    out, _ = BACKEND.paged(plan, q.repeat(2, 1, 1), pages.k, pages.v, pages.meta)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(28, 4), (12, 2), (40, 8), (24, 8), (64, 1), (14, 2), (9, 3)]
)
def test_d08_every_group_size(heads, kv_heads):
    """A tile's rows are cut without regard to the group."""
    where = site(heads, kv_heads, 64, 64)
    q, k, v = packed(where, [1, 3], [11, 6])
    pages = paged(k, v, [1, 3], [11, 6], 16)
    got = BACKEND.paged(tiny(where, Phase.EXTEND), q, pages.k, pages.v, pages.meta)
    close(got, dense_packed(q, k, v, where, [1, 3], [11, 6]), TOLERANCE)


def test_d17_caches_of_any_strides():
    where = site(heads=4, kv_heads=2, dim=12, dim_v=12)
    q_lens, kv_lens = [1, 2], [21, 9]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size=8)
    plan = tiny(where, Phase.EXTEND, 8)
    want = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    n, p, heads, dim = pages.k.shape
    interleaved = torch.stack([pages.k, pages.v], 1).unbind(1)
    layers = torch.stack([pages.k, pages.v], 0).transpose(0, 1).contiguous().unbind(1)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (pages.k, pages.v)]
    padded = []
    for t in (pages.k, pages.v):
        wide = torch.full((n, p * heads * dim + 21), torch.nan)  # no multiple of 16 bytes
        wide[:, : p * heads * dim] = t.flatten(1)
        padded.append(wide[:, : p * heads * dim].unflatten(1, (p, heads, dim)))
    for cache_k, cache_v in (interleaved, layers, heads_first, padded):
        assert not cache_k.is_contiguous()
        got = BACKEND.paged(plan, q, cache_k, cache_v, pages.meta)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)
    with pytest.raises(AssertionError, match="neighbours"):
        BACKEND.paged(plan, q, pages.k.mT.contiguous().mT, pages.v, pages.meta)


@pytest.mark.parametrize("kv_len", [15, 16, 17, 31, 32, 33])
def test_d19_stale_pages_are_not_attended(kv_len):
    where = site()
    q, k, v = packed(where, [1], [kv_len])
    plan = tiny(where, Phase.DECODE)
    exact = paged(k, v, [1], [kv_len], 16)
    stale = paged(k, v, [1], [kv_len], 16, poison=1e4, spare_pages=1)
    want = BACKEND.paged(plan, q, exact.k, exact.v, exact.meta)
    got = BACKEND.paged(plan, q, stale.k, stale.v, stale.meta)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize(("window", "kv_len"), [*[(4, n) for n in range(1, 13)], (495, 600)])
def test_d20_window_edges(window, kv_len):
    """Values are key numbers: the set of keys seen is read off the result."""
    where = site(heads=1, kv_heads=1, dim=4, dim_v=1, window=window, scale=1.0)
    oldest = max(0, kv_len - 1 - window)
    expected = torch.arange(oldest, kv_len).double().mean()
    q, k = torch.zeros(1, 1, 4), torch.zeros(kv_len, 1, 4)
    v = torch.arange(kv_len, dtype=torch.float32)[:, None, None]
    prefill = varlen(tiny(where, Phase.PREFILL), q, k, v, [1], [kv_len])
    pages = paged(k, v, [1], [kv_len], 16)
    decode = BACKEND.paged(tiny(where, Phase.DECODE, 16, 4), q, pages.k, pages.v, pages.meta)
    count = torch.tensor(float(kv_len - oldest)).log()
    for got in (prefill, decode):
        assert abs(got[0].item() - expected) <= 1e-3
        assert abs(got[1].item() - count) <= 1e-5


@pytest.mark.parametrize("page_size", [4, 32])
def test_keys_before_the_window_may_be_anything(page_size):
    """Pages that left the window belong to others: neither they nor their table entries are read,
    even where a tile begins in them."""
    where = site(window=5)
    q_lens, kv_lens = [1, 1, 2], [40, 33, 40]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size)
    plan = tiny(where, Phase.EXTEND, page_size)
    want = dense_packed(q, k, v, where, q_lens, kv_lens)
    firsts = [34, 27, 33]
    live = torch.cat([torch.arange(first, n) for first, n in zip(firsts, kv_lens, strict=True)])
    live += torch.tensor([0] * 6 + [40] * 6 + [73] * 7)
    slots = key_slots(pages.meta)[live]
    for t in (pages.k, pages.v):
        keep = gather_slots(t, slots).clone()
        t.fill_(torch.nan)
        t.flatten(0, 1)[slots] = keep
    for row, first in enumerate(firsts):
        pages.meta.block_table[row, : first // page_size] = 2**30
    close(BACKEND.paged(plan, q, pages.k, pages.v, pages.meta), want, TOLERANCE)


def test_d22_a_call_that_was_not_planned_is_refused():
    where = site()
    q, k, v = packed(where, [3], [3])
    plan = tiny(where, Phase.PREFILL)
    sink = torch.zeros(where.num_q_heads)
    for call in (
        lambda: varlen(plan, q, k, v, [3], [3], sink),
        lambda: varlen(plan, q.half(), k.half(), v.half(), [3], [3]),
        lambda: varlen(plan, q[:, :4], k, v, [3], [3]),
        lambda: varlen(plan, q, k[:, :1], v[:, :1], [3], [3]),
        lambda: varlen(tiny(where, Phase.PREFILL, max_q_len=2), q, k, v, [3], [3]),
    ):
        with pytest.raises(AssertionError):
            call()
    pages = paged(k, v, [3], [3], page_size=4)
    with pytest.raises(AssertionError, match=r"4, 2, 12\), planned \[.., \(16, 2"):
        BACKEND.paged(tiny(where, Phase.EXTEND, 16), q, pages.k, pages.v, pages.meta)


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (128, 128), (72, 72), (80, 80), (64, 32)])
def test_d25_keys_and_values_of_other_widths(dim, dim_v):
    where = site(2, 1, dim, dim_v)
    q, k, v = packed(where, [6], [6])
    got = varlen(tiny(where, Phase.PREFILL), q, k, v, [6], [6])
    assert got.out.shape == (6, 2, dim_v)
    close(got, dense(q, k, v, where, 0), TOLERANCE)


@pytest.mark.parametrize("lens", [[], [0], [0, 0], [0, 3]])
def test_d27_empty_batches_and_sequences(lens):
    where = site()
    q, k, v = packed(where, lens, lens)
    pages = paged(k, v, lens, lens, 16)
    want = dense(q, k, v, where, 0)
    close(varlen(tiny(where, Phase.PREFILL), q, k, v, lens, lens), want, TOLERANCE)
    got = BACKEND.paged(tiny(where, Phase.EXTEND), q, pages.k, pages.v, pages.meta)
    close(got, want, TOLERANCE)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 332), (5, 18), (33, 115)])
@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_d32_many_heads_softcap_and_window(q_len, kv_len, softcap):
    where = site(16, 2, 16, 16, softcap=softcap, window=64)
    q, k, v = packed(where, [q_len], [kv_len])
    pages = paged(k, v, [q_len], [kv_len], 32)
    plan = tiny(where, Phase.EXTEND, 32, tile_m=64)
    got = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    close(got, dense(q, k, v, where, kv_len - q_len), 5e-5)


def test_a_soft_cap_keeps_a_nan():
    """A key that is NaN makes its readers NaN, as it does without a cap."""
    where = site(4, 2, 16, 16, softcap=2.0)
    q, k, v = (torch.randn(20, h, 16) for h in (4, 2, 2))
    k[3] = torch.nan
    meta = varlen_metadata([20], CPU_DEVICE)
    out = BACKEND.varlen(tiny(where, Phase.PREFILL), q, k, v, meta).out
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()
