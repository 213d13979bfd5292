"""Bytes of tensors alive, counted at every operation: a deterministic peak, on any device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make while it is active. `peak`: the most alive at once;
    `largest`: the largest single one."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.current = self.peak = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and _key(t) not in given and _key(t) not in self.alive:
                storage = t.untyped_storage()
                self.alive[_key(t)] = storage.nbytes()
                self.current += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._freed, _key(t))
        self.peak = max(self.peak, self.current)
        return result

    def _freed(self, key: int) -> None:
        self.current -= self.alive.pop(key)


def _key(t: Tensor) -> int:
    return t.untyped_storage()._cdata
