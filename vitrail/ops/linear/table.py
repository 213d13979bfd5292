"""Which way a product of T rows with a matrix [O, K] is computed on a GPU: a measured table as
data, no torch.

Few rows: the product is a read of the matrix. Ours gives each program some of the matrix's rows,
whole, in registers before the product can begin, and lets the tokens take turns. Elsewhere the
library's product is as quick or quicker."""

from typing import NamedTuple

MAX_CHANNELS = 4096  # the matrix's rows are held whole
# (tokens, elements of the matrix) up to which ours is the quicker on an H200, in bf16, cold
TURNS = ((1, 1 << 62), (2, 8 << 20), (4, 4 << 20))
THREAD_VALUES = 64  # of the matrix that a thread holds: more leave no room for the next kernel's
WARP = 32


class Way(NamedTuple):
    """`outputs` rows of the matrix a program, `channels` of them, a power of two, at once."""

    outputs: int
    channels: int
    warps: int


def way(tokens: int, outputs: int, channels: int, normed: bool) -> Way | None:
    """None: the library's. `normed`: with a norm in front, which every program computes. For GPUs
    of Hopper's kind and later; others were not measured and use the library's."""
    if channels > MAX_CHANNELS or channels % 8:
        return None
    if not any(1 <= tokens <= t and outputs * channels <= most for t, most in TURNS):
        return None
    held, warps = 1 << (channels - 1).bit_length(), 8
    rows = THREAD_VALUES * WARP * warps // held
    # As many rows as fit where a norm is shared among them, else half.
    rows = max(1, min(8, rows) if normed else min(8, rows) // 2)
    return Way(rows, held, warps)


class FixedWay(NamedTuple):
    """A program's tile of `tokens` by `outputs`, `channels` at once."""

    tokens: int
    outputs: int
    channels: int
    warps: int
    stages: int


WIDE_OUTPUTS = 8192  # from so many on, tiles twice as wide are still enough for all SMs


def fixed_way(outputs: int) -> FixedWay:
    """For any number of tokens."""
    if outputs >= WIDE_OUTPUTS:
        return FixedWay(128, 128, 64, 8, 3)
    return FixedWay(128, 64, 64, 4, 4)
