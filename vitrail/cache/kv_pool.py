"""The device memory behind the pages. Owns the tensors; what a page holds is the manager's
business.

Legend: T tokens written, N pages, P page size, C latent rank + rotary channels, K key heads,
D head_dim, E head_dim_v."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.cache.spec import LatentKv, LayerSpec, PagedKv

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvPool:
    """`num_pages` pages of `page_size` tokens in every layer; one allocation per layer and kind.

    Memory is not cleared: a slot that nobody wrote may hold NaN. Slots are flat:
    page * page_size + offset in the page, int64."""

    def __init__(
        self, specs: Sequence[LayerSpec], num_pages: int, page_size: int, device: torch.device
    ):
        self.num_pages = num_pages
        self.page_size = page_size
        self._latent: dict[int, Tensor] = {}
        self._paged: dict[int, tuple[Tensor, Tensor]] = {}
        for i, spec in enumerate(specs):
            dtype = DTYPES[spec.dtype]
            match spec:
                case LatentKv():
                    shape = (num_pages, page_size, spec.latent_rank + spec.rope_dim)
                    self._latent[i] = torch.empty(shape, dtype=dtype, device=device)
                case PagedKv():
                    heads = (num_pages, page_size, spec.num_kv_heads)
                    self._paged[i] = (
                        torch.empty((*heads, spec.head_dim), dtype=dtype, device=device),
                        torch.empty((*heads, spec.head_dim_v), dtype=dtype, device=device),
                    )

    def latent(self, i: int) -> Float[Tensor, "N P C"]:
        """All pages of latent layer `i`. KeyError if the layer keeps keys and values."""
        return self._latent[i]

    def paged(self, i: int) -> tuple[Float[Tensor, "N P K D"], Float[Tensor, "N P K E"]]:
        """All pages of layer `i`: keys, values. KeyError if the layer keeps latent rows."""
        return self._paged[i]

    def layer(self, i: int) -> Tensor | tuple[Tensor, Tensor]:
        """`latent(i)` or `paged(i)`, whichever the layer's spec says."""
        return self._latent[i] if i in self._latent else self._paged[i]

    def write_latent(self, i: int, slots: Int[Tensor, "T"], rows: Float[Tensor, "T C"]) -> None:
        """Put one row a token into its slot. Slots of one call are distinct."""
        cache_NPC = self._latent[i]
        cache_NPC.view(-1, cache_NPC.shape[-1]).index_copy_(0, slots, rows)

    def write_paged(
        self,
        i: int,
        slots: Int[Tensor, "T"],
        k_TKD: Float[Tensor, "T K D"],
        v_TKE: Float[Tensor, "T K E"],
    ) -> None:
        """Put each token's keys and values into its slot. Slots of one call are distinct."""
        k_NPKD, v_NPKE = self._paged[i]
        k_NPKD.view(-1, *k_NPKD.shape[2:]).index_copy_(0, slots, k_TKD)
        v_NPKE.view(-1, *v_NPKE.shape[2:]).index_copy_(0, slots, v_TKE)

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' pages on the device."""
        pairs = [t for pair in self._paged.values() for t in pair]
        return sum(t.numel() * t.element_size() for t in (*self._latent.values(), *pairs))
