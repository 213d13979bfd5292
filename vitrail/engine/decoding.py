"""The running sequences whose prompts are launched to their ends, in columns by slot: a step's work
for those about which nothing is to be decided is arithmetic on arrays, and touches no object of
theirs. Says about whom something is to be decided, when a step is planned and when its result is
there; decides nothing.

    position  0 ....... len(tokens) ...... known ........ launched ......... limit
              in the    kept here, all     sampled by     the next           end of the pages that
              sequence  of one page        steps under    input              were sent, or of what
                                           way                               it may have"""

# numpy leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from collections import Counter

import numpy as np

from vitrail.engine.request import Sequence
from vitrail.engine.step import Decodes

Grown = dict[int, tuple[int, tuple[int, ...]]]


class Decoding:
    """Owns which sequences these are, in order of arrival, how far each is launched, and its tokens
    since a page was full: `take` and `leave` put them where they belong."""

    def __init__(self, max_running: int, page_size: int):
        self._page_size = page_size
        self._seqs: list[Sequence | None] = [None] * max_running
        self._order = np.zeros(0, np.int64)  # slots of those that have a token a step
        self._ids = np.full(max_running, -1, np.int64)
        self._arrivals, self._launched, self._limits, self._pages, self._firsts, self._marks = (
            np.zeros(max_running, np.int64) for _ in range(6)
        )
        self._seeds = np.zeros(max_running, np.uint64)
        self._names = [""] * max_running
        self._known = np.zeros(max_running, np.int64)
        self._late = np.zeros((max_running, page_size), np.int32)  # by position within a page
        self._stops = Counter({-1: 1})  # ids that end somebody; -1, no token, everybody

    def __contains__(self, seq: Sequence) -> bool:
        return seq.slot >= 0 and self._seqs[seq.slot] is seq

    @property
    def order(self) -> np.ndarray:
        """int64: slots of those that have a token a step, oldest first."""
        return self._order

    def enter(self, seq: Sequence) -> None:
        """The last chunk of its prompt is launched."""
        slot = seq.slot
        self._seqs[slot], self._ids[slot], self._arrivals[slot] = seq, seq.id, seq.arrival
        self._launched[slot], self._firsts[slot] = seq.launched, seq.num_prompt
        self._seeds[slot], self._names[slot] = seq.request.seed, seq.request.id
        self._known[slot] = len(seq.tokens)
        self._stops.update(seq.request.stop_token_ids)
        self._send(seq)
        self.mark(seq)
        at = np.searchsorted(self._arrivals[self._order], seq.arrival)
        self._order = np.insert(self._order, at, slot)

    def leave(self, seq: Sequence) -> None:
        """It stops running."""
        self.rest(seq)
        self._put(seq)
        for token in seq.request.stop_token_ids:
            self._stops[token] -= 1
            if not self._stops[token]:
                del self._stops[token]
        self._seqs[seq.slot], self._ids[seq.slot] = None, -1

    def rest(self, seq: Sequence) -> None:
        """All tokens that it may have are launched."""
        self._order = self._order[self._order != seq.slot]

    def launched(self, seq: Sequence) -> int:
        """Positions of `seq` that launched steps compute."""
        return int(self._launched[seq.slot])

    def in_flight(self, seq: Sequence) -> int:
        """Tokens of `seq` that launched steps sample, and nobody has seen."""
        return self.launched(seq) + 1 - int(self._known[seq.slot])

    def due(self) -> list[tuple[int, Sequence]]:
        """Those that have no page for their next input, or may have no further token, oldest first,
        each with its place in `order`."""
        order = self._order
        places = np.flatnonzero(self._launched[order] >= self._limits[order])
        return [(at, self._seq(int(order[at]))) for at in places.tolist()]

    def launch(self, slots: np.ndarray, grown: Grown) -> tuple[Decodes, np.ndarray, np.ndarray]:
        """The next token of `slots`, of which `grown` get pages (and `pages_sent` says so): rows of
        a plan, their seeds, uint64, and output indices, int64."""
        starts = self._launched[slots]
        rows = Decodes(self._ids[slots], slots, starts, self._pages[slots], grown)
        self._launched[slots] = after = starts + 1
        for slot in grown:
            self._send(self._seq(slot))
        return rows, self._seeds[slots], after - self._firsts[slots]

    def mark(self, seq: Sequence) -> None:
        """`commit_at` of `seq` has changed."""
        self._marks[seq.slot] = min(seq.commit_at - 1, seq.end - 2)

    def take(self, seq: Sequence, token: int) -> None:
        """Its next token, in `seq.tokens` as all before it."""
        self._put(seq)
        seq.tokens.append(token)
        self._known[seq.slot] = len(seq.tokens)

    def absorb(
        self, rows: Decodes, tokens: np.ndarray, ids: list[int], others: list[int]
    ) -> list[int]:
        """`tokens` (int64 [B]; -1: none; `ids`: the same as a list) follow `rows` of a plan. Keeps
        them, but for those that somebody has to look at: that end a request or complete a page,
        `others`, and what was sampled for who is gone since. The indices of these."""
        slots, after, size = rows.slots, rows.starts + 1, self._page_size
        look = (after > self._marks[slots]) | (self._ids[slots] != rows.seqs)
        # one by one: those that end somebody may be as many as there are ids
        ends = [i for i, token in enumerate(ids) if token in self._stops]
        if ends or others:
            look[ends + others] = True
        (looked,) = look.nonzero()
        if len(looked):
            kept = ~look
            slots, after, tokens = slots[kept], after[kept], tokens[kept]
        # flat, and of a page's places by a product: a remainder costs numpy four times that
        places = after + (slots - after // size) * size
        self._late.reshape(-1)[places] = tokens
        self._known[slots] = after + 1
        return looked.tolist()

    def names(self, rows: Decodes) -> list[str]:
        """Ids of the requests whose rows they are, where they have not gone since."""
        names = self._names
        return [names[slot] for slot in rows.slots.tolist()]

    def check(self, running: list[Sequence]) -> None:
        """`running`: those of them that run, oldest first."""
        held = [seq for seq in self._seqs if seq is not None]
        assert {id(seq) for seq in held} == {id(seq) for seq in running}
        assert len(held) == len(running)
        order = [self._seq(slot) for slot in self._order.tolist()]
        assert order == [s for s in running if s.slot in self._order], "not in order of arrival"
        for seq in running:
            slot = seq.slot
            assert self._ids[slot] == seq.id, "a handle of another"
            assert self._pages[slot] == seq.pages_sent
            assert self._firsts[slot] == seq.num_prompt
            assert self._marks[slot] == min(seq.commit_at - 1, seq.end - 2)
            assert slot in self._order or self._launched[slot] == seq.end - 1
            assert 0 <= self._known[slot] - len(seq.tokens) < self._page_size
        assert (self._ids >= 0).sum() == len(held), "a handle of nobody"
        stops = Counter(token for seq in running for token in seq.request.stop_token_ids)
        assert self._stops == stops + Counter({-1: 1}), "ids that end nobody"

    def _send(self, seq: Sequence) -> None:
        self._pages[seq.slot] = seq.pages_sent
        self._limits[seq.slot] = min(seq.pages_sent * self._page_size, seq.end - 1)

    def _put(self, seq: Sequence) -> None:
        """Tokens that are kept here into the sequence."""
        slot, have = seq.slot, len(seq.tokens)
        first, count = have % self._page_size, int(self._known[slot]) - have
        seq.tokens.frombytes(self._late[slot, first : first + count].tobytes())

    def _seq(self, slot: int) -> Sequence:
        seq = self._seqs[slot]
        assert seq is not None, f"slot {slot} decodes nothing"
        return seq
