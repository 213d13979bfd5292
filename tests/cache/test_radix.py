"""The tree of prefixes against a dictionary (key tuple -> page), a list of locks and a clock."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vitrail.cache.radix import Node, RadixCache

Prefix = tuple[bytes, ...]
KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=5).map(tuple)


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixCache()
        self.pages: dict[Prefix, int] = {}
        self.locks: list[tuple[Node, Prefix]] = []
        self.unlocked_at: dict[Prefix, int] = {}
        self.clock = 0
        self.next_page = 0

    def longest(self, keys: Prefix) -> Prefix:
        return next(keys[:n] for n in range(len(keys), -1, -1) if not n or keys[:n] in self.pages)

    def is_locked(self, prefix: Prefix) -> bool:
        return any(held[: len(prefix)] == prefix for _, held in self.locks)

    def unlock_at(self, i: int) -> tuple[Node, Prefix]:
        node, held = self.locks.pop(i)
        self.clock += 1
        self.unlocked_at |= {held[:n]: self.clock for n in range(1, len(held) + 1)}
        return node, held

    @rule(keys=KEYS)
    def open(self, keys: Prefix) -> None:
        node, pages = self.tree.match(keys)
        found = self.longest(keys)
        assert pages == [self.pages[found[:n]] for n in range(1, len(found) + 1)]
        self.tree.lock(node)
        self.locks.append((node, found))

    @rule(data=st.data(), more=KEYS)
    def insert(self, data: st.DataObject, more: Prefix) -> None:
        if not self.locks:
            return
        below, held = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        offered = list(range(self.next_page, self.next_page + len(more)))
        self.next_page += len(more)
        node, adopted = self.tree.insert(below, more, offered)
        expected: list[int] = []
        for n, page in enumerate(offered, start=1):
            prefix = held + more[:n]
            if prefix not in self.pages:
                self.pages[prefix] = page
                expected.append(page)
        assert adopted == expected
        self.locks.append((node, held + more))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locks:
            node, _ = self.unlock_at(data.draw(st.integers(0, len(self.locks) - 1)))
            self.tree.unlock(node)

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        expected: list[int] = []
        for _ in range(n):
            leaves = [
                p
                for p in self.pages
                if not self.is_locked(p) and not any(q[:-1] == p for q in self.pages)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=self.unlocked_at.__getitem__)
            expected.append(self.pages.pop(oldest))
        assert self.tree.evict(n) == expected

    @invariant()
    def the_tree_is_the_model(self) -> None:
        self.tree.check()
        assert sorted(self.tree.pages()) == sorted(self.pages.values())
        assert len(self.tree) == len(self.pages)
        assert self.tree.evictable == sum(not self.is_locked(p) for p in self.pages)

    def teardown(self) -> None:
        for node, _ in self.locks:
            self.tree.unlock(node)
        assert self.tree.evictable == len(self.tree)
        assert sorted(self.tree.evict(len(self.tree))) == sorted(self.pages.values())
        assert len(self.tree) == 0
        self.tree.check()


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def put(tree: RadixCache, keys: list[bytes], pages: list[int]) -> None:
    tree.lock(tree.root)
    tree.unlock(tree.insert(tree.root, keys, pages).node)


def test_a_prefix_used_again_outlives_a_newer_one() -> None:
    tree = RadixCache()
    put(tree, [b"a", b"b"], [1, 2])
    put(tree, [b"x", b"y"], [3, 4])
    node = tree.match([b"a"]).node
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(4) == [2, 4, 3, 1]


def test_more_unlocks_than_locks_is_our_fault() -> None:
    tree = RadixCache()
    put(tree, [b"a"], [1])
    with pytest.raises(AssertionError, match="was not locked"):
        tree.unlock(tree.match([b"a"]).node)
