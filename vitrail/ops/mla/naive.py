"""The definition of the steps around latent attention.

A token's projected row, X = H * D + C channels, D = N + P and C = R + P:

    | head 0: N without position, P rotary | head 1 | ... | R latent | P rotary |

Legend: T tokens, H heads, N, P, D, R, C, X as above, E value channels, F = P / 2 pairs."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.ops.norm.naive import rms_norm
from vitrail.ops.rope.naive import Turns, rotate

MAX_RANK = 512  # of latents that one of our programs holds whole


class MlaSizes(NamedTuple):
    """Channels: `nope` N, `rope` P, `rank` R, `value` E."""

    heads: int
    nope: int
    rope: int
    rank: int
    value: int

    @property
    def head(self) -> int:
        return self.nope + self.rope

    @property
    def row(self) -> int:
        return self.rank + self.rope

    @property
    def projected(self) -> int:
        return self.heads * self.head + self.row


class LatentNorm(NamedTuple):
    """The norm of the latent."""

    weight_R: Float[Tensor, "R"]
    eps: float


@runtime_checkable
class LatentSlots(Protocol):
    """Where the tokens' cache rows go: `slots_T` int64 [T], page * page size + offset, of pages
    `cache_NPC` [pages, page size, C]. Of e4m3 these hold row / scale."""

    cache_NPC: Tensor
    slots_T: Tensor
    scale: float

    def write(self, rows: Float[Tensor, "T C"]) -> None:
        """Put each row into its slot, rounded to what is stored."""
        ...


def expanded_queries(
    row_TX: Float[Tensor, "T X"],
    norm: LatentNorm,
    turns: Turns,
    sizes: MlaSizes,
    into: LatentSlots,
) -> Float[Tensor, "T H D"]:
    """Queries of the expanded form; every token's cache row, [normed latent | rotated channels], is
    in its slot. `row_TX` may be overwritten."""
    q_THD = _queries(row_TX, sizes)
    _write_rows(row_TX, norm, turns, sizes, into)
    return torch.cat((q_THD[..., : sizes.nope], _turned(q_THD[..., sizes.nope :], turns)), dim=-1)


def absorbed_queries(
    row_TX: Float[Tensor, "T X"],
    k_b_HNR: Float[Tensor, "H N R"],
    norm: LatentNorm,
    turns: Turns,
    sizes: MlaSizes,
    into: LatentSlots,
) -> Float[Tensor, "T H C"]:
    """Queries of the absorbed form, [q_nope k_b | rotated channels]; cache rows as above."""
    q_THD = _queries(row_TX, sizes)
    _write_rows(row_TX, norm, turns, sizes, into)
    q_THR = torch.bmm(q_THD[..., : sizes.nope].transpose(0, 1), k_b_HNR).transpose(0, 1)
    return torch.cat((q_THR, _turned(q_THD[..., sizes.nope :], turns)), dim=-1)


def values(
    out_THR: Float[Tensor, "T H R"], v_b_HER: Float[Tensor, "H E R"]
) -> Float[Tensor, "T HE"]:
    """Attended latents to values, heads side by side."""
    out_HTE = torch.bmm(out_THR.transpose(0, 1), v_b_HER.transpose(1, 2))
    return out_HTE.transpose(0, 1).flatten(1)


def expanded_keys(
    row_TC: Float[Tensor, "T C"], kv_b: Float[Tensor, "HNE R"], sizes: MlaSizes, mend: bool
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T H E"]]:
    """Keys and values of all heads from cache rows. Rows of `kv_b`: per head N, then E. `mend`:
    a row of values that is not finite becomes zeros, and its keys NaN, so that only who sees it is
    spoilt (`VarlenMetadata.mended`)."""
    kv_TX = F.linear(row_TC[:, : sizes.rank], kv_b)
    kv_THX = kv_TX.unflatten(-1, (sizes.heads, sizes.nope + sizes.value))
    k_pe_THP = row_TC[:, None, sizes.rank :].expand(-1, sizes.heads, -1)
    k_THD, v_THE = torch.cat((kv_THX[..., : sizes.nope], k_pe_THP), -1), kv_THX[..., sizes.nope :]
    if mend:
        faulty_TH1 = ~v_THE.isfinite().all(-1, keepdim=True)
        return k_THD.masked_fill(faulty_TH1, torch.nan), v_THE.masked_fill(faulty_TH1, 0)
    return k_THD, v_THE


def _queries(row_TX: Float[Tensor, "T X"], sizes: MlaSizes) -> Float[Tensor, "T H D"]:
    return row_TX[:, : sizes.heads * sizes.head].unflatten(-1, (sizes.heads, sizes.head))


def _turned(x_THP: Float[Tensor, "T H P"], turns: Turns) -> Float[Tensor, "T H P"]:
    return rotate(x_THP, turns.cos_TF, turns.sin_TF, turns.interleaved)


def _write_rows(
    row_TX: Float[Tensor, "T X"],
    norm: LatentNorm,
    turns: Turns,
    sizes: MlaSizes,
    into: LatentSlots,
) -> None:
    row_TC = row_TX[:, sizes.heads * sizes.head :]
    latent_TR = rms_norm(row_TC[:, : sizes.rank], norm.weight_R, norm.eps)
    k_pe_TP = _turned(row_TC[:, None, sizes.rank :], turns)[:, 0]
    into.write(torch.cat((latent_TR, k_pe_TP), dim=-1))
