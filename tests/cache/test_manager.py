"""The manager with a simulated device: a slot remembers which prefix computed it, so that a hit is
right exactly if the slots say so."""

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vitrail.cache.manager import Manager
from vitrail.cache.page_keys import PageKeys

PAGE = 3
NUM_PAGES = 10
A, B = b"a" * 32, b"b" * 32
Spans = list[tuple[int, int, bytes]]


def keyed(ids: list[int], spans: Spans, page_size: int) -> PageKeys:
    return PageKeys(array("i", ids), spans, page_size)


class Request:
    """A prompt of ids 0 and 1, perhaps with an image of 4 tokens at 1, and what became of it."""

    def __init__(self, ids: list[int], image: bytes | None, salt: bytes):
        self.ids = array("i", [*ids[:1], *([7] * 4 if image else []), *ids[1:]])
        self.image, self.salt = image, salt
        self.keys = PageKeys(self.ids, [(1, 4, image)] if image else [], PAGE, salt)
        self.computed = 0
        self.absorbed = 0

    def value(self, position: int) -> tuple[object, ...]:
        """What attention at `position` depends on: everything up to it."""
        image = self.image if position >= 1 else None
        return (self.salt, image, *self.ids[: position + 1])


REQUESTS = st.builds(
    Request,
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.sampled_from([None, None, A, B]),
    st.sampled_from([b"", b"", b"tenant"]),
)


class ManagerMachine(RuleBasedStateMachine):
    prefix_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = Manager(NUM_PAGES, PAGE, self.prefix_cache)
        self.slots: dict[int, tuple[object, ...]] = {}
        self.running: dict[int, Request] = {}
        self.next_seq = 0

    def open(self, seq: int, request: Request) -> None:
        cached = self.manager.open(seq, request.keys, len(request.ids))
        assert cached % PAGE == 0
        assert cached < len(request.ids)
        assert len(self.manager.pages(seq)) * PAGE == cached
        request.computed = request.absorbed = cached
        self.running[seq] = request

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.running)))

    def slot(self, seq: int, position: int) -> int:
        return self.manager.pages(seq)[position // PAGE] * PAGE + position % PAGE

    @rule(request=REQUESTS)
    def start(self, request: Request) -> None:
        self.open(self.next_seq, request)
        self.next_seq += 1

    @rule(request=REQUESTS)
    def run_whole(self, request: Request) -> None:
        """A whole life in one rule, so that the cache fills and evicts often."""
        self.start(request)
        seq = self.next_seq - 1
        self.compute(seq, len(request.ids))
        self.manager.commit(seq, request.computed)
        del self.running[seq]
        self.manager.close(seq)

    @rule(data=st.data(), n=st.integers(1, 8))
    def launch(self, data: st.DataObject, n: int) -> None:
        """Compute up to n more positions, ahead of what was absorbed."""
        if self.running:
            self.compute(self.pick(data), n)

    def compute(self, seq: int, n: int) -> None:
        request = self.running[seq]
        until = min(request.computed + n, len(request.ids))
        before, free = list(self.manager.pages(seq)), self.manager.free_pages
        usage = self.manager.usage()
        missing = -(-until // PAGE) - len(before)
        if not self.manager.reserve(seq, until):
            assert missing > free
            assert self.manager.pages(seq) == before
            assert self.manager.free_pages == free
            return
        pages = self.manager.pages(seq)
        assert pages[: len(before)] == before
        assert len(pages) == max(len(before), -(-until // PAGE))
        others = {p for s in self.running if s != seq for p in self.manager.pages(s)}
        assert not others & set(pages[len(before) :]), "a page in use was handed out"
        evicted = usage.cached_pages - self.manager.usage().cached_pages
        assert evicted == max(0, missing - usage.free_pages), "no more than had to go"
        for position in range(request.computed, until):
            self.slots[self.slot(seq, position)] = request.value(position)
        request.computed = until

    @rule(data=st.data(), token=st.integers(0, 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        if self.running:
            self.running[self.pick(data)].ids.append(token)

    @rule(data=st.data())
    def absorb(self, data: st.DataObject) -> None:
        if self.running:
            seq = self.pick(data)
            request = self.running[seq]
            request.absorbed = data.draw(st.integers(request.absorbed, request.computed))
            self.manager.commit(seq, request.absorbed)

    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        if self.running:
            seq = self.pick(data)
            del self.running[seq]
            self.manager.close(seq)

    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        if self.running:
            seq = self.pick(data)
            self.manager.close(seq)
            self.open(seq, self.running[seq])

    @invariant()
    def what_was_computed_is_there(self) -> None:
        self.manager.check()
        for seq, request in self.running.items():
            for position in range(request.computed):
                assert self.slots[self.slot(seq, position)] == request.value(position)
        usage = self.manager.usage()
        parts = usage.free_pages + usage.cached_pages + usage.running_pages
        assert parts == usage.num_pages == NUM_PAGES
        assert usage.free_pages + usage.cached_pages == self.manager.free_pages
        tables = {p for seq in self.running for p in self.manager.pages(seq)}
        assert usage.running_pages >= len(tables)
        assert usage.hit_tokens <= usage.query_tokens

    def teardown(self) -> None:
        for seq in self.running:
            self.manager.close(seq)
        self.manager.check()
        assert self.manager.free_pages == NUM_PAGES


class UncachedMachine(ManagerMachine):
    prefix_cache = False

    @invariant()
    def nothing_is_kept(self) -> None:
        assert self.manager.usage().cached_pages == 0
        assert self.manager.usage().hit_tokens == 0


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestUncached = UncachedMachine.TestCase
TestUncached.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def run_whole(manager: Manager, seq: int, keys: PageKeys, num_tokens: int) -> int:
    cached = manager.open(seq, keys, num_tokens)
    assert manager.reserve(seq, num_tokens)
    manager.commit(seq, num_tokens)
    manager.close(seq)
    return cached


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_second_run_hits_all_but_the_last_token(page_size: int) -> None:
    for length in (1, page_size, page_size + 1, 5 * page_size - 1, 5 * page_size):
        manager = Manager(7, page_size)
        ids = list(range(length))
        assert run_whole(manager, 0, keyed(ids, [], page_size), length) == 0
        hit = run_whole(manager, 1, keyed(ids, [], page_size), length)
        assert hit == (length - 1) // page_size * page_size
        usage = manager.usage()
        assert (usage.hit_tokens, usage.query_tokens) == (hit, 2 * length)


def test_duplicates_stay_private_and_vanish() -> None:
    """Two equal prompts side by side: the second's pages are its own, what follows is shared."""
    manager = Manager(12, PAGE)
    ids = [1] * 7
    one, two = keyed(ids, [], PAGE), keyed([*ids, 0, 0], [], PAGE)
    for seq, keys in ((1, one), (2, two)):
        manager.open(seq, keys, 7)
        assert manager.reserve(seq, 9)
    manager.commit(1, 7)
    manager.commit(2, 9)
    first, second = list(manager.pages(1)), list(manager.pages(2))
    assert not set(first) & set(second)
    manager.close(2)
    assert manager.usage().free_pages == 12 - 4
    manager.open(3, keyed([*ids, 0, 0, 0], [], PAGE), 10)
    assert manager.pages(3) == [*first[:2], second[2]]
    manager.close(1)
    manager.close(3)
    manager.check()


def test_reserve_is_all_or_nothing() -> None:
    manager = Manager(6, PAGE)
    run_whole(manager, 0, keyed([0] * 9, [], PAGE), 9)
    manager.open(1, keyed([1] * 30, [], PAGE), 30)
    assert not manager.reserve(1, 6 * PAGE + 1)
    assert manager.pages(1) == []
    assert manager.usage().cached_pages == 3, "nothing was evicted in vain"
    assert manager.usage().query_tokens == 9, "a request that waits is not counted"
    assert manager.reserve(1, 6 * PAGE)
    assert manager.usage().cached_pages == 0
    assert sorted(manager.pages(1)) == [0, 1, 2, 3, 4, 5]


def test_reserve_evicts_no_more_than_it_needs_and_the_oldest() -> None:
    manager = Manager(6, PAGE)
    old, new = keyed([0] * 7, [], PAGE), keyed([1] * 7, [], PAGE)
    run_whole(manager, 0, old, 7)
    run_whole(manager, 1, new, 7)
    manager.open(2, keyed([2] * 9, [], PAGE), 9)
    assert manager.reserve(2, 6)
    assert manager.usage().cached_pages == 4, "two pages were free"
    assert manager.reserve(2, 9)
    assert manager.usage().cached_pages == 3
    assert manager.open(3, old, 7) == 3
    assert manager.open(4, new, 7) == 6


def test_a_prompt_is_counted_once() -> None:
    manager = Manager(6, PAGE)
    manager.open(0, keyed([0] * 7, [], PAGE), 7)
    for num_tokens in (3, 7, 8, 9):
        assert manager.reserve(0, num_tokens)
    assert manager.usage().query_tokens == 7


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    manager = Manager(6, PAGE, prefix_cache=False)
    keys = keyed([0] * 7, [], PAGE)
    assert [run_whole(manager, seq, keys, 7) for seq in range(3)] == [0, 0, 0]
    assert manager.usage().free_pages == 6


def test_an_uncommitted_page_is_not_shared() -> None:
    """A step that was launched and never absorbed (it failed) leaves nothing behind."""
    manager = Manager(6, PAGE)
    ids = [1] * 9
    manager.open(0, keyed(ids, [], PAGE), 9)
    assert manager.reserve(0, 9)
    manager.commit(0, 5)
    manager.close(0)
    assert manager.usage().cached_pages == 1
    assert manager.open(1, keyed(ids, [], PAGE), 9) == PAGE


def test_c01_parallel_requests_with_other_pictures_share_only_the_text_before() -> None:
    manager = Manager(500, 4)
    ids = [1] * 6 + [7] * 9 + [2] * 6
    for i in range(64):
        keys = keyed(ids, [(6, 9, bytes([i]) * 32)], 4)
        hit = manager.open(i, keys, len(ids))
        assert hit == (4 if i else 0)
        assert manager.reserve(i, len(ids))
        manager.commit(i, len(ids))
    again = manager.open(64, keyed(ids, [(6, 9, bytes([9]) * 32)], 4), len(ids))
    assert again == 20
    assert manager.pages(64) == manager.pages(9)[:5]
    for seq in range(65):
        manager.close(seq)
    manager.check()


def test_c16_a_preempted_image_request_resumes() -> None:
    manager = Manager(8, PAGE)
    ids = array("i", [1, *[7] * 9, 2, 3])
    keys = PageKeys(ids, [(1, 9, A)], PAGE)
    manager.open(5, keys, 12)
    assert manager.reserve(5, 8)
    manager.commit(5, 8)
    manager.close(5)
    ids.append(4)
    assert manager.open(5, keys, 13) == 6, "its computed pages were kept"
    manager.close(5)
    manager.open(6, keyed([0] * 24, [], PAGE), 24)
    assert manager.reserve(6, 24), "and given up under pressure"
    manager.close(6)
    assert manager.open(5, keys, 13) == 0
    assert manager.reserve(5, 13)
    manager.close(5)
    manager.check()


def test_c20_500_requests_of_which_a_third_abort_leave_nothing() -> None:
    """Page 16, chunks mixed with decodes, up to 12 at once, random lengths, aborts at any point."""
    rng = random.Random(20)
    manager = Manager(160, 16)
    running: dict[int, list[int]] = {}  # seq: length, computed, abort at
    waiting = [(seq, rng.randint(1, 700)) for seq in range(500)]
    finished = 0
    while waiting or running:
        while waiting and len(running) < 12:
            seq, length = waiting.pop()
            ids = [rng.randrange(2) if rng.random() < 0.01 else 1 for _ in range(length)]
            done = manager.open(seq, keyed(ids, [], 16), length)
            abort = rng.randint(0, length) if seq % 3 == 0 else length
            running[seq] = [length, done, abort]
        for seq, (length, done, abort) in list(running.items()):
            until = min(length, done + rng.choice([1, 1, 37, 256]))
            if done >= abort:
                manager.close(seq)
                del running[seq]
                finished += 1
            elif manager.reserve(seq, until):
                manager.commit(seq, done)
                running[seq][1] = until
            elif len(running) > 1:
                manager.close(seq)
                del running[seq]
                waiting.insert(0, (seq, length))
    assert finished == 500
    manager.check()
    assert manager.free_pages == manager.num_pages == 160
    assert manager.usage().running_pages == 0


def test_c26_a_chat_edited_in_turn_2_hits_up_to_the_edit() -> None:
    manager = Manager(200, 4)
    ids: list[int] = []
    spans: Spans = []
    for turn in range(6):
        spans.append((len(ids) + 3, 10, bytes([turn]) * 32))
        ids += [turn, 1, 2, *[7] * 10, 3, 4, 5]
        hit = run_whole(manager, turn, keyed(ids, spans, 4), len(ids))
        assert hit == 16 * turn
    edited = [*ids]
    edited[17] = 99
    assert manager.open(6, keyed(edited, spans, 4), len(ids)) == 16
    assert manager.open(7, keyed([9] * 30, [], 4), 30) == 0


def test_h13_1000_failed_admissions_leave_nothing() -> None:
    manager = Manager(4, PAGE)
    keys = keyed([1] * 40, [], PAGE)
    for seq in range(1000):
        manager.open(seq, keys, 40)
        assert not manager.reserve(seq, 40)
        manager.close(seq)
    manager.check()
    assert manager.usage().free_pages == 4
    assert manager.usage().query_tokens == 0


def test_a_sequence_is_open_once() -> None:
    manager = Manager(4, PAGE)
    manager.open(0, keyed([1], [], PAGE), 1)
    with pytest.raises(AssertionError, match="already open"):
        manager.open(0, keyed([1], [], PAGE), 1)
