"""Bytes of tensors alive, counted at every operation: a deterministic peak, on any device, the
meta device among them. Also which tensors were read at all."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make while it is active. `peak`: the most alive at once;
    `largest`: the largest single one; `read`: storages that operations were given."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.read: set[int] = set()
        self.current = self.peak = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.read |= given
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            key = storage_key(t) if isinstance(t, Tensor) else 0
            if key and key not in given and key not in self.alive:
                storage = t.untyped_storage()
                self.alive[key] = storage.nbytes()
                self.current += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._freed, key)
        self.peak = max(self.peak, self.current)
        return result

    def _freed(self, key: int) -> None:
        self.current -= self.alive.pop(key)


def storage_key(t: Tensor) -> int:
    """What views of one storage share."""
    return t.untyped_storage()._cdata
