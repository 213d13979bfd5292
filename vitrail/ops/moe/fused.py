"""The mixture of experts by our Triton kernels: allocates, launches, asks the device for nothing.

Legend: T tokens, M hidden channels, V routed experts, X all experts (shared ones last), K experts a
token, S = T * K slots, R rows of blocks, I intermediate channels, F = 2I ([gate | up])."""

from typing import NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton import KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.config.hardware import Hardware
from vitrail.ops.launch import launch
from vitrail.ops.moe import triton as kernels
from vitrail.ops.moe.naive import Routing
from vitrail.ops.moe.plan import (
    SORT_ALONE,
    SORT_CHUNK,
    Choice,
    ExpertsShape,
    direct,
    experts_plan,
    fixed_plan,
    max_blocks,
    power_of_2,
    router_tiles,
)
from vitrail.ops.moe.tile import ExpertsPlan, Tile
from vitrail.ops.record import on_gpu

ROUTER_BK = 64  # channels of a span that are multiplied at once
LAID = 16  # blocks that a program of `moe_lay` lays
WIDE = 1024  # channels that a program of `moe_join` adds


class Placed(NamedTuple):
    """`rows` [X * T]: slots by expert, in any order; `counts` [X...]: how many there are. `records`
    [blocks + 1, 4]: expert (-1: nobody), first row and number of rows of each block; the last one
    begins with the number of blocks that are owned. With `direct`, only the bound of `blocks`
    means anything."""

    rows: Int[Tensor, "R"]
    counts: Int[Tensor, "C"]
    records: Int[Tensor, "B 4"]
    blocks: int
    direct: int


def triton_mixture(
    gpu: Hardware,
    x_TM: Float[Tensor, "T M"],
    router_VM: Float[Tensor, "V M"],
    bias_V: Float[Tensor, "V"],
    choice: Choice,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
    fixed: bool = False,
) -> Float[Tensor, "T M"]:
    """`naive_route`, then `naive_experts`. All tensors are contiguous. `fixed`: in the tiles of any
    number of tokens."""
    if not len(x_TM):
        return torch.empty_like(x_TM)
    experts, hidden, inner = down_XMI.shape
    shape = ExpertsShape(hidden, inner, experts, choice.top_k + choice.num_shared)
    plan = fixed_plan(shape, gpu) if fixed else experts_plan(len(x_TM), shape, gpu)
    routing, placed = triton_route(x_TM, router_VM, bias_V, choice, plan)
    if plan.rows is not None and len(x_TM) == 1:
        return one_token(x_TM, routing, gate_up_XFM, down_XMI, choice.num_shared, plan)
    return triton_experts(x_TM, routing, gate_up_XFM, down_XMI, plan, placed)


def triton_route(
    x_TM: Float[Tensor, "T M"],
    router_VM: Float[Tensor, "V M"],
    bias_V: Float[Tensor, "V"],
    choice: Choice,
    plan: ExpertsPlan,
) -> tuple[Routing, Placed]:
    """As `naive_route`, placed. `x` is bf16, the router fp32."""
    assert x_TM.dtype == torch.bfloat16, x_TM.dtype
    assert router_VM.dtype == bias_V.dtype == torch.float32, (router_VM.dtype, bias_V.dtype)
    tokens, top_k, num_experts = len(x_TM), choice.top_k + choice.num_shared, len(router_VM)
    ids_TK = torch.empty((tokens, top_k), dtype=torch.int32, device=x_TM.device)
    weights_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=x_TM.device)
    placed = _room(ids_TK, num_experts + choice.num_shared, plan)
    part = _scores(x_TM, router_VM, placed, choice, plan)
    _run(
        kernels.moe_choose,
        (tokens,),
        ids_TK,
        weights_TK,
        placed.rows,
        placed.counts,
        part,
        bias_V,
        tokens,
        num_experts,
        tokens,
        choice.scaling,
        SPANS=len(part),
        ROUTED=choice.top_k,
        SHARED=choice.num_shared,
        NORMALIZE=choice.normalize,
        XP=max(32, power_of_2(num_experts)),
        KP=power_of_2(top_k),
        PLACE=not placed.direct,
        num_warps=1,
        **_early(plan.early),
    )
    if not placed.direct:
        _lay(placed, num_experts + choice.num_shared, tokens, plan)
    return Routing(ids_TK, weights_TK), placed


def _scores(
    x_TM: Float[Tensor, "T M"],
    router_VM: Float[Tensor, "V M"],
    placed: Placed,
    choice: Choice,
    plan: ExpertsPlan,
) -> Float[Tensor, "P T V"]:
    """Parts of the logits, to be added in their order; sets the counts to 0."""
    (tokens, hidden), num_experts = x_TM.shape, len(router_VM)
    made = router_tiles(tokens, hidden, plan.fixed)
    part = torch.empty((made.parts, tokens, num_experts), dtype=torch.float32, device=x_TM.device)
    _run(
        kernels.moe_score,
        (-(-tokens // made.bt), made.parts),
        part,
        placed.counts,
        x_TM,
        router_VM,
        tokens,
        num_experts,
        M=hidden,
        BT=made.bt,
        XP=max(64, power_of_2(num_experts)),
        BK=ROUTER_BK,
        SPAN=made.span,
        WIDTH=made.width,
        MULTIPLY=tl.bfloat16 if on_gpu(x_TM.device) else tl.float32,
        COUNTS=power_of_2(num_experts + choice.num_shared),
        num_warps=4,
        num_stages=3,
        **_early(plan.early),
    )
    return part


def _lay(placed: Placed, num_experts: int, tokens: int, plan: ExpertsPlan) -> None:
    _run(
        kernels.moe_lay,
        (-(-placed.blocks // LAID),),
        placed.records,
        placed.counts,
        num_experts,
        placed.blocks,
        tokens,
        LAID=LAID,
        BT=plan.bt,
        XP=power_of_2(num_experts),
        num_warps=4,
        **_early(plan.early),
    )


def triton_experts(
    x_TM: Float[Tensor, "T M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
    plan: ExpertsPlan,
    placed: Placed | None = None,
) -> Float[Tensor, "T M"]:
    """As `naive_experts`; a token chooses an expert at most once, and choices outside [0, X) add
    nothing. All tensors are contiguous. `placed`: where the router has done so, for `plan.bt`."""
    if not len(x_TM):
        return torch.empty_like(x_TM)
    ids_TK, experts = routing.expert_ids, len(down_XMI)
    placed = placed or place(ids_TK, experts, plan)
    act_RI = run_up(x_TM, gate_up_XFM, ids_TK, placed, plan)
    part_SM = run_down(act_RI, down_XMI, ids_TK, placed, plan.down, plan)
    return join(part_SM, routing, experts, plan)


def one_token(
    x_1M: Float[Tensor, "1 M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
    num_shared: int,
    plan: ExpertsPlan,
) -> Float[Tensor, "1 M"]:
    """As `triton_experts` of one token, whose last `num_shared` choices are the last experts."""
    assert plan.rows is not None, plan
    (experts, hidden, inner), rows = down_XMI.shape, plan.rows
    ids_1K = routing.expert_ids
    slots, early = ids_1K.numel(), _early(plan.early)
    act_KI = x_1M.new_empty((slots, inner))
    _run(
        kernels.moe_up_rows,
        (slots * -(-inner // rows.up),),
        x_1M,
        gate_up_XFM,
        act_KI,
        ids_1K,
        experts,
        M=hidden,
        INNER=inner,
        K=slots,
        SHARED=num_shared,
        ROWS=rows.up,
        **_blocks(hidden),
        num_warps=rows.up_warps,
        **early,
    )
    part_KM = x_1M.new_empty((slots, hidden))
    _run(
        kernels.moe_down_rows,
        (slots * -(-hidden // rows.down),),
        act_KI,
        down_XMI,
        part_KM,
        ids_1K,
        experts,
        M=hidden,
        INNER=inner,
        K=slots,
        ROWS=rows.down,
        **_blocks(inner),
        num_warps=rows.down_warps,
        **early,
    )
    return join(part_KM, routing, experts, plan)


def _blocks(channels: int) -> dict[str, int]:
    """Channels as a power of two and what is left of them, rounded up to one."""
    block = 1 << (channels.bit_length() - 1)
    rest = channels - block
    return {"BLOCK": block, "REST": power_of_2(rest) if rest else 0}


def place(expert_ids: Int[Tensor, "T K"], num_experts: int, plan: ExpertsPlan) -> Placed:
    """The batch's slots in blocks of one expert each."""
    slots, placed = expert_ids.numel(), _room(expert_ids, num_experts, plan)
    if placed.direct:
        return placed
    alone = slots <= SORT_ALONE
    if not alone:
        placed.counts.zero_()
    share = -(-slots // SORT_CHUNK) * SORT_CHUNK if alone else SORT_CHUNK
    _run(
        kernels.moe_scatter,
        (-(-slots // share),),
        placed.rows,
        placed.records,
        placed.counts,
        expert_ids,
        slots,
        num_experts,
        placed.blocks,
        len(expert_ids),
        SHARE=share,
        CHUNK=SORT_CHUNK,
        LAID=LAID,
        ALONE=alone,
        BT=plan.bt,
        XP=power_of_2(num_experts),
        num_warps=8,
        **_early(plan.early),
    )
    if not alone:
        _lay(placed, num_experts, len(expert_ids), plan)
    return placed


def _room(expert_ids: Int[Tensor, "T K"], num_experts: int, plan: ExpertsPlan) -> Placed:
    """Not written yet."""
    tokens, slots = len(expert_ids), expert_ids.numel()
    how = direct(tokens, slots, num_experts, plan)
    blocks = min(slots, num_experts) if how else max_blocks(slots, num_experts, plan.bt)
    sizes = power_of_2(num_experts), (blocks + 1) * 4, 0 if how else num_experts * tokens
    pool = torch.empty(sum(sizes), dtype=torch.int32, device=expert_ids.device)
    counts, records, rows = pool.split(sizes)
    return Placed(rows, counts, records.view(-1, 4), blocks, how)


def run_up(
    x_TM: Float[Tensor, "T M"],
    gate_up_XFM: Float[Tensor, "X F M"],
    ids_TK: Int[Tensor, "T K"],
    placed: Placed,
    plan: ExpertsPlan,
) -> Float[Tensor, "R I"]:
    """silu(gate x) * up x for the rows of every block that has an owner."""
    hidden, inner, up = x_TM.shape[1], gate_up_XFM.shape[1] // 2, plan.up
    act_RI = x_TM.new_empty((placed.blocks * plan.bt, inner))
    _run(
        kernels.moe_up,
        (placed.blocks * -(-inner // up.bn),),
        x_TM,
        _pairs(gate_up_XFM, up) if up.paired else _boxes(gate_up_XFM, up),
        act_RI,
        *_batch(ids_TK, placed, len(gate_up_XFM)),
        M=hidden,
        INNER=inner,
        PAIRED=up.paired,
        **_options(up, plan, placed, ids_TK.shape[1]),
    )
    return act_RI


def run_down(
    act_RI: Float[Tensor, "R I"],
    down_XMI: Float[Tensor, "X M I"],
    ids_TK: Int[Tensor, "T K"],
    placed: Placed,
    down: Tile,
    plan: ExpertsPlan,
) -> Float[Tensor, "S M"]:
    """Each slot's expert's output."""
    experts, hidden, inner = down_XMI.shape
    part_SM = act_RI.new_empty((ids_TK.numel(), hidden))
    _run(
        kernels.moe_down,
        (down.programs or placed.blocks * -(-hidden // down.bn),),
        *_rows(act_RI, down, plan),
        _boxes(down_XMI, down),
        part_SM,
        *_batch(ids_TK, placed, experts),
        M=hidden,
        INNER=inner,
        SORTED=down.sorted,
        PROGRAMS=down.programs,
        FLAT=down.flat,
        **_options(down, plan, placed, ids_TK.shape[1]),
    )
    return part_SM


def join(
    part_SM: Float[Tensor, "S M"], routing: Routing, num_experts: int, plan: ExpertsPlan
) -> Float[Tensor, "T M"]:
    """Each token's weighted sum over its choices, in their order."""
    (tokens, top_k), hidden = routing.expert_ids.shape, part_SM.shape[1]
    out_TM = part_SM.new_empty((tokens, hidden))
    width = min(power_of_2(hidden), WIDE)
    _run(
        kernels.moe_join,
        (tokens, -(-hidden // width)),
        out_TM,
        part_SM,
        routing.expert_ids,
        routing.weights,
        num_experts,
        M=hidden,
        K=top_k,
        KP=power_of_2(top_k),
        BN=width,
        num_warps=4,
        **_early(plan.early),
    )
    return out_TM


def _run(
    kernel: KernelInterface, grid: tuple[int, ...], *arguments: object, **options: object
) -> None:
    device = next(a for a in arguments if isinstance(a, Tensor)).device
    launch(kernel, grid, device, *arguments, **options)


def _rows(x: Tensor, tile: Tile, plan: ExpertsPlan) -> tuple[Tensor | TensorDescriptor, ...]:
    """By whole and by half blocks."""
    if not tile.sorted:
        return x, x
    whole, half = [plan.bt, tile.bk], [plan.bt // 2, tile.bk]
    return TensorDescriptor.from_tensor(x, whole), TensorDescriptor.from_tensor(x, half)


def _boxes(weight: Tensor, tile: Tile) -> TensorDescriptor:
    flat = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(flat, [tile.bn, tile.bk])


def _pairs(gate_up_XFM: Tensor, tile: Tile) -> TensorDescriptor:
    experts, both, hidden = gate_up_XFM.shape
    split = gate_up_XFM.view(experts, 2, both // 2, hidden)
    return TensorDescriptor.from_tensor(split, [1, 2, tile.bn, tile.bk])


def _batch(ids_TK: Tensor, placed: Placed, experts: int) -> tuple[Tensor | int, ...]:
    tokens, slots = len(ids_TK), ids_TK.numel()
    return placed.rows, placed.records, ids_TK, tokens, slots, placed.blocks, experts


def _options(tile: Tile, plan: ExpertsPlan, placed: Placed, top_k: int) -> dict[str, int]:
    return {
        "K": top_k,
        "KP": power_of_2(top_k),
        "BT": plan.bt,
        "BN": tile.bn,
        "BK": tile.bk,
        "SWAP": tile.swap,
        "DIRECT": placed.direct,
        "HALVES": tile.halves and not placed.direct,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **_early(plan.early),
    }


def _early(early: int) -> dict[str, int]:
    """Of a launch; a kernel's `_begin` says what it means."""
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})
