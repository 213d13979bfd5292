"""The device memory behind the pages. Owns the tensors and what their values are multiplied by;
what a page holds is the manager's business.

Attention reads keys and values from here and nowhere else, those of this step's tokens too. So
where they are rounded (e4m3), every way through the cache sees the same ones: whole or in chunks,
cached, preempted and computed again.

Legend: T tokens written, N pages, P page size, C latent rank + rotary channels, K key heads,
D head_dim, E head_dim_v."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitrail.cache.spec import LatentKv, LayerSpec, PagedKv
from vitrail.config.model import KvDType, KvScales

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
DTYPES: Mapping[KvDType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": E4M3,
}


class KvPool:
    """`num_pages` pages of `page_size` tokens in every layer; one allocation per layer and kind.

    Memory is not cleared: a slot that nobody wrote may hold NaN. Slots are flat:
    page * page_size + offset in the page, int64. `scales`: of layers that are stored as e4m3, by
    layer; 1 where there is none."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
        scales: Mapping[int, KvScales] | None = None,
    ):
        self.num_pages = num_pages
        self.page_size = page_size
        self._latent: dict[int, Tensor] = {}
        self._paged: dict[int, tuple[Tensor, Tensor]] = {}
        self._scales = [(scales or {}).get(i, KvScales()) for i in range(len(specs))]
        for i, spec in enumerate(specs):
            dtype = DTYPES[spec.dtype]
            _check_scales(i, spec, self._scales[i])
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

    def scales(self, i: int) -> KvScales:
        """What layer `i`'s stored values are multiplied by."""
        return self._scales[i]

    def write_latent(self, i: int, slots: Int[Tensor, "T"], rows: Float[Tensor, "T C"]) -> None:
        """Put one row a token into its slot. Slots of one call are distinct."""
        _write(self._latent[i], slots, rows, self._scales[i].k)

    def write_paged(
        self,
        i: int,
        slots: Int[Tensor, "T"],
        k_TKD: Float[Tensor, "T K D"],
        v_TKE: Float[Tensor, "T K E"],
    ) -> None:
        """Put each token's keys and values into its slot. Slots of one call are distinct."""
        k_NPKD, v_NPKE = self._paged[i]
        _write(k_NPKD, slots, k_TKD, self._scales[i].k)
        _write(v_NPKE, slots, v_TKE, self._scales[i].v)

    def latent_slots(self, i: int, slots: Int[Tensor, "T"]) -> "LatentSlots":
        """The place of one row a token in latent layer `i`. Slots of one call are distinct."""
        return LatentSlots(self, i, slots)

    def paged_slots(self, i: int, slots: Int[Tensor, "T"]) -> "PagedSlots":
        """The place of each token's keys and values in layer `i`. Slots of one call are
        distinct."""
        return PagedSlots(self, i, slots)

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers' pages on the device."""
        pairs = [t for pair in self._paged.values() for t in pair]
        return sum(t.numel() * t.element_size() for t in (*self._latent.values(), *pairs))


class LatentSlots:
    """Slots `slots_T` of a pool's latent layer, for a kernel that fills them itself."""

    def __init__(self, pool: KvPool, layer: int, slots_T: Int[Tensor, "T"]):
        self._pool, self._layer = pool, layer
        self.cache_NPC, self.slots_T = pool.latent(layer), slots_T
        self.scale = pool.scales(layer).k

    def write(self, rows: Float[Tensor, "T C"]) -> None:
        """Put each row into its slot, as e4m3 where that is what is stored: row / scale."""
        self._pool.write_latent(self._layer, self.slots_T, rows)


class PagedSlots:
    """Slots `slots_T` of a pool's layer of keys and values, for a kernel that fills them itself."""

    def __init__(self, pool: KvPool, layer: int, slots_T: Int[Tensor, "T"]):
        self._pool, self._layer = pool, layer
        self.k_NPKD, self.v_NPKD = pool.paged(layer)
        self.slots_T = slots_T
        self.k_scale, self.v_scale = pool.scales(layer)

    def write(self, k_TKD: Float[Tensor, "T K D"], v_TKD: Float[Tensor, "T K D"]) -> None:
        """Put each token's keys and values into its slot, as e4m3 where that is what is stored."""
        self._pool.write_paged(self._layer, self.slots_T, k_TKD, v_TKD)


def quantized(x: Tensor, scale: float) -> Tensor:
    """x / scale as e4m3, to the nearest, ties to even. Finite values beyond 448 saturate; what is
    not finite becomes NaN, so that a fault stays one (e4m3 has no infinity)."""
    # A product: some devices divide by a number so, and codes are to be the same on all.
    near = (x.float() * (1 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    return near.masked_fill(~x.isfinite(), torch.nan).to(E4M3)


def dequantized(stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """stored * scale, rounded once. Of another dtype than e4m3: as it is."""
    return stored if stored.dtype != E4M3 else (stored.float() * scale).to(dtype)


def _write(cache: Tensor, slots: Tensor, rows: Tensor, scale: float) -> None:
    if cache.dtype == E4M3:
        # Bytes: torch has no index_copy_ of e4m3.
        cache, rows = cache.view(torch.uint8), quantized(rows, scale).view(torch.uint8)
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def _check_scales(i: int, spec: LayerSpec, scales: KvScales) -> None:
    assert min(scales) > 0, f"layer {i}: {scales}"
    assert spec.dtype == "float8_e4m3fn" or scales == KvScales(), f"layer {i}: {spec}, {scales}"
    if isinstance(spec, LatentKv):
        assert scales.k == scales.v, f"layer {i}: {scales} of rows that are keys and values at once"
