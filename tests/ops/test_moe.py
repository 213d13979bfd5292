"""Router and experts: the choice by hand, the grouped product against the definition."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.ops.dispatch import Experts, select_mixture
from vitrail.ops.moe.grouped import grouped_experts, segmented_experts
from vitrail.ops.moe.naive import Routing, naive_experts, naive_route, route
from vitrail.ops.moe.plan import Choice

HIDDEN, INNER = 24, 16  # whole 16 bytes in bf16


def weights(experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    gate_up = torch.randn(experts, 2 * INNER, HIDDEN) / HIDDEN**0.5
    return gate_up, torch.randn(experts, HIDDEN, INNER) / INNER**0.5


def routed(tokens: int, experts: int, top_k: int, seed: int = 1) -> Routing:
    torch.manual_seed(seed)
    return route(torch.randn(tokens, experts), torch.zeros(experts), top_k, True, 2.446)


def test_the_bias_decides_the_choice_and_never_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0])
    got = route(logits, bias, 2, False, 1.0)
    assert got.expert_ids.tolist() == [[3, 1]]
    want = torch.tensor([[-1.0, 1.0]]).sigmoid()
    torch.testing.assert_close(got.weights, want, atol=0, rtol=0)


def test_weights_are_normalised_then_scaled() -> None:
    got = routed(9, 7, 3)
    torch.testing.assert_close(got.weights.sum(-1), torch.full((9,), 2.446), atol=1e-6, rtol=0)


def test_scores_of_zero_give_finite_weights() -> None:
    got = route(torch.full((2, 5), -200.0), torch.zeros(5), 3, True, 2.446)
    assert torch.equal(got.weights, torch.zeros(2, 3))


def test_a_router_in_bf16_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="bfloat16"):
        route(torch.zeros(1, 4).bfloat16(), torch.zeros(4), 2, True, 1.0)


def test_naive_experts_are_the_sum_written_out() -> None:
    gate_up, down = weights(4)
    x, got = torch.randn(3, HIDDEN), routed(3, 4, 2)
    want = torch.zeros(3, HIDDEN)
    for t in range(3):
        for weight, e in zip(got.weights[t], got.expert_ids[t].tolist(), strict=True):
            gate, up = (gate_up[e] @ x[t]).split(INNER)
            want[t] += weight * (down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(naive_experts(x, got, gate_up, down), want, atol=1e-5, rtol=1e-5)


FAST = [segmented_experts, grouped_experts]


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 8, 3), (2, 8, 8), (37, 8, 3), (256, 8, 3), (5, 1, 1), (3, 65, 6), (0, 8, 3)],
)
def test_fast_experts_are_the_definition(
    fast: Experts, tokens: int, experts: int, top_k: int
) -> None:
    gate_up, down = weights(experts)
    x, got = torch.randn(tokens, HIDDEN), routed(tokens, experts, top_k)
    want = naive_experts(x, got, gate_up, down)
    torch.testing.assert_close(fast(x, got, gate_up, down), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fast", FAST)
def test_fast_experts_when_all_tokens_choose_the_same(fast: Experts) -> None:
    gate_up, down = weights(8)
    x = torch.randn(11, HIDDEN)
    got = Routing(torch.tensor([[7, 0]]).expand(11, 2).contiguous(), torch.rand(11, 2))
    want = naive_experts(x, got, gate_up, down)
    torch.testing.assert_close(fast(x, got, gate_up, down), want, atol=1e-5, rtol=1e-5)


def test_segments_take_any_width() -> None:
    torch.manual_seed(3)
    gate_up, down = torch.randn(5, 2 * 7, 13), torch.randn(5, 13, 7)
    x, got = torch.randn(9, 13), routed(9, 5, 2)
    want = naive_experts(x, got, gate_up, down)
    torch.testing.assert_close(segmented_experts(x, got, gate_up, down), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fast", FAST)
def test_a_token_gets_the_same_alone_and_with_strangers(fast: Experts) -> None:
    gate_up, down = weights(8)
    x, got = torch.randn(19, HIDDEN), routed(19, 8, 3)
    whole = fast(x, got, gate_up, down)
    for t in (0, 7, 18):
        one = Routing(got.expert_ids[t : t + 1], got.weights[t : t + 1])
        alone = fast(x[t : t + 1], one, gate_up, down)
        torch.testing.assert_close(alone, whole[t : t + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fast", FAST)
def test_bf16_is_as_close_to_fp32_as_the_definition_is(fast: Experts) -> None:
    gate_up, down = weights(8)
    x, got = torch.randn(33, HIDDEN), routed(33, 8, 3)
    exact = naive_experts(x, got, gate_up, down)
    low = x.bfloat16(), got, gate_up.bfloat16(), down.bfloat16()
    error = (naive_experts(*low).float() - exact).abs().max()
    assert (fast(*low).float() - exact).abs().max() <= 2 * error


CHOICE = Choice(top_k=3, num_shared=2, normalize=True, scaling=2.446)


def test_shared_experts_follow_the_routed_with_weight_1() -> None:
    torch.manual_seed(4)
    x, router, bias = torch.randn(5, HIDDEN), torch.randn(7, HIDDEN), torch.randn(7)
    got = naive_route(x, router, bias, CHOICE)
    want = route(x @ router.T, bias, 3, True, 2.446)
    assert torch.equal(got.expert_ids[:, :3], want.expert_ids)
    assert got.expert_ids[:, 3:].tolist() == [[7, 8]] * 5
    torch.testing.assert_close(got.weights[:, :3], want.weights, atol=0, rtol=0)
    assert torch.equal(got.weights[:, 3:], torch.ones(5, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_on_the_host_is_its_router_and_its_experts(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    gate_up, down = (w.to(dtype) for w in weights(9))
    x, router, bias = torch.randn(5, HIDDEN).to(dtype), torch.randn(7, HIDDEN), torch.randn(7)
    run = select_mixture(torch.device("cpu"), dtype, (HIDDEN, INNER))
    want = naive_experts(x, naive_route(x, router, bias, CHOICE), gate_up, down)
    got = run(x, router, bias, CHOICE, gate_up, down)
    limit = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)
