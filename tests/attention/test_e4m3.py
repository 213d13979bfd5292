"""Keys and values in e4m3 with a scale each: both backends against attention written out over the
values that the pages stand for."""

from dataclasses import replace

import pytest
import torch
from dense_attention import TINY, close, dense_packed, packed, paged, planned, site
from torch import Tensor
from triton_plans import tiny

from vitrail.attention.backend import load_backend
from vitrail.attention.shape import Phase
from vitrail.config.model import KvScales

E4M3 = torch.float8_e4m3fn
SITES = {
    "plain": site(),
    "window": site(window=4),
    "softcap": site(softcap=1.5),
    "sink": site(sink=True, window=7),
    "wide": site(heads=4, kv_heads=2, dim=24, dim_v=36),
}
SCALES = KvScales(0.37, 2.5)
Q_LENS, KV_LENS = [1, 4, 0, 1, 9], [37, 2, 3, 65, 48]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it compiled")
BACKENDS = ["reference", pytest.param("triton", marks=interpreted)]


def plan_of(backend: str, where, phase: Phase, page: int, splits: int = 1, dtype: str = "float32"):
    if backend == "triton":
        made = tiny(where, phase, page, splits, dtype=dtype)
    else:
        made = planned(where, phase, page, dtype=dtype, **TINY)
    return replace(made, shape=replace(made.shape, max_q_len=64, kv_dtype="float8_e4m3fn"))


def in_pages(k: Tensor, v: Tensor, q_lens, kv_lens, page: int):
    """Pages of e4m3; what is no live key is NaN."""
    pages = paged(k.to(E4M3).float(), v.to(E4M3).float(), q_lens, kv_lens, page)
    return pages._replace(k=pages.k.to(E4M3), v=pages.v.to(E4M3))


def stands_for(t: Tensor, scale: float) -> Tensor:
    return t.to(E4M3).double() * scale


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_e4m3_pages_are_their_values_times_the_scales(backend, name, page, splits):
    """Cap, window, sink and the log-sum-exp see the scaled scores, partial results too."""
    where = SITES[name]
    q, k, v = packed(where, Q_LENS, KV_LENS)
    k, v = k / SCALES.k, v / SCALES.v
    sink = torch.linspace(-1, 1, where.num_q_heads) if where.sink else None
    pages = in_pages(k, v, Q_LENS, KV_LENS, page)
    plan = plan_of(backend, where, Phase.EXTEND, page, splits)
    got = load_backend(backend).paged(plan, q, pages.k, pages.v, pages.meta, sink, SCALES)
    k, v = stands_for(k, SCALES.k), stands_for(v, SCALES.v)
    close(got, dense_packed(q, k, v, where, Q_LENS, KV_LENS, sink), 3e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("heads", [2, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_e4m3_row_is_key_and_value_with_one_scale(backend, heads, splits):
    where = site(heads, 1, 22, 16, latent_rank=16)
    q_lens, kv_lens, scale = [1, 3], [45, 8], 0.7
    q, k, _ = packed(where, q_lens, kv_lens)
    pages = in_pages(k, k, q_lens, kv_lens, 8)
    plan, run = plan_of(backend, where, Phase.DECODE, 8, splits), load_backend(backend).latent
    got = run(plan, q, pages.k[:, :, 0], pages.meta, KvScales(scale, scale))
    k = stands_for(k, scale)
    close(got, dense_packed(q, k, k[..., :16], where, q_lens, kv_lens), 2e-5)
    with pytest.raises(AssertionError, match="keys and values at once"):
        run(plan, q, pages.k[:, :, 0], pages.meta, SCALES)


@pytest.mark.parametrize("phase", [Phase.EXTEND, Phase.DECODE])
def test_half_precision_over_e4m3_is_no_worse_than_torch(phase):
    """Triton in fp16 against plain torch in fp16 on the same values."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs it compiled")
    where = site(heads=4, kv_heads=2, dim=72, dim_v=72)
    n = 33 if phase is Phase.EXTEND else 1
    q, k, v = (t.half() for t in packed(where, [n], [97]))
    pages = in_pages(k, v, [n], [97], 16)
    plan = plan_of("triton", where, phase, 16, 3, dtype="float16")
    out, lse = load_backend("triton").paged(plan, q, pages.k, pages.v, pages.meta)
    assert out.dtype == q.dtype
    k, v = (t.to(E4M3).half() for t in (k, v))
    want, want_lse = dense_packed(q, k, v, where, [n], [97])
    k, v = (t.repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * where.scale
    scores = scores.masked_fill(torch.ones(n, 97, dtype=torch.bool).triu(98 - n), -torch.inf)
    plain = (torch.softmax(scores, -1) @ v).transpose(0, 1)
    assert (out.double() - want).abs().max() <= 2 * (plain.double() - want).abs().max()
    assert (lse.double() - want_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_another_dtype_than_planned_are_our_own_fault(backend):
    where = site()
    q, k, v = packed(where, [1], [5])
    pages = paged(k, v, [1], [5], 4)
    plan = plan_of(backend, where, Phase.DECODE, 4)
    with pytest.raises(AssertionError, match="planned float8_e4m3fn"):
        load_backend(backend).paged(plan, q, pages.k, pages.v, pages.meta)
