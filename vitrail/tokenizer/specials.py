"""Special tokens as literals: where they occur in text, and how a client's text is kept from
spelling one. Knows no vocabulary beyond them."""

import re
from collections.abc import Iterable, Mapping

from vitrail.config.finding import Refused


class Specials:
    """The special tokens of one tokenizer. Matching is leftmost, then longest.

    Raises `Refused` for a literal that is a single character or blank: ordinary text could not be
    told from it.
    """

    def __init__(self, ids: Mapping[str, int]):
        for literal, token_id in ids.items():
            if len(literal) < 2 or not literal.strip():
                raise Refused.because(
                    where=f"special token {token_id}",
                    saw=f"the literal {literal!r}",
                    rule="a special literal has two characters or more and is not blank",
                    change='mark it "special": false in the checkpoint\'s added tokens',
                    code="bad_tokenizer",
                )
        self.ids: dict[str, int] = dict(ids)
        self.by_id: dict[int, str] = {token_id: literal for literal, token_id in ids.items()}
        pattern = _any_of(sorted(ids))
        self._literal = re.compile(f"({pattern})")
        self._start = re.compile(f"(?={pattern}).", re.DOTALL)
        self._heads = {s[:n] for s in ids for n in range(1, len(s))}
        self._tails = {s[n:] for s in ids for n in range(1, len(s))}
        self._longest = max(map(len, ids), default=0)

    def split(self, text: str) -> list[str]:
        """`text` cut at its special literals: text, literal, text, ..., text. Every odd item is a
        literal; the texts may be empty."""
        return self._literal.split(text)

    def guard(self, text: str, mark: str) -> str:
        """`text` with `mark`, a character that occurs in no literal, wherever `text` spells a
        special token, alone or together with whatever a template puts around it.

        An occurrence gets the mark after its first character. An end of the text that could be a
        piece of a literal gets it outside that piece, and once more inside surrounding whitespace,
        so that a template's `trim` cannot join the pieces. Removing the marks gives `text` back.
        """
        if not text:
            return text
        begin = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        places = {match.start() + 1 for match in self._start.finditer(text)}
        places.update(i for i in {0, begin} if self._continues(text, i))
        places.update(i for i in {end, len(text)} if self._is_begun(text, i))
        for first, last in {(0, len(text)), (begin, end)}:
            if first < last and self._is_inside(text[first:last]):
                places.update((first, last))
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[a:b] for a, b in zip(cuts, cuts[1:], strict=False))

    def _continues(self, text: str, at: int) -> bool:
        """Whether a proper suffix of a literal starts at `at`."""
        return any(text[at : at + n] in self._tails for n in range(1, self._longest))

    def _is_begun(self, text: str, end: int) -> bool:
        """Whether a proper prefix of a literal stops at `end`."""
        return any(text[max(end - n, 0) : end] in self._heads for n in range(1, self._longest))

    def _is_inside(self, text: str) -> bool:
        return len(text) < self._longest and any(text in literal for literal in self.ids)


def _any_of(literals: Iterable[str]) -> str:
    """A regular expression for the longest of the sorted `literals`: a trie, so that hundreds of
    `<|reserved_...|>` cost one walk and not one try each. Without literals it matches nothing."""
    groups: dict[str, list[str]] = {}
    for literal in literals:
        groups.setdefault(literal[:1], []).append(literal)
    is_optional = groups.pop("", None) is not None
    if not groups:
        return "" if is_optional else "(?!)"
    options: list[str] = []
    for members in groups.values():
        shared = _shared_prefix(members[0], members[-1])
        rest = _any_of(m[len(shared) :] for m in members)
        options.append(re.escape(shared) + rest)
    if len(options) == 1 and not is_optional:
        return options[0]
    return f"(?:{'|'.join(options)}){'?' if is_optional else ''}"


def _shared_prefix(first: str, last: str) -> str:
    """What the smallest and the largest of sorted strings share, all between them share too."""
    length = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return first[:length]
