"""`ForwardContext`: all that one forward pass of the decoder needs beside its activations. An
argument, never ambient state.

A step's tokens are packed [prefill tokens | decode tokens]: the first `num_prefill` belong to
chunks of `prefill`, the rest are one token a sequence of `decode`."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from vitrail.attention.metadata import PagedMetadata
from vitrail.attention.plan import PlanTable
from vitrail.cache.kv_pool import KvPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """`positions`: int64 [T], absolute. `cache_slots`: int64 [T], page * page_size + offset, where
    each token's key is written. `prefill` / `decode` are None when the step has no such tokens."""

    positions: Int[Tensor, "T"]
    cache_slots: Int[Tensor, "T"]
    num_prefill: int
    prefill: PagedMetadata | None
    decode: PagedMetadata | None
    plans: PlanTable
    pool: KvPool
