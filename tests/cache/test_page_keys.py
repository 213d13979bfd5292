"""Two pages have one key exactly if tokens, images and salt agree."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.cache.page_keys import PageKeys

A, B = bytes(range(32)), bytes(range(1, 33))
IMAGE_ID = 7
few = settings(max_examples=150, deadline=None, derandomize=True, database=None)

Spans = list[tuple[int, int, bytes]]


def keyed(ids: list[int], spans: Spans, page_size: int, salt: bytes = b"") -> PageKeys:
    return PageKeys(array("i", ids), spans, page_size, salt)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], Spans]:
    """Pieces of text (ids 0, 1) and images (1 to 7 tokens, one of two identities)."""
    ids: list[int] = []
    spans: Spans = []
    for image in draw(st.lists(st.booleans(), min_size=1, max_size=5)):
        length = draw(st.integers(1, 7))
        if image:
            spans.append((len(ids), length, draw(st.sampled_from([A, B]))))
            ids += [IMAGE_ID] * length
        else:
            ids += draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    return ids, spans


def meaning(ids: list[int], spans: Spans, page_size: int, page: int) -> tuple[object, ...]:
    """What a page holds, position by position: the id, and which row of which whole image."""
    where = {
        offset + i: (identity, i, length)
        for offset, length, identity in spans
        for i in range(length)
    }
    here = range(page * page_size, (page + 1) * page_size)
    return tuple((ids[i], where.get(i)) for i in here)


@few
@given(prompts(), prompts(), st.sampled_from([1, 3, 4, 16]), st.binary(max_size=3))
def test_keys_are_equal_exactly_if_the_pages_are(
    one: tuple[list[int], Spans], two: tuple[list[int], Spans], page_size: int, salt: bytes
) -> None:
    keys_one = keyed(*one, page_size, salt).keys(len(one[0]))
    keys_two = keyed(*two, page_size, salt).keys(len(two[0]))
    assert len(keys_one) == len(one[0]) // page_size
    for i, key in enumerate(keys_one[1:], start=1):
        for j, other in enumerate(keys_two[1:], start=1):
            same = meaning(*one, page_size, i) == meaning(*two, page_size, j)
            assert (key == other) == same
    if keys_one and keys_two:
        same = meaning(*one, page_size, 0) == meaning(*two, page_size, 0)
        assert (keys_one[0] == keys_two[0]) == same


@few
@given(prompts(), st.sampled_from([1, 3, 5]), st.data())
def test_grown_equals_whole(
    prompt: tuple[list[int], Spans], page_size: int, data: st.DataObject
) -> None:
    ids, spans = prompt
    growing = array("i")
    keys = PageKeys(growing, spans, page_size, b"s")
    while len(growing) < len(ids):
        growing.extend(ids[len(growing) :][: data.draw(st.integers(1, 9))])
        keys.keys(data.draw(st.integers(0, len(growing))))
    whole = keyed(ids, spans, page_size, b"s").keys(len(ids))
    assert keys.keys(len(ids)) == whole
    assert keys.keys(len(ids) - 1) == whole[: (len(ids) - 1) // page_size]


def test_c01_same_text_other_picture() -> None:
    ids = [1, 2, *[IMAGE_ID] * 5, 3, 4, 5]
    one = keyed(ids, [(2, 5, A)], 3).keys(len(ids))
    two = keyed(ids, [(2, 5, B)], 3).keys(len(ids))
    assert [a == b for a, b in zip(one, two, strict=True)] == [False, False, False]


def test_c02_same_tokens_other_boundaries() -> None:
    """One run of image ids: a picture of 3 then of 5, of 5 then of 3, or of 8; and shifted rows."""
    ids = [IMAGE_ID] * 8
    cut = [
        [(0, 3, A), (3, 5, A)],
        [(0, 5, A), (5, 3, A)],
        [(0, 8, A)],
        [(0, 3, A), (3, 5, B)],
        [(0, 4, A), (4, 4, A)],
    ]
    firsts = {keyed(ids, spans, 4).keys(4)[0] for spans in cut}
    assert len(firsts) == 5
    ids = [1, *[IMAGE_ID] * 7, 1]
    assert keyed(ids, [(1, 7, A)], 3).keys(9)[1] != keyed(ids, [(2, 6, A)], 3).keys(9)[1]


def test_c05_an_identity_is_never_a_token() -> None:
    """Ids are left alone, and no text makes the key of a page with a picture."""
    ids = array("i", [IMAGE_ID] * 4)
    with_picture = PageKeys(ids, [(0, 4, A)], 4).keys(4)[0]
    assert ids.tolist() == [IMAGE_ID] * 4
    as_text = list(array("i", with_picture))
    assert keyed(as_text, [], len(as_text)).keys(len(as_text))[0] != with_picture
    assert keyed(as_text, [], 4).keys(4)[0] != with_picture


def test_salts_separate_and_cannot_pose_as_pictures() -> None:
    ids = [3, 1, 4, 1]
    plain = keyed(ids, [], 4).keys(4)[0]
    keys = {keyed(ids, [], 4, salt).keys(4)[0] for salt in (b"", b"\0", b"\0\0", b"tenant")}
    assert len(keys) == 4
    record = keyed(ids, [(1, 2, A)], 4).keys(4)[0][len(plain) :]
    assert keyed(ids, [], 4, record).keys(4)[0] != keyed(ids, [(1, 2, A)], 4).keys(4)[0]


@pytest.mark.parametrize(
    "spans", [[(0, 3, A), (2, 3, B)], [(4, 2, A), (0, 2, B)], [(0, 0, A)], [(0, 2, b"short")]]
)
def test_spans_that_cannot_be(spans: Spans) -> None:
    with pytest.raises(AssertionError):
        keyed([IMAGE_ID] * 8, spans, 4)


def test_no_key_beyond_the_tokens() -> None:
    with pytest.raises(AssertionError, match="5 of 4 tokens"):
        keyed([1, 2, 3, 4], [], 2).keys(5)
