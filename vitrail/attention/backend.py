"""What every attention backend implements, and the one door to the backend that a plan names.

Legend: T packed queries, S packed keys, H query heads, K key heads, D head_dim, E head_dim_v,
N pages, P page size, C latent rank + rotary channels, R latent rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from vitrail.attention.call import Call
from vitrail.attention.metadata import PagedMetadata, VarlenMetadata
from vitrail.attention.plan import BACKENDS, AttentionPlan
from vitrail.attention.records import Lengths
from vitrail.config.model import KvScales

UNSCALED = KvScales()
# Of no plan: `check` runs models on the meta device by it.
HOLLOW = "hollow"
_MODULES = {**BACKENDS, HOLLOW: "vitrail.attention.backends.hollow"}


class Attended(NamedTuple):
    """`out` in the queries' dtype; `lse` fp32, natural log of the softmax denominator. A query that
    sees no key has out 0 and lse -inf. A sink counts in the denominator alone: where a site has
    one, `lse` includes it and is the sink itself for a query without keys."""

    out: Float[Tensor, "T H E"]
    lse: Float[Tensor, "T H"]


class Sent(NamedTuple):
    """What a batch's work is made of: `arrays` for the device, and `place`, which makes it of its
    metadata and of them, once they are there."""

    arrays: tuple[np.ndarray, ...]
    place: Callable[[Any, Sequence[Tensor]], object]


class AttentionBackend(ABC):
    """Runs plans that name it, all by `attend`; the layers call what says how their keys lie. Every
    element of the result is written; nothing past a length is read; nothing is asked of the device.
    Stateless."""

    def pack(self, plan: AttentionPlan, lengths: Lengths) -> Sent | None:
        """The work of a batch, for whoever sends it with other numbers; without it (None: ever) it
        is made by the first layer that runs. `place` puts nothing into the metadata."""
        return None

    @abstractmethod
    def attend(self, call: Call) -> Attended:
        """The call's result."""

    def varlen(
        self,
        plan: AttentionPlan,
        q_THD: Float[Tensor, "T H D"],
        k_SKD: Float[Tensor, "S K D"],
        v_SKE: Float[Tensor, "S K E"],
        meta: VarlenMetadata,
        sink_H: Float[Tensor, "H"] | None = None,
    ) -> Attended:
        """Encode and prefill phases: packed queries against packed keys."""
        return self.attend(Call(plan, q_THD, k_SKD, v_SKE, meta, sink_H, UNSCALED))

    def paged(
        self,
        plan: AttentionPlan,
        q_THD: Float[Tensor, "T H D"],
        k_NPKD: Float[Tensor, "N P K D"],
        v_NPKE: Float[Tensor, "N P K E"],
        meta: PagedMetadata,
        sink_H: Float[Tensor, "H"] | None = None,
        scales: KvScales = UNSCALED,
    ) -> Attended:
        """Extend and decode phases: keys and values in pages (any strides), stored as the plan's
        `kv_dtype`; `scales`: what the stored ones are multiplied by."""
        return self.attend(Call(plan, q_THD, k_NPKD, v_NPKE, meta, sink_H, scales))

    def latent(
        self,
        plan: AttentionPlan,
        q_THC: Float[Tensor, "T H C"],
        cache_NPC: Float[Tensor, "N P C"],
        meta: PagedMetadata,
        scales: KvScales = UNSCALED,
    ) -> Attended:
        """Extend and decode over latent pages: out is in latent space, [T, H, R]. A row has one
        scale: `scales.k` and `scales.v` are equal."""
        assert scales.k == scales.v, f"{scales} of rows that are keys and values at once"
        rows_NP1C = cache_NPC[:, :, None]
        values_NP1R = rows_NP1C[..., : plan.shape.site.latent_rank]
        return self.attend(Call(plan, q_THC, rows_NP1C, values_NP1R, meta, None, scales))


@cache
def load_backend(name: str) -> AttentionBackend:
    """`BACKEND` of the module that `BACKENDS` gives for a plan's `backend`."""
    return import_module(_MODULES[name]).BACKEND
