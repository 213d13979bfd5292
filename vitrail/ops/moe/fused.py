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
from vitrail.ops.moe import triton as kernels
from vitrail.ops.moe.naive import Routing
from vitrail.ops.moe.plan import (
    SORT_CHUNK,
    SORT_PIECE,
    Choice,
    ExpertsShape,
    direct,
    experts_plan,
    fixed_plan,
    max_blocks,
    power_of_2,
    router_tiles,
    sort_share,
)
from vitrail.ops.moe.tile import ExpertsPlan, Tile

ROUTER_BK = 64
WIDE = 1024  # channels that a program of `join` adds, where there are many tokens


class Placed(NamedTuple):
    """`rows` [blocks * bt]: slots, S where there is none. `owners` [blocks + 1]: who owns each
    block, -1 for nobody; the last entry is the number of blocks that are owned. Where slots are
    placed `direct`ly neither is read."""

    rows: Int[Tensor, "R"]
    owners: Int[Tensor, "B"]
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
    routing = triton_route(x_TM, router_VM, bias_V, choice, plan.early, fixed)
    return triton_experts(x_TM, routing, gate_up_XFM, down_XMI, plan)


def triton_route(
    x_TM: Float[Tensor, "T M"],
    router_VM: Float[Tensor, "V M"],
    bias_V: Float[Tensor, "V"],
    choice: Choice,
    early: bool,
    fixed: bool = False,
) -> Routing:
    """As `naive_route`. `x` is bf16, the router fp32."""
    assert x_TM.dtype == torch.bfloat16, x_TM.dtype
    assert router_VM.dtype == bias_V.dtype == torch.float32, (router_VM.dtype, bias_V.dtype)
    (tokens, hidden), num_experts = x_TM.shape, len(router_VM)
    made, device = router_tiles(tokens, hidden, fixed), x_TM.device
    part = torch.empty((made.parts, tokens, num_experts), dtype=torch.float32, device=device)
    _run(
        kernels.score,
        (-(-tokens // made.bt), made.parts),
        part,
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
        MULTIPLY=tl.bfloat16 if x_TM.is_cuda else tl.float32,
        num_warps=4,
        num_stages=3,
        **_early(early),
    )
    top_k = choice.top_k + choice.num_shared
    ids_TK = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    weights_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    _run(
        kernels.choose,
        (tokens,),
        ids_TK,
        weights_TK,
        part,
        bias_V,
        tokens,
        num_experts,
        choice.scaling,
        SPANS=made.parts,
        ROUTED=choice.top_k,
        SHARED=choice.num_shared,
        NORMALIZE=choice.normalize,
        XP=max(32, power_of_2(num_experts)),
        KP=power_of_2(top_k),
        num_warps=1,
        **_early(early),
    )
    return Routing(ids_TK, weights_TK)


def triton_experts(
    x_TM: Float[Tensor, "T M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
    plan: ExpertsPlan,
) -> Float[Tensor, "T M"]:
    """As `naive_experts`; choices outside [0, X) add nothing. All tensors are contiguous."""
    if not len(x_TM):
        return torch.empty_like(x_TM)
    ids_TK, experts = routing.expert_ids, len(down_XMI)
    placed = place(ids_TK, experts, plan)
    act_RI = run_up(x_TM, gate_up_XFM, ids_TK, placed, plan)
    part_SM = run_down(act_RI, down_XMI, ids_TK, placed, plan)
    return join(part_SM, routing, experts, plan)


def place(expert_ids: Int[Tensor, "T K"], num_experts: int, plan: ExpertsPlan) -> Placed:
    """The batch's slots in blocks of one expert each."""
    (tokens, _), slots, device = expert_ids.shape, expert_ids.numel(), expert_ids.device
    how = direct(tokens, slots, num_experts, plan)
    if how:
        return Placed(expert_ids, expert_ids, min(slots, num_experts), how)
    blocks = max_blocks(slots, num_experts, plan.bt)
    rows = torch.empty(blocks * plan.bt, dtype=torch.int32, device=device)
    owners = torch.empty(blocks + 1, dtype=torch.int32, device=device)
    share, counted = sort_share(slots)
    shares, experts = -(-slots // share), power_of_2(num_experts + 1)
    counts = torch.empty((shares, experts), dtype=torch.int32, device=device)
    fixed = {"SHARE": share, "XP": experts, "num_warps": 4, **_early(plan.early)}
    if counted:
        _run(kernels.count, (shares,), counts, expert_ids, slots, num_experts, **fixed)
    _run(
        kernels.place,
        (shares,),
        rows,
        owners,
        counts,
        expert_ids,
        slots,
        num_experts,
        blocks,
        shares,
        PIECE=SORT_PIECE,
        CHUNK=SORT_CHUNK,
        BT=plan.bt,
        COUNTED=counted,
        **fixed,
    )
    return Placed(rows, owners, blocks, 0)


def run_up(
    x_TM: Float[Tensor, "T M"],
    gate_up_XFM: Float[Tensor, "X F M"],
    ids_TK: Int[Tensor, "T K"],
    placed: Placed,
    plan: ExpertsPlan,
) -> Float[Tensor, "R I"]:
    """silu(gate x) * up x for the rows of every block that has an owner."""
    hidden, inner, up = x_TM.shape[1], gate_up_XFM.shape[1] // 2, plan.up
    rows = placed.blocks * plan.bt
    x = _gathered(x_TM, ids_TK, placed, plan) if up.sorted else x_TM
    act_RI = x_TM.new_empty((rows, inner))
    _run(
        kernels.up,
        _grid(up, placed.blocks, inner),
        *_rows(x, up, plan),
        _boxes(gate_up_XFM, up),
        act_RI,
        *_batch(ids_TK, placed, len(gate_up_XFM)),
        M=hidden,
        INNER=inner,
        **_options(up, plan, placed, ids_TK.shape[1]),
    )
    return act_RI


def _gathered(
    x_TM: Float[Tensor, "T M"], ids_TK: Int[Tensor, "T K"], placed: Placed, plan: ExpertsPlan
) -> Float[Tensor, "R M"]:
    hidden, rows = x_TM.shape[1], placed.blocks * plan.bt
    x_RM = x_TM.new_empty((rows, hidden))
    _run(
        kernels.gather,
        (rows,),
        x_RM,
        x_TM,
        placed.rows,
        placed.owners,
        ids_TK.numel(),
        M=hidden,
        K=ids_TK.shape[1],
        BT=plan.bt,
        BN=power_of_2(hidden),
        num_warps=4,
        **_early(plan.early),
    )
    return x_RM


def run_down(
    act_RI: Float[Tensor, "R I"],
    down_XMI: Float[Tensor, "X M I"],
    ids_TK: Int[Tensor, "T K"],
    placed: Placed,
    plan: ExpertsPlan,
) -> Float[Tensor, "S M"]:
    """Each slot's expert's output."""
    experts, hidden, inner = down_XMI.shape
    down = plan.down
    part_SM = act_RI.new_empty((ids_TK.numel(), hidden))
    _run(
        kernels.down,
        _grid(down, placed.blocks, hidden),
        *_rows(act_RI, down, plan),
        _boxes(down_XMI, down),
        part_SM,
        *_batch(ids_TK, placed, experts),
        M=hidden,
        INNER=inner,
        AHEAD=down.ahead and plan.early,
        **_options(down, plan, placed, ids_TK.shape[1]),
    )
    return part_SM


def join(
    part_SM: Float[Tensor, "S M"], routing: Routing, num_experts: int, plan: ExpertsPlan
) -> Float[Tensor, "T M"]:
    """Each token's weighted sum over its choices, in their order."""
    (tokens, top_k), hidden = routing.expert_ids.shape, part_SM.shape[1]
    out_TM = part_SM.new_empty((tokens, hidden))
    width = min(power_of_2(hidden), WIDE if tokens > 64 or plan.fixed else WIDE // 4)
    _run(
        kernels.join,
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
    kernel[grid](*arguments, **options)


def _grid(tile: Tile, blocks: int, channels: int) -> tuple[int]:
    return (tile.programs or blocks * -(-channels // tile.bn),)


def _rows(x: Tensor, tile: Tile, plan: ExpertsPlan) -> tuple[Tensor | TensorDescriptor, ...]:
    """By whole and by half blocks."""
    if not tile.sorted:
        return x, x
    whole, half = [plan.bt, tile.bk], [plan.bt // 2, tile.bk]
    return TensorDescriptor.from_tensor(x, whole), TensorDescriptor.from_tensor(x, half)


def _boxes(weight: Tensor, tile: Tile) -> TensorDescriptor:
    flat = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(flat, [tile.bn, tile.bk])


def _batch(ids_TK: Tensor, placed: Placed, experts: int) -> tuple[Tensor | int, ...]:
    tokens, slots = len(ids_TK), ids_TK.numel()
    return placed.rows, placed.owners, ids_TK, tokens, slots, placed.blocks, experts


def _options(tile: Tile, plan: ExpertsPlan, placed: Placed, top_k: int) -> dict[str, int]:
    return {
        "K": top_k,
        "KP": power_of_2(top_k),
        "BT": plan.bt,
        "BN": tile.bn,
        "BK": tile.bk,
        "SWAP": tile.swap,
        "SORTED": tile.sorted,
        "PROGRAMS": tile.programs,
        "FLAT": tile.flat,
        "SPLIT": tile.split,
        "DIRECT": placed.direct,
        "HALVES": tile.halves and not placed.direct,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **_early(plan.early),
    }


def _early(early: bool) -> dict[str, bool]:
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})
