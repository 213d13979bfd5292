"""FlashAttention-4's own legality and tiles, as arithmetic (see `tiles`): what its host code
decides and refuses, read in its releases from 4.0.0b26 on, each constraint one statement.

Latent sites are its `qv` form: queries and keys of head_dim - rank rotary channels beside a latent
of `rank`. Its splits are even shares of every sequence, not work items of ours."""

from collections.abc import Callable

from vitrail.attention.legality import Rule
from vitrail.attention.tiles import (
    BY_BULK,
    BY_ROWS,
    DECODE,
    DECODE_QUERIES,
    EXTEND,
    LATENT,
    VARLEN,
    Choice,
    Facts,
    Num,
    ceil_div,
    least,
    live_pages,
    most,
    round_up,
    row_blocks,
    where,
    workspace_bytes,
)

BUDGET_BYTES = 224 << 10  # of shared memory, on SM100 and SM110
MAX_SPLITS = 128


def is_datacenter_blackwell(f: Facts) -> Num:
    return (f.cc >= 100) & (f.cc < 120)


def is_hopper(f: Facts) -> Num:
    return f.cc == 90


def dims(f: Facts) -> tuple[Num, Num]:
    """head_dim and head_dim_v as it sees them."""
    return f.dim - f.latent, f.dim_v


def is_local(f: Facts) -> Num:
    return f.window >= 0


def q_stage(f: Facts) -> Num:
    """Tiles of 128 packed rows that an SM100 program holds."""
    two = f.q_len * (f.q_heads // f.kv_heads) > 128
    return where(is_datacenter_blackwell(f) & two & (f.dim_v < 256), 2, 1)


def tile(f: Facts) -> tuple[Num, Num]:
    """tile_m, tile_n by architecture and head_dim; nothing later changes them."""
    d, dv = dims(f)
    local = is_local(f)
    m90 = where(d <= 96, 192, where(d <= 256, 128, 64))
    n90 = where(
        d <= 64,
        128,
        where(
            d <= 96,
            where(f.causal | local, 128, 144),
            where(
                d <= 128,
                128,
                where(
                    d <= 192,
                    where(local, 96, where(dv <= 128, 128, 112)),
                    where(d <= 256, where(local, 64, 80), 64),
                ),
            ),
        ),
    )
    hopper, blackwell = is_hopper(f), is_datacenter_blackwell(f)
    return where(hopper, m90, 128), where(blackwell, 128, where(hopper, n90, 64))


def num_splits(f: Facts, tile_m: Num, tile_n: Num) -> Num:
    """Shares of each sequence's keys, from its real length, where it can split at all. The cap of
    two tiles of queries with head_dim != head_dim_v is its own: it would halve the key tile for
    them and leave the bulk copy."""
    d, dv = dims(f)
    can = (
        is_datacenter_blackwell(f)
        & f.paged
        & (f.q_len <= DECODE_QUERIES)
        & (round_up(dv, 16) < 192)
        & (f.latent == 0)
        & (f.invariant == 0)
        & ((d == dv) | (q_stage(f) == 1))
    )
    tiles = ceil_div(live_pages(f) * most(f.page, 1), tile_n)
    rows = ceil_div(f.q_len * (f.q_heads // f.kv_heads), tile_m * q_stage(f))
    shares = least(f.num_sms // (f.batch * f.kv_heads * rows), least(tiles, MAX_SPLITS))
    return where(can & (tiles > 4), most(shares, 1), 1)


def is_bulk(f: Facts, tile_n: Num) -> Num:
    """Keys come by bulk copy where they are not paged, and from pages of just a tile."""
    return (is_hopper(f) | is_datacenter_blackwell(f)) & ((f.paged == 0) | (f.page == tile_n))


def choose_fa4(f: Facts) -> Choice:
    d, dv = dims(f)
    d, dv = round_up(d, 16), round_up(dv, 16)
    hopper, blackwell = is_hopper(f), is_datacenter_blackwell(f)
    tile_m, tile_n = tile(f)
    stage = q_stage(f)
    shares = num_splits(f, tile_m, tile_n)
    bulk = is_bulk(f, tile_n)
    loaders = where(blackwell & (stage == 2), 64, 128)
    groups = where(blackwell, 3, where(hopper, where(dv > 256, 2, tile_m // 64), 1))
    warps = where(blackwell, 16, where(hopper, 4 * (tile_m // 64 + 1), 4))
    stages, smem = stages_and_bytes(f, stage, shares, tile_m, tile_n)
    # Hopper's warpgroups give registers from the loader to those that multiply.
    working = where(groups == 3, 160, where(groups == 2, where(bulk, 240, 224), 255))
    loading = where(groups == 3, 32, where(groups == 2, where(bulk, 24, 40), 56))
    live = tile_m * (tile_n + dv) // (128 * groups)
    pages = live_pages(f)
    decode = f.paged & (f.q_len <= DECODE_QUERIES)
    # A pair of SMs shares heads of 256 and latents.
    pair = where(dv >= 256, 2, 1)
    return Choice(
        where(f.latent > 0, LATENT, where(decode, DECODE, where(f.paged, EXTEND, VARLEN))),
        tile_m,
        tile_n,
        where(f.latent > 0, f.dim, d),
        0,
        dv,
        0,
        f.q_heads > f.kv_heads,
        warps,
        stages,
        where(bulk, BY_BULK, BY_ROWS),
        loaders,
        ceil_div(tile_n, loaders),
        tile_n % loaders != 0,
        shares,
        most(f.num_sms // f.kv_heads, 1),
        f.batch * row_blocks(f, tile_m) * shares,
        ceil_div(pages, shares),
        0,
        smem,
        where(blackwell, 128, working),
        where(blackwell, 512 * 128, where(hopper, 128 * (loading + working * groups), 128 * 255)),
        where(blackwell, 0, live),
        where(blackwell, stage * (128 + dv // pair), 0),
        workspace_bytes(f, shares, f.batch * row_blocks(f, tile_m) * shares, tile_m),
    )


def stages_and_bytes(
    f: Facts, stage: Num, shares: Num, tile_m: Num, tile_n: Num
) -> tuple[Num, Num]:
    """Stages of keys and values, and the shared memory of all buffers. SM100: queries and output
    (fp32 where shares are combined) lie over each other for (192, 128) and for wide split heads; a
    stage holds either a tile of keys or one of values."""
    d, dv = dims(f)
    d, dv = round_up(d, 16) + f.latent, round_up(dv, 16)
    hopper, blackwell = is_hopper(f), is_datacenter_blackwell(f)
    pair = where(dv >= 256, 2, 1)
    q = stage * 128 * d * 2 // pair
    o = stage * 128 * dv * where(shares > 1, 4, 2) // pair
    over = (d == 192) | ((dv >= 128) & (shares > 1)) | (f.latent > 0)
    held = where(over, most(q, o), q + o)
    one = tile_n * where(f.latent > 0, most(f.latent, dv), most(d, dv)) * 2 // pair
    fits = most(least((BUDGET_BYTES - held) // one, 32), 2)
    pairs = where(hopper & (dv <= 256), 2, 1)
    plain = tile_m * d * 2 + pairs * tile_n * (d + dv) * 2
    return where(blackwell, fits, pairs), where(blackwell, held + fits * one, plain)


def _dims_of_blackwell(f: Facts) -> Num:
    d, dv = dims(f)
    small = (d >= 8) & (d <= 128) & (dv >= 8) & (dv <= 128)
    wide = ((d == 192) & (dv == 128)) | ((d == 256) & (dv == 256))
    return small | wide | ((dv == 512) & ((d == 64) | (d == 512)))


def _dims_of_hopper(f: Facts) -> Num:
    d, dv = dims(f)
    return ((d >= 8) & (d <= 256) & (dv >= 8) & (dv <= 256)) | ((d == 512) & (dv == 512))


def _is_hd256(f: Facts) -> Num:
    return is_datacenter_blackwell(f) & (f.dim == 256) & (f.latent == 0)


def _rule(
    name: str,
    field: str,
    holds: Callable[[Facts, Choice], Num],
    saw: str,
    rule: str,
    change: str,
) -> Rule:
    return Rule(f"fa4_{name}", field, holds, saw, rule, change)


_HEADS = "head_dim {f.dim} and {f.dim_v}, latent rank {f.latent}"
_OTHER = "use the triton backend"

FA4_RULES: tuple[Rule, ...] = (
    _rule(
        "arch",
        "gpu",
        lambda f, c: (f.cc >= 80) & (f.cc < 120),
        "compute capability {f.cc}",
        "80 to 119",
        _OTHER,
    ),
    _rule(
        "dtype",
        "dtype",
        lambda f, c: (f.half == 1) & (f.kv_bytes == f.q_bytes),
        "queries of {f.q_bytes} bytes, keys of {f.kv_bytes}",
        "bfloat16 or float16, queries, keys and values alike",
        _OTHER,
    ),
    _rule(
        "alignment",
        "head_dim",
        lambda f, c: (f.dim % 8 == 0) & (f.dim_v % 8 == 0),
        _HEADS,
        "multiples of 8",
        _OTHER,
    ),
    _rule(
        "dims_ampere",
        "head_dim",
        lambda f, c: (f.cc >= 90) | ((f.dim <= 256) & (f.dim_v <= 256)),
        _HEADS,
        "at most 256 before compute capability 90",
        _OTHER,
    ),
    _rule(
        "dims_hopper",
        "head_dim",
        lambda f, c: (is_hopper(f) == 0) | (f.latent > 0) | _dims_of_hopper(f),
        _HEADS,
        "8 to 256, or 512 and 512",
        _OTHER,
    ),
    _rule(
        "dims_blackwell",
        "head_dim",
        lambda f, c: (is_datacenter_blackwell(f) == 0) | _dims_of_blackwell(f),
        _HEADS,
        "8 to 128, (192, 128), (256, 256), or 512 with 64 or 512",
        _OTHER,
    ),
    _rule(
        "paged_ampere",
        "page_size",
        lambda f, c: (f.cc >= 90) | (f.paged == 0),
        "pages of {f.page} on compute capability {f.cc}",
        "no pages before 90",
        _OTHER,
    ),
    _rule(
        "paged_dims",
        "head_dim",
        lambda f, c: (f.paged == 0) | ((f.dim % 16 == 0) & (f.dim_v % 16 == 0)),
        _HEADS + ", in pages",
        "multiples of 16 where keys are paged",
        _OTHER,
    ),
    _rule(
        "bulk_page",
        "page_size",
        lambda f, c: (c.loader != BY_BULK) | (f.paged == 0) | (f.page == c.tile_n),
        "a bulk copy of tiles of {c.tile_n} keys from pages of {f.page}",
        "a page is a tile",
        "use a page size of {c.tile_n}",
    ),
    _rule(
        "tile_kept",
        "max_kv_len",
        lambda f, c: (c.tile_m == tile(f)[0]) & (c.tile_n == tile(f)[1]),
        "a tile of {c.tile_m} x {c.tile_n}",
        "the tile of this architecture and head, whatever is decided later",
        "report this plan",
    ),
    _rule(
        "bulk_kept",
        "page_size",
        lambda f, c: (is_bulk(f, tile(f)[1]) == 0) | (c.loader == BY_BULK),
        "tiles of {c.tile_n} keys copied row by row from pages of {f.page}",
        "what can come by bulk copy does",
        "report this plan",
    ),
    _rule(
        "split_arch",
        "max_kv_len",
        lambda f, c: (c.max_splits == 1) | is_datacenter_blackwell(f),
        "{c.max_splits} splits on compute capability {f.cc}",
        "splits on 100 to 119 alone",
        _OTHER,
    ),
    _rule(
        "split_dims",
        "head_dim",
        lambda f, c: (c.max_splits == 1) | ((round_up(f.dim_v, 16) < 192) & (f.latent == 0)),
        "{c.max_splits} splits of " + _HEADS,
        "splits have values below 192 channels and no latent",
        _OTHER,
    ),
    _rule(
        "split_two_tiles",
        "max_q_len",
        lambda f, c: (c.max_splits == 1) | (f.dim == f.dim_v) | (q_stage(f) == 1),
        "{c.max_splits} splits of {f.q_len} queries of {f.q_heads} heads, " + _HEADS,
        "unequal heads of more than 128 packed rows are not split: the key tile would halve",
        _OTHER,
    ),
    _rule(
        "hd256",
        "head_dim",
        lambda f, c: (_is_hd256(f) == 0) | ((f.softcap == 0) & (f.sink == 0) & (f.paged == 0)),
        _HEADS + ", softcap {f.softcap}, sink {f.sink}, pages of {f.page}",
        "heads of 256 have no softcap, sink or pages of sequences of several lengths",
        _OTHER,
    ),
    _rule(
        "latent_arch",
        "latent_rank",
        lambda f, c: (f.latent == 0) | is_datacenter_blackwell(f),
        "latent rank {f.latent} on compute capability {f.cc}",
        "latents on 100 to 119 alone",
        _OTHER,
    ),
    _rule(
        "latent_plain",
        "latent_rank",
        lambda f, c: (f.latent == 0) | ((f.latent == 512) & (f.window < 0) & (f.softcap == 0)),
        "latent rank {f.latent}, window {f.window}, softcap {f.softcap}",
        "a latent of 512 channels, no window, no softcap",
        _OTHER,
    ),
    _rule(
        "sink",
        "sink",
        lambda f, c: (f.sink == 0) | ((f.bf16 == 1) & (f.cc >= 90)),
        "a sink, compute capability {f.cc}, bfloat16: {f.bf16}",
        "sinks are bfloat16, on 90 to 119",
        _OTHER,
    ),
)
