"""Latent attention against the formula written out densely in float64.

Legend: T tokens, M hidden, H heads, N/P/R/E nope, rotary, latent and value channels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vitrail.attention.metadata import paged_metadata, with_chunks
from vitrail.attention.plan import PlanLimits, make_table
from vitrail.cache.kv_pool import KvPool
from vitrail.config.hardware import CPU
from vitrail.config.model import MlaConfig, RopeConfig, TextConfig
from vitrail.layers.attention import (
    Form,
    MlaAttention,
    MlaForms,
    mla_cache_spec,
    mla_context,
    mla_sites,
)
from vitrail.layers.context import ForwardContext
from vitrail.layers.rotary import make_rotary

M, H, N, P, R, E = 21, 3, 7, 4, 10, 5
PAGE = 3
TEXT = TextConfig(
    vocab_size=9,
    hidden_size=M,
    num_layers=1,
    num_heads=H,
    num_kv_heads=H,
    head_dim=N + P,
    intermediate_size=8,
    rms_eps=9.0,
    rope=RopeConfig(theta=100.0, dim=P, interleaved=True),
    max_position=64,
    tie_embeddings=False,
    mla=MlaConfig(
        kv_lora_rank=R, qk_nope_head_dim=N, qk_rope_head_dim=P, v_head_dim=E, kv_norm_eps=0.3
    ),
    moe=None,
)
FORMS: list[Form] = ["expanded", "absorbed"]


def layer(forms: MlaForms) -> MlaAttention:
    torch.manual_seed(4)
    made = MlaAttention(TEXT, 0, torch.float32, forms)
    for parameter in made.parameters():
        parameter.normal_(0, 0.5)
    return made


def hidden(tokens: int) -> Tensor:
    return torch.randn((tokens, M), generator=torch.Generator().manual_seed(6))


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) as complex numbers, times e^(i position theta^(-2i / P))."""
    frequencies = 100.0 ** (-torch.arange(0, P, 2).double() / P)
    angle = positions.double()[:, None] * frequencies
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def dense(made: MlaAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """(output, cache rows) of a whole sequence, one head after another."""
    w = {name: p.double() for name, p in made.named_parameters()}
    x, positions = x.double(), torch.arange(len(x))
    rows = x @ w["qkv_a_proj.weight"].T
    row = rows[:, H * (N + P) :]
    latent = row[:, :R] / (row[:, :R].pow(2).mean(-1, keepdim=True) + 0.3).sqrt()
    latent = latent * w["kv_a_norm.weight"]
    k_pe = turned(row[:, R:], positions)
    future = torch.ones(len(x), len(x)).triu(1).bool()
    heads = []
    for h in range(H):
        q = rows[:, h * (N + P) : (h + 1) * (N + P)]
        q = torch.cat((q[:, :N], turned(q[:, N:], positions)), -1)
        key, value = w["kv_b_proj.weight"].view(H, N + E, R)[h].split((N, E))
        k, v = torch.cat((latent @ key.T, k_pe), -1), latent @ value.T
        scores = (q @ k.T / (N + P) ** 0.5).masked_fill(future, -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    return torch.cat(heads, -1) @ w["o_proj.weight"].T, torch.cat((latent, k_pe), -1)


class Bench:
    """One layer and a pool; a sequence in pages 4, 1, 6, 0, 2, ..."""

    pages = (4, 1, 6, 0, 2, 5, 3)

    def __init__(self, forms: MlaForms):
        self.layer, self.forms = layer(forms), forms
        self.pool = KvPool([mla_cache_spec(TEXT, "float32")], 7, PAGE, torch.device("cpu"))
        limits = PlanLimits(
            dtype="float32", page_size=PAGE, max_batch=1, max_q_len=21, max_kv_len=21
        )
        self.plans = make_table(mla_sites(TEXT, forms), limits, CPU, None)

    def context(self, start: int, stop: int, decode: bool) -> ForwardContext:
        positions = torch.arange(start, stop)
        table = torch.tensor([self.pages], dtype=torch.int32)
        meta = paged_metadata(PAGE, [stop - start], [stop], table)
        return ForwardContext(
            positions=positions,
            cache_slots=table[0, positions // PAGE].long() * PAGE + positions % PAGE,
            num_prefill=0 if decode else stop - start,
            prefill=None if decode else meta,
            decode=meta if decode else None,
            plans=self.plans,
            pool=self.pool,
        )

    def run(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return self.attend(x, mla_context(ctx, self.forms))

    def attend(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        row = self.layer.qkv_a_proj(x)
        return self.layer(row, make_rotary(ctx.positions, TEXT.rope), ctx)


@pytest.mark.parametrize("form", FORMS)
def test_a_prefill_is_the_formula(form: Form) -> None:
    bench, x = Bench(MlaForms(prefill=form)), hidden(17)
    got = bench.run(x, bench.context(0, 17, decode=False))
    want, _ = dense(bench.layer, x)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_decodes_are_the_formula(form: Form) -> None:
    bench, x = Bench(MlaForms(decode=form)), hidden(11)
    rows = [bench.run(x[t : t + 1], bench.context(t, t + 1, decode=True)) for t in range(11)]
    want, _ = dense(bench.layer, x)
    torch.testing.assert_close(torch.cat(rows).double(), want, atol=1e-5, rtol=1e-5)


def test_the_cache_holds_the_normed_latent_then_the_rotated_channels() -> None:
    bench, x = Bench(MlaForms()), hidden(17)
    ctx = bench.context(0, 17, decode=False)
    bench.run(x, ctx)
    _, rows = dense(bench.layer, x)
    kept = bench.pool.latent(0).flatten(0, 1)[ctx.cache_slots]
    torch.testing.assert_close(kept.double(), rows, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("piece", [1, 2, 5, 16])
@pytest.mark.parametrize("prefix", [0, 6, 13])
def test_keys_expanded_in_pieces_are_the_whole(prefix: int, piece: int) -> None:
    bench, x = Bench(MlaForms()), hidden(17)
    if prefix:
        bench.run(x[:prefix], bench.context(0, prefix, decode=False))
    ctx = bench.context(prefix, 17, decode=False)
    assert ctx.prefill is not None
    ctx = replace(ctx, prefill=with_chunks(ctx.prefill, piece))
    got = bench.attend(x[prefix:], ctx)
    want, _ = dense(bench.layer, x)
    torch.testing.assert_close(got.double(), want[prefix:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_pieces_of_several_sequences_are_said_to_be_mended(batch: int) -> None:
    """As `expanded_keys` is asked to make them."""
    table = torch.arange(2 * batch, dtype=torch.int32).view(batch, 2)
    ctx = Bench(MlaForms()).context(0, 5, decode=False)
    meta = paged_metadata(PAGE, [5] * batch, [5] * batch, table)
    for given in (meta, with_chunks(meta)):
        prefill = mla_context(replace(ctx, prefill=given), MlaForms()).prefill
        assert prefill is not None
        assert prefill.chunks
        assert {c.meta.mended for c in prefill.chunks} == {batch > 1}


def test_expanding_without_pieces_is_an_error_of_ours() -> None:
    bench, x = Bench(MlaForms()), hidden(5)
    ctx = bench.context(0, 5, decode=False)
    with pytest.raises(AssertionError, match="mla_context"):
        bench.attend(x, ctx)


@pytest.mark.parametrize("forms", [MlaForms(prefill=p, decode=d) for p in FORMS for d in FORMS])
def test_only_sites_that_are_declared_are_called(forms: MlaForms) -> None:
    """`Bench` plans what `mla_sites` says; a call of another site would not find its plan."""
    bench, x = Bench(forms), hidden(9)
    bench.run(x[:8], bench.context(0, 8, decode=False))
    assert bench.run(x[8:], bench.context(8, 9, decode=True)).shape == (1, M)
    assert len(mla_sites(TEXT, forms)) == (1 if forms == MlaForms(decode="expanded") else 2)
