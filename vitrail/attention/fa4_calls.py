"""How a batch of packed attention is cut into calls that FlashAttention-4 can express: its causal
kernels align the last query with the last key. Ints alone; no torch."""

from typing import NamedTuple

from vitrail.attention.records import Lengths


class Part(NamedTuple):
    """One call: packed queries `rows` against packed keys `keys`, `causal` with the last query at
    the last key; `q_lens`, `kv_lens` of its sequences."""

    rows: slice
    keys: slice
    causal: bool
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


class Cut(NamedTuple):
    """Calls that together make a batch, and packed rows that see no key."""

    parts: tuple[Part, ...]
    blank: tuple[slice, ...]


def cut(causal: bool, window: bool, lengths: Lengths) -> Cut:
    """Sequence by sequence: rows before the first key are blank, rows up to the last key are
    aligned with the end of the keys that they see, rows from there on see all keys. Neighbours go
    in one call where their rows and keys are neighbours."""
    parts: list[Part] = []
    blank: list[slice] = []
    row = key = 0
    for n, m, start in zip(lengths.q_lens, lengths.kv_lens, lengths.q_starts, strict=True):
        assert not window or not n or start == m - n >= 0, (
            f"{n} queries from {start} on against {m} keys: under a window the last ones meet"
        )
        first, aligned, seen = _edges(causal, n, m, start)
        if first:
            blank.append(slice(row, row + first))
        for begin, end, ends in ((first, aligned, True), (aligned, n, False)):
            if begin < end:
                rows, keys = slice(row + begin, row + end), slice(key, key + seen)
                _append(parts, Part(rows, keys, ends and causal, (end - begin,), (seen,)))
        row, key = row + n, key + m
    return Cut(tuple(parts), tuple(blank))


def _edges(causal: bool, n: int, m: int, start: int) -> tuple[int, int, int]:
    """Of a sequence of n queries from position `start` and m keys: rows that see none, rows up to
    the last that is aligned with an end, keys that any row sees."""
    if not causal:
        return (0, n, m) if m else (n, n, 0)
    seen = min(m, max(start + n, 0))
    if not seen:
        return n, n, 0
    first = min(max(-start, 0), n)
    return first, min(max(seen - start, first), n), seen


def _append(parts: list[Part], part: Part) -> None:
    last = parts[-1] if parts else None
    if (
        last is None
        or last.causal != part.causal
        or last.rows.stop != part.rows.start
        or last.keys.stop != part.keys.start
    ):
        parts.append(part)
        return
    parts[-1] = Part(
        slice(last.rows.start, part.rows.stop),
        slice(last.keys.start, part.keys.stop),
        part.causal,
        last.q_lens + part.q_lens,
        last.kv_lens + part.kv_lens,
    )
