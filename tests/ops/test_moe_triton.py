"""The mixture's Triton kernels, in the interpreter, against the definition: any number of tokens,
widths that are no whole tiles, experts that nobody or everybody chooses, rows of padding."""

from dataclasses import replace

import pytest
import torch

from vitrail.config.hardware import find
from vitrail.ops.moe import fused
from vitrail.ops.moe.fused import one_token, place, triton_experts, triton_route
from vitrail.ops.moe.naive import Routing, naive_experts, naive_route, route
from vitrail.ops.moe.plan import Choice, max_blocks
from vitrail.ops.moe.tile import ExpertsPlan, Rows, Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
FEW = Tile(bn=16, bk=16, stages=2, warps=4)
MANY = Tile(bn=32, bk=16, stages=2, warps=4, swap=False, sorted=True)
GATHERED = replace(MANY, sorted=False)
PLANS = {
    "few": ExpertsPlan(bt=16, up=FEW, down=FEW, early=0),
    "all at once": ExpertsPlan(bt=128, up=FEW, down=FEW, early=0),
    "many": ExpertsPlan(bt=32, up=GATHERED, down=MANY, early=0),
    "halves": ExpertsPlan(
        bt=32, up=replace(FEW, halves=True), down=replace(MANY, halves=True), early=0
    ),
    "paired": ExpertsPlan(
        bt=32, up=replace(GATHERED, paired=True, halves=True), down=GATHERED, early=0
    ),
    "shared": ExpertsPlan(
        bt=32, up=replace(FEW, halves=True), down=replace(MANY, programs=5), early=0
    ),
}
TOLERANCE = 1e-5


def weights(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(experts)
    gate_up = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
    return gate_up, torch.randn(experts, hidden, inner) / inner**0.5


def routed(tokens: int, experts: int, top_k: int) -> Routing:
    torch.manual_seed(tokens)
    return route(torch.randn(tokens, experts), torch.zeros(experts), top_k, True, 2.446)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 8, 3, 24, 16), (37, 8, 3, 40, 24), (5, 1, 1, 24, 8), (3, 65, 6, 32, 48), (0, 8, 3, 24, 8)],
)
def test_experts_are_the_definition(
    name: str, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> None:
    gate_up, down = weights(experts, hidden, inner)
    x, choices = torch.randn(tokens, hidden), routed(tokens, experts, top_k)
    want = naive_experts(x, choices, gate_up, down)
    got = triton_experts(x, choices, gate_up, down, PLANS[name])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", PLANS)
def test_choices_that_are_nobody_s_add_nothing(name: str) -> None:
    """Padding rows of a graph; what they would have read is NaN here."""
    gate_up, down = weights(8, 24, 16)
    x, choices = torch.randn(20, 24), routed(20, 8, 3)
    ids, kept = choices.expert_ids.clone(), choices.weights.clone()
    ids[3], ids[7, 1], ids[19] = -1, 8, 1 << 20
    kept[(ids < 0) | (ids > 7)] = 0
    x[3] = x[19] = torch.nan
    got = triton_experts(x, Routing(ids, choices.weights), gate_up, down, PLANS[name])
    clean = x.nan_to_num()
    want = naive_experts(clean, Routing(ids, kept), gate_up, down)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(got[3], torch.zeros(24))


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize(
    ("experts", "top_k", "num_shared", "hidden", "inner"),
    [(8, 5, 2, 24, 16), (6, 3, 0, 40, 24), (9, 4, 1, 32, 48)],
)
def test_one_token_by_rows_is_the_definition(
    rows: int, experts: int, top_k: int, num_shared: int, hidden: int, inner: int
) -> None:
    """Rows that do not divide the channels, channels that are no power of two, and a choice that is
    nobody's, of whose rows nothing is there but NaN."""
    gate_up, down = weights(experts, hidden, inner)
    x, first = torch.randn(1, hidden), experts - num_shared
    ids = torch.cat([torch.randperm(first)[: top_k - num_shared], torch.arange(first, experts)])
    ids = ids[None].int()
    by_rows = Rows(up=rows, up_warps=4, down=rows, down_warps=4)
    plan = replace(PLANS["few"], rows=by_rows)
    for nobody in (None, -1, experts):
        kept = torch.rand(1, top_k)
        if nobody is not None:
            ids[0, 0], kept[0, 0] = nobody, 0
        want = naive_experts(x, Routing(ids, kept), gate_up, down)
        chosen = Routing(ids, kept if nobody is None else kept.index_fill(1, torch.tensor(0), 1.0))
        got = one_token(x, chosen, gate_up, down, num_shared, plan)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_mixture_of_one_token_runs_as_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = weights(10, 64, 24)
    choice = Choice(top_k=3, num_shared=2, normalize=True, scaling=2.446)
    x, router, bias = torch.randn(2, 64).bfloat16(), torch.randn(8, 64) / 8, torch.randn(8) / 10
    ran: list[int] = []

    def counted(x: torch.Tensor, *args: object) -> torch.Tensor:
        ran.append(len(x))
        return one_token(x, *args)

    plan = replace(PLANS["few"], rows=Rows(up=2, up_warps=4, down=8, down_warps=4))
    monkeypatch.setattr(fused, "experts_plan", lambda *_: plan)
    monkeypatch.setattr(fused, "one_token", counted)
    want = naive_experts(x[:1].float(), naive_route(x[:1], router, bias, choice), gate_up, down)
    layer = (router, bias, choice, gate_up.bfloat16(), down.bfloat16())
    got, both = (fused.triton_mixture(find("H200"), x_TM, *layer) for x_TM in (x[:1], x))
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.05)
    assert both.shape == x.shape  # in tiles, whose products in bf16 the interpreter gets wrong
    assert ran == [1]


@pytest.mark.parametrize("name", PLANS)
def test_all_tokens_may_choose_the_same_experts(name: str) -> None:
    gate_up, down = weights(8, 24, 16)
    x = torch.randn(70, 24)
    choices = Routing(torch.tensor([[7, 0]]).expand(70, 2).contiguous(), torch.rand(70, 2))
    want = naive_experts(x, choices, gate_up, down)
    got = triton_experts(x, choices, gate_up, down, PLANS[name])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of products with NaN
@pytest.mark.parametrize("name", PLANS)
def test_rows_that_no_kernel_wrote_may_hold_anything(name: str, monkeypatch) -> None:
    gate_up, down = weights(8, 24, 16)
    x, choices = torch.randn(37, 24), routed(37, 8, 3)
    want = triton_experts(x, choices, gate_up, down, PLANS[name])
    new = torch.Tensor.new_empty

    def dirty(x: torch.Tensor, *size, **more) -> torch.Tensor:
        made = new(x, *size, **more)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", dirty)
    assert torch.equal(triton_experts(x, choices, gate_up, down, PLANS[name]), want)


def test_a_token_gets_the_very_same_alone_and_with_strangers() -> None:
    gate_up, down = weights(8, 24, 16)
    x, choices = torch.randn(19, 24), routed(19, 8, 3)
    whole = triton_experts(x, choices, gate_up, down, PLANS["few"])
    for t in (0, 7, 18):
        one = Routing(choices.expert_ids[t : t + 1], choices.weights[t : t + 1])
        alone = triton_experts(x[t : t + 1], one, gate_up, down, PLANS["few"])
        assert torch.equal(alone, whole[t : t + 1])


@pytest.mark.parametrize("tokens", [17, 60, 400, 1500])
def test_every_slot_has_its_row(tokens: int) -> None:
    """Blocks are of one expert, all but its last are full, and every slot is in one."""
    plan, chosen = PLANS["few"], routed(tokens, 11, 3).expert_ids
    chosen[::5, 1] = -1
    slots = chosen.numel()
    rows, counts, records, blocks, how = place(chosen, 11, plan)
    assert (how, blocks) == (0, max_blocks(slots, 11, plan.bt))
    want = [int((chosen == e).sum()) for e in range(11)]
    assert counts[:11].tolist() == want
    used = int(records[-1, 0])
    assert used == sum(-(-count // plan.bt) for count in want)
    assert (records[used:-1, 0] == -1).all()
    seen: list[int] = []
    left = list(want)
    for expert, first, live, _ in records[:used].tolist():
        assert live == min(left[expert], plan.bt)
        left[expert] -= live
        mine = rows[first : first + live].long()
        assert (chosen.flatten()[mine] == expert).all()
        seen += mine.tolist()
    assert not any(left)
    assert sorted(seen) == (chosen.flatten() >= 0).nonzero().flatten().tolist()


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("num_shared", [0, 2])
def test_the_router_is_the_definition(tokens: int, num_shared: int) -> None:
    torch.manual_seed(tokens)
    choice = Choice(top_k=6, num_shared=num_shared, normalize=True, scaling=2.446)
    x, router = torch.randn(tokens, 200).bfloat16(), torch.randn(64, 200) / 200**0.5
    bias = torch.randn(64) / 10
    want = naive_route(x, router, bias, choice)
    got, placed = triton_route(x, router, bias, choice, PLANS["few"])
    assert torch.equal(got.expert_ids.long(), want.expert_ids)
    torch.testing.assert_close(got.weights, want.weights, atol=1e-6, rtol=1e-6)
    again = place(got.expert_ids, 64 + num_shared, PLANS["few"])
    assert placed.direct == again.direct
    assert (placed.direct == 0) == (tokens > 16)
    if not placed.direct:
        assert torch.equal(placed.records[:, :3], again.records[:, :3])
        for expert, first, live, _ in placed.records[: int(placed.records[-1, 0])].tolist():
            mine = placed.rows[first : first + live].long()
            assert (got.expert_ids.flatten()[mine] == expert).all()


@pytest.mark.parametrize("tokens", [3, 17])
def test_a_mixture_is_its_router_and_its_experts(tokens: int) -> None:
    gate_up, down = weights(10, 64, 24)
    choice = Choice(top_k=3, num_shared=2, normalize=True, scaling=2.446)
    x, router, bias = torch.randn(tokens, 64), torch.randn(8, 64) / 8, torch.randn(8) / 10
    x = x.bfloat16().float()
    want = naive_experts(x, naive_route(x, router, bias, choice), gate_up, down)
    for plan in PLANS.values():
        routing, placed = triton_route(x.bfloat16(), router, bias, choice, plan)
        got = triton_experts(x, routing, gate_up, down, plan, placed)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of products with NaN
def test_states_that_are_no_numbers_stay_with_their_tokens() -> None:
    gate_up, down = weights(10, 64, 24)
    choice = Choice(top_k=3, num_shared=2, normalize=True, scaling=2.446)
    x, router, bias = torch.randn(40, 64).bfloat16(), torch.randn(8, 64), torch.randn(8)
    clean, _ = triton_route(x, router, bias, choice, PLANS["few"])
    x[5], x[20, 3], x[39] = torch.nan, torch.inf, torch.nan
    bad, placed = triton_route(x, router, bias, choice, PLANS["few"])
    good = [t for t in range(40) if t not in (5, 20, 39)]
    assert torch.equal(bad.expert_ids[good], clean.expert_ids[good])
    assert torch.equal(bad.weights[good], clean.weights[good])
    assert all(len(set(row)) == 5 for row in bad.expert_ids.tolist())
    got = triton_experts(x.float(), bad, gate_up, down, PLANS["few"], placed)
    assert got[good].isfinite().all()
    assert not got[[5, 39]].isfinite().any()


def test_the_first_of_equal_scores_is_chosen() -> None:
    choice = Choice(top_k=3, num_shared=1, normalize=False, scaling=2.0)
    x, router = torch.zeros(4, 64).bfloat16(), torch.randn(10, 64)
    bias = torch.tensor([0.0, 1, 0, 1, 0, 0, 0, 0, 0, 0])
    got, _ = triton_route(x, router, bias, choice, PLANS["few"])
    assert got.expert_ids.tolist() == [[1, 3, 0, 10]] * 4
    assert got.weights.tolist() == [[1.0, 1.0, 1.0, 1.0]] * 4
