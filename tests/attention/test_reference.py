"""The reference backend against attention written out, and the faults others shipped."""

from dataclasses import replace

import pytest
import torch
from dense_attention import (
    CPU_DEVICE,
    TINY,
    close,
    dense,
    dense_packed,
    packed,
    paged,
    planned,
    site,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.packed import varlen_metadata
from vitrail.attention.backend import load_backend
from vitrail.attention.metadata import gather_slots, key_slots, paged_metadata
from vitrail.attention.shape import Phase
from vitrail.check.live_bytes import LiveBytes
from vitrail.config.finding import Refused

BACKEND = load_backend("reference")
SITES = {
    "plain": site(),
    "window": site(window=4),
    "softcap": site(softcap=1.5),
    "sink": site(sink=True, window=7),
    "heads_alone": site(heads=5, kv_heads=5, dim=7, dim_v=7),
    "one_key_head": site(heads=7, kv_heads=1),
}


def sink_of(where):
    return torch.linspace(-1, 1, where.num_q_heads) if where.sink else None


def varlen(plan, q, k, v, q_lens, kv_lens, sink=None):
    meta = varlen_metadata(q_lens, CPU_DEVICE, kv_lens)
    return BACKEND.varlen(plan, q, k, v, meta, sink)


@pytest.mark.parametrize("blocks", [{}, TINY], ids=["planned", "tiny"])
@pytest.mark.parametrize("name", SITES)
def test_varlen_is_dense(name, blocks):
    where = SITES[name]
    q_lens, kv_lens = [5, 1, 0, 17, 3], [5, 9, 2, 31, 0]
    q, k, v = packed(where, q_lens, kv_lens)
    got = varlen(planned(where, Phase.PREFILL, **blocks), q, k, v, q_lens, kv_lens, sink_of(where))
    close(got, dense_packed(q, k, v, where, q_lens, kv_lens, sink_of(where)))


@pytest.mark.parametrize("window", [None, 3])
def test_encode_sees_both_sides(window):
    where = site(causal=False, window=window)
    lens = [13, 1, 22]
    q, k, v = packed(where, lens, lens)
    want = dense_packed(q, k, v, where, lens, lens)
    close(varlen(planned(where, Phase.ENCODE), q, k, v, lens, lens), want)
    close(varlen(planned(where, Phase.ENCODE, **TINY), q, k, v, lens, lens), want)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("name", SITES)
def test_paged_is_dense(name, page_size):
    where = SITES[name]
    q_lens, kv_lens = [1, 4, 1, 4, 1, 9, 0], [37, 40, 2, 5, 65, 64, 3]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size)
    want = dense_packed(q, k, v, where, q_lens, kv_lens, sink_of(where))
    for blocks in ({}, TINY):
        plan = planned(where, Phase.EXTEND, page_size, **blocks)
        close(BACKEND.paged(plan, q, pages.k, pages.v, pages.meta, sink_of(where)), want)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_lengths_and_blocks(data):
    batch = data.draw(st.integers(0, 5))
    q_lens = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    kv_lens = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
    where = site(
        heads=4,
        window=data.draw(st.none() | st.integers(0, 12)),
        softcap=data.draw(st.none() | st.just(2.0)),
    )
    blocks = {f: data.draw(st.integers(1, 8)) for f in TINY}
    page_size = data.draw(st.integers(1, 9))
    q, k, v = packed(where, q_lens, kv_lens, seed=batch)
    pages = paged(k, v, q_lens, kv_lens, page_size)
    got = BACKEND.paged(
        planned(where, Phase.EXTEND, page_size, **blocks), q, pages.k, pages.v, pages.meta
    )
    if batch:
        close(got, dense_packed(q, k, v, where, q_lens, kv_lens))
    close(varlen(planned(where, Phase.PREFILL, **blocks), q, k, v, q_lens, kv_lens), got)


@pytest.mark.parametrize("blocks", [{}, TINY], ids=["planned", "tiny"])
def test_latent_is_the_expanded_form(blocks):
    """q . (W_k c) + q_pe . k_pe  =  (W_k^T q) . c + q_pe . k_pe, and values alike."""
    heads, rank, rope, nope, dim_v, page_size = 5, 16, 6, 11, 9, 3
    q_lens, kv_lens = [1, 3, 1], [14, 8, 1]
    g = torch.Generator().manual_seed(1)
    cache = torch.randn(sum(kv_lens), rank + rope, generator=g)
    w_k = torch.randn(heads, nope, rank, generator=g) / 4
    w_v = torch.randn(heads, dim_v, rank, generator=g) / 4
    q = torch.randn(sum(q_lens), heads, nope + rope, generator=g)

    latent, k_pe = cache[:, :rank], cache[:, rank:]
    k = torch.einsum("hnr,sr->shn", w_k, latent)
    k = torch.cat([k, k_pe[:, None].expand(-1, heads, -1)], -1)
    v = torch.einsum("her,sr->she", w_v, latent)
    expanded = site(heads, heads, nope + rope, dim_v)
    want = dense_packed(q, k, v, expanded, q_lens, kv_lens)

    absorbed = site(heads, 1, rank + rope, rank, scale=expanded.scale, latent_rank=rank)
    q_latent = torch.einsum("thn,hnr->thr", q[..., :nope], w_k)
    pages = paged(cache, cache, q_lens, kv_lens, page_size)
    plan = planned(absorbed, Phase.DECODE, page_size, **blocks)
    out, lse = BACKEND.latent(plan, torch.cat([q_latent, q[..., nope:]], -1), pages.k, pages.meta)
    close((torch.einsum("thr,her->the", out, w_v), lse), want)


def test_lse_is_the_logarithm_of_the_denominator():
    where = site(causal=False, heads=4, kv_heads=4)
    q, k, v = packed(where, [7], [19])
    _, lse = varlen(planned(where, Phase.ENCODE), q, k, v, [7], [19])
    scores = torch.einsum("thd,shd->ths", q, k) * where.scale
    assert (lse - torch.logsumexp(scores, -1)).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_no_worse_than_torch(dtype):
    where = site(heads=4, kv_heads=4, dim=72, dim_v=72)
    lens = [97]
    q, k, v = (t.to(getattr(torch, dtype)) for t in packed(where, lens, lens))
    want, want_lse = dense(q, k, v, where, 0)
    out, lse = varlen(planned(where, Phase.PREFILL, dtype=dtype), q, k, v, lens, lens)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    hqd, hkd, hvd = (t.transpose(0, 1) for t in (q, k, v))
    scores = (hqd @ hkd.transpose(1, 2) * where.scale).masked_fill(
        torch.ones(97, 97, dtype=torch.bool).triu(1), -torch.inf
    )
    plain = (torch.softmax(scores, -1) @ hvd).transpose(0, 1)
    assert (out.double() - want).abs().max() <= 2 * (plain.double() - want).abs().max()
    assert (lse.double() - want_lse).abs().max() <= 1e-5


def test_batched_is_alone():
    """Strangers in the batch change a sequence's result by rounding at most."""
    where = site()
    kv_lens = [3, 70, 64, 65, 9, 300, 1, 290]
    q_lens = [1] * len(kv_lens)
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, 16)
    plan = planned(where, Phase.DECODE)
    assert plan.block_batch >= len(kv_lens)
    together = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    for i, n in enumerate(kv_lens):
        meta = paged_metadata(16, [1], [n], pages.meta.block_table[i : i + 1])
        alone = BACKEND.paged(plan, q[i : i + 1], pages.k, pages.v, meta)
        assert (together.out[i] - alone.out[0]).abs().max() <= 1e-6
        assert (together.lse[i] - alone.lse[0]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v", "rank"),
    [
        (4, 4, 128, 128, 0),
        (4, 1, 576, 512, 512),
    ],
)
def test_d01_unused_slots_of_the_last_page_never_leak(heads, kv_heads, dim, dim_v, rank):
    where = site(heads, kv_heads, dim, dim_v, latent_rank=rank)
    q, k, v = packed(where, [1], [13])
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        pages = paged(k, v, [1], [13], page_size=4, poison=poison)
        plan = planned(where, Phase.DECODE, 4)
        if rank:
            results.append(BACKEND.latent(plan, q, pages.k[:, :, 0], pages.meta))
        else:
            results.append(BACKEND.paged(plan, q, pages.k, pages.v, pages.meta))
    for other in results[1:]:
        assert torch.equal(results[0].out, other.out)
        assert torch.equal(results[0].lse, other.lse)


def test_d02_padding_of_shorter_sequences_never_leaks():
    where = site(heads=1, kv_heads=1, dim=64, dim_v=64)
    q, k, v = (t.half() for t in packed(where, [1, 1], [1, 3]))
    pages = paged(k, v, [1, 1], [1, 3], page_size=3)
    plan = planned(where, Phase.DECODE, 3, dtype="float16")
    got = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    close(got, dense_packed(q, k, v, where, [1, 1], [1, 3]), 2e-3)


@pytest.mark.parametrize("kv_len", [2, 0])
def test_d05_queries_without_keys_give_zero_and_minus_infinity(kv_len):
    where = site()
    q, k, v = packed(where, [5], [kv_len])
    pages = paged(k, v, [5], [kv_len], 16)
    for got in (
        varlen(planned(where, Phase.PREFILL), q, k, v, [5], [kv_len]),
        BACKEND.paged(planned(where, Phase.EXTEND), q, pages.k, pages.v, pages.meta),
    ):
        blind = 5 - kv_len
        assert torch.equal(got.out[:blind], torch.zeros_like(got.out[:blind]))
        assert (got.lse[:blind] == -torch.inf).all()
        assert got.lse[blind:].isfinite().all()
        close(got, dense(q, k, v, where, kv_len - 5))


def test_d06_equal_one_page_sequences_give_equal_rows():
    where = site(heads=32, kv_heads=8, dim=64, dim_v=64)
    q, k, v = packed(where, [1], [1])
    pages = paged(k.repeat(2, 1, 1), v.repeat(2, 1, 1), [1, 1], [1, 1], page_size=2)
    plan = planned(where, Phase.DECODE, 2)
    out, _ = BACKEND.paged(plan, q.repeat(2, 1, 1), pages.k, pages.v, pages.meta)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(28, 4), (12, 2), (40, 8), (24, 8), (64, 1), (14, 2), (9, 3)]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_d08_every_group_size(heads, kv_heads, dim):
    where = site(heads, kv_heads, dim, dim)
    q, k, v = packed(where, [1, 3], [11, 6])
    pages = paged(k, v, [1, 3], [11, 6], 16)
    got = BACKEND.paged(planned(where, Phase.EXTEND), q, pages.k, pages.v, pages.meta)
    close(got, dense_packed(q, k, v, where, [1, 3], [11, 6]))


def test_d10_slots_are_64_bit():
    """Page ids are int32, and page * page_size passes 2^31 long before they do."""
    page = 2**31 // 64 + 5
    table = torch.tensor([[page, page + 1]], dtype=torch.int32)
    slots = key_slots(paged_metadata(64, [1], [66], table))
    assert slots[0].item() == page * 64
    assert slots[-1].item() == (page + 1) * 64 + 1


@pytest.mark.parametrize(("kv_lens", "row"), [([65, 1], 0), ([64, 65], 1)])
def test_d12_a_table_too_short_is_refused_by_row_and_capacity(kv_lens, row):
    with pytest.raises(Refused) as refused:
        paged_metadata(16, [1, 1], kv_lens, torch.zeros((2, 4), dtype=torch.int32))
    (finding,) = refused.value.findings
    assert finding.where == f"block_table row {row}"
    assert finding.saw == "65 keys in 4 pages of 16"
    assert "64 keys" in finding.rule
    paged_metadata(16, [1, 1], [64, 64], torch.zeros((2, 4), dtype=torch.int32))


def test_d17_caches_of_any_strides():
    where = site(heads=4, kv_heads=2, dim=12, dim_v=12)
    q_lens, kv_lens = [1, 2], [21, 9]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size=8)
    plan = planned(where, Phase.EXTEND, 8)
    want = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    n, p, heads, dim = pages.k.shape
    interleaved = torch.stack([pages.k, pages.v], 1).unbind(1)
    layers = torch.stack([pages.k, pages.v], 0).transpose(0, 1).contiguous().unbind(1)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (pages.k, pages.v)]
    padded = []
    for t in (pages.k, pages.v):
        wide = torch.full((n, p * heads * dim + 20), torch.nan)
        wide[:, : p * heads * dim] = t.flatten(1)
        padded.append(wide[:, : p * heads * dim].unflatten(1, (p, heads, dim)))
    for cache_k, cache_v in (interleaved, layers, heads_first, padded):
        assert not cache_k.is_contiguous()
        got = BACKEND.paged(plan, q, cache_k, cache_v, pages.meta)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("kv_len", [15, 16, 17, 31, 32, 33])
def test_d19_stale_pages_are_not_attended(kv_len):
    where = site()
    q, k, v = packed(where, [1], [kv_len])
    plan = planned(where, Phase.DECODE)
    exact = paged(k, v, [1], [kv_len], 16)
    stale = paged(k, v, [1], [kv_len], 16, poison=1e4, spare_pages=1)
    want = BACKEND.paged(plan, q, exact.k, exact.v, exact.meta)
    got = BACKEND.paged(plan, q, stale.k, stale.v, stale.meta)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize(("window", "kv_len"), [*[(4, n) for n in range(1, 13)], (4095, 5000)])
def test_d20_window_edges(window, kv_len):
    """Values are key numbers one-hot by weight: the set of keys seen is read off the result."""
    where = site(heads=1, kv_heads=1, dim=4, dim_v=1, window=window, scale=1.0)
    oldest = max(0, kv_len - 1 - window)
    expected = torch.arange(oldest, kv_len).double().mean()
    q, k = torch.zeros(kv_len, 1, 4), torch.zeros(kv_len, 1, 4)
    v = torch.arange(kv_len, dtype=torch.float32)[:, None, None]
    prefill = varlen(planned(where, Phase.PREFILL), q[-1:], k, v, [1], [kv_len])
    pages = paged(k, v, [1], [kv_len], 16)
    decode = BACKEND.paged(planned(where, Phase.DECODE), q[-1:], pages.k, pages.v, pages.meta)
    count = torch.tensor(float(kv_len - oldest)).log()
    for got in (prefill, decode, dense(q[-1:], k, v, where, kv_len - 1)):
        assert abs(got[0].item() - expected) <= 1e-3
        assert abs(got[1].item() - count) <= 1e-5


def test_keys_before_the_window_may_be_anything():
    """Pages that left the window belong to others: what they hold now must not matter."""
    where = site(window=5)
    q_lens, kv_lens = [1, 1, 2], [40, 33, 40]
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size=4)
    plan = planned(where, Phase.EXTEND, 4, block_batch=2)
    want = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    live = torch.cat(
        [torch.arange(40)[34:], 40 + torch.arange(33)[27:], 73 + torch.arange(40)[33:]]
    )
    slots = key_slots(pages.meta)
    for t in (pages.k, pages.v):
        keep = gather_slots(t, slots[live]).clone()
        t.fill_(torch.nan)
        t.flatten(0, 1)[slots[live]] = keep
    got = BACKEND.paged(plan, q, pages.k, pages.v, pages.meta)
    assert torch.equal(got.out, want.out)


def test_d22_a_call_that_was_not_planned_is_refused():
    where = site()
    q, k, v = packed(where, [3], [3])
    plan = planned(where, Phase.PREFILL)
    sink = torch.zeros(where.num_q_heads)
    bounds = replace(plan, shape=replace(plan.shape, max_kv_len=2))
    for call in (
        lambda: varlen(plan, q, k, v, [3], [3], sink),
        lambda: varlen(plan, q.half(), k.half(), v.half(), [3], [3]),
        lambda: varlen(plan, q[:, :4], k, v, [3], [3]),
        lambda: varlen(bounds, q, k, v, [3], [3]),
    ):
        with pytest.raises(AssertionError):
            call()
    pages = paged(k, v, [3], [3], page_size=4)
    with pytest.raises(AssertionError, match="4, 16"):
        BACKEND.paged(planned(where, Phase.EXTEND, 16), q, pages.k, pages.v, pages.meta)


@pytest.mark.parametrize(
    ("dim", "dim_v"), [(192, 128), (576, 512), (128, 128), (72, 72), (80, 80), (64, 32)]
)
def test_d25_keys_and_values_of_other_widths(dim, dim_v):
    where = site(4, 2, dim, dim_v)
    q, k, v = packed(where, [6], [6])
    got = varlen(planned(where, Phase.PREFILL), q, k, v, [6], [6])
    assert got.out.shape == (6, 4, dim_v)
    close(got, dense(q, k, v, where, 0))


@pytest.mark.parametrize("dim", [1, 40, 56, 72, 80, 96, 112, 160, 224, 256])
def test_d26_any_head_dim(dim):
    where = site(2, 1, dim, dim)
    q, k, v = packed(where, [5], [7])
    close(varlen(planned(where, Phase.PREFILL), q, k, v, [5], [7]), dense(q, k, v, where, 2))


@pytest.mark.parametrize("lens", [[], [0], [0, 0], [0, 3]])
def test_d27_empty_batches_and_sequences(lens):
    where = site()
    q, k, v = packed(where, lens, lens)
    pages = paged(k, v, lens, lens, 16)
    want = dense(q, k, v, where, 0)
    close(varlen(planned(where, Phase.PREFILL), q, k, v, lens, lens), want)
    close(BACKEND.paged(planned(where, Phase.EXTEND), q, pages.k, pages.v, pages.meta), want)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1328), (5, 18), (129, 463)])
@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_d32_many_heads_softcap_and_window(q_len, kv_len, softcap):
    where = site(64, 8, 16, 16, softcap=softcap, window=64)
    q, k, v = packed(where, [q_len], [kv_len])
    pages = paged(k, v, [q_len], [kv_len], 32)
    got = BACKEND.paged(planned(where, Phase.EXTEND, 32), q, pages.k, pages.v, pages.meta)
    close(got, dense(q, k, v, where, kv_len - q_len))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_never_exceed_the_plan(dtype):
    """The largest tensor that a long call makes is the planned block or linear in the lengths."""
    where = site(heads=8, kv_heads=8, dim=4, dim_v=4)
    q, k, v = (t.to(getattr(torch, dtype)) for t in packed(where, [1100], [1100]))
    plan = planned(where, Phase.PREFILL, dtype=dtype)
    assert plan.score_bytes == 4 * 2 * 256 * 1024 < 4 * 1100 * 1100
    with torch.inference_mode(), LiveBytes() as live:
        varlen(plan, q, k, v, [1100], [1100])
    assert live.largest == plan.score_bytes
    assert live.peak <= 2 * plan.score_bytes + 8 * 4 * q.numel()
