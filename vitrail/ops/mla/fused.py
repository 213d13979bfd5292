"""The steps around latent attention in Triton: one launch each. Legend: see `naive`."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitrail.ops.launch import launch_early
from vitrail.ops.mla.naive import MAX_RANK, LatentNorm, LatentSlots, MlaSizes
from vitrail.ops.mla.triton import absorbed_kernel, expanded_kernel, keys_kernel, values_kernel
from vitrail.ops.rope.naive import Turns

MAX_UNROLLED = 4  # tokens that take turns over weights in registers; more are rows of a product
MATRIX_ROWS = 16  # the fewest
R_BLOCK = 64
E_BLOCK = 16
MAX_VALUE_TOKENS = 128  # beyond, the batched product of the library


class Tile(NamedTuple):
    """Tokens of a program, and whether they are rows of a matrix product."""

    tokens: int
    dot: bool


def tile(tokens: int, most: int = 64, fixed: bool = False) -> Tile:
    """Of a batch: few kinds, so that few kernels are compiled; `fixed`: one."""
    if fixed:
        return Tile(most, True)
    held = triton.next_power_of_2(tokens)
    if held <= MAX_UNROLLED:
        return Tile(held, False)
    return Tile(min(max(held, MATRIX_ROWS), most), True)


def expanded_queries(
    row_TX: Tensor, norm: LatentNorm, turns: Turns, sizes: MlaSizes, into: LatentSlots
) -> Tensor:
    """`naive.expanded_queries`: a view of `row_TX`, whose rotary query channels are turned in
    place."""
    tokens = _check_rows(row_TX, turns, sizes, into)
    q_THD = row_TX[:, : sizes.heads * sizes.head].view(tokens, sizes.heads, sizes.head)
    if not tokens:
        return q_THD
    launch_early(
        expanded_kernel,
        (tokens,),
        row_TX.device,
        row_TX,
        norm.weight_R,
        turns.cos_TF,
        turns.sin_TF,
        into.slots_T,
        into.cache_NPC,
        row_TX.stride(0),
        *_cache_arguments(into, norm),
        H_BLOCK=triton.next_power_of_2(sizes.heads),
        **_row_constants(sizes, turns.interleaved, into.cache_NPC.dtype),
    )
    return q_THD


def absorbed_queries(
    row_TX: Tensor,
    k_b_HNR: Tensor,
    norm: LatentNorm,
    turns: Turns,
    sizes: MlaSizes,
    into: LatentSlots,
    fixed: bool = False,
) -> Tensor:
    """`naive.absorbed_queries`. `k_b_HNR`: heads of any stride."""
    tokens = _check_rows(row_TX, turns, sizes, into)
    assert k_b_HNR.shape == (sizes.heads, sizes.nope, sizes.rank), k_b_HNR.shape
    assert k_b_HNR.stride()[1:] == (sizes.rank, 1), k_b_HNR.stride()
    q_THC = row_TX.new_empty((tokens, sizes.heads, sizes.row))
    if not tokens:
        return q_THC
    shape = tile(tokens, fixed=fixed)
    products = -(-tokens // shape.tokens) * sizes.heads * -(-sizes.rank // R_BLOCK)
    launch_early(
        absorbed_kernel,
        (products + tokens,),
        row_TX.device,
        row_TX,
        k_b_HNR,
        norm.weight_R,
        turns.cos_TF,
        turns.sin_TF,
        into.slots_T,
        into.cache_NPC,
        q_THC,
        tokens,
        row_TX.stride(0),
        k_b_HNR.stride(0),
        *_cache_arguments(into, norm),
        TILE_T=shape.tokens,
        N_BLOCK=max(triton.next_power_of_2(sizes.nope), MATRIX_ROWS),
        R_BLOCK=R_BLOCK,
        DOT=shape.dot,
        **_row_constants(sizes, turns.interleaved, into.cache_NPC.dtype),
    )
    return q_THC


def values(out_THR: Tensor, v_b_HER: Tensor, fixed: bool = False) -> Tensor:
    """`naive.values`. `v_b_HER`: heads of any stride."""
    tokens, heads, rank = out_THR.shape
    width = v_b_HER.shape[1]
    assert v_b_HER.shape == (heads, width, rank), f"{tuple(v_b_HER.shape)}"
    assert v_b_HER.stride()[1:] == (rank, 1), v_b_HER.stride()
    assert out_THR.stride(-1) == 1, out_THR.stride()
    out = out_THR.new_empty((tokens, heads * width))
    if (tokens > MAX_VALUE_TOKENS and not fixed) or rank > MAX_RANK:
        assert not fixed, f"a latent of {rank} channels: refused at start-up"
        by_head = out.view(tokens, heads, width).transpose(0, 1)
        torch.bmm(out_THR.transpose(0, 1), v_b_HER.transpose(1, 2), out=by_head)
        return out
    if not tokens:
        return out
    shape = tile(tokens, most=32, fixed=fixed)
    blocks = -(-width // E_BLOCK)
    launch_early(
        values_kernel,
        (-(-tokens // shape.tokens) * heads * blocks,),
        out_THR.device,
        out_THR,
        v_b_HER,
        out,
        tokens,
        *out_THR.stride()[:2],
        v_b_HER.stride(0),
        H=heads,
        E=width,
        R=rank,
        TILE_T=shape.tokens,
        E_BLOCK=E_BLOCK,
        R_BLOCK=max(triton.next_power_of_2(rank), MATRIX_ROWS),
        DOT=shape.dot,
        num_warps=4,
    )
    return out


def expanded_keys(
    row_TC: Tensor, kv_b: Tensor, sizes: MlaSizes, mend: bool
) -> tuple[Tensor, Tensor]:
    """`naive.expanded_keys`; the values are a view of the product."""
    tokens = len(row_TC)
    assert row_TC.stride(1) == 1, row_TC.stride()
    kv_TX = torch.nn.functional.linear(row_TC[:, : sizes.rank], kv_b)
    kv_THX = kv_TX.view(tokens, sizes.heads, sizes.nope + sizes.value)
    k_THD = row_TC.new_empty((tokens, sizes.heads, sizes.head))
    if tokens:
        launch_early(
            keys_kernel,
            (tokens,),
            kv_TX.device,
            kv_TX,
            row_TC,
            k_THD,
            row_TC.stride(0),
            MEND=mend,
            **_key_constants(sizes),
        )
    return k_THD, kv_THX[..., sizes.nope :]


def _check_rows(row_TX: Tensor, turns: Turns, sizes: MlaSizes, into: LatentSlots) -> int:
    """How many tokens there are."""
    tokens, pairs = len(row_TX), sizes.rope // 2
    cache_NPC = into.cache_NPC
    assert row_TX.shape == (tokens, sizes.projected), f"{tuple(row_TX.shape)}, {sizes}"
    assert row_TX.stride(1) == cache_NPC.stride(2) == 1, (row_TX.stride(), cache_NPC.stride())
    assert cache_NPC.shape[2] == sizes.row, f"{tuple(cache_NPC.shape)}, {sizes}"
    assert into.slots_T.shape == (tokens,), f"{tuple(into.slots_T.shape)} for {tokens} tokens"
    for table_TF in (turns.cos_TF, turns.sin_TF):
        assert table_TF.shape == (tokens, pairs), f"{tuple(table_TF.shape)}, {tokens} tokens"
        assert table_TF.is_contiguous(), table_TF.stride()
    return tokens


def _cache_arguments(into: LatentSlots, norm: LatentNorm) -> tuple[int | float, ...]:
    cache_NPC = into.cache_NPC
    return (*cache_NPC.stride()[:2], cache_NPC.shape[1], norm.eps, 1 / into.scale)


@cache
def _row_constants(sizes: MlaSizes, interleaved: bool, stored: torch.dtype) -> dict[str, int]:
    """Of kernels that make cache rows; the same for every layer of a model."""
    return {
        "H": sizes.heads,
        "N": sizes.nope,
        "F": sizes.rope // 2,
        "R": sizes.rank,
        "F_BLOCK": triton.next_power_of_2(sizes.rope // 2),
        "R_ALL": triton.next_power_of_2(sizes.rank),
        "INTERLEAVED": interleaved,
        "E4M3": stored == torch.float8_e4m3fn,
        "num_warps": 4,
    }


@cache
def _key_constants(sizes: MlaSizes) -> dict[str, int]:
    """Of `keys_kernel`."""
    return {
        "H": sizes.heads,
        "N": sizes.nope,
        "P": sizes.rope,
        "KV_HEAD": sizes.nope + sizes.value,
        "R": sizes.rank,
        "H_BLOCK": triton.next_power_of_2(sizes.heads),
        "N_BLOCK": triton.next_power_of_2(sizes.nope),
        "P_BLOCK": triton.next_power_of_2(sizes.rope),
        "E_BLOCK": triton.next_power_of_2(sizes.value),
        "num_warps": 4,
    }
