import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.tokenizer.detokenize import Detokenizer, StopChecker
from vitrail.tokenizer.tokenizer import Tokenizer


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(423)}
    return [by_bytes[bytes([b])] for b in data]


def test_b08_characters_byte_by_byte(tokenizer: Tokenizer):
    text = "ďábelské 👩‍🚀 漢字"
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([i]) for i in _byte_ids(tokenizer, text.encode())]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == text
    assert [d for d in deltas if d] == list(text)
    for delta in deltas:
        assert "\ufffd" not in delta
        delta.encode()


@given(data=st.data())
def test_joined_deltas_equal_the_whole_decode(kimi: Tokenizer, data: st.DataObject):
    """Ids of any kind: half characters, invalid bytes, specials between bytes of one character."""
    ids = data.draw(st.lists(st.integers(0, kimi.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(kimi, skip_special=skip)
    text, i = "", 0
    while i < len(ids):
        step = data.draw(st.integers(1, 4))
        text += detokenizer.push(ids[i : i + step])
        i += step
        assert kimi.decode(ids, skip_special=skip).startswith(text)
    assert text + detokenizer.finish() == kimi.decode(ids, skip_special=skip)


def test_a_special_between_the_bytes_of_a_character_does_not_break_it(kimi: Tokenizer):
    a, b, c = _byte_ids(kimi, "漢".encode())
    detokenizer = Detokenizer(kimi)
    assert [detokenizer.push([i]) for i in (a, b, 425, c)] == ["", "", "", "漢"]


def test_invalid_bytes_are_replaced_as_python_replaces_them(kimi: Tokenizer):
    raw = b"a\xff\xe6\xbcb\xf0\x9f\x91"
    detokenizer = Detokenizer(kimi)
    text = "".join(detokenizer.push([i]) for i in _byte_ids(kimi, raw)) + detokenizer.finish()
    assert text == raw.decode(errors="replace") == "a\ufffd\ufffdb\ufffd"
    assert text == codecs.decode(raw, "utf-8", "replace")


def test_b11_nothing_of_the_stop_string_is_emitted():
    checker = StopChecker(["DEFGHIJ"])
    results = [checker.push(delta) for delta in ("ABC", "DEF", "G", "HI", "J and more")]
    assert [r.text for r in results] == ["ABC", "", "", "", ""]
    assert results[-1] == ("", 3, "DEFGHIJ")
    assert checker.finish() == ""


def test_what_did_not_become_a_stop_string_comes_out():
    checker = StopChecker(["ENDING", "DOT"])
    assert checker.push("the EN").text == "the "
    assert checker.push("DI").text == ""
    assert checker.push("DO").text == "ENDI"
    assert checker.push("G. E").text == "DOG. "
    assert checker.finish() == "E"


def _cut(text: str, stops: list[str], include_stop: bool) -> tuple[str, int | None, str | None]:
    """The definition: the first end of any stop string, the longest that ends there."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            at = end if include_stop else end - len(stop)
            return text[:at], at, stop
    return text, None, None


words = st.text("ab", min_size=1, max_size=5)


@given(
    deltas=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(words, max_size=4),
    include_stop=st.booleans(),
)
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(
    deltas: list[str], stops: list[str], include_stop: bool
):
    checker, streamed, at, stop = StopChecker(stops, include_stop), "", None, None
    expected = _cut("".join(deltas), stops, include_stop)
    for delta in deltas:
        text, at, stop = checker.push(delta)
        streamed += text
        assert expected[0].startswith(streamed)
        if at is not None:
            break
    assert (streamed + checker.finish(), at, stop) == expected


@given(deltas=st.lists(st.text("ab", max_size=3), max_size=9), stops=st.lists(words, min_size=1))
def test_only_what_could_become_a_stop_string_is_held_back(deltas: list[str], stops: list[str]):
    checker, emitted, seen = StopChecker(stops), "", ""
    for delta in deltas:
        seen += delta
        text, at, _ = checker.push(delta)
        emitted += text
        if at is not None:
            return
        held = seen[len(emitted) :]
        prefixes = {s[:n] for s in stops for n in range(len(s))}
        assert held == max((p for p in prefixes if seen.endswith(p)), key=len)


def test_pushing_after_the_stop_is_our_own_mistake():
    checker = StopChecker(["."])
    checker.push("a.")
    with pytest.raises(AssertionError):
        checker.push("b")
