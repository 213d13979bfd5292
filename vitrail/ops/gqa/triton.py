"""The step before attention over keys and values by head in Triton: one launch. Legend: see
`naive`."""

# A constant given to a jitted function is a constexpr inside it, which no type says.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vitrail.ops.gqa.naive import GqaSizes, PagedSlots
from vitrail.ops.launch import launch_early
from vitrail.ops.rope.naive import Turns
from vitrail.ops.rope.triton import stored, turn

MAX_HEADS = 16  # of a program


def paged_queries(row_TX: Tensor, turns: Turns, sizes: GqaSizes, into: PagedSlots) -> Tensor:
    """`naive.paged_queries`: a view of `row_TX`, whose queries are turned in place."""
    tokens, pairs = len(row_TX), sizes.head // 2
    k_NPKD, v_NPKD = into.k_NPKD, into.v_NPKD
    assert row_TX.shape == (tokens, sizes.projected), f"{tuple(row_TX.shape)}, {sizes}"
    assert row_TX.stride(1) == k_NPKD.stride(3) == v_NPKD.stride(3) == 1, row_TX.stride()
    for pages in (k_NPKD, v_NPKD):
        assert pages.shape[2:] == sizes[1:], f"{tuple(pages.shape)}, {sizes}"
    assert into.slots_T.shape == (tokens,), f"{tuple(into.slots_T.shape)} for {tokens} tokens"
    for table_TF in (turns.cos_TF, turns.sin_TF):
        assert table_TF.shape == (tokens, pairs), f"{tuple(table_TF.shape)}, {tokens} tokens"
        assert table_TF.is_contiguous(), table_TF.stride()
    q_THD = row_TX[:, : sizes.heads * sizes.head].view(tokens, sizes.heads, sizes.head)
    if not tokens:
        return q_THD
    block = min(triton.next_power_of_2(max(sizes.heads, sizes.kv_heads)), MAX_HEADS)
    parts = triton.cdiv(sizes.heads, block) + 2 * triton.cdiv(sizes.kv_heads, block)
    launch_early(
        queries_kernel,
        (tokens, parts),
        row_TX.device,
        row_TX,
        turns.cos_TF,
        turns.sin_TF,
        into.slots_T,
        k_NPKD,
        v_NPKD,
        row_TX.stride(0),
        *k_NPKD.stride()[:3],
        *v_NPKD.stride()[:3],
        k_NPKD.shape[1],
        1 / into.k_scale,
        1 / into.v_scale,
        H=sizes.heads,
        K=sizes.kv_heads,
        F=pairs,
        H_BLOCK=block,
        F_BLOCK=triton.next_power_of_2(pairs),
        INTERLEAVED=turns.interleaved,
        E4M3=k_NPKD.dtype == torch.float8_e4m3fn,
        num_warps=4,
    )
    return q_THD


@triton.jit(
    do_not_specialize=["page_size", "k_unscale", "v_unscale"],
    do_not_specialize_on_alignment=["slots"],
)
def queries_kernel(
    row,
    cos,
    sin,
    slots,
    k_pages,
    v_pages,
    row_stride,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    page_size,
    k_unscale,
    v_unscale,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    H_BLOCK: tl.constexpr,
    F_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E4M3: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, j): token i, heads of block j of the queries, then of the keys, then of the
    values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    D: tl.constexpr = 2 * F
    q_parts: tl.constexpr = (H + H_BLOCK - 1) // H_BLOCK
    k_parts: tl.constexpr = (K + H_BLOCK - 1) // H_BLOCK
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    f = tl.arange(0, F_BLOCK)[None, :]
    c = tl.load(cos + token * F + f, mask=f < F, other=0.0)
    s = tl.load(sin + token * F + f, mask=f < F, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    page, offset = slot // page_size, slot % page_size
    if part < q_parts:
        h = part * H_BLOCK + tl.arange(0, H_BLOCK)
        at = row + token * row_stride + h * D
        turn(at, at, h < H, c, s, 1.0, F, H_BLOCK, F_BLOCK, INTERLEAVED, False)
    elif part < q_parts + k_parts:
        key = (part - q_parts) * H_BLOCK + tl.arange(0, H_BLOCK)
        keys = row + token * row_stride + (H + key) * D
        to = k_pages + page * k_page + offset * k_slot + key.to(tl.int64) * k_head
        turn(keys, to, key < K, c, s, k_unscale, F, H_BLOCK, F_BLOCK, INTERLEAVED, E4M3)
    else:
        value = (part - q_parts - k_parts) * H_BLOCK + tl.arange(0, H_BLOCK)
        d = tl.arange(0, 2 * F_BLOCK)[None, :]
        there = (value < K)[:, None] & (d < D)
        values = row + token * row_stride + (H + K + value) * D
        x = tl.load(values[:, None] + d, mask=there, other=0.0)
        at_v = v_pages + page * v_page + offset * v_slot + value.to(tl.int64) * v_head
        tl.store(at_v[:, None] + d, stored(x, v_pages, v_unscale, E4M3), mask=there)
