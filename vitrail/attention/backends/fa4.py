"""Attention by FlashAttention-4's kernels (flash-attn-4, CuTe DSL), in the tiles and splits that a
plan names. Its host code is used to compile and never to launch: `compile_launch` calls it once for
each distinct kernel on tensors without memory, and the compiled kernel is then called with its
arguments directly. So a call costs little Python, and nothing is decided from a batch or a pool.

Its causal kernels align the last query with the last key, and on Hopper a tile of queries that sees
no key reads its neighbours'. So a batch whose queries stand elsewhere (a piece of a longer context)
is cut on the host, once for all layers, into calls that it can express: rows that see all keys,
rows aligned with the end, rows that see none (`cut`).

Legend: T packed queries, S packed keys, H query heads, K key heads, D head_dim, E head_dim_v,
X splits."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vitrail.attention.backend import UNSCALED, Attended, AttentionBackend, Sent
from vitrail.attention.backends import triton
from vitrail.attention.backends.kept import kept
from vitrail.attention.call import WIDE_BYTES, Call, check_lengths, check_tensors, is_wide
from vitrail.attention.fa4 import weights_in_registers
from vitrail.attention.fa4_calls import cut
from vitrail.attention.kernels.mend import mend
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata, lengths_of
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.records import Lengths
from vitrail.attention.shape import Phase
from vitrail.ops.launch import launch

MENDED_ROWS = 32  # of a program that looks for rows that are not finite
# What a score's function reads beside: a named tuple there, which a compiled kernel gets as any
# tuple's items. Its own type would be an import of the package, and of torch's compiler with it.
NO_EXTRAS = (None, None)
Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that a kernel is specialised for, in plain values. `page_size` 0: packed keys. `window`
    is its presence; its size is an argument. `max_q_len`: 1 for what fits a tile, else the bound or
    anything beyond two tiles. `max_kv_len` 0 where nothing is split."""

    dtype: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: bool
    softcap: float | None
    sink: bool
    page_size: int
    tile_m: int
    tile_n: int
    pack_gqa: bool
    splits: int
    max_q_len: int
    max_kv_len: int


class Kernels(NamedTuple):
    """Compiled: the attention itself, and what joins its splits where there are any. Both take
    their arguments by position."""

    forward: Kernel
    combine: Kernel | None


def launch_of(plan: AttentionPlan, causal: bool) -> Launch:
    shape, site = plan.shape, plan.shape.site
    group = site.num_q_heads // site.num_kv_heads if plan.pack_gqa else 1
    max_q_len = shape.max_q_len
    if max_q_len * group <= plan.tile_m:
        max_q_len = 1
    elif max_q_len * group > 2 * plan.tile_m:
        max_q_len = 2 * plan.tile_m + 1
    return Launch(
        dtype=shape.dtype,
        num_q_heads=site.num_q_heads,
        num_kv_heads=site.num_kv_heads,
        head_dim=site.head_dim,
        head_dim_v=site.head_dim_v,
        causal=causal,
        window=site.window is not None,
        softcap=site.softcap,
        sink=site.sink,
        page_size=shape.page_size or 0,
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        pack_gqa=plan.pack_gqa,
        splits=plan.max_splits,
        max_q_len=max_q_len,
        max_kv_len=shape.max_kv_len if plan.max_splits > 1 else 0,
    )


@cache
def launches(plan: AttentionPlan) -> tuple[Launch, ...]:
    """What a plan may run: of a causal prefill also the kernel of rows that see all keys."""
    site = plan.shape.site
    ends = (site.causal,)
    if plan.shape.phase is Phase.PREFILL and site.causal and site.window is None:
        ends = (True, False)
    return tuple(launch_of(plan, causal) for causal in ends)


def compile_launch(launch: Launch) -> Kernels:
    """Through its own host code, on fake tensors; needs no GPU where its environment names one.
    Raises what its compiler raises."""
    interface = import_module("flash_attn.cute.interface")
    with _watched(interface) as used, FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interface._flash_attn_fwd(**_arguments(launch, interface))
        forward, combine = used()
    assert forward is not None, "its host code asks its cache"
    return Kernels(forward, combine)


class _Watch:
    """A cache of compiled kernels that remembers which one was asked for."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.key = kept, None

    def __contains__(self, key: object) -> bool:
        self.key = key
        return key in self.kept

    def __setitem__(self, key: object, kernel: Kernel) -> None:
        self.kept[key] = kernel

    def __getitem__(self, key: object) -> Kernel:
        return self.kept[key]


@contextmanager
def _watched(interface: Any) -> Iterator[Callable[[], list[Kernel | None]]]:
    """Gives a function that gives the kernels which were used meanwhile."""
    functions = (interface._flash_attn_fwd, interface._flash_attn_fwd_combine)
    watches = [_Watch(function.compile_cache) for function in functions]
    for function, watch in zip(functions, watches, strict=True):
        function.compile_cache = watch
    try:
        yield lambda: [None if w.key is None else w.kept[w.key] for w in watches]
    finally:
        for function, watch in zip(functions, watches, strict=True):
            function.compile_cache = watch.kept


def _arguments(launch: Launch, interface: Any) -> dict[str, Any]:
    """Keyword arguments of its host function. Whatever its host would choose is given, but for the
    longest query: it takes the number of all tokens, and with no bound from the host a grid of all
    tiles, where a persistent one would be cut to the GPU that it compiles on."""
    dtype, batch, tokens = getattr(torch, launch.dtype), 2, launch.max_q_len

    def empty(*size: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=of, device="cuda")

    rows = (64, launch.page_size) if launch.page_size else (64,)
    given: dict[str, Any] = {
        "q": empty(tokens, launch.num_q_heads, launch.head_dim),
        "k": empty(*rows, launch.num_kv_heads, launch.head_dim),
        "v": empty(*rows, launch.num_kv_heads, launch.head_dim_v),
        "cu_seqlens_q": empty(batch + 1, of=torch.int32),
        "max_seqlen_k": launch.max_kv_len or launch.tile_n,
        "softmax_scale": 1.0,
        "causal": launch.causal,
        "softcap": launch.softcap,
        "tile_mn": (launch.tile_m, launch.tile_n),
        "mma_pv_is_rs": weights_in_registers(launch.head_dim),
        "intra_wg_overlap": True,
        "num_splits": launch.splits,
        "pack_gqa": launch.pack_gqa,
        "return_lse": True,
    }
    if launch.window:
        # Of no size in particular: it is an argument of the kernel.
        given |= {"window_size_left": 2, "window_size_right": 0 if launch.causal else 2}
    if launch.sink:
        given["learnable_sink"] = empty(launch.num_q_heads, of=torch.float32)
    if launch.page_size:
        given["seqused_k"] = empty(batch, of=torch.int32)
        given["page_table"] = empty(batch, 4, of=torch.int32)
    else:
        given["cu_seqlens_k"] = empty(batch + 1, of=torch.int32)
    # Shares of equal size, not those of a kernel before this one; releases without it have none.
    if "disable_scheduler_metadata" in signature(interface._flash_attn_fwd).parameters:
        given["disable_scheduler_metadata"] = True
    return given


@cache
def kernels_of(launch: Launch) -> Kernels:
    """For the GPU at hand, once a process, from disk where it was compiled before."""
    parts = parts_of(launch)
    made = kept(f"fa4 {launch}", parts, lambda: compile_launch(launch)[: len(parts)])
    return Kernels(made[0], made[1] if len(made) > 1 else None)


def parts_of(launch: Launch) -> tuple[str, ...]:
    """Which of `Kernels` it has."""
    return ("forward",) if launch.splits == 1 else ("forward", "combine")


class Fa4(AttentionBackend):
    """Pages of the plan's size, in pools of any strides that are multiples of 16 bytes. Packed keys
    in one call where queries end with them, or see all of them; of several sequences, rows of keys
    and values that are not finite are changed in place (`kernels/mend.py`)."""

    def pack(self, plan: AttentionPlan, lengths: Lengths) -> Sent:
        """Prefix sums of the calls that the batch is cut in."""
        return pack_calls(plan, lengths)

    def attend(self, call: Call) -> Attended:
        plan, q_THD, k, v, meta, sink_H, scales = call
        site, num_tokens = plan.shape.site, q_THD.shape[0]
        assert not site.latent_rank, f"{plan.backend} plans no latent rows"
        assert scales == UNSCALED, scales
        check_tensors(call)
        for t in (q_THD, k, v):
            assert is_wide(t), f"strides {t.stride()}: rows start at borders of {WIDE_BYTES} bytes"
        work = meta.work.get(plan, lambda: _prepare(plan, meta, q_THD.device))
        assert num_tokens == work.num_tokens, f"{num_tokens} queries of {work.num_tokens}"
        if not isinstance(meta, PagedMetadata):
            assert k.shape[0] == v.shape[0] == work.num_keys, f"{len(k)} keys of {work.num_keys}"
            if meta.batch > 1 and not meta.mended:
                _mend(plan, k, v)
        out_THE = q_THD.new_empty((num_tokens, site.num_q_heads, site.head_dim_v))
        lse_HT = q_THD.new_empty((site.num_q_heads, num_tokens), dtype=torch.float32)
        sink_H = None if sink_H is None else sink_H.float()
        for rows in work.blank:
            out_THE[rows] = 0
            lse_HT[:, rows] = -torch.inf if sink_H is None else sink_H[:, None]
        for one in work.calls:
            rows, keys = one.rows, one.keys
            tensors = (q_THD[rows], k[keys], v[keys], out_THE[rows], lse_HT[:, rows])
            _run(plan, one, tensors, sink_H)
        return Attended(out_THE, lse_HT.t())


BACKEND: AttentionBackend = Fa4()
WHOLE = slice(None)


class KernelCall(NamedTuple):
    """A launch for packed queries `rows` and (packed) keys `keys` or all pages. `lengths`: prefix
    sums of queries and (packed) of keys, (paged) lengths of keys and table."""

    kernels: Kernels
    rows: slice
    keys: slice
    causal: bool
    lengths: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class Prepared(NamedTuple):
    """A batch's calls, made once for all layers, and packed rows that see no key. `num_tokens`
    queries, `num_keys` packed keys (0 where they are paged)."""

    calls: tuple[KernelCall, ...]
    blank: tuple[slice, ...]
    num_tokens: int
    num_keys: int


def pack_calls(plan: AttentionPlan, lengths: Lengths) -> Sent:
    """Prefix sums of the lengths of calls that are not the whole batch's: int32 [2, B + 1]."""
    site = plan.shape.site
    if lengths.paged:
        return Sent((), lambda meta, _: _paged_call(plan, meta))
    made = cut(site.causal, site.window is not None, lengths)
    whole = (lengths.q_lens, lengths.kv_lens)
    arrays = tuple(
        np.array([[0, *accumulate(n)] for n in (part.q_lens, part.kv_lens)], dtype=np.int32)
        for part in made.parts
        if (part.q_lens, part.kv_lens) != whole
    )

    def place(meta: VarlenMetadata, tensors: Sequence[Tensor]) -> Prepared:
        check_lengths(plan, meta)
        calls, sums = list[KernelCall](), iter(tensors)
        for part in made.parts:
            mine = (part.q_lens, part.kv_lens) == whole
            cu_q, cu_kv = (meta.cu_q, meta.cu_kv) if mine else next(sums)
            kernels = kernels_of(launch_of(plan, part.causal))
            lengths = (cu_q, cu_kv, None, None)
            calls.append(KernelCall(kernels, part.rows, part.keys, part.causal, lengths))
        return Prepared(tuple(calls), made.blank, sum(meta.q_lens), sum(meta.kv_lens))

    return Sent(arrays, place)


def _paged_call(plan: AttentionPlan, meta: PagedMetadata) -> Prepared:
    check_lengths(plan, meta)
    num_tokens = sum(meta.q_lens)
    if not num_tokens:
        return Prepared((), (), 0, 0)
    assert len(meta.block_table) == meta.batch, meta.block_table.shape
    for q_len, kv_len in zip(meta.q_lens, meta.kv_lens, strict=True):
        assert q_len <= kv_len, f"{q_len} queries are the last of {kv_len} keys"
    lengths = (meta.cu_q, None, meta.kv_lens_dev, meta.block_table)
    causal = plan.shape.site.causal
    call = KernelCall(kernels_of(launch_of(plan, causal)), WHOLE, WHOLE, causal, lengths)
    return Prepared((call,), (), num_tokens, 0)


def _prepare(
    plan: AttentionPlan, meta: VarlenMetadata | PagedMetadata, device: torch.device
) -> Prepared:
    """For whoever sent nothing."""
    sent = pack_calls(plan, lengths_of(meta))
    tensors = [torch.from_numpy(a).to(device) for a in sent.arrays]
    return cast(Prepared, sent.place(meta, tensors))


@cache
def mend_launch(plan: AttentionPlan) -> triton.Launch:
    site, half = plan.shape.site, f"*{triton.TYPES[plan.shape.dtype]}"
    return triton.Launch(
        kernel=mend,
        types={"k": half, "v": half}
        | dict.fromkeys(("num_rows", "k_row", "k_head", "v_row", "v_head"), "i32"),
        aligned=("k", "v"),
        constants={
            "D": site.head_dim,
            "D_BLOCK": 1 << (site.head_dim - 1).bit_length(),
            "E": site.head_dim_v,
            "E_BLOCK": 1 << (site.head_dim_v - 1).bit_length(),
            "KV_HEADS": site.num_kv_heads,
            "ROWS": MENDED_ROWS,
        },
        num_warps=4,
        num_stages=1,
    )


def _mend(plan: AttentionPlan, k_SKD: Tensor, v_SKE: Tensor) -> None:
    """In place. The last tile of a sequence holds the first rows of the next one as well."""
    made, strides = mend_launch(plan), (*k_SKD.stride()[:2], *v_SKE.stride()[:2])
    launch(
        made.kernel,
        (-(-k_SKD.shape[0] * k_SKD.shape[1] // MENDED_ROWS),),
        k_SKD.device,
        k_SKD,
        v_SKE,
        len(k_SKD),
        *strides,
        **made.constants,
        **made.options,
    )


def _run(
    plan: AttentionPlan, call: KernelCall, tensors: tuple[Tensor, ...], sink_H: Tensor | None
) -> None:
    """`tensors`: queries, keys, values, out and lse of a call."""
    arguments = forward_arguments(plan, call, sink_H)
    if plan.max_splits == 1:
        call.kernels.forward(*tensors, *arguments)
        return
    assert call.kernels.combine is not None, "compiled with its splits"
    *inputs, out_THE, lse_HT = tensors
    part_XTHE, part_XHT = (
        t.new_empty((plan.max_splits, *t.shape), dtype=torch.float32) for t in (out_THE, lse_HT)
    )
    call.kernels.forward(*inputs, part_XTHE, part_XHT, *arguments)
    joined = (part_XTHE, part_XHT.transpose(1, 2), out_THE, lse_HT.t())
    call.kernels.combine(*joined, call.lengths[0], None, None, None, None)


def forward_arguments(
    plan: AttentionPlan, call: KernelCall, sink_H: Tensor | None
) -> tuple[Any, ...]:
    """Of a compiled kernel after its tensors, as `attention.fa4.RELEASE` has them."""
    site = plan.shape.site
    cu_q, cu_kv, kv_lens, table = call.lengths
    after = None if site.window is None else (0 if call.causal else site.window)
    blackwell = plan.tmem_columns > 0
    return (
        site.scale,
        cu_q,
        cu_kv,
        None,  # used queries
        kv_lens,
        table,
        site.window,
        after,
        sink_H,
        *((None,) if blackwell else ()),  # scales of 8-bit inputs
        None,  # block sparsity
        NO_EXTRAS,
        *((None,) * 7 if blackwell else (None, None)),  # another kernel's schedule
        *((plan.shape.max_q_len,) if blackwell else ()),
    )
