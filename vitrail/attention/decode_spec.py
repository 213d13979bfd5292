"""How a plan's CuTe kernel is specialised: the one statement of it, so that what runs is what
`compile_cute` proves. Imports neither torch nor the compiler."""

from dataclasses import dataclass
from functools import cache

from vitrail.attention.plan import AttentionPlan, Loader

WARPGROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """All that the kernel is specialised for. `tile_m`: query rows of a program, 8, 16, 32 or 64.
    `single`: one causal query a sequence, whose bounds are the item's."""

    half: str
    tile_m: int
    stages: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    page: int
    latent: bool
    single: bool
    window: bool
    softcap: bool
    sink: bool
    bulk: bool

    @property
    def groups(self) -> int:
        """Warpgroups that compute: two where the accumulator of a latent tile needs them. Each
        scores half of the rows and sums half of the channels."""
        return 2 if self.latent and self.tile_m == 64 else 1

    @property
    def key_dim(self) -> int:
        """Channels of K."""
        return self.dim - self.dim_v if self.latent else self.dim

    @property
    def key_stages(self) -> int:
        """Tiles of K. A latent's rotary tile becomes that of its weights: one at work, one on its
        way leave room for three of the wide tiles."""
        return 2 if self.latent else self.stages

    @property
    def loaders(self) -> int:
        """Loading threads: a whole warpgroup also where it hands its registers over."""
        return 32 if self.bulk and self.groups == 1 else WARPGROUP


@cache
def spec(plan: AttentionPlan) -> Spec:
    """What the kernel of a plan is specialised for."""
    shape, site = plan.shape, plan.shape.site
    assert shape.page_size is not None, shape
    single = site.causal and shape.max_q_len == 1
    return Spec(
        half=shape.dtype,
        tile_m=plan.tile_m,
        stages=plan.num_stages,
        heads=site.num_q_heads,
        kv_heads=site.num_kv_heads,
        dim=site.head_dim,
        dim_v=site.head_dim_v,
        page=shape.page_size,
        latent=site.latent_rank > 0,
        single=single,
        window=site.window is not None,
        softcap=site.softcap is not None,
        sink=site.sink,
        bulk=plan.loader is Loader.BULK,
    )
