"""The definitions of the towers' operations.

Legend: N packed patches, M channels, F features in or rotary pairs, H heads, D head_dim, h w the
sides of a learned table, G grids."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from vitrail.ops.rope.naive import rope_table_2d, rotate

# Whether `rotate_heads` makes rows safe that are not finite: see `VarlenMetadata.mended`.
MENDS = False


class Grids(NamedTuple):
    """(height, width) in patches of packed sequences, row-major, one after another. `ints`: int32
    on the device, [prefix sums of their patches | their sides]. `num_patches` in all. `longest`:
    0, or what is launched is captured, and serves whatever sizes `ints` has then, as many patches
    in all and none longer."""

    sizes: tuple[tuple[int, int], ...]
    ints: Int[Tensor, "I"]
    num_patches: int
    longest: int = 0

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]], device: torch.device) -> "Grids":
        """In one copy, which the host does not wait for."""
        ints = grid_ints(sizes)
        if device.type == "cuda":
            host = torch.tensor(ints, dtype=torch.int32, pin_memory=True)
            flat = host.to(device, non_blocking=True)
        else:
            flat = torch.tensor(ints, dtype=torch.int32, device=device)
        return cls(tuple(sizes), flat, sum(height * width for height, width in sizes))

    @classmethod
    def over(cls, grids: "Sequence[tuple[int, int]] | Grids", device: torch.device) -> "Grids":
        """`grids`, packed if they are not."""
        return grids if isinstance(grids, Grids) else cls.of(grids, device)

    @property
    def edges(self) -> Int[Tensor, "G1"]:
        """Prefix sums of the sequences' patches."""
        return self.ints[: len(self.sizes) + 1]

    @property
    def sides(self) -> Int[Tensor, "G2"]:
        """height, width, height, width, ..."""
        return self.ints[len(self.sizes) + 1 :]


def grid_ints(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """What `Grids.ints` holds."""
    edges = accumulate((height * width for height, width in sizes), initial=0)
    return [*edges, *chain.from_iterable(sizes)]


def normalise(
    patches_NF: Float[Tensor, "N F"] | UInt8[Tensor, "N F"], dtype: torch.dtype
) -> Float[Tensor, "N F"]:
    """uint8 samples to (x / 255 - 0.5) / 0.5 in fp32, rounded once to `dtype`; floats as they
    are."""
    if patches_NF.dtype != torch.uint8:
        return patches_NF.to(dtype)
    return ((patches_NF.float() / 255 - 0.5) / 0.5).to(dtype)


def embed(
    patches_NF: Float[Tensor, "N F"] | UInt8[Tensor, "N F"],
    weight_MF: Float[Tensor, "M F"],
    bias_M: Float[Tensor, "M"],
) -> Float[Tensor, "N M"]:
    """Normalised patches through the first projection, in the weight's dtype."""
    return F.linear(normalise(patches_NF, weight_MF.dtype), weight_MF, bias_M)


def positions(
    table_hwM: Float[Tensor, "h w M"], sizes: Sequence[tuple[int, int]]
) -> Float[Tensor, "N M"]:
    """The learned table resized to each grid, bicubic in fp32 and rounded once, as it is where the
    sizes agree."""
    made = {size: _resized(table_hwM, size) for size in dict.fromkeys(sizes)}
    none = table_hwM.new_empty((0, table_hwM.shape[2]))
    return torch.cat([none, *(made[size] for size in sizes)])


def add_positions(
    x_NM: Float[Tensor, "N M"], table_hwM: Float[Tensor, "h w M"], grids: Grids
) -> Float[Tensor, "N M"]:
    """x + `positions`. May overwrite x."""
    return x_NM + positions(table_hwM, grids.sizes)


def rope_tables(
    grids: Grids, dim: int, theta: float, device: torch.device
) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N F"]]:
    """`rope_table_2d` of packed grids: fp32 cos and sin."""
    return rope_table_2d(grids.sizes, dim, theta, device)


def rotate_heads(
    qkv_NHD: Float[Tensor, "N H D"],
    heads: tuple[int, int, int],
    cos_NF: Float[Tensor, "N F"],
    sin_NF: Float[Tensor, "N F"],
    interleaved: bool,
) -> tuple[Float[Tensor, "N Hq D"], Float[Tensor, "N Hk D"], Float[Tensor, "N Hv D"]]:
    """Queries, keys and values, of so many heads each: the first two turned (`rope.naive.rotate`).
    May overwrite what it is given, and make rows safe that are not finite (`MENDS`)."""
    q_NHD, k_NHD, v_NHD = qkv_NHD.split(heads, dim=1)
    turned = [rotate(x_NHD, cos_NF, sin_NF, interleaved) for x_NHD in (q_NHD, k_NHD)]
    return turned[0], turned[1], v_NHD


def layer_norm(
    x_NM: Float[Tensor, "N M"], weight_M: Float[Tensor, "M"], bias_M: Float[Tensor, "M"], eps: float
) -> Float[Tensor, "N M"]:
    """(x - mean) / sqrt(var + eps) * weight + bias: fp32 inside, rounded once to x's dtype."""
    return F.layer_norm(x_NM, (x_NM.shape[1],), weight_M, bias_M, eps)


def add_layer_norm(
    x_NM: Float[Tensor, "N M"],
    delta_NM: Float[Tensor, "N M"],
    weight_M: Float[Tensor, "M"],
    bias_M: Float[Tensor, "M"],
    eps: float,
) -> tuple[Float[Tensor, "N M"], Float[Tensor, "N M"]]:
    """(norm of x + delta, x + delta). The sum is rounded to x's dtype before it is normed. May
    overwrite delta."""
    total_NM = x_NM + delta_NM
    return layer_norm(total_NM, weight_M, bias_M, eps), total_NM


def linear_gelu(
    x_NM: Float[Tensor, "N M"],
    weight_FM: Float[Tensor, "F M"],
    bias_F: Float[Tensor, "F"],
    approximate: str,
) -> Float[Tensor, "N F"]:
    """gelu(x weight^T + bias); `approximate`: torch's name of the form."""
    return F.gelu(F.linear(x_NM, weight_FM, bias_F), approximate=approximate)


def _resized(table_hwM: Float[Tensor, "h w M"], size: tuple[int, int]) -> Float[Tensor, "hw M"]:
    if table_hwM.shape[:2] != size:
        image_1Mhw = table_hwM.float().permute(2, 0, 1)[None]
        resized = F.interpolate(image_1Mhw, size, mode="bicubic")
        table_hwM = resized[0].permute(1, 2, 0).to(table_hwM.dtype)
    return table_hwM.flatten(0, 1)
