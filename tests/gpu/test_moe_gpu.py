"""The mixture of experts, compiled: the published layer's widths, every plan, in a CUDA graph,
without a synchronisation, the same each time."""

import pytest
import torch

from vitrail.ops.dispatch import gpu_of, select_mixture
from vitrail.ops.moe.naive import Routing, naive_experts, naive_route
from vitrail.ops.moe.plan import Choice, ExpertsShape, experts_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.suite("kernels", minutes=2, owner="ops", gpus=1),
]
HIDDEN, INNER, ROUTED = 2048, 1408, 64
CHOICE = Choice(top_k=6, num_shared=2, normalize=True, scaling=2.446)
SHAPE = ExpertsShape(HIDDEN, INNER, 66, 8)
SIZES = [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 200, 300, 700, 1100, 3000]
CHECKED = 40


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(5)
    device = torch.device("cuda")
    experts = ROUTED + CHOICE.num_shared
    router = torch.randn(ROUTED, HIDDEN, device=device) / HIDDEN**0.5
    bias = torch.randn(ROUTED, device=device) / 10
    gate_up = torch.randn(experts, 2 * INNER, HIDDEN, device=device) / HIDDEN**0.5
    down = torch.randn(experts, HIDDEN, INNER, device=device) / INNER**0.5
    return router, bias, gate_up.bfloat16(), down.bfloat16()


def states(tokens: int) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randn(tokens, HIDDEN, device="cuda").bfloat16()


def run(x: torch.Tensor, layer: tuple[torch.Tensor, ...]) -> torch.Tensor:
    mixture = select_mixture(x.device, x.dtype, (HIDDEN, INNER))
    return mixture(x, *layer[:2], CHOICE, *layer[2:])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("tokens", SIZES)
def test_a_mixture_is_as_close_to_fp32_as_plain_torch(tokens, layer):
    router, bias, gate_up, down = layer
    x = states(tokens)
    run(x, layer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(x, layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    some = torch.randperm(tokens, device=x.device)[:CHECKED]
    chosen = naive_route(x[some], router, bias, CHOICE)
    exact = naive_experts(x[some].float(), chosen, gate_up.float(), down.float())
    plain = naive_experts(x[some], chosen, gate_up, down)
    error = (plain.float() - exact).abs().max()
    assert (got[some].float() - exact).abs().max() <= 2 * error


@pytest.mark.parametrize("tokens", [1, 8, 33, 200, 1100])
def test_the_router_chooses_what_torch_chooses(tokens, layer):
    from vitrail.ops.moe.fused import triton_route

    router, bias = layer[:2]
    x = states(tokens)
    plan = experts_plan(tokens, SHAPE, gpu_of(x.device))
    want, (got, _) = (
        naive_route(x, router, bias, CHOICE),
        triton_route(x, router, bias, CHOICE, plan),
    )
    scores = (x.double() @ router.double().T).sigmoid() + bias.double()
    seventh = scores.topk(7).values
    close = (seventh[:, :-1] - seventh[:, 1:]).min(-1).values < 1e-6  # either order is right
    assert torch.equal(got.expert_ids.long()[~close], want.expert_ids[~close])
    torch.testing.assert_close(got.weights, want.weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", SIZES)
def test_a_graph_gives_the_very_same_each_time(tokens, layer):
    """Also for other tokens than it was captured with."""
    x = states(tokens)
    run(x, layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, layer)
    for seed in (3, 4):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        want = run(x, layer)
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, want)


@pytest.mark.parametrize("tokens", [2, 17, 200, 1100])
def test_a_token_gets_the_same_alone_and_with_strangers(tokens, layer):
    """To what is rounded between products: one token's sum is of fp32, several tokens' of bf16."""
    x = states(tokens)
    whole = run(x, layer)
    alone = torch.cat([run(x[t : t + 1], layer) for t in (0, tokens // 2, tokens - 1)])
    apart = whole[[0, tokens // 2, tokens - 1]]
    assert (alone - apart).abs().max() <= 2**-7 * apart.abs().max()


def test_choices_that_are_nobody_s_add_nothing(layer):
    from vitrail.ops.moe.fused import triton_experts

    router, bias, gate_up, down = layer
    for tokens in SIZES:
        x = states(tokens)
        plan = experts_plan(tokens, SHAPE, gpu_of(x.device))
        chosen = naive_route(x, router, bias, CHOICE)
        ids = chosen.expert_ids.int()
        want = triton_experts(x, Routing(ids, chosen.weights), gate_up, down, plan)
        padded = ids.clone()
        padded[1::3] = -1
        got = triton_experts(x, Routing(padded, chosen.weights), gate_up, down, plan)
        assert torch.equal(got[::3], want[::3])
        assert not got[1::3].any()
