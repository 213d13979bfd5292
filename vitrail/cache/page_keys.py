"""`PageKeys`: what makes two pages of tokens the same. Knows nothing of pages' places in memory.

    key    = [salt length | salt: page 0 only] token ids | a record for each image that touches it
    record = identity (32 bytes) | image start - page start (signed) | image length

The tree walks keys from the first page on, so a key need not repeat what came before it; a salt in
page 0 separates whole conversations. Keys are compared in full, never by a hash of them."""

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # not subscriptable before Python 3.12

IDENTITY_BYTES = 32
_RECORD = Struct("<32sqq")
_SALT_LEN = Struct("<I")


class Span(NamedTuple):
    """`length` tokens from absolute position `offset` that stand for the image `identity`."""

    offset: int
    length: int
    identity: bytes


class PageKeys:
    """Keys of one request's full pages, made once each and extended as its tokens grow.

    `token_ids` is the request's own growing `array("i")`: read here, never written; ids that were
    keyed must not change. `spans` are ascending and disjoint. Unequal salts share nothing."""

    def __init__(
        self,
        token_ids: TokenIds,
        spans: Sequence[tuple[int, int, bytes]],
        page_size: int,
        salt: bytes = b"",
    ):
        assert token_ids.typecode == "i"
        self.page_size = page_size
        self._token_ids = token_ids
        self._spans = [Span(*span) for span in spans]
        self._salt = salt
        self._keys: list[bytes] = []
        self._next_span = 0  # the first span that ends past the keyed pages
        end = 0
        for span in self._spans:
            assert span.offset >= end, f"span at {span.offset} begins before {end}"
            assert span.length >= 1
            assert len(span.identity) == IDENTITY_BYTES
            end = span.offset + span.length

    def keys(self, num_tokens: int) -> list[bytes]:
        """Keys of the full pages among the first `num_tokens` tokens, first page first."""
        assert num_tokens <= len(self._token_ids), f"{num_tokens} of {len(self._token_ids)} tokens"
        num_pages = num_tokens // self.page_size
        if num_pages > len(self._keys):
            self._extend(num_pages)
        return self._keys[:num_pages]

    def _extend(self, num_pages: int) -> None:
        first, size = len(self._keys), self.page_size
        raw = self._token_ids[first * size : num_pages * size].tobytes()
        step = size * self._token_ids.itemsize
        made = [raw[at : at + step] for at in range(0, len(raw), step)]
        for i, records in self._records(first, num_pages):
            made[i - first] += records
        if first == 0:
            made[0] = _SALT_LEN.pack(len(self._salt)) + self._salt + made[0]
        self._keys += made

    def _records(self, first: int, end: int) -> list[tuple[int, bytes]]:
        """(page, record) for every image and each page of [first, end) that it touches."""
        size = self.page_size
        found: list[tuple[int, bytes]] = []
        while self._next_span < len(self._spans):
            offset, length, identity = self._spans[self._next_span]
            past = -(-(offset + length) // size)
            found += (
                (page, _RECORD.pack(identity, offset - page * size, length))
                for page in range(max(first, offset // size), min(end, past))
            )
            if past > end:
                break
            self._next_span += 1
        return found
