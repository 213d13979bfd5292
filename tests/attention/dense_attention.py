"""Attention written out: one sequence, the whole matrix of scores, float64. And what tests of the
backends need around it: plans, pages in a poisoned pool.

Legend: T queries, S keys, H query heads, K key heads, D head_dim, E head_dim_v."""

import random
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.attention.metadata import PagedMetadata, paged_metadata
from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import accept
from vitrail.config.hardware import CPU

CPU_DEVICE = torch.device("cpu")


def site(
    heads: int = 6, kv_heads: int = 2, dim: int = 12, dim_v: int = 10, **more
) -> AttentionSite:
    facts = {"scale": dim**-0.5, "causal": True, **more}
    return AttentionSite(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, **facts
    )


def planned(where: AttentionSite, phase: Phase, page_size: int = 16, **more) -> AttentionPlan:
    """A plan of generous bounds; `more` replaces fields of it."""
    shape = AttentionShape(
        site=where,
        phase=phase,
        dtype=more.pop("dtype", "float32"),
        page_size=page_size if phase in PAGED else None,
        batch=64,
        max_q_len=1 if phase is Phase.DECODE else 4096,
        max_kv_len=8192,
    )
    return replace(accept(plan(shape, CPU)), **more)


TINY = {"block_batch": 2, "block_heads": 2, "block_q": 3, "block_kv": 5}


def dense(
    q: Tensor, k: Tensor, v: Tensor, where: AttentionSite, q_start: int, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [T, H, E] and lse [T, H] in float64; query j stands at key position q_start + j."""
    group = where.num_q_heads // where.num_kv_heads
    keys, values = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * where.scale
    if where.softcap is not None:
        scores = where.softcap * torch.tanh(scores / where.softcap)
    own = q_start + torch.arange(q.shape[0])[:, None]
    key = torch.arange(k.shape[0])[None]
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if where.causal:
        seen &= key <= own
    if where.window is not None:
        seen &= (own - key).abs() <= where.window
    scores = scores.masked_fill(~seen, -torch.inf)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink.double()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    lse = torch.logsumexp(logits, -1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    return torch.einsum("hts,shd->thd", weights, values), lse.T


class Pages(NamedTuple):
    """A pool of pages, poisoned where no key lives, and the metadata that leads to the keys."""

    k: Tensor
    v: Tensor
    meta: PagedMetadata


def paged(
    k: Tensor,
    v: Tensor,
    q_lens: list[int],
    kv_lens: list[int],
    page_size: int,
    poison: float = float("nan"),
    spare_pages: int = 0,
) -> Pages:
    """Packed keys and values laid in shuffled pages. Unused slots and `spare_pages` more pages a
    row hold `poison`; table entries past them an impossible page."""
    pages = [-(-n // page_size) + spare_pages for n in kv_lens]
    ids = list(range(1, sum(pages) + 2))
    random.Random(0).shuffle(ids)
    pool_k = torch.full((len(ids) + 1, page_size, *k.shape[1:]), poison, dtype=k.dtype)
    pool_v = torch.full((len(ids) + 1, page_size, *v.shape[1:]), poison, dtype=v.dtype)
    table = torch.full((len(kv_lens), max(pages, default=0) + 1), 2**30, dtype=torch.int32)
    row = 0
    for i, n in enumerate(kv_lens):
        mine = [ids.pop() for _ in range(pages[i])]
        table[i, : pages[i]] = torch.tensor(mine, dtype=torch.int32)
        for j in range(n):
            pool_k[mine[j // page_size], j % page_size] = k[row + j]
            pool_v[mine[j // page_size], j % page_size] = v[row + j]
        row += n
    return Pages(pool_k, pool_v, paged_metadata(page_size, q_lens, kv_lens, table))


def packed(where: AttentionSite, q_lens: list[int], kv_lens: list[int], seed: int = 0):
    """Random q [T, H, D], k [S, K, D], v [S, K, E]."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(q_lens), where.num_q_heads, where.head_dim, generator=g)
    k = torch.randn(sum(kv_lens), where.num_kv_heads, where.head_dim, generator=g)
    v = torch.randn(sum(kv_lens), where.num_kv_heads, where.head_dim_v, generator=g)
    return q, k, v


def dense_packed(q, k, v, where, q_lens, kv_lens, sink=None):
    """`dense` of each sequence, packed again; queries end with their keys."""
    parts = [
        dense(a, b, c, where, n - t, sink)
        for a, b, c, t, n in zip(
            q.split(q_lens), k.split(kv_lens), v.split(kv_lens), q_lens, kv_lens, strict=True
        )
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def close(got, want, tolerance: float = 1e-5) -> None:
    """Out and lse agree; where a query sees nothing, exactly 0 and -inf."""
    out, lse = (t.double() for t in got)
    assert (out - want[0]).abs().max() <= tolerance if out.numel() else out.shape == want[0].shape
    blind = want[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    assert out[blind].abs().sum() == 0
    assert (lse - want[1])[~blind].abs().max() <= tolerance if (~blind).any() else True
