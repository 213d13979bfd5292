"""Rotary positions of a step: cosines and sines once a forward pass, shared by all layers.

Legend: T packed tokens, H heads, D rotary channels, F = D / 2 frequencies."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from vitrail.config.model import RopeConfig
from vitrail.ops.dispatch import select_rope_table
from vitrail.ops.rope.naive import Turns, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """fp32 tables of a step's positions. Calling it rotates all channels of x, back in x's
    dtype."""

    cos_TF: Float[Tensor, "T F"]
    sin_TF: Float[Tensor, "T F"]
    interleaved: bool

    def part(self, tokens: slice) -> Turns:
        """Of some of the tokens, for ops that rotate among other things."""
        return Turns(self.cos_TF[tokens], self.sin_TF[tokens], self.interleaved)

    def __call__(self, x_THD: Float[Tensor, "T H D"]) -> Float[Tensor, "T H D"]:
        return rotate(x_THD, self.cos_TF, self.sin_TF, self.interleaved)


def make_rotary(positions_T: Int[Tensor, "T"], rope: RopeConfig) -> Rotary:
    """Computed from the positions alone, on their device: no table of the longest context is
    kept."""
    rope_table = select_rope_table(positions_T.device)
    cos_TF, sin_TF = rope_table(positions_T, rope.dim, rope.theta, rope.scaling)
    return Rotary(cos_TF=cos_TF, sin_TF=sin_TF, interleaved=rope.interleaved)
