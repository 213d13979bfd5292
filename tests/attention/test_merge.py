"""Merging partial results over disjoint keys, and attention over keys in chunks."""

import pytest
import torch
from dense_attention import CPU_DEVICE, close, dense_packed, packed, paged, planned, site
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.packed import varlen_metadata
from vitrail.attention.backend import Attended, load_backend
from vitrail.attention.chunked import attend_chunks
from vitrail.attention.merge import merge
from vitrail.attention.metadata import gather_slots, key_slots, with_chunks
from vitrail.attention.shape import Phase

BACKEND = load_backend("reference")


def part(where, q, k, v):
    """All queries against these keys."""
    meta = varlen_metadata([len(q)], CPU_DEVICE, [len(k)])
    return BACKEND.varlen(planned(where, Phase.ENCODE), q, k, v, meta)


def same(a: Attended, b: Attended) -> None:
    assert (a.out - b.out).abs().max() <= 1e-6
    assert torch.equal(a.lse == -torch.inf, b.lse == -torch.inf)
    finite = a.lse.isfinite()
    assert (a.lse - b.lse)[finite].abs().max() <= 1e-6 if finite.any() else True


@pytest.mark.parametrize("kv_len", [1, 2, 3, 15, 16, 17])
@pytest.mark.parametrize("splits", [2, 8, 16])
def test_d15_splits_merged_are_the_whole(kv_len, splits):
    """Empty splits count for nothing."""
    where = site(causal=False)
    q, k, v = packed(where, [4], [kv_len])
    edges = [kv_len * i // splits for i in range(splits + 1)]
    result = part(where, q, k[:0], v[:0])
    for start, stop in zip(edges, edges[1:], strict=False):
        result = merge(result, part(where, q, k[start:stop], v[start:stop]))
    assert result.out.isfinite().all()
    same(result, part(where, q, k, v))


def test_merge_is_commutative_and_associative():
    where = site(causal=False)
    q, k, v = packed(where, [4], [30])
    k[10:20] *= 30  # one part dominates
    a, b, c = (part(where, q, k[s : s + 10], v[s : s + 10]) for s in (0, 10, 20))
    same(merge(a, b), merge(b, a))
    same(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_d05_nothing_merged_with_nothing_is_nothing():
    nothing = Attended(torch.zeros(3, 2, 5), torch.full((3, 2), -torch.inf))
    merged = merge(nothing, nothing)
    assert torch.equal(merged.out, nothing.out)
    assert torch.equal(merged.lse, nothing.lse)
    some = Attended(torch.randn(3, 2, 5), torch.full((3, 2), 1e4))
    for merged in (merge(some, nothing), merge(nothing, some)):
        assert torch.equal(merged.out, some.out)
        assert torch.equal(merged.lse, some.lse)


@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), max_size=5),
    max_tokens=st.integers(1, 70),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_chunks_are_the_whole(lens, max_tokens):
    """Wherever the packed keys are cut, the result is that of all keys at once."""
    q_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    where = site(heads=4, window=None)
    q, k, v = packed(where, q_lens, kv_lens)
    pages = paged(k, v, q_lens, kv_lens, page_size=3)
    meta = with_chunks(pages.meta, max_tokens)
    assert all(len(chunk.slots) <= max_tokens for chunk in meta.chunks)
    cut = [chunk.slots for chunk in meta.chunks]
    assert torch.equal(torch.cat([key_slots(pages.meta)[:0], *cut]), key_slots(pages.meta))

    def expand(slots):
        return gather_slots(pages.k, slots), gather_slots(pages.v, slots)

    got = attend_chunks(BACKEND, planned(where, Phase.PREFILL), q, meta.chunks, expand)
    if lens:
        close(got, dense_packed(q, k, v, where, q_lens, kv_lens))
    else:
        assert got.out.shape == (0, 4, where.head_dim_v)


def test_chunked_windows_and_half_precision():
    where = site(window=6)
    q_lens, kv_lens = [7, 2, 11], [30, 2, 11]
    q, k, v = (t.bfloat16() for t in packed(where, q_lens, kv_lens))
    pages = paged(k, v, q_lens, kv_lens, page_size=4)
    want = dense_packed(q, k, v, where, q_lens, kv_lens)
    plan = planned(where, Phase.PREFILL, dtype="bfloat16")
    for max_tokens in (1, 5, 16, 1000):
        chunks = with_chunks(pages.meta, max_tokens).chunks
        got = attend_chunks(
            BACKEND,
            plan,
            q,
            chunks,
            lambda slots: (gather_slots(pages.k, slots), gather_slots(pages.v, slots)),
        )
        assert got.out.dtype == torch.bfloat16
        assert (got.out.double() - want[0]).abs().max() <= 2e-2
        assert (got.lse.double() - want[1]).abs().max() <= 1e-5
