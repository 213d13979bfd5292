"""Which way a product of T rows with a matrix [O, K] is computed: arithmetic and a measured table,
no torch.

Few rows: the product is a read of the matrix. `rows` gives each program some of the matrix's rows,
whole, in registers before the product can begin, and lets the tokens take turns. `tiles` streams
tiles of the matrix past all tokens at once, as a matrix product. None: the library's product."""

from typing import Literal, NamedTuple

MAX_TURNS = 4  # tokens of `rows`
MAX_TILE_TOKENS = 16
MAX_ROW_CHANNELS = 4096  # of `rows`: the matrix's rows are held whole
PROGRAM_BYTES = 16 << 10  # that a program of `rows` holds
WARP = 32


class Way(NamedTuple):
    """`outputs` rows of the matrix a program, `channels` of them at once."""

    kind: Literal["rows", "tiles"]
    outputs: int
    channels: int
    warps: int
    stages: int


def way(tokens: int, outputs: int, channels: int, itemsize: int) -> Way | None:
    """Of a product on a GPU of Hopper's kind or later; others were not measured and use the
    library's."""
    if not 1 <= tokens <= MAX_TURNS or channels > MAX_ROW_CHANNELS or channels % 8:
        return None
    held = 1 << (channels - 1).bit_length()
    rows = max(1, min(8, PROGRAM_BYTES // (held * itemsize)))
    return Way("rows", rows, held, 4, 1)
