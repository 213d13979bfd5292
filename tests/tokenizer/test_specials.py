import re

from hostile_text import LITERALS, hostile
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.tokenizer.specials import Specials

SPECIALS = Specials({literal: i for i, literal in enumerate(LITERALS)})
MARK = "\ufdd7"
unmarked = hostile.filter(lambda text: MARK not in text)


def _occurrences(literals: tuple[str, ...], text: str) -> list[tuple[int, int]]:
    """Every place of every literal, overlapping ones too."""
    return [
        (m.start(), m.start() + len(s))
        for s in literals
        for m in re.finditer(f"(?={re.escape(s)})", text)
    ]


@given(text=unmarked)
def test_removing_the_marks_gives_the_text_back(text: str):
    assert SPECIALS.guard(text, MARK).replace(MARK, "") == text


@st.composite
def torn_literals(draw: st.DrawFn) -> tuple[list[tuple[bool, str]], bool]:
    """A literal torn into pieces, each the client's (True) or the template's, between other text;
    and whether the template trims: then the client's pieces have blanks around them."""
    literal = draw(st.sampled_from(LITERALS))
    cuts = draw(st.sets(st.integers(1, len(literal) - 1), min_size=1, max_size=4))
    edges = [0, *sorted(cuts), len(literal)]
    pieces = [literal[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    owners = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    owners[draw(st.integers(0, len(pieces) - 1))] = True
    pieces[0], pieces[-1] = draw(unmarked) + pieces[0], pieces[-1] + draw(unmarked)
    is_trimmed = draw(st.booleans())
    blanks = st.sampled_from(("", " ", "\n\t")) if is_trimmed else st.just("")
    pieces = [
        draw(blanks) + text + draw(blanks) if mine else text
        for mine, text in zip(owners, pieces, strict=True)
    ]
    return list(zip(owners, pieces, strict=True)), is_trimmed


@settings(max_examples=400)
@given(torn=torn_literals())
def test_no_special_token_touches_guarded_text(torn: tuple[list[tuple[bool, str]], bool]):
    """Neither by itself nor with pieces of literals, other texts and trimmed ends around it."""
    pieces, is_trimmed = torn
    whole, spans = "", []
    for is_clients, text in pieces:
        if is_clients:
            text = SPECIALS.guard(text, MARK)
            text = text.strip() if is_trimmed else text
            spans.append((len(whole), len(whole) + len(text)))
        whole += text
    touched = [
        whole[a:b]
        for a, b in _occurrences(LITERALS, whole)
        if any(first < b and a < last for first, last in spans)
    ]
    assert touched == []


def test_text_without_pieces_of_literals_is_left_alone():
    for text in ("", "x", " hello\n", "</think> a < b | c > d.", "1 [2] 3", "  "):
        assert SPECIALS.guard(text, MARK) == text


def test_overlapping_occurrences_are_all_broken():
    specials = Specials({"abab": 0, "ba": 1})
    assert specials.split(specials.guard("ababab", MARK)) == [specials.guard("ababab", MARK)]


@given(text=unmarked, literals=st.sets(st.text("ab<|", min_size=2, max_size=5)))
def test_split_is_leftmost_then_longest(text: str, literals: set[str]):
    text += "a<|ab<a|bb"
    literals = {s for s in literals if s.strip()}
    pieces = Specials({s: i for i, s in enumerate(sorted(literals))}).split(text)
    longest_first = sorted(literals, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    assert pieces == re.split(f"({pattern})", text)
    assert "".join(pieces) == text
