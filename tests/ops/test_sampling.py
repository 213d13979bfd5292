"""Sampling kernels against their definition, in the interpreter where there is no GPU. Blocks are
shorter than the rows, and the vocabulary is no multiple of one."""

from typing import Any

import pytest
import torch

from vitrail.ops.sampling import naive, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 2 * triton.BLOCK + 37


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)


def defined(name: str, *arguments: Any) -> Any:
    """By the definition, on the CPU: not all of it is deterministic elsewhere."""
    on_cpu = [
        a.cpu() if isinstance(a, torch.Tensor) else naive.Filters(*(c.cpu() for c in a))
        for a in arguments
    ]
    return vars(naive)[name](*on_cpu)


def never(*ids: int) -> torch.Tensor:
    mask = torch.zeros(VOCAB, device=DEVICE)
    mask[list(ids)] = -torch.inf
    return mask


def test_the_best_tokens_are_the_first_of_the_largest():
    x = rows(5)
    x[1, 4100] = x[1, 70] = x[1, 69] = 50.0
    x[2, 9] = 90.0  # never sampled
    x[3, VOCAB - 1] = 60.0
    got, finite = triton.best_tokens(x, never(9))
    want, well = defined("best_tokens", x, never(9))
    assert got.tolist() == want.tolist()
    assert got[1] == 69
    assert got[3] == VOCAB - 1
    assert finite.tolist() == well.tolist() == [True] * 5


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_reported_alone(value: float):
    x = rows(3)
    x[1, VOCAB - 2] = value
    tokens, finite = triton.best_tokens(x, never())
    assert finite.tolist() == defined("best_tokens", x, never())[1].tolist() == [True, False, True]
    assert 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("value", [1e38, -3e38])
def test_a_row_of_large_numbers_is_finite_though_its_sum_is_not(value: float):
    x = torch.full((2, VOCAB), value)
    assert not x.sum(-1).isfinite().any()
    tokens, finite = triton.best_tokens(x, never())
    want, well = defined("best_tokens", x, never())
    assert finite.tolist() == well.tolist() == [True, True]
    assert tokens.tolist() == want.tolist() == [0, 0]


def test_what_is_kept_is_what_the_next_step_reads():
    """Rows in any order of slots, one that is not finite, two of nobody's in the same slot."""
    x = rows(5)
    x[2, 70] = torch.nan
    slots = torch.tensor([6, 0, 3, 7, 7], device=DEVICE)
    last, kept = (torch.arange(8, device=DEVICE) + 100000 for _ in range(2))
    x[4] = x[3]
    got, want = (
        triton.keep_best(x, never(9), last, slots),
        [*defined("best_tokens", x, never(9))[0]],
    )
    want[2] = -1
    assert got.tolist() == [int(token) for token in want]
    assert got.tolist() == naive.keep_best(x, never(9), kept, slots).tolist()
    assert last.tolist() == kept.tolist()
    assert last[3] == 0
    assert last[[1, 2, 4, 5]].tolist() == [100001, 100002, 100004, 100005]


def test_a_row_with_every_id_masked_is_reported():
    mask = torch.full((VOCAB,), -torch.inf, device=DEVICE)
    tokens, finite = triton.best_tokens(rows(1), mask)
    assert finite.tolist() == [False]
    assert 0 <= tokens[0] < VOCAB


def test_draws_are_those_of_the_definition():
    """Where u lies within rounding of a border, a neighbour with a weight would do; none does."""
    count = 24
    x, index = rows(3, seed=1), torch.arange(count, device=DEVICE) % 3
    u = torch.linspace(0, 0.99999, count, dtype=torch.float64, device=DEVICE)
    t = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64, device=DEVICE)[index]
    got = triton.draw_plain(x, index, never(5), t, u)
    assert got.tolist() == defined("draw_plain", x, index, never(5), t, u).tolist()


def test_no_draw_gives_an_impossible_id():
    x = torch.full((1, VOCAB), -1e30, device=DEVICE)
    x[0, 11], x[0, 4000], x[0, 4130] = 0.0, -1.0, 0.5
    index = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    u = torch.tensor([0.0, 0.4, 1 - 2**-53], dtype=torch.float64, device=DEVICE)
    got = triton.draw_plain(x, index, never(4130), torch.ones_like(u), u)
    assert got.tolist() == [11, 11, 4000]


def test_a_row_draws_alone_as_among_others():
    x, index = rows(4, seed=2), torch.arange(4, device=DEVICE)
    u = torch.tensor([0.1, 0.5, 0.7, 0.9], dtype=torch.float64, device=DEVICE)
    t = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64, device=DEVICE)
    x[1] = torch.nan
    together = triton.draw_plain(x, index, never(), t, u).tolist()
    assert 0 <= together[1] < VOCAB
    for i in (0, 2, 3):
        alone = triton.draw_plain(x, index[i : i + 1], never(), t[i : i + 1], u[i : i + 1])
        assert alone.tolist() == [together[i]]


FEW = triton.FILTER_BLOCK + 37


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(FEW, 0.9, 0.0), (7, 1.0, 0.0), (FEW, 1.0, 0.02), (40, 0.8, 0.01), (FEW, 0.01, 0.0)],
)
def test_filtered_draws_are_those_of_the_definition(top_k: float, top_p: float, min_p: float):
    """Also where equal logits, of which some are kept, lie at a filter's end."""
    x = rows(2, seed=3)[:, :FEW].contiguous()
    x[1] = (x[1] * 2).round() / 2
    index = torch.arange(4, device=DEVICE) % 2
    u = torch.tensor([0.0, 0.4, 0.7, 0.9999], dtype=torch.float64, device=DEVICE)
    t = torch.tensor([0.7, 1.0], dtype=torch.float64, device=DEVICE)[index]
    kept = naive.Filters(*(torch.full_like(u, v) for v in (top_k, top_p, min_p)))
    mask = never(5)[:FEW]
    got = triton.draw_filtered(x, index, mask, t, kept, u)
    assert got.tolist() == defined("draw_filtered", x, index, mask, t, kept, u).tolist()
