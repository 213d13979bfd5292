"""Metadata of packed attention, from lengths alone."""

from collections.abc import Sequence

import torch

from vitrail.attention.metadata import VarlenMetadata, prefix_sums


def varlen_metadata(
    q_lens: Sequence[int],
    device: torch.device,
    kv_lens: Sequence[int] | None = None,
    q_starts: Sequence[int] | None = None,
) -> VarlenMetadata:
    """Metadata of packed attention. Without `kv_lens`: self-attention. Without `q_starts`: queries
    are the last positions of their keys."""
    cu_q = prefix_sums(q_lens, device)
    if kv_lens is None:
        kv_lens, cu_kv = q_lens, cu_q
    else:
        cu_kv = prefix_sums(kv_lens, device)
    if q_starts is None:
        q_starts = [kv - q for q, kv in zip(q_lens, kv_lens, strict=True)]
    return VarlenMetadata(
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        q_starts=tuple(q_starts),
        cu_q=cu_q,
        cu_kv=cu_kv,
    )
