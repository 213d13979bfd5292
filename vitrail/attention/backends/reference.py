"""The definition of attention in plain torch: any device, any float dtype, fp32 inside. What CPU
users run, and what every kernel is tested against.

Scores exist only as blocks of the plan's size, joined by online softmax: for keys in blocks and a
running maximum m, denominator l and numerator o of each query,

    m' = max(m, max s)    l' = l e^(m - m') + sum e^(s - m')    o' = o e^(m - m') + e^(s - m') v

Sequences are computed in spans: one packed sequence, or several paged ones with equally many
queries and about as many keys, padded to the longest by repeating rows of their own. What a span
may read is decided on host ints, so a slot that holds no live key is never touched.

Legend: T packed queries, S packed keys, H query heads, K key heads, G query heads a key head,
D head_dim, E head_dim_v, N pages, P page size, B sequences of a span, Q queries
of a sequence, X keys of a block; g, q: heads and queries of a block."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitrail.attention.backend import UNSCALED, Attended, AttentionBackend
from vitrail.attention.call import Call
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata, gather_slots
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.shape import AttentionSite
from vitrail.config.model import KvScales

# Keys and values of packed slots or rows: [X, K, D], [X, K, E].
Keys = tuple[Tensor, Tensor]
# A group is split rather than padded by more than a quarter of its keys plus this many, about what
# one more pass over a block costs.
PADDED_KEYS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Sequences computed together, B of them. Query j of sequence b stands at key position
    q_starts[b] + j; the sequence's live keys are [lows[b], kv_lens[b])."""

    q_len: int
    q_starts: tuple[int, ...]
    lows: tuple[int, ...]
    kv_lens: tuple[int, ...]


class Reference(AttentionBackend):
    """Packed keys sequence by sequence: they are contiguous, so nothing is gathered or padded.
    Paged ones by spans of sequences; each block of keys is gathered once, by slot."""

    def attend(self, call: Call) -> Attended:
        plan, q_THD, k, v, meta, sink_H, scales = call
        _check(plan, q_THD, meta, sink_H)
        result = _blank(plan, q_THD, sink_H)
        if isinstance(meta, PagedMetadata):
            _check_pages(plan, k, v, meta)
            _paged(plan, q_THD, _reader(plan, k, v), meta, sink_H, scales, result)
        else:
            _packed(plan, q_THD, k, v, meta, sink_H, result)
        return result


BACKEND: AttentionBackend = Reference()


def _check(
    plan: AttentionPlan,
    q_THD: Tensor,
    meta: VarlenMetadata | PagedMetadata,
    sink_H: Tensor | None,
) -> None:
    """The call is the one that was planned."""
    shape, site = plan.shape, plan.shape.site
    assert q_THD.shape == (sum(meta.q_lens), site.num_q_heads, site.head_dim), q_THD.shape
    assert str(q_THD.dtype) == f"torch.{shape.dtype}", f"{q_THD.dtype}, planned {shape.dtype}"
    assert meta.batch <= shape.batch, f"{meta.batch} sequences, planned {shape.batch}"
    assert meta.max_kv_len <= shape.max_kv_len, f"{meta.max_kv_len}, planned {shape.max_kv_len}"
    assert site.sink == (sink_H is not None), f"sink planned: {site.sink}"


def _check_pages(plan: AttentionPlan, k: Tensor, v: Tensor, meta: PagedMetadata) -> None:
    stored = plan.shape.kv_dtype or plan.shape.dtype
    for cache in (k, v):
        assert str(cache.dtype) == f"torch.{stored}", f"{cache.dtype}, planned {stored}"
    assert meta.page_size == plan.shape.page_size, f"{meta.page_size}, {plan.shape.page_size}"


def _blank(plan: AttentionPlan, q_THD: Tensor, sink_H: Tensor | None) -> Attended:
    """The result of queries that see no key."""
    shape = (*q_THD.shape[:2], plan.shape.site.head_dim_v)
    lse_TH = torch.full(shape[:2], -torch.inf, device=q_THD.device)
    if sink_H is not None:
        lse_TH = sink_H.float().expand(shape[:2]).clone()
    return Attended(q_THD.new_zeros(shape), lse_TH)


def _span(
    site: AttentionSite, q_len: int, q_starts: Sequence[int], kv_lens: Sequence[int]
) -> _Span:
    """Keys before the first query's window are not live: their page may be another's by now."""
    lows = [0 if site.window is None else max(0, start - site.window) for start in q_starts]
    return _Span(q_len=q_len, q_starts=tuple(q_starts), lows=tuple(lows), kv_lens=tuple(kv_lens))


def _packed(
    plan: AttentionPlan,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    meta: VarlenMetadata,
    sink_H: Tensor | None,
    result: Attended,
) -> None:
    q_edges = list(accumulate(meta.q_lens, initial=0))
    kv_edges = list(accumulate(meta.kv_lens, initial=0))
    for seq, (q_len, kv_len) in enumerate(zip(meta.q_lens, meta.kv_lens, strict=True)):
        if not q_len or not kv_len:
            continue
        rows = slice(q_edges[seq], q_edges[seq + 1])
        keys = slice(kv_edges[seq], kv_edges[seq + 1])

        def fetch(start: int, stop: int, keys: slice = keys) -> Keys:
            return k_SKD[keys][None, start:stop], v_SKE[keys][None, start:stop]

        span = _span(plan.shape.site, q_len, [meta.q_starts[seq]], [kv_len])
        out, lse = _attend(plan, q_THD[None, rows], span, fetch, sink_H, UNSCALED)
        result.out[rows], result.lse[rows] = out[0], lse[0]


def _reader(plan: AttentionPlan, k_NPKD: Tensor, v_NPKE: Tensor) -> Callable[[Tensor], Keys]:
    """Keys and values of slots; a gathered latent row is both."""
    rank = plan.shape.site.latent_rank

    def read(slots_X: Tensor) -> Keys:
        k_XKD = gather_slots(k_NPKD, slots_X)
        return k_XKD, k_XKD[..., :rank] if rank else gather_slots(v_NPKE, slots_X)

    return read


def _paged(
    plan: AttentionPlan,
    q_THD: Tensor,
    read: Callable[[Tensor], Keys],
    meta: PagedMetadata,
    sink_H: Tensor | None,
    scales: KvScales,
    result: Attended,
) -> None:
    device = q_THD.device
    edges = list(accumulate(meta.q_lens, initial=0))
    for seqs in _groups(meta, plan.block_batch):
        q_len, kv_lens = meta.q_lens[seqs[0]], [meta.kv_lens[seq] for seq in seqs]
        span = _span(plan.shape.site, q_len, [kv_len - q_len for kv_len in kv_lens], kv_lens)
        table_BW = meta.block_table[torch.tensor(seqs, device=device)]

        def fetch(start: int, stop: int, span: _Span = span, table: Tensor = table_BW) -> Keys:
            slots_BX = _live_slots(table, meta.page_size, span, start, stop)
            k_XKD, v_XKE = read(slots_BX.flatten())
            return k_XKD.unflatten(0, slots_BX.shape), v_XKE.unflatten(0, slots_BX.shape)

        firsts_B = torch.tensor([edges[seq] for seq in seqs], device=device)
        rows_BQ = firsts_B[:, None] + torch.arange(q_len, device=device)
        out_BQHE, lse_BQH = _attend(plan, q_THD[rows_BQ], span, fetch, sink_H, scales)
        result.out[rows_BQ], result.lse[rows_BQ] = out_BQHE, lse_BQH


def _groups(meta: PagedMetadata, block_batch: int) -> Iterator[list[int]]:
    """The sequences that have queries and keys, in groups of equal q_len and similar kv_len."""
    lens = list(zip(meta.q_lens, meta.kv_lens, strict=True))
    order = sorted((i for i, (q, kv) in enumerate(lens) if q and kv), key=lambda i: lens[i])
    group: list[int] = []
    live = 0
    for seq in order:
        q_len, kv_len = lens[seq]
        live += kv_len
        padded = kv_len * (len(group) + 1) - live
        if group and (
            len(group) == block_batch
            or q_len != lens[group[0]][0]
            or padded > live // 4 + PADDED_KEYS
        ):
            yield group
            group, live = [], kv_len
        group.append(seq)
    if group:
        yield group


def _live_slots(
    table_BW: Int[Tensor, "B W"], page_size: int, span: _Span, start: int, stop: int
) -> Int[Tensor, "B X"]:
    """Slots of keys [start, stop); where a sequence has no live key, that of its nearest one."""
    device = table_BW.device
    keys_BX = torch.arange(start, stop, device=device).expand(table_BW.shape[0], -1)
    if max(span.lows) > start:
        keys_BX = keys_BX.maximum(_column(span.lows, device))
    if min(span.kv_lens) < stop:
        keys_BX = keys_BX.minimum(_column(span.kv_lens, device) - 1)
    pages_BX = table_BW.gather(1, keys_BX // page_size).long()
    return pages_BX * page_size + keys_BX % page_size


def _column(values: Sequence[int], device: torch.device) -> Int[Tensor, "B 1"]:
    return torch.tensor(values, device=device)[:, None]


def _attend(
    plan: AttentionPlan,
    q_BQHD: Float[Tensor, "B Q H D"],
    span: _Span,
    fetch: Callable[[int, int], Keys],
    sink_H: Tensor | None,
    scales: KvScales,
) -> tuple[Float[Tensor, "B Q H E"], Float[Tensor, "B Q H"]]:
    """One span. `fetch(start, stop)`: its keys [B, X, K, D] and values [B, X, K, E] as stored;
    their scales go to the queries and to the sum of values, which are fewer."""
    site, device = plan.shape.site, q_BQHD.device
    heads = (site.num_kv_heads, site.num_q_heads // site.num_kv_heads)
    q_BKGQD = (q_BQHD.float() * (site.scale * scales.k)).unflatten(2, heads).permute(0, 2, 3, 1, 4)
    shape = q_BKGQD.shape[:-1]
    top_BKGQ = torch.full(shape, -torch.inf, device=device)
    sum_BKGQ = torch.zeros(shape, device=device)
    if sink_H is not None:
        top_BKGQ = sink_H.float().view(*heads, 1).expand(shape).clone()
        sum_BKGQ = torch.ones(shape, device=device)
    out_BKGQE = torch.zeros((*shape, site.head_dim_v), device=device)
    last = max(span.kv_lens)
    if site.causal:
        last = min(last, max(span.q_starts) + span.q_len)
    for start in range(min(span.lows), last, plan.block_kv):
        stop = min(start + plan.block_kv, last)
        k_BKXD, v_BKXE = (t.float().transpose(1, 2) for t in fetch(start, stop))
        for q0 in range(0, span.q_len, plan.block_q):
            q1 = min(q0 + plan.block_q, span.q_len)
            if _unseen(site, span, q0, q1, start, stop):
                continue
            hidden = _hidden(site, span, range(q0, q1), range(start, stop), device)
            for k, g in _head_blocks(*heads, plan.block_heads):
                at = (slice(None), k, g, slice(q0, q1))
                state = (top_BKGQ[at], sum_BKGQ[at], out_BKGQE[at])
                _join(state, q_BKGQD[at], k_BKXD[:, k], v_BKXE[:, k], hidden, site.softcap)
    out_BKGQE *= scales.v / sum_BKGQ.masked_fill(sum_BKGQ == 0, 1).unsqueeze(-1)
    lse_BKGQ = top_BKGQ + sum_BKGQ.log()
    out_BQHE = out_BKGQE.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out_BQHE.to(q_BQHD.dtype), lse_BKGQ.permute(0, 3, 1, 2).flatten(2, 3)


def _join(
    state: tuple[Tensor, Tensor, Tensor],
    q_BKgqD: Tensor,
    k_BKXD: Tensor,
    v_BKXE: Tensor,
    hidden_BqX: Tensor | None,
    softcap: float | None,
) -> None:
    """One block of scores into the running maximum, denominator and numerator, in place."""
    top, total, out = state
    scores = (q_BKgqD.flatten(2, 3) @ k_BKXD.transpose(2, 3)).unflatten(2, top.shape[2:])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden_BqX is not None:
        scores.masked_fill_(hidden_BqX[:, None, None], -torch.inf)
    new_top = torch.maximum(top, scores.amax(-1))
    # A query that has seen no key yet: -inf minus -inf would be nan.
    shift = new_top.masked_fill(new_top == -torch.inf, 0)
    scores.sub_(shift.unsqueeze(-1)).exp_()
    kept = (top - shift).exp_()
    total.mul_(kept).add_(scores.sum(-1))
    part = (scores.flatten(2, 3) @ v_BKXE).unflatten(2, top.shape[2:])
    out.mul_(kept.unsqueeze(-1)).add_(part)
    top.copy_(new_top)


def _unseen(site: AttentionSite, span: _Span, q0: int, q1: int, start: int, stop: int) -> bool:
    """Whether no query of [q0, q1) of any sequence sees a key of [start, stop)."""
    if site.causal and start > max(span.q_starts) + q1 - 1:
        return True
    if site.window is None:
        return False
    past = stop - 1 < min(span.q_starts) + q0 - site.window
    return past or start > max(span.q_starts) + q1 - 1 + site.window


def _hidden(
    site: AttentionSite, span: _Span, queries: range, keys: range, device: torch.device
) -> Bool[Tensor, "B q X"] | None:
    """Which keys each query does not see; None where it sees all of them."""
    first, last = min(span.q_starts) + queries[0], max(span.q_starts) + queries[-1]
    after = 0 if site.causal else site.window  # how far past its own a query sees; None: to the end
    conditions: list[Tensor] = []
    keys_11X = torch.arange(keys.start, keys.stop, device=device)[None, None]
    own_Bq = _column(span.q_starts, device) + torch.arange(
        queries.start, queries.stop, device=device
    )
    if min(span.kv_lens) < keys.stop:
        conditions.append(keys_11X >= _column(span.kv_lens, device)[..., None])
    if after is not None and keys[-1] > first + after:
        conditions.append(keys_11X > own_Bq[..., None] + after)
    if site.window is not None and keys[0] < last - site.window:
        conditions.append(keys_11X < own_Bq[..., None] - site.window)
    if not conditions:
        return None
    return reduce(torch.logical_or, conditions)


def _head_blocks(num_k: int, group: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Slices of key heads and of the query heads of each, `block` query heads at most."""
    step_k, step_g = max(1, block // group), min(block, group)
    for k in range(0, num_k, step_k):
        for g in range(0, group, step_g):
            yield slice(k, k + step_k), slice(g, g + step_g)
