"""`PageAllocator`: which pages are free, and how many hold each of the others. Knows nothing of
what is in a page."""

from collections.abc import Iterable


class PageAllocator:
    """Pages 0 .. num_pages - 1. A page is free, or held by one or more: the tree of shared prefixes
    counts as one holder, each running sequence that has it in its table as another."""

    def __init__(self, num_pages: int):
        assert num_pages >= 1
        self.num_pages = num_pages
        # A stack: the page given back last has the best chance to be warm in a device cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold `page`; 0: it is free."""
        return self._holders[page]

    def allocate(self, n: int) -> list[int] | None:
        """`n` free pages with one holder each; None, and nothing taken, if there are fewer."""
        kept = len(self._free) - n
        if kept < 0:
            return None
        taken = self._free[kept:]
        del self._free[kept:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page; all of them are held already."""
        holders = self._holders
        for page in pages:
            assert holders[page] > 0, f"page {page} is free"
            holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One holder less for each page; a page that nobody holds can be allocated again."""
        holders = self._holders
        for page in pages:
            assert holders[page] > 0, f"page {page} is already free"
            holders[page] -= 1
            if not holders[page]:
                self._free.append(page)

    def check(self) -> None:
        """Every page is free or held, never both, never neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, count in enumerate(self._holders):
            assert count >= 0, f"page {page} has {count} holders"
            assert (count == 0) == (page in free), f"page {page}: {count} holders, in free list"
        assert len(self._holders) == self.num_pages
