"""Slots and pictures: as many places as pictures, as many image ids as tokens, or a refusal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config.finding import Refused
from vitrail.vision.placeholders import ExpandedPrompt, expand, image_identity, locate

PAD = 505
EXAMPLES = settings(max_examples=200, derandomize=True, deadline=None)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(ids with one pad a picture, slots, tokens a picture); neighbours may touch."""
    pieces = draw(st.lists(st.lists(st.integers(0, 499), max_size=4), min_size=1, max_size=6))
    counts = draw(st.lists(st.integers(1, 9), min_size=len(pieces) - 1, max_size=len(pieces) - 1))
    ids: list[int] = []
    slots: list[int] = []
    for piece in pieces[:-1]:
        ids += piece
        slots.append(len(ids))
        ids.append(PAD)
    return ids + pieces[-1], slots, counts


def check(prompt: ExpandedPrompt, ids: list[int], counts: list[int]) -> None:
    """Spans are ordered, disjoint, and exactly the pads; what lies between is the text, in
    order."""
    covered = [i for s in prompt.spans for i in range(s.offset, s.offset + s.length)]
    assert covered == [i for i, token in enumerate(prompt.token_ids) if token == PAD]
    assert [s.length for s in prompt.spans] == counts
    assert [s.image_index for s in prompt.spans] == list(range(len(counts)))
    text = [token for token in prompt.token_ids if token != PAD]
    assert text == [token for token in ids if token != PAD]
    before = [sum(token != PAD for token in prompt.token_ids[: s.offset]) for s in prompt.spans]
    slots = [i for i, token in enumerate(ids) if token == PAD]
    assert before == [slot - index for index, slot in enumerate(slots)]


@EXAMPLES
@given(prompts())
def test_a19_pads_equal_the_pictures_tokens(case: tuple[list[int], list[int], list[int]]) -> None:
    ids, slots, counts = case
    prompt = expand(ids, slots, counts, PAD)
    check(prompt, ids, counts)
    assert prompt.token_ids.count(PAD) == sum(counts)


@EXAMPLES
@given(prompts(), st.lists(st.booleans(), min_size=6, max_size=6))
def test_a19_ids_of_the_caller_may_be_expanded_or_not(
    case: tuple[list[int], list[int], list[int]], whole: list[bool]
) -> None:
    """One pad a picture, runs already expanded, or each picture as it comes (apart): one prompt."""
    ids, slots, counts = case
    want = expand(ids, slots, counts, PAD)
    assert locate(ids, counts, PAD) == want
    assert locate(want.token_ids, counts, PAD) == want
    apart = [7]
    for index, count in enumerate(counts):
        apart += [PAD] * (count if whole[index] else 1) + [7]
    one_each, slots_apart = [7] + [PAD, 7] * len(counts), list(range(1, 2 * len(counts), 2))
    assert locate(apart, counts, PAD) == expand(one_each, slots_apart, counts, PAD)


@pytest.mark.parametrize(
    ("slots", "counts", "saw"),
    [
        ([1], [4, 5], "1 slot for 2 pictures of 9 tokens"),
        ([1], [], "1 slot for 0 pictures"),
        ([1, 3], [4], "2 slots for 1 pictures of 4 tokens"),
    ],
)
def test_a19_slots_that_are_not_pictures_are_refused(
    slots: list[int], counts: list[int], saw: str
) -> None:
    with pytest.raises(Refused, match=saw) as caught:
        expand([1, PAD, 2, PAD], slots, counts, PAD, where="messages")
    assert caught.value.findings[0].where == "messages"


def test_text_cannot_claim_a_slot() -> None:
    with pytest.raises(Refused, match=r"2 image tokens \(505\) for 1 slots"):
        expand([PAD, 1, PAD], [0], [4], PAD)
    with pytest.raises(Refused, match="1 image tokens"):
        expand([1, PAD], [0], [4], PAD)


@pytest.mark.parametrize(
    ("ids", "counts", "saw"),
    [
        ([1, 2], [4], "0 runs for 1 pictures"),
        ([PAD, 1], [], "1 image token for 0 pictures"),
        ([1, PAD, PAD, PAD, 2], [4], "3 image tokens in a row at position 1 for picture 0, .* 4"),
        ([1] + [PAD] * 5, [4], "5 image tokens for 1 pictures of 4 tokens"),
        ([PAD] * 4 + [1] + [PAD] * 4, [4], "8 image tokens for 1 pictures"),
        ([PAD] * 4 + [1] + [PAD] * 2, [4, 3], "2 image tokens in a row at position 5"),
        ([PAD] * 3 + [1] + [PAD] * 3, [3, 3, 3], "2 runs for 3 pictures of 9 tokens"),
    ],
)
def test_a19_runs_that_fit_no_picture_are_refused(
    ids: list[int], counts: list[int], saw: str
) -> None:
    with pytest.raises(Refused, match=saw) as caught:
        locate(ids, counts, PAD)
    assert caught.value.findings[0].where == "prompt_token_ids"


def test_a19_neighbours_may_touch() -> None:
    ids = [1] + [PAD] * 7 + [2]
    spans = locate(ids, [3, 4], PAD).spans
    assert [(s.offset, s.length) for s in spans] == [(1, 3), (4, 4)]
    assert locate([PAD] * 4, [3, 9], PAD).token_ids == [PAD] * 12


def test_identity_covers_content_processor_and_revision() -> None:
    parts = (b"a" * 32, b"b" * 32, "main")
    seen = {
        image_identity(*parts),
        image_identity(b"c" * 32, *parts[1:]),
        image_identity(parts[0], b"c" * 32, parts[2]),
        image_identity(*parts[:2], "main2"),
        image_identity(parts[1], parts[0], parts[2]),
    }
    assert len(seen) == 5
    assert {len(s) for s in seen} == {32}
    assert image_identity(*parts) in seen
