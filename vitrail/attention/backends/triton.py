"""Attention by our Triton kernels: one body (`kernels/attend.py`) for packed, paged and latent
keys, and one that joins split sequences (`kernels/combine.py`). The host checks the call, turns
lengths into records (`records.py`), once a batch for all layers, and launches. It never asks the
device for anything. `launches` is the one statement of how a kernel is specialised: what runs is
what `attention/compile.py` proves.

Legend: T packed queries, H query heads, D head_dim, E head_dim_v."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import KernelInterface

from vitrail.attention.backend import Attended, AttentionBackend, Sent
from vitrail.attention.call import WIDE_BYTES, Call, check_lengths, check_tensors, is_wide
from vitrail.attention.kernels.attend import attend
from vitrail.attention.kernels.combine import combine
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata, Work, lengths_of
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.records import (
    COMBINE_FIELDS,
    COMBINE_SPLITS,
    Lengths,
    records_of,
)
from vitrail.attention.shape import PAGED, Phase
from vitrail.config.model import ITEM_BYTES, KvScales
from vitrail.ops.launch import launch

LOG2_E = math.log2(math.e)
# What a joining program holds at once, over all splits and channels.
COMBINE_WARPS, COMBINE_VALUES = 4, 4096
COMBINE_MANY_ROWS = 256
# Of few rows, read at once: then a row of many splits is joined by as many programs as it has.
COMBINE_MANY_SPLITS = 128
JOIN_PROGRAMS = 1024  # more would queue for a GPU's SMs, where a graph has records to spare
STRIDES = (
    "q_token",
    "q_head",
    "k_page",
    "k_key",
    "k_head",
    "v_page",
    "v_key",
    "v_head",
    "table_row",
)
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel and all that the compiler specialises it for. `types`: Triton's names of the
    arguments that are not constants. `aligned`: those that are known to lie on 16-byte borders.
    `early`: may start while the launch before it runs, for which it waits itself."""

    kernel: KernelInterface
    types: dict[str, str]
    aligned: tuple[str, ...]
    constants: dict[str, int]
    num_warps: int
    num_stages: int
    early: bool = False

    @property
    def options(self) -> dict[str, int]:
        options: dict[str, int] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }
        return options | {"launch_pdl": True} if self.early else options


@cache
def launches(plan: AttentionPlan, wide: bool = True) -> tuple[Launch, ...]:
    """What a plan runs: `attend`, and `combine` where the plan splits. `wide`: all strides are
    multiples of 16 bytes, as those of every pool of ours are."""
    shape, site = plan.shape, plan.shape.site
    (d1, d2), (e1, e2) = plan.dim_blocks, plan.dim_v_blocks
    paged = shape.phase in PAGED
    single = site.causal and shape.max_q_len == 1  # then an item's bounds are its row's
    # Batch-invariant: one loop, so that where a block of rows ends chooses no code for a row.
    peeled = plan.max_splits == 1 and shape.phase is not Phase.DECODE and not single
    peeled = peeled and not shape.batch_invariant
    shared = bool(site.latent_rank) and (e1, e2) == (d1, 0) and site.head_dim_v == d1
    stored = shape.kv_dtype or shape.dtype
    results = {"out": f"*{TYPES[shape.dtype]}"}
    results |= dict.fromkeys(("lse", "part", "part_lse"), "*fp32")
    types = {"q": results["out"], "k": f"*{TYPES[stored]}", "v": f"*{TYPES[stored]}"}
    types |= {**results, "sink": "*fp32", "table": "*i32", "items": "*i32"}
    types |= dict.fromkeys((*STRIDES, "window"), "i32")
    types |= dict.fromkeys(("qk_scale", "exp_scale", "v_scale"), "fp32")
    heads = {"HEADS": site.num_q_heads, "KV_HEADS": site.num_kv_heads, "TILE_M": plan.tile_m}
    body = Launch(
        kernel=attend,
        types=types,
        aligned=("q", "k", "v", "out", "part") if wide else ("out", "part"),
        constants={
            **heads,
            "TILE_N": plan.tile_n,
            "PAGE": shape.page_size or 0,
            "D": site.head_dim,
            "D1": d1,
            "D2": d2,
            "E": site.head_dim_v,
            "E1": e1,
            "E2": e2,
            "SHARED": shared,
            "FROM_LO": site.window is not None,
            "CAUSAL": site.causal and not single,
            "WINDOW": site.window is not None and not single,
            "SOFTCAP": site.softcap is not None,
            "SINK": site.sink,
            "UNIT": WIDE_BYTES // ITEM_BYTES[shape.dtype] if wide else 1,
            "KV_UNIT": WIDE_BYTES // ITEM_BYTES[stored] if wide else 1,
            "PEELED": peeled,
        },
        num_warps=plan.num_warps,
        # The compiler counts the tile in use, and under pages pipelines the lookups as well.
        num_stages=(2 if paged else 1) * plan.num_stages + 1,
    )
    return (body,) if plan.max_splits == 1 else (body, join_launch(plan))


@cache
def join_launch(plan: AttentionPlan) -> Launch:
    """`combine` for the partial results of a plan, whichever backend makes them."""
    site = plan.shape.site
    # All channels of a row where there are many rows, else as many programs as they give. The
    # order of a sum follows from it, so batch-invariant ones are all alike.
    shape, fixed = plan.shape, plan.shape.batch_invariant
    channels = 1 << (site.head_dim_v - 1).bit_length()
    at_once = COMBINE_SPLITS
    if not fixed:
        at_once = min(max(1 << (plan.max_splits - 1).bit_length(), at_once), COMBINE_MANY_SPLITS)
    if fixed or shape.batch * shape.max_q_len * site.num_q_heads < COMBINE_MANY_ROWS:
        channels = min(channels, COMBINE_VALUES // at_once)
    splits = COMBINE_VALUES // channels
    if not fixed:
        splits = min(1 << (plan.max_splits - 1).bit_length(), splits)
    types = {"out": f"*{TYPES[plan.shape.dtype]}", "records": "*i32"}
    types |= {"live_rows": "i32", "num_rows": "i32"}
    types |= dict.fromkeys(("lse", "part", "part_lse"), "*fp32")
    return Launch(
        kernel=combine,
        types=types,
        aligned=("out", "part"),
        constants={
            "HEADS": site.num_q_heads,
            "KV_HEADS": site.num_kv_heads,
            "TILE_M": plan.tile_m,
            "E": site.head_dim_v,
            "E_BLOCK": channels,
            "SPLITS": splits,
            "EARLY": plan.backend == "cute",
        },
        num_warps=COMBINE_WARPS,
        num_stages=2,
        early=plan.backend == "cute",
    )


class Triton(AttentionBackend):
    """Pages of any size, any strides. Packed keys head by head and longest first, so that programs
    at work together share them. A latent row is loaded once."""

    def pack(self, plan: AttentionPlan, lengths: Lengths) -> Sent:
        """Records."""
        return pack_records(plan, lengths)

    def attend(self, call: Call) -> Attended:
        plan, q_THD, k, v, meta, sink_H, scales = call
        check_tensors(call)
        work = meta.work.get(plan, lambda: prepare(plan, meta, q_THD.device))
        made, site = results(plan, q_THD, meta, work), plan.shape.site
        if not len(work.items):
            return made.attended
        body = launches(plan, all(is_wide(t) for t in (q_THD, k, v)))[0]
        q_unit, kv_unit = body.constants["UNIT"], body.constants["KV_UNIT"]
        table = meta.block_table if isinstance(meta, PagedMetadata) else work.items
        launch(
            body.kernel,
            (len(work.items) * site.num_kv_heads,),
            q_THD.device,
            q_THD,
            k,
            v,
            made.lse_TH if sink_H is None else sink_H.float(),
            *made,
            table,
            work.items,
            *(stride // q_unit for stride in q_THD.stride()[:2]),
            *(stride // kv_unit for t in (k, v) for stride in (t.stride(0), *t.stride()[-3:-1])),
            table.stride(0),
            0 if site.window is None else site.window,
            *factors(plan, scales),
            **body.constants,
            **body.options,
        )
        join(plan, meta, work, made)
        return made.attended


BACKEND: AttentionBackend = Triton()


def pack_records(plan: AttentionPlan, lengths: Lengths) -> Sent:
    """The records of a batch."""
    records = records_of(plan, lengths)

    def place(meta: VarlenMetadata | PagedMetadata, arrays: Sequence[Tensor]) -> Work:
        check_lengths(plan, meta)
        return Work(items=arrays[0], combines=arrays[1], slots=records.slots)

    return Sent((records.items, records.combines), place)


def prepare(
    plan: AttentionPlan, meta: VarlenMetadata | PagedMetadata, device: torch.device
) -> Work:
    """The records of a batch, on the device by one copy that waits for nothing."""
    check_lengths(plan, meta)
    if isinstance(meta, VarlenMetadata) and meta.longest:
        return _any_work(plan, meta.cu_q, sum(meta.q_lens))
    records = records_of(plan, lengths_of(meta))
    flat = torch.cat(
        [torch.from_numpy(records.items).flatten(), torch.from_numpy(records.combines).flatten()]
    )
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    split = records.items.size
    return Work(
        items=flat[:split].view(records.items.shape),
        combines=flat[split:].view(-1, COMBINE_FIELDS),
        slots=records.slots,
    )


def _any_work(plan: AttentionPlan, edges_B1: Tensor, num_tokens: int) -> Work:
    """The records of self-attention made on the device, whatever lengths it finds there, which sum
    to `num_tokens`: as many items as these can need, the rest of them empty."""
    site, tile = plan.shape.site, plan.tile_m
    assert plan.max_splits == 1, plan
    assert not site.causal, plan
    assert site.window is None, plan
    group = site.num_q_heads // site.num_kv_heads
    lens_B = edges_B1.diff()
    blocks_B = (lens_B * group + (tile - 1)) // tile
    ends_B = blocks_B.cumsum(0, dtype=torch.int32)
    nth_I = torch.arange(num_tokens * group // tile + len(lens_B), device=edges_B1.device)
    nth_I = nth_I.to(torch.int32)
    seq_I = torch.searchsorted(ends_B, nth_I, right=True).clamp(max=len(lens_B) - 1)
    first_I, row_I = edges_B1[seq_I], (nth_I - (ends_B - blocks_B)[seq_I]) * tile
    none_I = torch.zeros_like(nth_I)
    columns = [first_I, row_I, lens_B[seq_I] * group, none_I, first_I, none_I, lens_B[seq_I]]
    items = torch.stack([*columns, none_I - 1, none_I + site.sink], 1)
    items = items * (nth_I < ends_B[-1])[:, None]
    return Work(items=items, combines=items.new_zeros((0, COMBINE_FIELDS)), slots=0)


class Results(NamedTuple):
    """What a launch writes: rows, and those of the items of split sequences."""

    out_THE: Tensor
    lse_TH: Tensor
    part: Tensor
    part_lse: Tensor

    @property
    def attended(self) -> Attended:
        return Attended(self.out_THE, self.lse_TH)


def results(
    plan: AttentionPlan, q_THD: Tensor, meta: VarlenMetadata | PagedMetadata, work: Work
) -> Results:
    """Not written yet."""
    assert len(q_THD) == sum(meta.q_lens), f"{len(q_THD)} queries of {sum(meta.q_lens)}"
    site, device = plan.shape.site, q_THD.device
    out_THE = q_THD.new_empty((len(q_THD), site.num_q_heads, site.head_dim_v))
    lse_TH = torch.empty(out_THE.shape[:2], dtype=torch.float32, device=device)
    cells = work.slots * site.num_kv_heads * plan.tile_m
    part = torch.empty((cells, site.head_dim_v), dtype=torch.float32, device=device)
    return Results(out_THE, lse_TH, part, torch.empty(cells, dtype=torch.float32, device=device))


def join(
    plan: AttentionPlan,
    meta: VarlenMetadata | PagedMetadata,
    work: Work,
    made: Results,
) -> None:
    """Write the rows of split sequences from their partial results, where there are any."""
    if plan.max_splits == 1 or not len(work.combines):
        return
    kernel, site = join_launch(plan), plan.shape.site
    group = site.num_q_heads // site.num_kv_heads
    live_rows = min(plan.tile_m, meta.max_q_len * group)
    blocks = -(-site.head_dim_v // kernel.constants["E_BLOCK"])
    num_rows = len(work.combines) * site.num_kv_heads * live_rows
    launch(
        kernel.kernel,
        (min(num_rows, JOIN_PROGRAMS), blocks),
        made.out_THE.device,
        *made,
        work.combines,
        live_rows,
        num_rows,
        **kernel.constants,
        **kernel.options,
    )


def factors(plan: AttentionPlan, scales: KvScales) -> tuple[float, float, float]:
    """Of scores before and after the soft cap, the latter leading to exponents of two; of the sum
    of values. The scale of stored keys belongs before the cap."""
    site = plan.shape.site
    scale = site.scale * scales.k
    if site.softcap is None:
        return 1.0, scale * LOG2_E, scales.v
    return scale / site.softcap, site.softcap * LOG2_E, scales.v
