"""Token ids to text as they come, and stop strings cut out of text as it comes. Owns what has been
emitted of one request. Knows nothing of sampling, finish reasons or transport."""

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from vitrail.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """The text of one request's tokens, without ever emitting half a character.

    Law: the joined results of `push` and `finish` equal `tokenizer.decode` of all ids. Constant
    time a token: bytes go through an incremental UTF-8 decoder, nothing is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._table = tokenizer.bytes_table(skip_special)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; bytes of an unfinished character wait."""
        table = self._table
        return self._decode(b"".join([table[i] for i in ids if 0 <= i < len(table)]))

    def finish(self) -> str:
        """What is left: U+FFFD where a character stayed unfinished. Call once, last."""
        return self._decode(b"", True)


class Stopped(NamedTuple):
    """What `StopChecker.push` found. `text`: safe to emit now. `stopped_at`: characters of the
    whole text that are kept, once a stop string was met; `stop`: that string."""

    text: str
    stopped_at: int | None
    stop: str | None


class StopChecker:
    """Emits a request's text up to its first stop string.

    The first stop string is the one that is *complete* first; of several that end at the same
    character, the longest. So the result depends on the text alone, not on how it was cut into
    deltas, and generation can end at once. What could still become a stop string is held back.
    Cost is linear in the text, whatever the stop strings (Aho-Corasick); none of them may be
    empty.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False):
        assert all(stop_strings), "an empty stop string is refused at the edge"
        self._next, self._fail, self._depth, self._stop = _automaton(tuple(stop_strings))
        self._first = frozenset(s[0] for s in stop_strings)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._seen = 0
        self._is_stopped = False

    def push(self, text: str) -> Stopped:
        """Add a delta. Nothing may be pushed after a stop string was met."""
        assert not self._is_stopped, "text after the stop string"
        if self._state == 0 and self._first.isdisjoint(text):
            self._seen += len(text)
            return Stopped(text, None, None)
        state = self._state
        for i, char in enumerate(text, start=1):
            while state and char not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            stop = self._stop[state]
            if stop is not None:
                return self._cut(text[:i], stop)
        whole = self._held + text
        keep = len(whole) - self._depth[state]
        self._state, self._held = state, whole[keep:]
        self._seen += len(text)
        return Stopped(whole[:keep], None, None)

    def finish(self) -> str:
        """What was held back, once no more text comes. Call once, last."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, stop: str) -> Stopped:
        dropped = 0 if self._include_stop else len(stop)
        whole = self._held + text
        self._held, self._is_stopped = "", True
        self._seen += len(text)
        return Stopped(whole[: len(whole) - dropped], self._seen - dropped, stop)


@lru_cache(maxsize=64)  # read only once built; the choices of a request share it
def _automaton(
    words: tuple[str, ...],
) -> tuple[list[dict[str, int]], list[int], list[int], list[str | None]]:
    """Aho-Corasick over `words`. Of each state: the next state by character; the state of its
    longest proper suffix; its depth, which is the length of text that may still become a word; the
    longest word that ends there."""
    following: list[dict[str, int]] = [{}]
    depth = [0]
    ends: list[str | None] = [None]
    for word in words:
        state = 0
        for char in word:
            if char not in following[state]:
                following[state][char] = len(following)
                following.append({})
                depth.append(depth[state] + 1)
                ends.append(None)
            state = following[state][char]
        ends[state] = word
    fail = [0] * len(following)
    queue = list(following[0].values())
    for state in queue:
        for char, child in following[state].items():
            back = fail[state]
            while back and char not in following[back]:
                back = fail[back]
            fail[child] = following[back].get(char, 0)
            queue.append(child)
        ends[state] = ends[state] or ends[fail[state]]
    return following, fail, depth, ends
