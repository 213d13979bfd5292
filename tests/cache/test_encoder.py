"""The encoder cache against a list of who came last, and a simulated pool on the device."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vitrail.cache.encoder import EncoderCache, EncoderEntry, EntryState

BUDGET = 20  # tokens; 3 bytes each
SIZES = [1, 4, 7, 9, 20, 31]


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


class EncoderMachine(RuleBasedStateMachine):
    """Images 0..5 have `SIZES` tokens; the last is larger than the budget. `idle`: oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(3 * BUDGET + 2, 3)
        self.live: dict[int, EncoderEntry] = {}
        self.held: list[tuple[int, EncoderEntry, int]] = []  # image, entry, seq
        self.idle: list[int] = []
        self.device: dict[int, int] = {}
        self.ids: set[int] = set()

    def gone(self, image: int) -> None:
        entry = self.live.pop(image)
        if image in self.idle:
            self.idle.remove(image)
        assert entry.state is EntryState.GONE

    def users(self, image: int) -> int:
        return sum(e is self.live.get(image) for _, e, _ in self.held)

    @rule(image=st.integers(0, 5), seq=st.integers(0, 3), encode=st.booleans())
    def use(self, image: int, seq: int, encode: bool) -> None:
        entry = self.cache.lookup(name(image))
        assert entry is self.live.get(image)
        if entry is None:
            entry = self.admit(image)
        if entry is None:
            return
        self.cache.acquire(entry, seq)
        self.held.append((image, entry, seq))
        if image in self.idle:
            self.idle.remove(image)
        if entry.ready:
            assert entry.id in self.device, "a ready image lost its rows"
        elif encode:
            self.drop()
            self.device[entry.id] = entry.num_tokens
            self.cache.mark_ready(entry)

    @rule(image=st.integers(0, 5))
    def serve(self, image: int) -> None:
        """A whole use in one rule, so that the cache fills and evicts often."""
        before = len(self.held)
        self.use(image, 4, True)
        if len(self.held) > before:
            self.release_at(before)

    def admit(self, image: int) -> EncoderEntry | None:
        used = sum(SIZES[i] for i in self.live)
        referenced = used - sum(SIZES[i] for i in self.idle)
        entry = self.cache.admit(name(image), SIZES[image])
        fits = referenced + SIZES[image] <= BUDGET or referenced == 0
        assert (entry is not None) == fits
        if entry is None:
            assert all(e.state is not EntryState.GONE for e in self.live.values())
            return None
        assert entry.id not in self.ids, "an id came back"
        self.ids.add(entry.id)
        while self.idle and used + SIZES[image] > BUDGET:
            used -= SIZES[self.idle[0]]
            self.gone(self.idle[0])
        self.live[image] = entry
        self.idle.append(image)
        return entry

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.release_at(data.draw(st.integers(0, len(self.held) - 1)))

    def release_at(self, i: int) -> None:
        image, entry, seq = self.held.pop(i)
        self.cache.release(entry, seq)
        if entry is self.live.get(image) and not self.users(image):
            if entry.id in self.device and SIZES[image] <= BUDGET:
                self.idle.append(image)
            else:
                self.gone(image)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self.live:
            image = data.draw(st.sampled_from(sorted(self.live)))
            entry = self.live[image]
            self.cache.forget(entry)
            self.cache.forget(entry)
            self.gone(image)
            assert self.cache.lookup(name(image)) is None

    @rule()
    def drop(self) -> None:
        for entry in self.cache.take_dropped():
            assert entry in self.ids
            self.device.pop(entry, None)
            self.ids.remove(entry)  # each id is dropped once

    @invariant()
    def the_cache_is_the_model(self) -> None:
        self.cache.check()
        used = sum(SIZES[i] for i in self.live)
        idle = sum(SIZES[i] for i in self.idle)
        assert len(self.cache) == len(self.live)
        assert self.cache.used_bytes == 3 * used
        assert self.cache.referenced_bytes == 3 * (used - idle)
        assert used <= BUDGET or len(self.live) == 1
        for image, entry in self.live.items():
            assert (image in self.idle) == (not self.users(image))
            assert entry.ready == (entry.id in self.device)

    def teardown(self) -> None:
        while self.held:
            _, entry, seq = self.held.pop()
            self.cache.release(entry, seq)
        self.cache.check()
        assert self.cache.referenced_bytes == 0
        assert self.cache.used_bytes <= 3 * BUDGET
        self.drop()
        assert self.device.keys() <= {e.id for e in self.live.values()}


TestEncoder = EncoderMachine.TestCase
TestEncoder.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def serve(cache: EncoderCache, image: int, num_tokens: int, seq: int) -> bool:
    """One use of an image; True if it had to be encoded."""
    entry = cache.lookup(name(image))
    fresh = entry is None
    if entry is None:
        entry = cache.admit(name(image), num_tokens)
        assert entry is not None
    cache.acquire(entry, seq)
    cache.mark_ready(entry)
    cache.release(entry, seq)
    return fresh


@pytest.mark.parametrize("budget", [0, 1, 99, 100])
def test_an_image_larger_than_the_cache_is_served_and_not_kept(budget: int) -> None:
    cache = EncoderCache(budget * 8, 8)
    assert serve(cache, 0, 100, seq=1)
    assert len(cache) == (1 if budget == 100 else 0)
    assert serve(cache, 0, 100, seq=2) == (budget < 100)
    entry = cache.lookup(name(0)) or cache.admit(name(0), 100)
    assert entry is not None
    cache.acquire(entry, 3)
    assert cache.admit(name(1), 1) is None, "nothing fits beside it"
    cache.release(entry, 3)
    assert cache.admit(name(1), 1) is not None


def test_the_same_picture_twice_in_one_request() -> None:
    cache = EncoderCache(10, 1)
    entry = cache.admit(name(0), 10)
    assert entry is not None
    cache.acquire(entry, 4)
    cache.acquire(entry, 4)
    cache.mark_ready(entry)
    cache.release(entry, 4)
    assert cache.admit(name(1), 1) is None
    cache.release(entry, 4)
    assert cache.admit(name(1), 1) is not None
    assert cache.take_dropped() == (entry.id,)
    assert cache.take_dropped() == ()


def test_the_image_unused_for_longest_goes_first() -> None:
    cache = EncoderCache(30, 1)
    for image in (0, 1, 2, 0):
        serve(cache, image, 10, seq=1)
    serve(cache, 3, 10, seq=1)
    assert [i for i in range(4) if cache.lookup(name(i))] == [0, 2, 3]
    serve(cache, 4, 20, seq=1)
    assert [i for i in range(5) if cache.lookup(name(i))] == [3, 4]


def test_c11_1000_images_do_not_grow_the_cache() -> None:
    cache = EncoderCache(64, 1)
    most = 0
    for i in range(1000):
        assert serve(cache, i, 9, seq=i)
        cache.take_dropped()
        most = max(most, cache.used_bytes)
        assert len(cache) <= 7
    assert most == 63
    assert [serve(cache, 999, 9, seq=i) for i in range(1000)].count(True) == 0


def test_c16_a_preempted_request_finds_its_image_again() -> None:
    cache = EncoderCache(64, 1)
    assert serve(cache, 0, 9, seq=1)
    assert not serve(cache, 0, 9, seq=1)


def test_c22_a_failed_image_works_the_next_time_and_eviction_ends() -> None:
    cache = EncoderCache(50, 1)
    entry = cache.admit(name(0), 20)
    assert entry is not None
    cache.acquire(entry, 1)
    cache.acquire(entry, 2)
    cache.mark_ready(entry)
    cache.forget(entry)
    assert cache.take_dropped() == (entry.id,)
    cache.release(entry, 1)
    assert serve(cache, 0, 20, seq=3), "encoded anew, under a new id"
    cache.release(entry, 2)
    rng = random.Random(22)
    for i in range(500):
        serve(cache, i, rng.randint(1, 60), seq=i)
        cache.check()
    assert cache.referenced_bytes == 0


def test_an_image_that_nobody_waits_for_is_given_up_before_it_is_encoded() -> None:
    cache = EncoderCache(50, 1)
    entry = cache.admit(name(0), 20)
    assert entry is not None
    cache.acquire(entry, 1)
    cache.release(entry, 1)
    assert cache.lookup(name(0)) is None
    assert cache.used_bytes == 0
    cache.mark_ready(entry)  # its step comes back later: no matter
    assert cache.take_dropped() == (entry.id,)
