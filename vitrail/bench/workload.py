"""What is asked: synthetic requests or the lines of a JSONL file, and when each is due. Pure but
for reading the file: a request is a function of (seed, run, index), so two servers that are
compared get the same ones, and no run repeats those of another (whatever should miss a cache does).
Knows no protocol. No torch."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from vitrail.config.finding import Finding, Refused

WORDS = (
    *("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are"),
    *("with", "as", "his", "they", "be", "at", "one", "have", "this", "from", "or", "had", "by"),
    *("word", "but", "what", "some", "we", "can", "out", "other", "were", "all", "there", "when"),
    *("up", "use", "your", "how", "said", "an", "each", "she", "which", "do", "their", "time"),
)
SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
MAX_LINES = 1_000_000
_SHARED = 0x5AED  # in place of a run's number: what all runs share


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A picture of fresh uniform noise, as nothing compresses and no cache knows. `seed`: of
    numpy's generator."""

    height: int
    width: int
    seed: tuple[int, ...]

    def pixels(self) -> np.ndarray:
        """uint8 [height, width, 3]."""
        draw = np.random.default_rng(self.seed)
        return draw.integers(0, 256, (self.height, self.width, 3), dtype=np.uint8)

    def png(self) -> bytes:
        """A PNG file, stored: to compress noise costs time and gains nothing."""
        out = io.BytesIO()
        Image.fromarray(self.pixels()).save(out, "png", compress_level=0)
        return out.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request. A synthetic one is `shared_ids`, which all requests begin with, then pictures
    (the shared ones first), then `ids` of its own; a line of a file has `prompt` or `messages`
    instead, sent as they are, pictures being put before the last message's text."""

    max_tokens: int
    shared_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    pictures: tuple[Noise, ...] = ()
    prompt: str | list[int] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def conversation(item: Item, pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """A chat of the same shape everywhere. `pictures`: the item's as the receiver takes them, put
    before the text of the last turn."""
    if item.messages is None:
        text = [{"type": "text", "text": words(item.ids)}]
        turn = {"role": "user", "content": [*pictures, *text]}
        before = [{"role": "system", "content": words(item.shared_ids)}]
        return [*before, turn] if item.shared_ids else [turn]
    *before, last = [dict(m) for m in item.messages]
    if pictures:
        said = last["content"]
        text = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
        last["content"] = [*pictures, *text]
    return [*before, last]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Lengths in tokens, sizes in pixels (height, width), ids in [low, high). `num_pictures` are
    fresh in every request; `num_shared_pictures` and `shared_len` ids are those of every request of
    every run, so that caches may find them."""

    prompt_len: int
    output_len: int
    num_pictures: int = 0
    picture_size: tuple[int, int] = (1024, 1024)
    shared_len: int = 0
    num_shared_pictures: int = 0
    ids: tuple[int, int] = (0, 30_000)

    def items(self, seed: int, run: int, count: int) -> list[Item]:
        """`count` requests. `run` >= 0."""
        low, high = self.ids
        shared = np.random.default_rng((seed, _SHARED)).integers(low, high, self.shared_len)
        made: list[Item] = []
        for index in range(count):
            draw = np.random.default_rng((seed, 1, run, index))
            fresh = [(seed, 2, run, index, n) for n in range(self.num_pictures)]
            common = [(seed, _SHARED, n) for n in range(self.num_shared_pictures)]
            made.append(
                Item(
                    max_tokens=self.output_len,
                    shared_ids=tuple(shared.tolist()),
                    ids=tuple(draw.integers(low, high, self.prompt_len).tolist()),
                    pictures=tuple(self._noise(key) for key in (*common, *fresh)),
                )
            )
        return made

    def _noise(self, seed: tuple[int, ...]) -> Noise:
        return Noise(height=self.picture_size[0], width=self.picture_size[1], seed=seed)


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a workload file. `pictures`: sizes of fresh noise, "WIDTHxHEIGHT"."""

    max_tokens: int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    pictures: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The requests of a file, in its order, from the first again where more are asked for. Their
    text is the same in every run; only their pictures are fresh."""

    lines: tuple[_Line, ...]

    def items(self, seed: int, run: int, count: int) -> list[Item]:
        """`count` requests."""
        return [self._item(seed, run, index) for index in range(count)]

    def _item(self, seed: int, run: int, index: int) -> Item:
        line = self.lines[index % len(self.lines)]
        sizes = [parse_size(text, "pictures") for text in line.pictures]
        return Item(
            max_tokens=line.max_tokens,
            prompt=line.prompt,
            messages=None if line.messages is None else tuple(line.messages),
            pictures=tuple(
                Noise(height=h, width=w, seed=(seed, 2, run, index, n))
                for n, (h, w) in enumerate(sizes)
            ),
        )


Workload = Synthetic | Lines


def read_lines(path: Path) -> Lines:
    """A JSONL file: each line an object with `max_tokens`, either `prompt` (text or token ids) or
    `messages`, and perhaps `pictures`. Raises `Refused` with the first line that is wrong."""
    try:
        raw = path.read_bytes().splitlines()
    except OSError as error:
        raise _bad(f"{path}", str(error), "a file that can be read", "give its path") from error
    lines: list[_Line] = []
    for number, text in enumerate(raw[:MAX_LINES], 1):
        if text.strip():
            lines.append(_read_line(text, f"{path.name}:{number}"))
    if not lines or len(raw) > MAX_LINES:
        raise _bad(path.name, f"{len(raw)} lines", f"1 to {MAX_LINES} requests", "give another")
    return Lines(lines=tuple(lines))


def _read_line(text: bytes, where: str) -> _Line:
    rule = "an object with max_tokens, and prompt or messages, and perhaps pictures"
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise _bad(where, str(error), rule, "mend the line") from error
    if (line.prompt is None) == (line.messages is None):
        given = "neither" if line.prompt is None else "both"
        raise _bad(where, f"{given} of prompt and messages", "one of the two", "mend the line")
    if line.max_tokens < 1:
        raise _bad(where, f"max_tokens {line.max_tokens}", "at least 1", "mend the line")
    if line.pictures and line.messages is None:
        rule = "pictures go with messages"
        raise _bad(where, "pictures beside a prompt", rule, "give messages")
    if line.messages is not None and not line.messages:
        raise _bad(where, "no message", "at least one message", "mend the line")
    for size in line.pictures:
        parse_size(size, where)
    return line


def parse_size(text: str, where: str) -> tuple[int, int]:
    """ "WIDTHxHEIGHT" in pixels -> (height, width). Raises `Refused`."""
    found = SIZE.fullmatch(text)
    if found is None or not min(map(int, found.groups())):
        rule = "WIDTHxHEIGHT in pixels, each 1 to 99999"
        raise _bad(where, repr(text), rule, "for example 1024x768")
    return int(found[2]), int(found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """`concurrency` requests at any time: the next is sent when one has ended."""

    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Requests at random moments, `rate` a second on average, whatever the server does."""

    rate: float

    def times(self, seed: int, run: int, count: int) -> list[float]:
        """Seconds after the start, rising: gaps are exponential with mean 1 / rate."""
        draw = np.random.default_rng((seed, 3, run))
        return np.cumsum(draw.exponential(1 / self.rate, count)).tolist()


Arrivals = Closed | Poisson


def words(ids: Sequence[int]) -> str:
    """Text of one short word an id, for routes that take no ids. Most tokenizers make one token of
    each; how many they were is in the answer's usage, and the report shows that."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)


def _bad(where: str, saw: str, rule: str, change: str) -> Refused:
    finding = Finding(where=where, saw=saw, rule=rule, change=change, code="bad_workload")
    return Refused(finding)
