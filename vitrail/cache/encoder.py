"""`EncoderCache`: which encoded images the device keeps. Bookkeeping by identity, in ints: the rows
live in `encoder_pool`, and what to drop from it travels in the step plan.

Rules. An entry counts its whole size from `admit` on. Running sequences alone hold references, from
the chunk that first reads an image to the one that reads its last row and no longer: so whoever
holds references can go on without asking for more, and `admit` is refused only for a while.
Unreferenced entries stay, the oldest goes first. An image larger than the whole budget is admitted
when nothing else is referenced, and is dropped with its last reference: served, never kept."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from vitrail.cache.page_keys import IDENTITY_BYTES


class EntryState(StrEnum):
    """`NEW`: to be encoded. `READY`: later steps may read it. `GONE`: dropped or failed."""

    NEW = "new"
    READY = "ready"
    GONE = "gone"


@dataclass(slots=True, kw_only=True, eq=False)
class EncoderEntry:
    """One image. `id` is never used again; `users`: references by sequence. `encoded`: of its
    attention sequences, those that are encoded in planned steps, `step` the last of these. The
    cache writes it, but for these two, which are its planner's."""

    id: int
    identity: bytes
    num_tokens: int
    encoded: int = 0
    step: int = -1
    state: EntryState = EntryState.NEW
    users: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def ready(self) -> bool:
        return self.state is EntryState.READY


class EncoderCache:
    """Entries within `budget_bytes`, at `bytes_per_token` (hidden size x item size)."""

    def __init__(self, budget_bytes: int, bytes_per_token: int):
        assert budget_bytes >= 0
        assert bytes_per_token >= 1
        self.budget_bytes = budget_bytes
        self.bytes_per_token = bytes_per_token
        self._entries: dict[bytes, EncoderEntry] = {}
        self._idle: OrderedDict[int, EncoderEntry] = OrderedDict()  # no users, the oldest first
        self._used = 0
        self._idle_used = 0
        self._next_id = 0
        self._dropped: list[int] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries; above the budget only while one oversized image is in use."""
        return self._used * self.bytes_per_token

    @property
    def referenced_bytes(self) -> int:
        """Bytes that cannot be evicted now."""
        return (self._used - self._idle_used) * self.bytes_per_token

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, identity: bytes) -> EncoderEntry | None:
        """The entry of this image, ready or not. Acquire it before the next `admit`."""
        return self._entries.get(identity)

    def admit(self, identity: bytes, num_tokens: int) -> EncoderEntry | None:
        """A new entry, not ready, for an image that `lookup` does not find; acquire it next. None,
        and nothing evicted, if it does not fit beside what is referenced: try when less is."""
        assert len(identity) == IDENTITY_BYTES
        assert identity not in self._entries
        assert num_tokens >= 1
        needed = num_tokens * self.bytes_per_token
        if self.referenced_bytes and self.referenced_bytes + needed > self.budget_bytes:
            return None
        while self._idle and self.used_bytes + needed > self.budget_bytes:
            self._drop(next(iter(self._idle.values())))
        entry = EncoderEntry(id=self._next_id, identity=identity, num_tokens=num_tokens)
        self._next_id += 1
        self._entries[identity] = entry
        self._used += num_tokens
        self._rest(entry)
        return entry

    def acquire(self, entry: EncoderEntry, seq: int) -> None:
        """One more reference by `seq` (one for each span of the same picture, if it likes)."""
        assert entry.state is not EntryState.GONE, f"entry {entry.id} is gone"
        if not entry.users:
            del self._idle[entry.id]
            self._idle_used -= entry.num_tokens
        entry.users[seq] = entry.users.get(seq, 0) + 1

    def mark_ready(self, entry: EncoderEntry) -> None:
        """Its encoding is in a launched step: device work is ordered, later steps may read it."""
        if entry.state is EntryState.NEW:
            entry.state = EntryState.READY

    def release(self, entry: EncoderEntry, seq: int) -> None:
        """One reference of `seq` less. Without the last one a ready entry stays until its room is
        needed; one that was never encoded, or is larger than the budget, goes at once. Nothing
        happens to an entry that was forgotten meanwhile."""
        if entry.state is EntryState.GONE:
            return
        entry.users[seq] -= 1
        if not entry.users[seq]:
            del entry.users[seq]
        if not entry.users:
            self._rest(entry)
            if not entry.ready or self.used_bytes > self.budget_bytes:
                self._drop(entry)

    def forget(self, entry: EncoderEntry) -> None:
        """Its encoding failed: nobody finds it any more, and its references count for nothing."""
        if entry.state is EntryState.GONE:
            return
        if entry.users:
            entry.users.clear()
            self._rest(entry)
        self._drop(entry)

    def take_dropped(self) -> tuple[int, ...]:
        """Ids that left since the last call, for the next step's `drop_entries`."""
        taken, self._dropped = tuple(self._dropped), []
        return taken

    def drop_again(self, entries: Iterable[int]) -> None:
        """Ids that were taken for a step which failed: they may not have been dropped."""
        self._dropped[:0] = entries

    @property
    def has_dropped(self) -> bool:
        """Whether `take_dropped` has something to give: memory that nobody needs is still held."""
        return bool(self._dropped)

    def check(self) -> None:
        """Sizes add up, idle is what has no users, and only a lone image exceeds the budget."""
        entries = self._entries.values()
        assert self._used == sum(e.num_tokens for e in entries)
        assert self._idle_used == sum(e.num_tokens for e in self._idle.values())
        assert {e.id for e in entries if not e.users} == self._idle.keys()
        for identity, entry in self._entries.items():
            assert entry.identity == identity
            assert entry.state is not EntryState.GONE
            assert all(count > 0 for count in entry.users.values())
            assert entry.id not in self._dropped
        assert self.used_bytes <= self.budget_bytes or len(self) == 1

    def _rest(self, entry: EncoderEntry) -> None:
        self._idle[entry.id] = entry
        self._idle_used += entry.num_tokens

    def _drop(self, entry: EncoderEntry) -> None:
        """Remove an idle entry."""
        del self._idle[entry.id]
        del self._entries[entry.identity]
        self._idle_used -= entry.num_tokens
        self._used -= entry.num_tokens
        entry.state = EntryState.GONE
        self._dropped.append(entry.id)
