"""The page allocator against a dictionary of counts."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vitrail.cache.allocator import PageAllocator

NUM_PAGES = 11


class AllocatorMachine(RuleBasedStateMachine):
    """`held` is the truth: how many hold each page."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.held: Counter[int] = Counter()

    @rule(n=st.integers(0, NUM_PAGES + 2))
    def allocate(self, n: int) -> None:
        free = NUM_PAGES - len(self.held)
        taken = self.pages.allocate(n)
        if n > free:
            assert taken is None
            return
        assert taken is not None
        assert len(taken) == len(set(taken)) == n
        assert not set(taken) & self.held.keys(), "a held page was handed out"
        self.held.update(taken)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.held:
            some = data.draw(st.sets(st.sampled_from(sorted(self.held))))
            self.pages.share(some)
            self.held.update(some)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            some = data.draw(st.sets(st.sampled_from(sorted(self.held))))
            self.pages.free(some)
            self.held.subtract(some)
            self.held += Counter()

    @invariant()
    def counts_are_the_models(self) -> None:
        self.pages.check()
        assert self.pages.num_free == NUM_PAGES - len(self.held)
        assert [self.pages.holders(p) for p in range(NUM_PAGES)] == [
            self.held[p] for p in range(NUM_PAGES)
        ]

    def teardown(self) -> None:
        self.pages.free(self.held.elements())
        self.pages.check()
        assert self.pages.num_free == NUM_PAGES


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def test_every_page_is_used() -> None:
    pages = PageAllocator(5)
    assert sorted(pages.allocate(5) or []) == [0, 1, 2, 3, 4]
    assert pages.num_free == 0
    assert pages.allocate(1) is None
    assert pages.allocate(0) == []


def test_a_free_page_cannot_be_freed_or_shared() -> None:
    pages = PageAllocator(3)
    taken = pages.allocate(1)
    assert taken is not None
    pages.free(taken)
    with pytest.raises(AssertionError, match="already free"):
        pages.free(taken)
    with pytest.raises(AssertionError, match="is free"):
        pages.share(taken)
