"""Linear, embedding, norm, rotary and mixture layers: their formulas and dtypes."""

import torch
import torch.nn.functional as F
from torch import nn

from vitrail.config.model import MoeConfig, RopeConfig
from vitrail.layers.embedding import LmHead, VocabEmbedding
from vitrail.layers.linear import GatedMlp, Linear, parameter, torch_dtype
from vitrail.layers.moe import MoeLayer
from vitrail.layers.norm import RmsNorm
from vitrail.layers.rotary import make_rotary
from vitrail.ops.moe.naive import naive_route


def drawn(module: nn.Module, std: float = 0.3) -> nn.Module:
    torch.manual_seed(2)
    for p in module.parameters():
        p.normal_(0, std)
    return module


def test_parameters_are_for_inference_and_of_their_dtype() -> None:
    made = parameter(3, 5, dtype=torch_dtype("bfloat16"))
    assert (made.dtype, made.requires_grad, tuple(made.shape)) == (torch.bfloat16, False, (3, 5))


def test_linear_and_gated_mlp() -> None:
    x = torch.randn(4, 7)
    linear = drawn(Linear(7, 5, torch.float32))
    torch.testing.assert_close(linear(x), x @ linear.weight.T, atol=1e-6, rtol=1e-6)
    mlp = drawn(GatedMlp(7, 3, torch.float32))
    gate, up = (x @ mlp.gate_up_proj.weight.T).split(3, -1)
    want = (F.silu(gate) * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), want, atol=1e-6, rtol=1e-6)


def test_embedding_and_head() -> None:
    embedding = drawn(VocabEmbedding(11, 6, torch.bfloat16))
    ids = torch.tensor([3, 0, 10, 3])
    assert torch.equal(embedding(ids), embedding.weight[ids])
    head = drawn(LmHead(11, 6, torch.bfloat16))
    logits = head(embedding(ids))
    assert logits.dtype == torch.float32
    want = embedding(ids).float() @ head.weight.float().T
    torch.testing.assert_close(logits, want, atol=1e-2, rtol=1e-2)


def test_norm_without_a_residual_starts_one() -> None:
    norm, x = drawn(RmsNorm(6, 1e-5, torch.float32)), torch.randn(3, 6)
    normed, residual = norm.add(x, None)
    assert residual is x
    assert torch.equal(normed, norm(x))
    again, total = norm.add(x, residual)
    assert torch.equal(total, x + x)
    assert torch.equal(again, norm(x + x))


def test_a_norm_into_a_linear_layer_is_both() -> None:
    norm, x = drawn(RmsNorm(6, 1e-5, torch.float32)), torch.randn(3, 6)
    linear = drawn(Linear(6, 5, torch.float32))
    projected, residual = norm.add_into(linear, x, None)
    assert residual is x
    assert torch.equal(projected, linear(norm(x)))
    again, total = norm.add_into(linear, x, residual)
    assert torch.equal(total, x + x)
    assert torch.equal(again, linear(norm(x + x)))


def test_rotary_depends_on_the_absolute_position_alone() -> None:
    rope = RopeConfig(theta=8e5, dim=6, interleaved=True)
    x = torch.randn(4, 2, 6)
    far = torch.tensor([0, 1, 131071, 7])
    together = make_rotary(far, rope)(x)
    assert torch.equal(together[0], x[0])
    for i in range(4):
        alone = make_rotary(far[i : i + 1], rope)(x[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], atol=1e-6, rtol=0)


def test_rotary_products_depend_on_the_distance() -> None:
    rope = RopeConfig(theta=100.0, dim=6, interleaved=True)
    q, k = torch.randn(1, 1, 6).expand(9, 1, 6), torch.randn(1, 1, 6).expand(9, 1, 6)
    rotary = make_rotary(torch.arange(9), rope)
    products = (rotary(q)[:, 0] @ rotary(k)[:, 0].T).double()
    for distance in range(-8, 9):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)


GATE, UP = slice(0, 5), slice(5, 10)


def moe(num_shared: int) -> MoeConfig:
    return MoeConfig(
        num_experts=6,
        top_k=2,
        intermediate_size=5,
        num_shared=num_shared,
        routed_scaling=2.446,
        normalize=True,
        first_moe_layer=0,
    )


def test_shared_experts_are_added_to_the_routed() -> None:
    """As published: one gated MLP of their widths together, next to the routed experts."""
    made, x = drawn(MoeLayer(7, moe(2), torch.float32)), torch.randn(9, 7)
    scores = (x @ made.router.weight.T).sigmoid()
    chosen = (scores + made.router.bias).topk(2).indices
    weights = scores.gather(1, chosen)
    weights = 2.446 * weights / weights.sum(-1, keepdim=True)
    gate, up = (torch.cat([made.gate_up[e, half] for e in (6, 7)]) for half in (GATE, UP))
    down = torch.cat([made.down[6], made.down[7]], 1)
    want = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    for t in range(9):
        for weight, e in zip(weights[t], chosen[t].tolist(), strict=True):
            gate, up = (made.gate_up[e] @ x[t]).split(5)
            want[t] += weight * (made.down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(made(x), want, atol=1e-5, rtol=1e-5)


def test_without_shared_experts_there_are_only_the_routed() -> None:
    made = drawn(MoeLayer(7, moe(0), torch.float32))
    assert len(made.gate_up) == len(made.down) == 6
    made.down.zero_()
    assert torch.equal(made(torch.randn(3, 7)), torch.zeros(3, 7))


def test_the_router_computes_in_fp32_under_bf16_weights() -> None:
    """Scores that bf16 cannot tell apart (it has 8 bits) choose by what fp32 sees."""
    made = drawn(MoeLayer(8, moe(1), torch.bfloat16))
    router = made.router
    router.weight.zero_()
    router.bias.zero_()
    router.weight[4, 0], router.weight[1, 0] = 1.0002, 1.0001
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    x[0, 0] = 1

    def chosen() -> list[list[int]]:
        return naive_route(x, router.weight, router.bias, router.choice).expert_ids.tolist()

    assert chosen() == [[4, 1, 6]]
    router.weight[1, 0] = 1.0003
    assert chosen() == [[1, 4, 6]]
    assert made(x).dtype == torch.bfloat16
