"""Embeddings of encoded images on the device, by entry id, and the features of those whose last
part is still to come. Owns the tensors; which entries exist and when they go is `encoder.py`'s
business.

Legend: T tokens, M hidden size, N patches, C channels of the tower."""

from collections.abc import Iterable

from jaxtyping import Float
from torch import Tensor


class EncoderPool:
    """One tensor an entry, so that an entry's memory goes with it."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._parts: dict[int, list[Tensor]] = {}

    def put(self, entry: int, rows_TM: Float[Tensor, "T M"]) -> None:
        """Keep a copy of `rows_TM`: a view would hold the whole batch it was encoded in."""
        assert entry not in self._rows, f"entry {entry} was already encoded"
        self._rows[entry] = rows_TM.clone()
        self._parts.pop(entry, None)

    def add_part(self, entry: int, features_NC: Float[Tensor, "N C"]) -> None:
        """Keep a copy of the features of an image's next sequences until its last ones come."""
        self._parts.setdefault(entry, []).append(features_NC.clone())

    def parts(self, entry: int) -> list[Float[Tensor, "N C"]]:
        """The features kept so far, in order."""
        return list(self._parts.get(entry, ()))

    def slice(self, entry: int, start: int, length: int) -> Float[Tensor, "T M"]:
        """Rows [start, start + length) of an entry. KeyError if its encoding failed."""
        rows_TM = self._rows[entry]
        assert 0 <= start <= start + length <= len(rows_TM), f"[{start}, +{length}) of {entry}"
        return rows_TM[start : start + length]

    def drop(self, entries: Iterable[int]) -> None:
        """Give back memory. An id without rows is no error: its encoding failed or never ran."""
        for entry in entries:
            self._rows.pop(entry, None)
            self._parts.pop(entry, None)

    def __contains__(self, entry: int) -> bool:
        return entry in self._rows

    @property
    def total_bytes(self) -> int:
        """Bytes held on the device."""
        parts = (part for each in self._parts.values() for part in each)
        return sum(rows.numel() * rows.element_size() for rows in (*self._rows.values(), *parts))
