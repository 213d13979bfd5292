"""`RadixCache`: the tree of shared prefixes, a page an edge. Knows nothing of tokens (it compares
keys) nor of who runs (it counts locks)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Node:
    """One cached page. `pins`: locks on the node itself plus children with pins, so it is 0 exactly
    where neither the node nor anything below it is locked. Written by the tree alone."""

    __slots__ = ("children", "key", "page", "parent", "pins")

    def __init__(self, key: bytes, page: int, parent: "Node | None"):
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.pins = 0


class Match(NamedTuple):
    """The deepest node that was found (the root if none) and the pages from the first one to it."""

    node: Node
    pages: list[int]


class Inserted(NamedTuple):
    """The node that the caller now has locked, and which of its pages became the tree's."""

    node: Node
    adopted: list[int]


class RadixCache:
    """Pages by prefix. A locked node and all above it stay; the others are evictable, least
    recently unlocked first, a page never before the pages that continue it.

    `_idle` holds the evictable nodes in that order. A node becomes idle after all its children did,
    and a new node is born locked: so the first idle node is a leaf, and evicting it takes O(1)."""

    def __init__(self) -> None:
        self.root = Node(b"", -1, None)
        self.root.pins = 1
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._num_pages = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    @property
    def evictable(self) -> int:
        """Pages that `evict` can give back now."""
        return len(self._idle)

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest cached prefix of `keys`. Lock its node before the next `evict`."""
        node, pages = self.root, list[int]()
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
        return Match(node, pages)

    def insert(self, below: Node, keys: Sequence[bytes], pages: Sequence[int]) -> Inserted:
        """Continue `below`, which the caller locked, by `keys`; its lock moves to the last node.
        Where the tree has a page for a key already, the caller's page stays the caller's own."""
        node, adopted = below, list[int]()
        for key, page in zip(keys, pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                self._idle[child] = None  # until the lock below
                adopted.append(page)
            node = child
        self._num_pages += len(adopted)
        self.lock(node)
        self.unlock(below)
        return Inserted(node, adopted)

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it. Walks up only as far as nothing was locked yet."""
        here: Node | None = node
        while here is not None:
            here.pins += 1
            if here.pins > 1:
                return
            del self._idle[here]
            here = here.parent

    def unlock(self, node: Node) -> None:
        """Take back one `lock`. What nobody locks any more becomes evictable, the deepest first."""
        here: Node | None = node
        while here is not None:
            here.pins -= 1
            assert here.pins >= 0, f"page {here.page} was not locked"
            if here.pins:
                return
            self._idle[here] = None
            here = here.parent

    def evict(self, n: int) -> list[int]:
        """Forget up to `n` pages that nobody has locked; their ids."""
        pages: list[int] = []
        for _ in range(min(n, len(self._idle))):
            node, _ = self._idle.popitem(last=False)
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.key]
            pages.append(node.page)
        self._num_pages -= len(pages)
        return pages

    def pages(self) -> list[int]:
        """Every page in the tree, in no order."""
        return [node.page for node in self._walk()]

    def check(self) -> None:
        """Counts add up, no page is twice in the tree, and idle nodes come in a safe order."""
        nodes = self._walk()
        assert len(nodes) == self._num_pages
        assert len({node.page for node in nodes}) == len(nodes), "a page is twice in the tree"
        rank = {node: i for i, node in enumerate(self._idle)}
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert parent.children[node.key] is node
            assert node.pins >= sum(child.pins > 0 for child in node.children.values())
            assert (node.pins == 0) == (node in rank), f"page {node.page}: {node.pins} pins"
            if node in rank and parent in rank:
                assert rank[node] < rank[parent], f"page {parent.page} goes before its child"
        assert rank.keys() <= set(nodes)
        assert self.root.pins >= 1

    def _walk(self) -> list[Node]:
        nodes = list(self.root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes
