"""The definition of the step before attention over keys and values by head.

A token's projected row, X = (H + 2 K) D channels: | queries by head | keys | values |

Legend: T tokens, H query heads, K key heads, D channels of a head, F = D / 2 pairs."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from vitrail.ops.rope.naive import Turns, rotate


class GqaSizes(NamedTuple):
    """H, K and D."""

    heads: int
    kv_heads: int
    head: int

    @property
    def projected(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head


@runtime_checkable
class PagedSlots(Protocol):
    """Where the tokens' keys and values go: `slots_T` int64 [T], page * page size + offset, of
    pages [pages, page size, K, D]. Of e4m3 these hold keys / scale and values / scale."""

    k_NPKD: Tensor
    v_NPKD: Tensor
    slots_T: Tensor
    k_scale: float
    v_scale: float

    def write(self, k_TKD: Float[Tensor, "T K D"], v_TKD: Float[Tensor, "T K D"]) -> None:
        """Put each token's keys and values into its slot, rounded to what is stored."""
        ...


def paged_queries(
    row_TX: Float[Tensor, "T X"], turns: Turns, sizes: GqaSizes, into: PagedSlots
) -> Float[Tensor, "T H D"]:
    """Rotated queries; every token's rotated keys and its values are in their slots. `row_TX` may
    be overwritten."""
    row_TYD = row_TX.unflatten(-1, (-1, sizes.head))
    q_THD, k_TKD, v_TKD = row_TYD.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
    q_THD, k_TKD = (
        rotate(x, turns.cos_TF, turns.sin_TF, turns.interleaved) for x in (q_THD, k_TKD)
    )
    into.write(k_TKD, v_TKD)
    return q_THD
