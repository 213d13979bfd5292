"""The frozen facts of an attention call site. Stdlib and config only: planners and `check` use it
without torch. Lengths in tokens (or patches), sizes in elements."""

from dataclasses import dataclass
from enum import StrEnum

from vitrail.config.model import DType, KvDType


class Phase(StrEnum):
    """How queries meet keys. `ENCODE`: packed sequences, bidirectional, no cache. `PREFILL`: packed
    queries against packed keys, causal and aligned to the end of the keys. `EXTEND`: packed
    queries, keys in pages. `DECODE`: a few queries a sequence, keys in pages."""

    ENCODE = "encode"
    PREFILL = "prefill"
    EXTEND = "extend"
    DECODE = "decode"


PAGED = (Phase.EXTEND, Phase.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """What a layer knows of its attention when it is built. `scale` multiplies q.k, `softcap` c
    turns a score s into c * tanh(s / c). `window` is how many keys before its own a query sees
    (None: all), and after its own where the site is not causal. `sink`: each head has a logit that
    joins the softmax without a value. `latent_rank` > 0: keys and values are one latent row of
    `latent_rank` channels plus `head_dim - latent_rank` rotary channels, shared by all heads
    (absorbed MLA); values are the latent channels, so head_dim_v equals latent_rank."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    causal: bool
    window: int | None = None
    sink: bool = False
    softcap: float | None = None
    latent_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A site in a phase at a bucket: what a plan is made for. `page_size` is None where keys are
    not paged. `max_kv_len` is the real upper bound of the bucket, never the pool's size.
    `kv_dtype`: what the pages hold; None: `dtype`, as packed keys always are. `batch_invariant`: a
    sequence's sums are made in an order that depends on its own lengths alone."""

    site: AttentionSite
    phase: Phase
    dtype: DType
    page_size: int | None
    batch: int
    max_q_len: int
    max_kv_len: int
    kv_dtype: KvDType | None = None
    batch_invariant: bool = False
