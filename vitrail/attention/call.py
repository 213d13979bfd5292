"""A call of a backend, and what must hold of it: it is the one that was planned.
The tensors are checked in every layer, the lengths once a batch, when its work is made."""

from typing import NamedTuple

from torch import Tensor

from vitrail.attention.metadata import PagedMetadata, VarlenMetadata
from vitrail.attention.plan import AttentionPlan
from vitrail.config.model import KvScales

WIDE_BYTES = 16  # what a wide copy moves


class Call(NamedTuple):
    """What a layer asks for. `k`, `v`: [N, P, K, D] and [N, P, K, E] where paged, else [S, K, D]
    and [S, K, E]. Of latent rows `k` is whole rows and `v` their first channels. `scales`: what
    stored keys and values are multiplied by."""

    plan: AttentionPlan
    q_THD: Tensor
    k: Tensor
    v: Tensor
    meta: VarlenMetadata | PagedMetadata
    sink_H: Tensor | None
    scales: KvScales


def check_tensors(call: Call) -> None:
    """They are those that were planned."""
    plan, q_THD, k, v, _, sink_H, _ = call
    shape, site = plan.shape, plan.shape.site
    page = () if shape.page_size is None else (shape.page_size,)
    stored = shape.kv_dtype or shape.dtype
    rows = (site.num_q_heads, site.head_dim)
    keys, values = ((*page, site.num_kv_heads, d) for d in (site.head_dim, site.head_dim_v))
    for t, planned in ((q_THD, rows), (k, keys), (v, values)):
        assert t.shape[1:] == planned, f"{tuple(t.shape)}, planned [.., {planned}]"
    assert str(q_THD.dtype) == f"torch.{shape.dtype}", f"{q_THD.dtype}, planned {shape.dtype}"
    assert str(k.dtype) == str(v.dtype) == f"torch.{stored}", f"{k.dtype}, planned {stored}"
    assert site.sink == (sink_H is not None), f"sink planned: {site.sink}"
    assert site.scale > 0, f"scale {site.scale}: the running maximum is that of scaled scores"
    for t in (q_THD, k, v):
        assert t.stride(-1) == 1, f"strides {t.stride()}: channels of a row are neighbours"


def check_lengths(plan: AttentionPlan, meta: VarlenMetadata | PagedMetadata) -> None:
    """The batch is within the one that was planned."""
    shape = plan.shape
    assert meta.batch <= shape.batch, f"{meta.batch} sequences, planned {shape.batch}"
    assert meta.max_q_len <= shape.max_q_len, f"{meta.max_q_len}, planned {shape.max_q_len}"
    assert meta.max_kv_len <= shape.max_kv_len, f"{meta.max_kv_len}, planned {shape.max_kv_len}"
    if isinstance(meta, PagedMetadata):
        assert meta.page_size == shape.page_size, f"{meta.page_size}, {shape.page_size}"
        assert len(meta.block_table) >= meta.batch, meta.block_table.shape
        assert meta.block_table.stride(-1) == 1, meta.block_table.stride()


def is_wide(t: Tensor) -> bool:
    """Whether every row starts at a border of `WIDE_BYTES`."""
    size = t.element_size()
    return t.data_ptr() % WIDE_BYTES == 0 and all(
        stride >= 0 and stride * size % WIDE_BYTES == 0 for stride in t.stride()[:-1]
    )
