"""The one attention of the towers: projections, sequences, windows, sinks, head groups."""

import pytest
import torch

from vitrail.attention.plan import PlanLimits, make_table
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.hardware import CPU
from vitrail.ops.rope.naive import rope_table, rotate
from vitrail.ops.vision.naive import Grids
from vitrail.vision.attention import (
    RotaryTable,
    VisionAttention,
    prepare_vision_attention_metadata,
)

DEVICE = torch.device("cpu")
LENGTHS = [7, 1, 12]
GRIDS = Grids.of([(1, 7), (1, 1), (3, 4)], DEVICE)


def make(kv_heads, dim, hidden, interleaved=True, **more):
    site = AttentionSite(
        num_q_heads=4,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim,
        scale=dim**-0.5,
        causal=False,
        **more,
    )
    torch.manual_seed(0)
    module = VisionAttention(site, hidden, interleaved, torch.float32).requires_grad_(False)
    if module.sink is not None:
        module.sink.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    limits = PlanLimits(dtype="float32", page_size=None, max_batch=3, max_q_len=1, max_kv_len=12)
    return module, make_table([(site, Phase.ENCODE)], limits, CPU, None)


def tables(dim):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return RotaryTable(*rope_table(positions, dim, 10000.0))


def expected(module, x, rotary):
    """One sequence at a time, one head at a time."""
    site, dim = module.site, module.site.head_dim
    group = site.num_q_heads // site.num_kv_heads
    rows = module.qkv(x)
    out, start = [], 0
    for n in LENGTHS:
        mine = rows[start : start + n]
        heads = []
        for h in range(site.num_q_heads):
            q = mine[:, h * dim : (h + 1) * dim]
            k_at = (site.num_q_heads + h // group) * dim
            k, v = mine[:, k_at : k_at + dim], mine[:, k_at + site.num_kv_heads * dim :][:, :dim]
            if rotary is not None:
                cos, sin = (t[start : start + n] for t in rotary)
                q, k = (rotate(t[:, None], cos, sin, module.rope_interleaved)[:, 0] for t in (q, k))
            scores = q @ k.T * site.scale
            if site.window is not None:
                far = (torch.arange(n)[:, None] - torch.arange(n)).abs() > site.window
                scores = scores.masked_fill(far, -torch.inf)
            if module.sink is not None:
                scores = torch.cat([scores, module.sink[h].expand(n, 1)], 1)
            heads.append(torch.softmax(scores, -1)[:, :n] @ v)
        out.append(torch.cat(heads, 1))
        start += n
    return module.out(torch.cat(out))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "facts", [{}, {"window": 2}, {"sink": True}, {"window": 0, "sink": True}], ids=str
)
@pytest.mark.parametrize("form", ["interleaved", "half", "none"])
def test_packed_is_head_by_head(kv_heads, facts, form):
    module, plans = make(kv_heads, 6, 20, form == "interleaved", **facts)
    rotary = None if form == "none" else tables(6)
    x = torch.randn(sum(LENGTHS), 20, generator=torch.Generator().manual_seed(4))
    meta = prepare_vision_attention_metadata(GRIDS, rotary, plans)
    assert (module(x, meta) - expected(module, x, rotary)).abs().max() <= 1e-5


def test_sequences_do_not_see_each_other():
    module, plans = make(4, 6, 20)
    meta = prepare_vision_attention_metadata(GRIDS, tables(6), plans)
    x = torch.randn(sum(LENGTHS), 20, generator=torch.Generator().manual_seed(4))
    before = module(x, meta)
    x[: LENGTHS[0]] = torch.nan
    after = module(x, meta)
    assert after[: LENGTHS[0]].isnan().all()
    assert torch.equal(after[LENGTHS[0] :], before[LENGTHS[0] :])


def test_the_projection_may_be_wider_than_the_model():
    """MiMo's tower: heads * head_dim is not the hidden size."""
    module, plans = make(2, 8, 20)
    assert module.qkv.weight.shape == ((4 + 2 + 2) * 8, 20)
    assert module.out.weight.shape == (20, 4 * 8)
    meta = prepare_vision_attention_metadata(GRIDS, tables(8), plans)
    assert module(torch.zeros(20, 20), meta).shape == (20, 20)
