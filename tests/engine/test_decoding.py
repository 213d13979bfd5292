"""Decodes by column: every step, arrays that go on from the last one against what is made anew, of
sequences one by one."""

from array import array
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scheduler_step import PAGE_SIZE, Tables, make, result
from vitrail.cache.page_keys import PageKeys
from vitrail.engine.decoding import Decoding
from vitrail.engine.graphs import DecodeGraphs
from vitrail.engine.request import EngineRequest, SamplingParams, Sequence
from vitrail.engine.step import Decodes, SequenceStep

SLOTS, PAGE = 5, 4


def test_a_steps_head_is_what_nobody_packed_before_would_pack() -> None:
    """Requests of other lengths, aborted at random: sizes, pages, padding and attention's work of
    each step, from heads that packed the steps before and from fresh ones."""
    random, running = np.random.default_rng(0), 20
    scheduler, tables = make(running, 150, prompt=PAGE_SIZE, spread=3 * PAGE_SIZE), Tables(running)
    alive, pending, compared = [f"request-{i}" for i in range(running)], [], set[int]()
    while not scheduler.idle:
        if alive and random.random() < 0.08:
            scheduler.abort(alive.pop(int(random.integers(len(alive)))))
        planned = scheduler.schedule()
        if planned is not None:
            pending.append(planned[0])
            tables.sampler.setup(planned[1].setups)
            if planned[0].prefills:
                tables.eager(*planned)
            else:
                compared.add(len(planned[0].decodes))
                _compare(tables, planned)
        while len(pending) > (planned is not None):
            plan = pending.pop(0)
            scheduler.absorb(plan, result(plan))
    assert len(compared) > 5, compared


def _compare(tables: Tables, planned) -> None:
    plan, inputs = planned
    fresh = DecodeGraphs(tables.parts, tables.graphs._sizes, tables.door.device)
    tables.graph(plan, inputs)
    fresh.pack(plan, tables.door.parcel())
    size = tables.graphs._size(len(plan.decodes))
    kept, made = tables.graphs._heads[size], fresh._heads[size]
    for name in ("slots", "kept_slots", "positions", "cache_slots", "places", "kv_lens", "pages"):
        assert np.array_equal(getattr(kept, name), getattr(made, name)), name
    for a, b in zip(kept._records, made._records, strict=True):
        assert sorted(a._items.tolist()) == sorted(b._items.tolist())
        assert np.array_equal(a._combines, b._combines)


@dataclass
class One:
    """A sequence as somebody knows it who looks at each by itself."""

    seq: Sequence
    tokens: list[int]
    launched: int
    flights: int = 0
    rests: bool = False


@dataclass
class World:
    decoding: Decoding = field(default_factory=lambda: Decoding(SLOTS, PAGE))
    ones: list[One] = field(default_factory=list)
    flights: list[tuple[Decodes, list[One]]] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    count: int = 0

    def enter(self, data: st.DataObject) -> None:
        """The youngest, or one that was here before and comes back to its place."""
        if not self.free:
            return
        num_prompt, more = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
        arrival = (
            2 * self.count if data.draw(st.booleans()) else 2 * data.draw(st.integers(0, 9)) + 1
        )
        if arrival in {one.seq.arrival for one in self.ones}:
            return
        self.count += 1
        tokens = array("i", range(num_prompt))
        request = EngineRequest(
            id=f"r{self.count}",
            prompt_token_ids=tokens.tolist(),
            images=[],
            params=SamplingParams(),
            max_tokens=more,
            stop_token_ids=frozenset(data.draw(st.lists(st.integers(90, 93), max_size=2))),
            seed=self.count,
        )
        seq = Sequence(
            request=request,
            arrival=arrival,
            tokens=tokens,
            keys=PageKeys(tokens, [], PAGE),
            num_prompt=num_prompt,
            end=num_prompt + more,
            id=100 + self.count,
            slot=self.free.pop(data.draw(st.integers(0, len(self.free) - 1))),
            launched=num_prompt,
            goal=num_prompt,
            pages_sent=num_prompt // PAGE + 1,
            commit_at=PAGE,
        )
        self.decoding.enter(seq)
        first = data.draw(st.integers(50, 89))
        self.decoding.take(seq, first)  # the prompt's own token, absorbed
        self._commit(seq, num_prompt)
        self.ones.append(One(seq, [*range(num_prompt), first], num_prompt))
        self.ones.sort(key=lambda one: one.seq.arrival)

    def _commit(self, seq: Sequence, computed: int) -> None:
        if computed >= seq.commit_at:
            seq.commit_at = (computed // PAGE + 1) * PAGE
            self.decoding.mark(seq)

    def launch(self, data: st.DataObject) -> None:
        going = [one for one in self.ones if not one.rests]
        due = [(i, o.seq) for i, o in enumerate(going) if o.launched >= _limit(o.seq)]
        assert self.decoding.due() == due
        grown = {}
        for _, seq in due:
            if self.decoding.launched(seq) + 1 >= seq.end:
                self.decoding.rest(seq)
            else:
                grown[seq.slot] = seq.pages_sent, (seq.id,)
                seq.pages_sent += 1
        for one in going:
            one.rests = one.launched + 1 >= one.seq.end
        going = [one for one in going if not one.rests]
        slots = self.decoding.order
        assert slots.tolist() == [one.seq.slot for one in going]
        rows, seeds, index = self.decoding.launch(slots, grown)
        want: list[SequenceStep] = []
        for one in going:
            before, new = grown.get(one.seq.slot, (one.seq.pages_sent, ()))
            row = SequenceStep(one.seq.id, one.seq.slot, one.launched, 1, before, new, True)
            want.append(row)
            one.launched += 1
            one.flights += 1
        assert list(rows) == want
        assert seeds.tolist() == [one.seq.request.seed for one in going]
        assert index.tolist() == [one.launched - one.seq.num_prompt for one in going]
        self.flights.append((rows, going))

    def absorb(self, data: st.DataObject) -> None:
        if not self.flights:
            return
        rows, ones = self.flights.pop(0)
        tokens = [data.draw(st.sampled_from([-1, *range(80, 94)])) for _ in ones]
        others = [i for i in range(len(ones)) if data.draw(st.integers(0, 9)) == 0]
        alive = [one in self.ones for one in ones]
        names = self.decoding.names(rows)
        assert [n for n, a in zip(names, alive, strict=True) if a] == [
            o.seq.request.id for o, a in zip(ones, alive, strict=True) if a
        ]
        stops = {-1}.union(*(one.seq.request.stop_token_ids for one in self.ones))
        looked = self.decoding.absorb(rows, np.array(tokens, np.int64), tokens, others)
        want: list[int] = []
        for i, (one, token) in enumerate(zip(ones, tokens, strict=True)):
            computed = int(rows.starts[i]) + 1
            ends = token in stops or computed + 1 >= one.seq.end or computed >= one.seq.commit_at
            if not alive[i] or ends or i in others:
                want.append(i)
        assert looked == want
        for i, (one, token) in enumerate(zip(ones, tokens, strict=True)):
            if not alive[i]:
                continue
            one.flights -= 1
            if i in looked and token < 0:
                self.leave(one)
                continue
            one.tokens.append(token)
            if i in looked:
                self.decoding.take(one.seq, token)
                assert one.seq.tokens.tolist() == one.tokens
                self._commit(one.seq, int(rows.starts[i]) + 1)
                if token in one.seq.request.stop_token_ids or len(one.tokens) >= one.seq.end:
                    self.leave(one)

    def leave(self, one: One) -> None:
        self.decoding.leave(one.seq)
        assert one.seq.tokens.tolist() == one.tokens
        self.free.append(one.seq.slot)
        one.seq.slot = -1
        self.ones.remove(one)


def _limit(seq: Sequence) -> int:
    return min(seq.pages_sent * PAGE, seq.end - 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_columns_are_what_each_sequence_says(data: st.DataObject) -> None:
    """Sequences enter at any place, are preempted or aborted at any moment, end by a token, by
    length or by an error; up to three steps are under way."""
    world = World()
    for _ in range(data.draw(st.integers(5, 40))):
        move = data.draw(
            st.sampled_from(["enter", "launch", "launch", "absorb", "absorb", "leave"])
        )
        if move == "leave":
            if world.ones and data.draw(st.integers(0, 3)) == 0:
                world.leave(data.draw(st.sampled_from(world.ones)))
        elif move == "launch":
            if len(world.flights) < 3:
                world.launch(data)
        else:
            getattr(world, move)(data)
        world.decoding.check([one.seq for one in world.ones])
        for one in world.ones:
            assert world.decoding.in_flight(one.seq) == one.flights


def test_decodes_are_a_sequence_of_their_rows() -> None:
    rows = [
        SequenceStep(7, 2, 9, 1, 3, (), True),
        SequenceStep(8, 0, 4, 1, 1, (5,), True),
        SequenceStep(9, 1, 0, 1, 0, (6, 4), True),
    ]
    made = Decodes.of(rows)
    assert list(made) == rows
    assert made[1] == rows[1]
    assert made[1:] == tuple(rows[1:])
    assert (len(made), bool(made), bool(Decodes.of([]))) == (3, True, False)
    with pytest.raises(AssertionError):
        Decodes.of([SequenceStep(7, 2, 9, 2, 3, (), True)])
