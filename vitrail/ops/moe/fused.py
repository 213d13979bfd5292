"""The mixture of experts by our Triton kernels: allocates, launches, asks the device for nothing.

Legend: T tokens, M hidden channels, X experts (all, shared ones last), K experts a token, S = T * K
slots, R rows of blocks, I intermediate channels, F = 2I ([gate | up])."""

from typing import NamedTuple

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.config.hardware import Hardware
from vitrail.ops.moe import triton as kernels
from vitrail.ops.moe.naive import Routing
from vitrail.ops.moe.plan import (
    Choice,
    ExpertsPlan,
    ExpertsShape,
    Tile,
    experts_plan,
    max_blocks,
    router_plan,
    share,
)

CHUNK = 128  # slots that are sorted at once
ROUTER_BK = 64
WIDE = 1024  # channels that a program of `join` adds


class Placed(NamedTuple):
    """`rows` [blocks * bt]: slots, S where there is none. `blocks` [blocks + 1]: who owns each
    block, -1 for nobody; the last entry is the number of blocks that are owned."""

    rows: Int[Tensor, "R"]
    blocks: Int[Tensor, "B"]


def triton_mixture(
    gpu: Hardware,
    x_TM: Float[Tensor, "T M"],
    router_VM: Float[Tensor, "V M"],
    bias_V: Float[Tensor, "V"],
    choice: Choice,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
) -> Float[Tensor, "T M"]:
    """`naive_route`, then `naive_experts`; V experts are routed. All tensors are contiguous."""
    if not len(x_TM):
        return torch.empty_like(x_TM)
    experts, hidden, inner = down_XMI.shape
    shape = ExpertsShape(hidden, inner, experts, choice.top_k + choice.num_shared)
    plan = experts_plan(len(x_TM), shape, gpu)
    routing, placed = triton_route(x_TM, router_VM, bias_V, choice, plan)
    return triton_experts(x_TM, routing, gate_up_XFM, down_XMI, plan, placed)


def triton_experts(
    x_TM: Float[Tensor, "T M"],
    routing: Routing,
    gate_up_XFM: Float[Tensor, "X F M"],
    down_XMI: Float[Tensor, "X M I"],
    plan: ExpertsPlan,
    placed: Placed | None = None,
) -> Float[Tensor, "T M"]:
    """As `naive_experts`; choices outside [0, X) add nothing. All tensors are contiguous.
    `placed`: where the caller has placed the slots in blocks of `plan.bt`."""
    ids_TK = routing.expert_ids
    if not len(x_TM):
        return torch.empty_like(x_TM)
    placed = placed or place(ids_TK, len(down_XMI), plan)
    act_RI = run_up(x_TM, gate_up_XFM, placed, ids_TK.shape[1], plan)
    part_SM = run_down(act_RI, down_XMI, placed, ids_TK.numel(), plan)
    return join(part_SM, routing, len(down_XMI), plan)


def triton_route(
    x_TM: Float[Tensor, "T M"],
    router_XM: Float[Tensor, "X M"],
    bias_X: Float[Tensor, "X"],
    choice: Choice,
    experts: ExpertsPlan,
) -> tuple[Routing, Placed]:
    """As `route`, its choice followed by the shared experts with weight 1, and placed. `x` is bf16,
    the router fp32."""
    assert x_TM.dtype == torch.bfloat16, x_TM.dtype
    assert router_XM.dtype == bias_X.dtype == torch.float32, (router_XM.dtype, bias_X.dtype)
    (tokens, hidden), num_experts = x_TM.shape, len(router_XM)
    made = router_plan(tokens, hidden)
    top_k = choice.top_k + choice.num_shared
    device = x_TM.device
    part = torch.empty((made.spans, tokens, num_experts), dtype=torch.float32, device=device)
    kernels.score[(-(-tokens // made.bt), made.spans)](
        part,
        x_TM,
        router_XM,
        tokens,
        num_experts,
        M=hidden,
        BT=made.bt,
        XP=max(64, _power(num_experts)),
        BK=ROUTER_BK,
        SPAN=made.span,
        MULTIPLY=tl.bfloat16 if x_TM.is_cuda else tl.float32,
        EARLY=experts.early,
        num_warps=4,
        num_stages=3,
        **_early(experts),
    )
    ids_TK = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    weights_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    all_experts = num_experts + choice.num_shared
    placed = _placed(ids_TK.numel(), all_experts, experts, device)
    kernels.choose[(-(-tokens // made.choosers),)](
        ids_TK,
        weights_TK,
        part,
        bias_X,
        *placed,
        tokens,
        num_experts,
        len(placed.blocks) - 1,
        choice.scaling,
        SPANS=made.spans,
        ROUTED=choice.top_k,
        SHARED=choice.num_shared,
        NORMALIZE=choice.normalize,
        TP=made.choosers,
        XP=_power(all_experts),
        BT=experts.bt if made.places else 0,
        EARLY=experts.early,
        num_warps=4,
        **_early(experts),
    )
    routing = Routing(ids_TK, weights_TK)
    return routing, placed if made.places else place(ids_TK, all_experts, experts, placed)


def place(
    expert_ids: Int[Tensor, "T K"],
    num_experts: int,
    plan: ExpertsPlan,
    into: Placed | None = None,
) -> Placed:
    """The batch's slots in blocks of one expert each."""
    slots, device = expert_ids.numel(), expert_ids.device
    placed = into or _placed(slots, num_experts, plan, device)
    each, experts = share(slots), _power(num_experts)
    shares = -(-slots // each)
    counts = torch.empty((shares, experts), dtype=torch.int32, device=device)
    fixed = {"SHARE": each, "CHUNK": CHUNK, "XP": experts, "EARLY": plan.early}
    options = {"num_warps": 8, **_early(plan)}
    if shares > 1:
        kernels.count[(shares,)](counts, expert_ids, slots, num_experts, **fixed, **options)
    kernels.place[(shares,)](
        *placed,
        counts,
        expert_ids,
        slots,
        num_experts,
        len(placed.blocks) - 1,
        shares,
        BT=plan.bt,
        COUNTED=shares > 1,
        **fixed,
        **options,
    )
    return placed


def _placed(slots: int, num_experts: int, plan: ExpertsPlan, device: torch.device) -> Placed:
    blocks = max_blocks(slots, num_experts, plan.bt)
    rows = torch.empty(blocks * plan.bt, dtype=torch.int32, device=device)
    return Placed(rows, torch.empty(blocks + 1, dtype=torch.int32, device=device))


def run_up(
    x_TM: Float[Tensor, "T M"],
    gate_up_XFM: Float[Tensor, "X F M"],
    placed: Placed,
    top_k: int,
    plan: ExpertsPlan,
) -> Float[Tensor, "R I"]:
    """silu(gate x) * up x for the rows of every block that has an owner."""
    (tokens, hidden), inner, up = x_TM.shape, gate_up_XFM.shape[1] // 2, plan.up
    blocks, slots = len(placed.blocks) - 1, tokens * top_k
    rows = x_TM
    if up.sorted:
        rows = x_TM.new_empty((blocks * plan.bt, hidden))
        kernels.gather[(blocks * plan.bt,)](
            rows,
            x_TM,
            *placed,
            slots,
            M=hidden,
            K=top_k,
            BT=plan.bt,
            BN=_power(hidden),
            EARLY=plan.early,
            num_warps=4,
            **_early(plan),
        )
    act_RI = x_TM.new_empty((blocks * plan.bt, inner))
    kernels.up[_grid(up, blocks, inner)](
        _rows(rows, up, plan),
        _boxes(gate_up_XFM, up),
        act_RI,
        *placed,
        slots,
        blocks,
        M=hidden,
        I=inner,
        K=top_k,
        **_options(up, plan),
    )
    return act_RI


def run_down(
    act_RI: Float[Tensor, "R I"],
    down_XMI: Float[Tensor, "X M I"],
    placed: Placed,
    slots: int,
    plan: ExpertsPlan,
) -> Float[Tensor, "S M"]:
    """Each slot's expert's output."""
    _, hidden, inner = down_XMI.shape
    blocks, down = len(placed.blocks) - 1, plan.down
    part_SM = act_RI.new_empty((slots, hidden))
    kernels.down[_grid(down, blocks, hidden)](
        _rows(act_RI, down, plan),
        _boxes(down_XMI, down),
        down_XMI,
        part_SM,
        *placed,
        slots,
        blocks,
        M=hidden,
        I=inner,
        PREFETCH=down.prefetch,
        **_options(down, plan),
    )
    return part_SM


def join(
    part_SM: Float[Tensor, "S M"], routing: Routing, num_experts: int, plan: ExpertsPlan
) -> Float[Tensor, "T M"]:
    """Each token's weighted sum over its choices, in their order."""
    (tokens, top_k), hidden = routing.expert_ids.shape, part_SM.shape[1]
    out_TM = part_SM.new_empty((tokens, hidden))
    width = min(_power(hidden), WIDE)
    kernels.join[(tokens, -(-hidden // width))](
        out_TM,
        part_SM,
        routing.expert_ids,
        routing.weights,
        num_experts,
        M=hidden,
        K=top_k,
        KP=_power(top_k),
        BN=width,
        EARLY=plan.early,
        num_warps=4,
        **_early(plan),
    )
    return out_TM


def _grid(tile: Tile, blocks: int, channels: int) -> tuple[int]:
    return (tile.programs or blocks * -(-channels // tile.bn),)


def _rows(x: Tensor, tile: Tile, plan: ExpertsPlan) -> Tensor | TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [plan.bt, tile.bk]) if tile.sorted else x


def _boxes(weight: Tensor, tile: Tile) -> TensorDescriptor:
    flat = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(flat, [tile.bn, tile.bk])


def _options(tile: Tile, plan: ExpertsPlan) -> dict[str, int]:
    return {
        "BT": plan.bt,
        "BN": tile.bn,
        "BK": tile.bk,
        "SWAP": tile.swap,
        "SORTED": tile.sorted,
        "PROGRAMS": tile.programs,
        "FLAT": tile.flat,
        "SPLIT": tile.split,
        "EARLY": plan.early,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **_early(plan),
    }


def _early(plan: ExpertsPlan) -> dict[str, bool]:
    return {"launch_pdl": True} if plan.early else {}


def _power(n: int) -> int:
    """The power of two from `n` on."""
    return 1 << (n - 1).bit_length()
