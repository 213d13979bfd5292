"""`Manager`: the scheduler's only door to the pages. Says which page holds which positions of each
open sequence, shares the pages of equal prefixes, and evicts what nobody runs. Ints alone: device
work is ordered, so a page may change hands while a step that writes to it is still under way.

    position  0 ........ committed ........ computed or under way ........ reserved
              cached or adopted pages,      private pages
              read only (or duplicates)"""

from dataclasses import dataclass

from vitrail.cache.allocator import PageAllocator
from vitrail.cache.page_keys import PageKeys
from vitrail.cache.radix import Node, RadixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """For metrics. `free_pages` + `cached_pages` + `running_pages` is every page: unused; kept for
    their prefix alone; needed by open sequences. `hit_tokens` of `query_tokens` prompt tokens came
    from the cache, since the start."""

    num_pages: int
    free_pages: int
    cached_pages: int
    running_pages: int
    hit_tokens: int
    query_tokens: int


@dataclass(slots=True, kw_only=True)
class _Row:
    """An open sequence. `node`: the tree's node of its first `committed` pages, locked. `asked`:
    prompt tokens to count in the metrics when its first pages are reserved."""

    keys: PageKeys
    pages: list[int]
    node: Node
    committed: int
    asked: int


class Manager:
    """Owner of the allocator, the tree and every open sequence's table."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True):
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache()
        self._prefix_cache = prefix_cache
        self._rows: dict[int, _Row] = {}
        self._hit_tokens = 0
        self._query_tokens = 0

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def free_pages(self) -> int:
        """Pages that `reserve` could hand out now: free or evictable."""
        return self._allocator.num_free + self._tree.evictable

    def open(self, seq: int, keys: PageKeys, prompt_len: int) -> int:
        """Begin `seq` with the longest cached prefix of its first `prompt_len` tokens (after a
        preemption: of all its tokens). Returns how many tokens it covers: whole pages, at least one
        token short of `prompt_len`, so that something is left to compute."""
        assert seq not in self._rows, f"sequence {seq} is already open"
        assert keys.page_size == self.page_size
        assert prompt_len >= 1
        node, pages = self._tree.root, list[int]()
        if self._prefix_cache:
            node, pages = self._tree.match(keys.keys(prompt_len - 1))
        self._tree.lock(node)
        self._allocator.share(pages)
        committed = len(pages)
        self._rows[seq] = _Row(
            keys=keys, pages=pages, node=node, committed=committed, asked=prompt_len
        )
        return committed * self.page_size

    def reserve(self, seq: int, num_tokens: int) -> bool:
        """Give positions [0, num_tokens) of `seq` a page each, evicting where needed. False, and
        nothing changed, if there are too few."""
        row = self._rows[seq]
        need = -(-num_tokens // self.page_size) - len(row.pages)
        if need > self.free_pages:
            return False
        if row.asked:
            self._query_tokens += row.asked
            self._hit_tokens += row.committed * self.page_size
            row.asked = 0
        if need > 0:
            self._allocator.free(self._tree.evict(need - self._allocator.num_free))
            taken = self._allocator.allocate(need)
            assert taken is not None
            row.pages += taken
        return True

    def pages(self, seq: int) -> list[int]:
        """The block table of `seq`: page i holds positions [i, i + 1) * page_size. Read only."""
        return self._rows[seq].pages

    def commit(self, seq: int, num_tokens: int) -> None:
        """Positions below `num_tokens` of `seq` are computed and their tokens final: its full pages
        may be shared from now on, and are never written again."""
        row = self._rows[seq]
        full = num_tokens // self.page_size
        if full <= row.committed or not self._prefix_cache:
            return
        assert full <= len(row.pages), f"{num_tokens} tokens in {len(row.pages)} pages"
        keys = row.keys.keys(num_tokens)[row.committed :]
        row.node, adopted = self._tree.insert(row.node, keys, row.pages[row.committed : full])
        self._allocator.share(adopted)
        row.committed = full

    def close(self, seq: int) -> None:
        """End `seq` (finished, aborted or preempted, at any point). Its committed pages stay cached
        until evicted, the others are free at once."""
        row = self._rows.pop(seq)
        self._tree.unlock(row.node)
        self._allocator.free(row.pages)

    def usage(self) -> CacheUsage:
        free, cached = self._allocator.num_free, self._tree.evictable
        return CacheUsage(
            num_pages=self.num_pages,
            free_pages=free,
            cached_pages=cached,
            running_pages=self.num_pages - free - cached,
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
        )

    def check(self) -> None:
        """Every page has exactly the holders that the tree and the open tables say. O(pages)."""
        self._allocator.check()
        self._tree.check()
        holders = [0] * self.num_pages
        for page in self._tree.pages():
            holders[page] += 1
        for row in self._rows.values():
            assert len(set(row.pages)) == len(row.pages), "a page is twice in a table"
            assert row.committed <= len(row.pages)
            for page in row.pages:
                holders[page] += 1
        for page, count in enumerate(holders):
            assert count == self._allocator.holders(page), f"page {page}: {count} holders"
        if not self._rows:
            assert self.free_pages == self.num_pages, "pages leaked"
