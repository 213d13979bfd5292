"""Pictures of several attention sequences in the scheduler: parts over steps, whoever shares,
aborts, fails or is preempted."""

import random

import pytest

from tests.engine.scheduler_rig import Rig, Setting, chat, run
from vitrail.engine.request import FinishReason


@pytest.mark.parametrize("budget", [18, 36, 54, 55, 90, 400])
@pytest.mark.parametrize("depth", [1, 2])
def test_c10_each_sequence_is_encoded_once_within_the_budget(budget: int, depth: int) -> None:
    """Pictures of 5, 1 and 3 sequences of 18 patches. The device asserts that parts come in order
    and are all of them."""
    setting = Setting(encoder_patches=budget, depth=depth, num_pages=200)
    rig = run(
        setting,
        chat("a", 2, (1, 9, 5), 1),
        chat("b", (2, 9), 3, (3, 9, 3)),
        chat("c", 1, (1, 9, 5), 2),
    )
    assert set(rig.device.encoded.values()) == {1}
    assert rig.device.max_patches <= budget
    parts = sum(job.count for plan in rig.plans for job in plan.encodes)
    assert parts == 9


def test_a_budget_is_filled_across_requests() -> None:
    """The rest of a budget goes to the next picture, begun and finished a step later."""
    setting = Setting(encoder_patches=72, max_step_tokens=64, num_pages=200)
    rig = run(setting, chat("a", (1, 9, 3), max_tokens=1), chat("b", (2, 9, 3), max_tokens=1))
    jobs = [[(j.first, j.count) for j in plan.encodes] for plan in rig.plans[:2]]
    assert jobs == [[(0, 3), (0, 1)], [(1, 2)]]


def test_a_step_may_encode_and_nothing_else() -> None:
    rig = run(Setting(encoder_patches=18), chat("a", (1, 9, 4), max_tokens=1))
    assert [bool(p.prefills) for p in rig.plans] == [False, False, False, True]


def test_decodes_go_on_while_a_picture_is_encoded() -> None:
    rig = Rig(Setting(encoder_patches=18))
    rig.add(chat("text", 3, max_tokens=12))
    rig.step()
    rig.add(chat("picture", (1, 9, 5)))
    while not rig.tokens("picture"):
        before = len(rig.plans)
        rig.step()
        assert rig.plans[before].decodes
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_who_shares_a_begun_picture_goes_on_with_it(after: int) -> None:
    rig = Rig(Setting(encoder_patches=18, num_pages=100))
    rig.add(chat("first", (1, 9, 5)), chat("second", 1, (1, 9, 5), 2))
    for _ in range(after):
        rig.step()
    rig.abort("first")
    rig.run()
    rig.check_outputs()
    assert rig.reason("second") is FinishReason.LENGTH
    assert list(rig.device.encoded.values()) == [1]
    assert sum(j.count for p in rig.plans for j in p.encodes) == 5


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_begun_picture_that_nobody_wants_is_dropped(after: int) -> None:
    rig = Rig(Setting(encoder_patches=18, num_pages=100))
    rig.add(chat("a", (1, 9, 5)), chat("b", 3, max_tokens=9))
    for _ in range(after):
        rig.step()
    rig.abort("a")
    rig.run()
    assert not rig.device.parts
    rig.add(chat("c", (1, 9, 5)))
    rig.run()
    rig.check_outputs()
    assert list(rig.device.encoded.values()) == [1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_part_that_fails_fails_all_who_need_the_picture(depth: int) -> None:
    rig = Rig(Setting(encoder_patches=18, num_pages=100, depth=depth))
    needy = [chat("a", 1, (1, 9, 4)), chat("b", 3, (1, 9, 4))]
    rig.device.bad_images = {needy[0].images[0].identity}
    rig.add(*needy, chat("c", (2, 9, 2)), chat("d", 5))
    rig.run()
    rig.check_outputs()
    assert [rig.reason(n) for n in "ab"] == [FinishReason.ERROR] * 2
    assert [rig.reason(n) for n in "cd"] == [FinishReason.LENGTH] * 2
    rig.device.bad_images = set()
    rig.add(chat("e", 1, (1, 9, 4)))
    rig.run()
    rig.check_outputs()
    assert rig.reason("e") is FinishReason.LENGTH


def test_a_step_that_raises_between_parts_ends_who_waited_and_nobody_hangs() -> None:
    for failing in range(4):
        rig = Rig(Setting(encoder_patches=18, num_pages=100))
        rig.add(chat("a", (1, 9, 4), 2), chat("b", 2, max_tokens=9))
        for _ in range(failing):
            rig.step()
        while not rig.flights:
            rig.launch()
        rig.fail()
        rig.add(chat("c", (1, 9, 4), 1))
        rig.run()
        rig.check_outputs()
        assert rig.reason("c") is FinishReason.LENGTH


def test_a_large_old_picture_is_not_starved_by_younger_ones() -> None:
    """It needs more room than is left beside a begun one, which must be finished first."""
    setting = Setting(encoder_patches=18, encoder_tokens=12, num_pages=300, max_running=6)
    requests = [chat(f"r{i}", 1, (i, 9, 3), 1, (i + 10, 9, 2), seed=i) for i in range(6)]
    rig = run(setting, *requests)
    assert all(rig.reason(r.id) is FinishReason.LENGTH for r in requests)


def test_preempted_between_parts() -> None:
    """A pool that is too small for all: someone with a begun picture gives it back."""
    setting = Setting(num_pages=16, page_size=4, max_model_len=60, encoder_patches=50, depth=2)
    preemptions = 0
    for before in range(1, 14):
        rig = Rig(setting)
        rig.add(chat("old", 5, max_tokens=45, seed=3))
        for _ in range(before):
            rig.step()
        rig.add(chat("young", 3, (1, 25, 4), 2, max_tokens=9, seed=4))
        rig.run()
        rig.check_outputs()
        assert not rig.device.parts
        preemptions += rig.scheduler.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("seed", range(30))
def test_anything_at_any_moment(seed: int) -> None:
    """Arrivals, aborts, failing steps and bad pictures among pictures of 1 to 5 sequences."""
    r = random.Random(seed)
    setting = Setting(
        num_pages=r.choice([30, 60]),
        encoder_patches=r.choice([20, 40, 70, 200]),
        encoder_tokens=r.choice([0, 12, 40]),
        max_step_tokens=r.choice([5, 16, 40]),
        prefix_cache=r.random() < 0.7,
        depth=r.choice([1, 2, 3]),
    )
    rig = Rig(setting)
    sizes = {name: (r.randint(1, 10), r.randint(1, 5)) for name in range(5)}
    live: list[str] = []
    for i in range(60):
        if r.random() < 0.4:
            parts = [
                (name, *sizes[name]) if r.random() < 0.6 else r.randint(1, 6)
                for name in r.sample(range(5), r.randint(1, 3))
            ]
            request = chat(f"r{i}", *parts, max_tokens=r.randint(1, 6), seed=i)
            if r.random() < 0.1 and request.images:
                rig.device.bad_images.add(request.images[0].identity)
            rig.add(request)
            live.append(request.id)
        if live and r.random() < 0.1:
            rig.abort(live.pop(r.randrange(len(live))))
        if rig.flights and r.random() < 0.05:
            rig.fail()
        if r.random() < 0.9:
            rig.step()
    rig.run()
    rig.check_outputs()


def late_elders() -> tuple[Rig, list[str]]:
    """Requests of a group wait for their leader and are older than whoever came meanwhile: they
    come to their pictures when a younger one has begun its own."""
    rig = Rig(Setting(encoder_patches=18, num_pages=300, max_running=8, max_step_tokens=40))
    rig.add(chat("leader", 60, group="g", max_tokens=2))
    rig.add(*(chat(f"m{i}", 3, (i, 9, 4), group="g", max_tokens=2) for i in range(3)))
    rig.step()
    rig.add(chat("young", (9, 9, 7), 2, max_tokens=2))
    return rig, ["leader", "m0", "m1", "m2", "young"]


def test_one_picture_is_begun_at_a_time() -> None:
    """What the device keeps of begun pictures is bounded by one of the largest."""
    rig, names = late_elders()
    begun: list[int] = []
    while not rig.scheduler.idle:
        rig.step()
        begun.append(len(rig.device.parts))
    rig.check_outputs()
    assert max(begun) == 1
    assert all(rig.reason(name) is FinishReason.LENGTH for name in names)


def test_while_one_is_begun_another_that_fits_whole_may_be_encoded() -> None:
    rig = Rig(Setting(encoder_patches=54, num_pages=100, max_step_tokens=64))
    rig.add(chat("a", (1, 9, 4)), chat("b", (2, 9, 2)), chat("c", (3, 9, 5)))
    rig.run()
    rig.check_outputs()
    jobs = [[(j.first, j.count) for j in plan.encodes] for plan in rig.plans if plan.encodes]
    assert jobs == [[(0, 3)], [(3, 1), (0, 2)], [(0, 3)], [(3, 2)]]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_aborted_picture_leaves_the_device_though_nothing_comes_after(after: int) -> None:
    """Its parts are dropped by a step that does nothing else."""
    rig = Rig(Setting(encoder_patches=18, num_pages=100))
    rig.add(chat("a", (1, 9, 5)))
    for _ in range(after):
        rig.step()
    assert rig.device.parts
    rig.abort("a")
    while rig.flights:
        rig.absorb()
    assert not rig.scheduler.idle
    rig.run()
    assert not rig.device.parts
    last = rig.plans[-1]
    assert last.drop_entries
    assert not (*last.prefills, *last.decodes, *last.encodes)
    assert rig.scheduler.schedule() is None
