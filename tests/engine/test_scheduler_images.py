"""Pictures in the scheduler: cut by chunks, encoded once and within budgets, shared, cached, given
back, failing. On a device made of paper (`scheduler_rig`)."""

from dataclasses import replace

import pytest

from tests.engine.scheduler_rig import Rig, Setting, chat, run
from vitrail.engine.request import FinishReason


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17, 18, 19, 40])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_c07_a_picture_may_be_cut_by_chunks_anywhere(chunk: int, page_size: int):
    setting = Setting(max_step_tokens=chunk, page_size=page_size, encoder_patches=40)
    rig = run(setting, chat("r", 1, (1, 17), 1, (2, 3)))
    covered = [
        (s.entry, s.entry_start + i) for p in rig.plans for s in p.slices for i in range(s.length)
    ]
    assert len(set(covered)) == len(covered) == 17 + 3
    assert sorted(rig.device.encoded.values()) == [1, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_c10_each_picture_is_encoded_once_within_the_budget(depth: int):
    pictures = [(i, 10) for i in range(10)]
    setting = Setting(
        num_pages=200,
        max_model_len=200,
        max_step_tokens=33,
        encoder_patches=50,
        encoder_tokens=35,
        depth=depth,
    )
    rig = run(setting, chat("r", 3, *pictures, 2), chat("same", 4, *pictures, 1))
    assert rig.device.max_patches == 40
    assert rig.device.max_entry_tokens <= 35
    assert len(rig.device.encoded) == 10
    alone = run(setting, chat("r", 3, *pictures, 2))
    assert set(alone.device.encoded.values()) == {1}
    first = [p.index for p in alone.plans if p.encodes]
    assert len(first) >= 5, "pictures are encoded when their chunk comes, not before"


def test_requests_with_one_picture_share_one_encoding():
    setting = Setting(max_step_tokens=200, num_pages=100)
    rig = run(setting, *(chat(f"r{i}", 1 + i, (5, 8), 2) for i in range(5)))
    assert list(rig.device.encoded.values()) == [1]


def test_c01_the_same_text_with_another_picture_shares_no_page():
    setting = Setting(page_size=3, num_pages=100)
    rig = run(setting, chat("a", 6, (1, 8), 4))
    rig.add(chat("b", 6, (2, 8), 4), chat("c", 6, (1, 8), 4))
    rig.run()
    rig.check_outputs()
    assert rig.outputs["b"][0].cached_tokens == 6, "the text before the picture"
    assert rig.outputs["c"][0].cached_tokens == 15
    assert rig.tokens("b") != rig.tokens("c") == rig.tokens("a")


def test_a_cached_picture_is_not_encoded_and_a_cut_one_is_encoded_whole():
    setting = Setting(page_size=4, num_pages=60, encoder_tokens=0, max_step_tokens=64)
    rig = run(setting, chat("a", 2, (1, 9), 6))  # pages end at 4, 8, 12 and 16
    rig.add(chat("b", 2, (1, 9), 6))
    rig.run()
    assert rig.outputs["b"][0].cached_tokens == 16
    assert sum(rig.device.encoded.values()) == 1, "all of it lay in the cached prefix"
    rig.add(chat("c", 2, (1, 9)))  # 11 tokens: the hit ends at 8, inside the picture
    rig.run()
    rig.check_outputs()
    assert rig.outputs["c"][0].cached_tokens == 8
    assert sum(rig.device.encoded.values()) == 2
    (cut,) = [s for p in rig.plans for s in p.slices if s.entry_start]
    assert (cut.entry_start, cut.length) == (6, 3)


def test_a_picture_that_ends_with_the_cached_prefix_is_not_touched():
    rig = run(Setting(page_size=4), chat("a", 3, (1, 5), 6))
    rig.add(chat("b", 3, (1, 5), 2))
    rig.run()
    rig.check_outputs()
    assert rig.outputs["b"][0].cached_tokens == 8
    assert list(rig.device.encoded.values()) == [1]
    assert sum(len(p.slices) for p in rig.plans) == 1


def test_a_request_without_tokens_left_in_the_step_takes_no_picture():
    """`b` was admitted with nothing to compute: its cached prefix ends inside a picture that has to
    wait for those of `long`, which then needs all the tokens of a step."""
    rig = Rig(Setting(page_size=1, max_step_tokens=9, encoder_tokens=0))
    rig.add(chat("a", 6, (1, 5), max_tokens=1))
    rig.run()
    rig.add(chat("long", (8, 1), (9, 8), 16), chat("b", 6, (1, 5)))
    rig.run()  # the device asserts that what is encoded is read
    rig.check_outputs()
    assert rig.outputs["b"][0].cached_tokens == 10
    assert [r.length for r in rig.plans[5].prefills] == [9]
    assert rig.plans[5].encodes == ()


def test_c16_a_preempted_picture_request_resumes():
    """Preempted at any moment: in the middle of its picture, or while it answers."""
    setting = Setting(num_pages=11, page_size=4, max_model_len=44, max_step_tokens=6)
    for prefix_cache in (True, False):
        world = replace(setting, prefix_cache=prefix_cache)
        preemptions = 0
        for before in range(1, 12, 2):
            rig = Rig(world)
            rig.add(chat("old", 5, max_tokens=36, seed=3))
            for _ in range(before):
                rig.step()
            rig.add(chat("young", 3, (1, 15), 2, max_tokens=9, seed=4))
            rig.run()
            rig.check_outputs()
            assert rig.reason("young") is FinishReason.LENGTH
            assert sum(rig.device.encoded.values()) == 1, "the entry was still there"
            preemptions += rig.scheduler.preemptions
        assert preemptions >= 6


def test_a_request_preempted_inside_a_picture_gives_it_back():
    rig = Rig(Setting(num_pages=9, page_size=4, max_model_len=36, max_step_tokens=5))
    rig.add(chat("old", 3, max_tokens=33, seed=1))
    for _ in range(6):
        rig.step()
    rig.add(chat("young", 2, (1, 16), 2, max_tokens=3, seed=2))
    given_back = 0
    while not rig.scheduler.idle:
        held, preempted = rig.encoder.referenced_bytes > 0, rig.scheduler.preemptions
        rig.step()
        if held and rig.scheduler.preemptions > preempted:
            given_back += 1
            assert rig.encoder.referenced_bytes == 0
    assert given_back > 0
    rig.check_outputs()


def test_31857_what_waits_holds_no_picture_so_nobody_blocks_for_ever():
    """Each of these needs nearly the whole encoder cache; chunks cut every picture."""
    setting = Setting(num_pages=60, encoder_tokens=12, max_step_tokens=7, max_running=6)
    requests = [chat(f"r{i}", 1, (i, 9), 1, (i + 10, 11), 1, seed=i) for i in range(6)]
    rig = run(setting, *requests)
    assert rig.device.max_entry_tokens <= 12
    assert all(rig.reason(r.id) is FinishReason.LENGTH for r in requests)
    small_pool = run(replace(setting, num_pages=18, max_model_len=54), *requests)
    assert all(small_pool.reason(r.id) is FinishReason.LENGTH for r in requests)


def test_small_young_pictures_do_not_starve_a_large_old_one():
    """Every step ends inside a small picture, which stays in hand; two of them fit, the large one
    needs all the room."""
    rig = Rig(Setting(num_pages=400, encoder_tokens=20, max_step_tokens=10))
    rig.add(chat("text", 5, max_tokens=1), chat("small", 1, (9, 9), max_tokens=1))
    rig.step()
    rig.add(chat("large", 1, (1, 20), max_tokens=1))
    for i in range(60):
        rig.add(chat(f"r{i}", 1, (10 + i, 9), max_tokens=1))
        rig.step()
        if rig.reason("large"):
            break
    assert i < 6, "the large picture waited for younger ones"
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("encoder_tokens", [0, 5])
def test_a_picture_larger_than_the_encoder_cache_is_served(encoder_tokens: int):
    setting = Setting(encoder_tokens=encoder_tokens, max_step_tokens=4)
    rig = run(setting, *(chat(f"r{i}", 2, (i, 9), (i + 5, 3), 1) for i in range(4)))
    assert set(rig.device.encoded.values()) == {1}
    rig.add(chat("after", 2))  # the next plan carries the last drop
    rig.run()
    assert len(rig.device.entries) <= 1


def test_a_step_that_raises_takes_its_pictures_with_it_but_not_those_who_share_them():
    rig = Rig(Setting(max_step_tokens=12, encoder_tokens=30))
    rig.add(chat("a", (1, 8), 4), chat("b", 1, (1, 8), 3))
    rig.launch()  # all of a, with the picture encoded
    rig.launch()  # all of b beside a's next token, from the entry of the first step
    assert [len(p.encodes) for p in rig.plans] == [1, 0]
    assert rig.plans[1].slices
    (job,) = rig.plans[0].encodes
    rig.fail()
    assert rig.reason("a") is FinishReason.ERROR
    assert rig.reason("b") is None
    rig.run()
    rig.check_outputs()
    assert rig.reason("b") is FinishReason.LENGTH
    assert job.entry in rig.plans[2].drop_entries
    assert list(rig.device.encoded.values()) == [2]


def test_drops_of_a_step_that_raised_are_said_again():
    rig = Rig(Setting(encoder_tokens=8, max_step_tokens=64))
    rig.add(chat("a", (1, 8), 1, max_tokens=1))
    rig.run()
    rig.add(chat("b", (2, 8), 1, max_tokens=1))
    rig.launch()
    assert rig.plans[-1].drop_entries == (0,)
    rig.fail()
    rig.add(chat("c", 3))
    rig.launch()
    assert set(rig.plans[-1].drop_entries) == {0, 1}
    rig.run()


@pytest.mark.parametrize("chunk", [4, 64])
def test_a_picture_that_cannot_be_encoded_fails_who_needs_it(chunk: int):
    rig = Rig(Setting(max_step_tokens=chunk, num_pages=100))
    needy = [chat("a", 1, (1, 9), 2), chat("b", 3, (1, 9), 2)]
    rig.device.bad_images = {needy[0].images[0].identity}
    rig.add(*needy, chat("c", 1, (2, 9), 2), chat("d", 5))
    rig.run()
    rig.check_outputs()
    assert [rig.reason(n) for n in "ab"] == [FinishReason.ERROR] * 2
    assert rig.outputs["a"][-1].error == "an image could not be encoded: bad pixels"
    assert [rig.reason(n) for n in "cd"] == [FinishReason.LENGTH] * 2
    rig.device.bad_images = set()
    rig.add(chat("e", 1, (1, 9), 2))
    rig.run()
    rig.check_outputs()
    assert rig.reason("e") is FinishReason.LENGTH


def beside(lag: int, decoding: int, **more: int) -> Rig:
    """`decoding` requests that decode, beside which 20 patches are encoded at once."""
    setting = Setting(patches_beside=20, lag=lag, num_pages=400, max_step_tokens=64, **more)
    rig = Rig(setting)
    rig.add(*(chat(f"d{i}", 3, max_tokens=50, seed=i) for i in range(decoding)))
    for _ in range(3):
        rig.step()
    return rig


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_decodes_do_not_wait_for_a_picture_that_is_encoded_beside_them(lag: int, depth: int):
    """The picture is read by the first step planned after it is known to be done, none before."""
    rig = beside(lag, 4, depth=depth)
    began = len(rig.plans)
    rig.add(chat("p", 2, (1, 9), 1))
    rig.run()
    rig.check_outputs()
    (encoded,) = [p.index for p in rig.plans if p.encodes]
    (read,) = [p.index for p in rig.plans if p.slices]
    assert encoded == began
    assert read == encoded + lag + depth
    assert all(len(p.decodes) == 4 for p in rig.plans[began : read + 1])
    assert [r.length for r in rig.plans[began].prefills] == [2], "the text before it goes ahead"


def test_one_batch_at_a_time_is_encoded_beside_decodes():
    """20 patches are a picture of 9 tokens; two of 5; one of 12 only by itself. Those of one
    request are encoded together before the first is read."""
    rig = beside(3, 8, max_running=20)
    rig.add(chat("p", (1, 5), (2, 5), (3, 9), (4, 12), 1))
    rig.run()
    rig.check_outputs()
    jobs = [(p.index, [j.num_tokens for j in p.encodes]) for p in rig.plans if p.encodes]
    assert [tokens for _, tokens in jobs] == [[5, 5], [9], [12]]
    steps = [index for index, _ in jobs]
    assert all(b - a > 3 for a, b in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize(("decoding", "waits"), [(0, False), (3, False), (4, True)])
def test_a_picture_is_part_of_its_step_where_few_decode(decoding: int, waits: bool):
    rig = beside(4, decoding)
    rig.add(chat("p", (1, 9), 1))
    rig.step()
    assert bool(rig.plans[-1].slices) is not waits
    rig.run()
    rig.check_outputs()


def test_pictures_are_part_of_their_step_where_many_wait():
    """The first of three are read at once; once more than a quarter of those that decode wait no
    longer, the others go beside them."""
    rig = beside(2, 8, max_running=20, encoder_patches=18)
    rig.add(*(chat(f"p{i}", (i, 9), 1, max_tokens=50) for i in range(3)))
    rig.run()
    rig.check_outputs()
    encoded = [(p, {j.entry for j in p.encodes}) for p in rig.plans if p.encodes]
    at_once = [any(s.entry in entries for s in p.slices) for p, entries in encoded]
    assert at_once == [True, False, False]


@pytest.mark.parametrize("after", range(1, 7))
@pytest.mark.parametrize("what", ["abort", "fail"])
def test_who_leaves_while_a_picture_is_encoded_beside_leaves_nothing(after: int, what: str):
    rig = beside(3, 4, encoder_tokens=12)
    rig.add(chat("p", (1, 9), 1), chat("q", (1, 9), 2))
    for _ in range(after):
        rig.launch() if len(rig.flights) < 2 else rig.absorb()
    if what == "abort":
        rig.abort("p")
    elif rig.flights:
        rig.fail()
    rig.add(chat("r", (2, 9), 1))
    rig.run()
    rig.check_outputs()
    assert rig.reason("r") is FinishReason.LENGTH
