"""The step before attention over keys and values by head: the kernel against the definition."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import interpreted
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.spec import PagedKv
from vitrail.config.model import KvDType, KvScales
from vitrail.ops.gqa import naive, triton
from vitrail.ops.gqa.naive import GqaSizes
from vitrail.ops.rope.naive import Turns, rope_table

PAGE = 3
# fewer heads than a program takes, and more
SIZES = [GqaSizes(3, 1, 10), GqaSizes(triton.MAX_HEADS + 2, triton.MAX_HEADS + 1, 8)]


class Step:
    """Tokens at slots of a pool that holds NaN elsewhere."""

    def __init__(
        self, tokens: int, sizes: GqaSizes, interleaved: bool, stored: KvDType, half: bool
    ):
        g = torch.Generator().manual_seed(tokens)
        row = torch.randn(tokens, sizes.projected + 2, generator=g)[:, 2:]
        self.row_TX = row.half() if half else row
        spec = PagedKv(
            num_kv_heads=sizes.kv_heads, head_dim=sizes.head, head_dim_v=sizes.head, dtype=stored
        )
        scales = KvScales(k=0.25, v=0.037) if stored == "float8_e4m3fn" else KvScales()
        pages = tokens // PAGE + 2
        self.pool = KvPool([spec], pages, PAGE, torch.device("cpu"), {0: scales})
        for kept in self.pool.paged(0):
            kept.view(torch.uint8).fill_(0xFF)
        self.slots = torch.randperm(pages * PAGE, generator=g)[:tokens]
        cos, sin = rope_table(torch.randint(0, 900, (tokens,), generator=g), sizes.head, 1e4)
        self.turns, self.sizes = Turns(cos, sin, interleaved), sizes

    def run(self, ops) -> Tensor:
        into = self.pool.paged_slots(0, self.slots)
        return ops.paged_queries(self.row_TX.clone(), self.turns, self.sizes, into)

    def written(self) -> tuple[Tensor, Tensor]:
        k, v = (t.flatten(0, 1).float() for t in self.pool.paged(0))
        others = torch.ones(len(k), dtype=torch.bool)
        others[self.slots] = False
        assert k[others].isnan().all()
        assert v[others].isnan().all()
        return k[self.slots], v[self.slots]


@interpreted
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_kernel_is_the_definition(tokens: int, sizes: GqaSizes, interleaved: bool) -> None:
    s, other = (Step(tokens, sizes, interleaved, "float32", False) for _ in range(2))
    torch.testing.assert_close(s.run(triton), other.run(naive), atol=2e-6, rtol=2e-6)
    for got, want in zip(s.written(), other.written(), strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@interpreted
def test_codes_of_e4m3_are_the_pool_s() -> None:
    """But for the interpreter's faults: see `test_mla`."""
    s, other = (Step(9, SIZES[0], False, "float8_e4m3fn", True) for _ in range(2))
    torch.testing.assert_close(s.run(triton), other.run(naive), atol=2e-3, rtol=2e-3)
    for got, want in zip(s.written(), other.written(), strict=True):
        assert (got != want).float().mean() < 0.05
