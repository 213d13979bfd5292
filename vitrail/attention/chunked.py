"""Attention over keys that are produced piece by piece: each piece is expanded, attended and merged
by log-sum-exp, so that the workspace is one piece, whatever the context's length.

Legend: T packed queries, S keys of a piece, H query heads, K key heads, D head_dim,
E head_dim_v."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.attention.backend import Attended, AttentionBackend
from vitrail.attention.merge import merge
from vitrail.attention.metadata import KvChunk
from vitrail.attention.plan import AttentionPlan

# int64 slots [S] -> keys [S, K, D], values [S, K, E]
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]


def attend_chunks(
    backend: AttentionBackend,
    plan: AttentionPlan,
    q_THD: Float[Tensor, "T H D"],
    chunks: Sequence[KvChunk],
    expand: Expand,
) -> Attended:
    """Queries against all of `chunks` (`PagedMetadata.chunks`); `expand(slots)` gives the keys and
    values of one. `plan`: phase prefill. The result of one `varlen` call over all the keys, with
    `out` accumulated in fp32 where there is more than one chunk."""
    site = plan.shape.site
    assert not site.sink, "a sink would count once a chunk"
    num_tokens, num_heads = q_THD.shape[:2]
    if len(chunks) == 1 and chunks[0].q_stop - chunks[0].q_start == num_tokens:
        return backend.varlen(plan, q_THD, *expand(chunks[0].slots), chunks[0].meta)
    shape = (num_tokens, num_heads, site.head_dim_v)
    out_THE = torch.zeros(shape, dtype=torch.float32, device=q_THD.device)
    lse_TH = torch.full(shape[:2], -torch.inf, device=q_THD.device)
    for chunk in chunks:
        rows = slice(chunk.q_start, chunk.q_stop)
        part = backend.varlen(plan, q_THD[rows], *expand(chunk.slots), chunk.meta)
        out_THE[rows], lse_TH[rows] = merge(Attended(out_THE[rows], lse_TH[rows]), part)
    return Attended(out_THE.to(q_THD.dtype), lse_TH)
