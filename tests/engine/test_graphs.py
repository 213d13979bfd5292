"""Decode graphs without a GPU: a replay is the captured forward pass over memory at fixed
addresses, run again, the attention's kernels in the interpreter. What capturing itself does is
tested on a GPU (`tests/gpu`)."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import scheduler_step as bench
from tests.engine.driver import golden_llm
from vitrail import LLM, Refused, SamplingParams
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.attention.shape import Phase
from vitrail.cache.kv_pool import KvPool
from vitrail.check.sizes import GRAPH_BYTES, graph_bytes, graph_findings, ladder
from vitrail.config.engine import EngineConfig, validate
from vitrail.config.finding import accept
from vitrail.config.hardware import find
from vitrail.engine import graphs as graphs_module
from vitrail.engine.engine import Engine
from vitrail.engine.graphs import DecodeGraphs, GraphParts, capture_graphs
from vitrail.engine.runner import Runner, RunnerParts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's, on a CPU")
PARAMS = [
    SamplingParams(max_tokens=n, temperature=t, seed=n, ignore_eos=True)
    for n, t in ((9, 0.0), (3, 0.8), (12, 1.3), (5, 0.0), (7, 0.9))
]
PROMPTS = [{"prompt_token_ids": list(range(1, n))} for n in (40, 4, 18, 33, 17)]


class Again:
    """Stands for a graph."""

    def __init__(self, run: Callable[[], torch.Tensor], made: torch.Tensor):
        self.run, self.made, self.replays = run, made, 0

    def replay(self) -> None:
        self.made.copy_(self.run())
        self.replays += 1


class Recorded(list[Again]):
    """Stands for `Recorder`: forward and greedy graphs in turn."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Again, torch.Tensor]:
        self.append(Again(run, run()))
        return self[-1], self[-1].made

    @property
    def steps(self) -> int:
        return sum(graph.replays for graph in self)

    @property
    def greedy(self) -> int:
        return sum(graph.replays for graph in self[1::2])


def parts_of(llm: LLM) -> RunnerParts:
    return llm.engine._runner._p


def triton_plans(llm: LLM, max_len: int) -> PlanTable:
    """As for a GPU of few SMs, so that a launch has few programs."""
    limits = PlanLimits(
        dtype="float32", page_size=16, max_batch=16, max_q_len=64, max_kv_len=max_len
    )
    sites = [s for s in parts_of(llm).model.text_sites() if s[1] is Phase.DECODE]
    return make_table(sites, limits, replace(find("H200"), num_sms=3), "triton")


def graphed(llm: LLM, sizes: list[int]) -> tuple[Recorded, KvPool]:
    """`llm` with decodes of up to the largest size replayed, over a pool full of NaN."""
    parts, pages = parts_of(llm), parts_of(llm).pool.num_pages
    pool = KvPool(parts.model.cache_specs(), pages + 1, 16, torch.device("cpu"))
    graphs = DecodeGraphs(
        GraphParts(
            model=parts.model,
            pool=pool,
            plans=triton_plans(llm, 112),
            builder=parts.builder,
            sampler=parts.sampler,
            scratch_page=pages,
            max_len=112,
        ),
        sizes,
        torch.device("cpu"),
    )
    recorded = Recorded()
    graphs.capture(parts.door, recorded)
    runner = Runner(replace(parts, pool=pool, graphs=graphs))
    llm.engine = Engine(llm.engine.scheduler, runner, step_ahead=True)
    return recorded, pool


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]


def test_replayed_decodes_give_the_same_tokens_and_write_the_same_slots():
    """Five requests of other lengths, which end one by one: padded, from sizes 8, 4, 2 and 1."""
    plain = golden_llm(max_model_len=112)
    want = tokens(plain)
    llm = golden_llm(max_model_len=112)
    recorded, pool = graphed(llm, [1, 2, 4, 8])
    assert tokens(llm) == want
    assert recorded.steps >= 8
    assert recorded.greedy < recorded.steps
    for layer in range(len(parts_of(llm).model.cache_specs())):
        eager, replayed = parts_of(plain).pool.latent(layer), pool.latent(layer)
        assert torch.equal(eager.isnan(), replayed[:-1].isnan()), "another slot was written"
        assert torch.allclose(eager, replayed[:-1], atol=1e-4, equal_nan=True)


def test_more_decodes_than_the_largest_graph_are_launched_kernel_by_kernel():
    llm = golden_llm(max_model_len=112)
    recorded, _ = graphed(llm, [1, 2])
    assert tokens(llm) == tokens(golden_llm(max_model_len=112))
    assert 0 < recorded.steps < 10


def test_a_greedy_batch_is_sampled_within_its_graphs():
    """Two of three rows are padded out of a size of four: nobody's token is another's."""
    params = [SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)] * 3
    llm, plain = golden_llm(max_model_len=112), golden_llm(max_model_len=112)
    recorded, _ = graphed(llm, [4])
    got, want = (each.generate(PROMPTS[:3], params) for each in (llm, plain))
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert recorded.greedy == recorded.steps == 5


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_sends_one_parcel(graphs: bool):
    """Biases, masks, penalties and logprobs among them, which no graph has room for."""
    llm = golden_llm(max_model_len=112)
    if graphs:
        graphed(llm, [4])
    door, before = parts_of(llm).door, parts_of(llm).door.copies
    params = [
        SamplingParams(max_tokens=3, top_k=5, repetition_penalty=1.2, logit_bias={7: 2.0}),
        SamplingParams(max_tokens=3, temperature=0, min_tokens=2, logprobs=2),
        SamplingParams(max_tokens=4),
    ]
    llm.generate(PROMPTS[:3], params)
    assert door.copies - before == llm.engine.stats().steps_total


def test_a_step_has_its_own_pages_and_none_of_the_step_before():
    """Whatever was packed before it, what a step sends is what it sends alone, but that its items
    may be in another order."""
    scheduler, used = bench.make(5, 150, prompt=70, spread=60), bench.Tables(5)
    grown = plans = 0
    while (planned := scheduler.schedule()) is not None:
        plan = planned[0]
        if plan.prefills:
            used.eager(*planned)
        else:
            fresh = bench.Tables(5)
            fresh.builder._table[:] = used.builder._table
            plans, grown = plans + 1, grown + bool(plan.decodes.grown)
            for each in (used, fresh):
                each.graphs.pack(plan, each.door.parcel())
            heads = [each.graphs._heads[5] for each in (used, fresh)]
            for name in ("slots", "positions", "cache_slots", "places", "pages", "kv_lens"):
                one, other = (getattr(head, name).tolist() for head in heads)
                assert one == other, (plan.index, name)
        scheduler.absorb(plan, bench.result(plan))
    assert grown > 8
    assert plans - grown > 100


class Called(TorchDispatchMode):
    """Operations of torch's, by name."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_greedy_step_asks_torch_for_two_copies_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    """Beside its replay, which is the device's: the numbers there, the tokens back. Three rows in a
    size of four, one step ahead; no memory is made, and no view."""
    llm = golden_llm(max_model_len=112)
    graphed(llm, [4])
    asked = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    steps: list[list[str]] = []

    def stepped(step: Callable[[], Any]) -> Any:
        with Called() as called:
            made = step()
        steps.append(called.names)
        return made

    monkeypatch.setattr(Again, "replay", lambda _: None)  # the tokens stay those of the capture
    monkeypatch.setattr(llm.engine, "step", partial(stepped, llm.engine.step))
    llm.generate(PROMPTS[:3], [asked] * 3)
    steady = steps[4:-2]
    assert len(steady) > 12
    assert all(names == ["copy_.default"] * 2 for names in steady), steady


def test_the_ladder_ends_with_what_was_asked():
    assert ladder(0) == []
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]
    assert ladder(256)[-4:] == [208, 224, 240, 256]
    for largest in (1, 3, 64, 65, 256, 300, 1000):
        sizes = ladder(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest


def test_the_memory_of_graphs_is_planned_with_the_largest_ones_logits():
    assert graph_bytes([], 1000) == 0
    one, two = graph_bytes([8], 1000), graph_bytes([8, 16], 1000)
    assert two - one == GRAPH_BYTES + 8 * 1000 * 8


@pytest.mark.parametrize(("own", "others"), [(0, 40 << 30), (40 << 30, 0)])
def test_what_graphs_take_is_this_processs_own(
    own: int, others: int, monkeypatch: pytest.MonkeyPatch
):
    """Memory that another process takes of the device meanwhile is nothing that they took."""
    llm, held = golden_llm(max_model_len=112), {"own": 1 << 30, "free": 100 << 30}

    class Graphs:
        def __init__(self, *_: object):
            pass

        def capture(self, *_: object) -> None:
            held["own"] += own
            held["free"] -= own + others

    monkeypatch.setattr(graphs_module, "DecodeGraphs", Graphs)
    monkeypatch.setattr(graphs_module, "Recorder", lambda *_: None)
    monkeypatch.setattr(graphs_module, "graph_sizes", lambda *_: [1, 2])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held["own"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (held["free"], 140 << 30))
    parts, config = parts_of(llm), EngineConfig(model="m")
    given = GraphParts(
        model=parts.model,
        pool=parts.pool,
        plans=triton_plans(llm, 112),
        builder=parts.builder,
        sampler=parts.sampler,
        scratch_page=0,
        max_len=112,
    )
    if own:
        with pytest.raises(Refused, match=f"2 graphs of up to 2 decodes take {own} bytes"):
            capture_graphs(given, config, parts.door)
    else:
        assert isinstance(capture_graphs(given, config, parts.door), Graphs)


def test_graphs_over_attention_that_asks_the_host_are_refused():
    llm = golden_llm(max_model_len=112)
    with pytest.raises(Refused, match=r"decode on backend reference.*--cuda-graphs 0"):
        accept(graph_findings(p for p in parts_of(llm).plans if p.shape.phase is Phase.DECODE))


def test_graphs_on_a_cpu_are_refused():
    (found,) = validate(EngineConfig(model="m", device="cpu", cuda_graphs=8))
    assert "8 on a CPU" in str(found)
    assert not validate(EngineConfig(model="m", device="cpu", cuda_graphs=0))


class Empty:
    """Stands for a CUDA graph of nothing, whose end warns as torch's does."""

    def capture_begin(self, **_: object) -> None:
        pass

    def capture_end(self) -> None:
        warnings.warn("The CUDA Graph is empty.", UserWarning, stacklevel=2)


def test_what_fails_while_it_is_recorded_is_what_is_raised(monkeypatch: pytest.MonkeyPatch):
    """Ending a graph that has nothing yet warns, and where warnings are errors raises: neither
    takes the place of why it has nothing."""
    for name in ("Stream", "graph_pool_handle", "synchronize", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Empty)
    record = graphs_module.Recorder(torch.device("cpu"), first=False)

    def broken() -> torch.Tensor:
        raise ValueError("not whole tiles")

    for action in ("error", "always"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter(action)
            with pytest.raises(ValueError, match="not whole tiles"):
                record(broken)
        assert not warned
    with pytest.warns(UserWarning, match="empty"):  # of one that did not fail it says something
        record(lambda: torch.zeros(1))
