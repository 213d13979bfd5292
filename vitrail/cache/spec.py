"""What a layer keeps for each token: frozen facts, no torch. Layers of equal spec form a group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitrail.config.model import ITEM_BYTES, KvDType


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKv:
    """Keys and values of full attention, `num_kv_heads` heads a token."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: KvDType

    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKv:
    """One row a token for all heads: `latent_rank` normed channels, then `rope_dim` rotated."""

    latent_rank: int
    rope_dim: int
    dtype: KvDType

    def bytes_per_token(self) -> int:
        return (self.latent_rank + self.rope_dim) * ITEM_BYTES[self.dtype]


LayerSpec = PagedKv | LatentKv


def stored_as(specs: Sequence[LayerSpec], dtype: KvDType) -> list[LayerSpec]:
    """The same layers, their keys and values kept as `dtype`."""
    return [replace(spec, dtype=dtype) for spec in specs]
