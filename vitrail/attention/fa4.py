"""FlashAttention-4's own legality and tiles, as arithmetic (see `tiles`): what its host code
decides and refuses, read in the one release that we launch, each constraint one statement.

Its splits are even shares of every sequence, not work items of ours. Latent rows are refused: for
them its host chooses among several kernels by numbers that a plan does not hold."""

import re
from collections.abc import Iterator

from vitrail.attention.legality import Rule
from vitrail.attention.tiles import (
    BY_BULK,
    BY_ROWS,
    DECODE,
    DECODE_QUERIES,
    EXTEND,
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
from vitrail.config.finding import Finding

# Of flash-attn-4, whose compiled kernels take their arguments by position. CI compiles with it.
RELEASE = "4.0.0b36"
# The first that divides the rows of a paged tile by the loader's threads with ceiling.
CEILING_RELEASE = "4.0.0b26"

BUDGET_BYTES = 224 << 10  # of shared memory, on SM100 and SM110
BARRIER_BYTES = 1024  # beside Hopper's buffers, their alignment included
STATE_BYTES = 1024  # on SM100, of barriers and of each tile of queries' maxima and sums
MAX_SPLITS = 128


def is_datacenter_blackwell(f: Facts) -> Num:
    return (f.cc >= 100) & (f.cc < 120)


def is_hopper(f: Facts) -> Num:
    return f.cc == 90


def release_findings(release: str | None, f: Facts, c: Choice) -> Iterator[Finding]:
    """Why an installed release (None: there is none) cannot run what a plan chose."""
    change = f"pip install flash-attn-4=={RELEASE}"
    if release is None:
        yield Finding(
            where="attention backend fa4",
            saw="flash-attn-4 is not installed",
            rule=f"flash-attn-4 {RELEASE} is beside torch",
            change=change,
            code="fa4_not_installed",
        )
    elif release != RELEASE:
        yield Finding(
            where="attention backend fa4",
            saw=f"flash-attn-4 {release}",
            rule=f"{RELEASE}: its kernels are compiled and launched as that release's host does",
            change=change,
            code="fa4_release",
        )
        tile_n = floor_tile(f, c)
        if is_before(release, CEILING_RELEASE) and tile_n < c.loader_threads:
            yield Finding(
                where="attention backend fa4: page_size",
                saw=f"{tile_n} keys of a tile, pages of {f.page}, for {c.loader_threads} loader "
                f"threads: flash-attn-4 {release} divides with floor, 0 rows a thread",
                rule="a loader thread has a row: the crash 'Expected size in shape to be strictly "
                f"positive, but got 0' of releases before {CEILING_RELEASE}",
                change=change,
                code="fa4_zero_rows",
            )


def is_before(release: str, other: str) -> bool:
    return _version(release) < _version(other)


def _version(release: str) -> tuple[tuple[int, ...], int]:
    """4.0.0b18 before 4.0.0; what is neither counts as old."""
    found = re.fullmatch(r"(\d+(?:\.\d+)*)(?:b(\d+))?", release)
    if found is None:
        return (0,), 0
    return tuple(map(int, found[1].split("."))), int(found[2] or 1 << 30)


def floor_tile(f: Facts, c: Choice) -> int:
    """Keys of the tile that the loader's threads share where they copy rows. Releases with the
    floor halve it, and leave the bulk copy, where they split keys and values of unequal heads."""
    d, dv = f.dim, f.dim_v
    tiles = live_pages(f) * most(f.page, 1) // 128
    halves = is_datacenter_blackwell(f) & f.paged & (d != dv) & (tiles >= 64) & (q_stage(f) == 1)
    if halves and f.batch * f.kv_heads * 2 <= f.num_sms:
        return 64
    return c.tile_n if c.loader == BY_ROWS else c.loader_threads


def is_local(f: Facts) -> Num:
    return f.window >= 0


def q_stage(f: Facts) -> Num:
    """Tiles of 128 packed rows that an SM100 program holds."""
    two = f.q_len * (f.q_heads // f.kv_heads) > 128
    return where(is_datacenter_blackwell(f) & two & (f.dim_v < 256), 2, 1)


def tile(f: Facts) -> tuple[Num, Num]:
    """tile_m, tile_n by architecture and head_dim; nothing later changes them."""
    d, dv = f.dim, f.dim_v
    local = is_local(f)
    m90 = where(d <= 96, 192, 128)
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
                    where(local, 64, 80),
                ),
            ),
        ),
    )
    hopper, blackwell = is_hopper(f), is_datacenter_blackwell(f)
    return where(hopper, m90, 128), where(blackwell, 128, where(hopper, n90, 64))


def weights_in_registers(head_dim: int) -> bool:
    """Whether its Hopper kernel keeps softmax weights in registers; else they have room in shared
    memory, a tile of queries by keys."""
    return bool(_weights_in_registers(head_dim))


def _weights_in_registers(d: Num) -> Num:
    return (d <= 64) | (d > 96)


def num_splits(f: Facts, tile_m: Num, tile_n: Num) -> Num:
    """Shares of each sequence's keys, from its real length, where it can split at all. Not where
    head_dim != head_dim_v: its host would halve the key tile, leave the bulk copy and choose
    another number."""
    can = (
        is_datacenter_blackwell(f)
        & f.paged
        & (f.q_len <= DECODE_QUERIES)
        & (f.dim == f.dim_v)
        & (f.invariant == 0)
    )
    tiles = ceil_div(live_pages(f) * most(f.page, 1), tile_n)
    rows = ceil_div(f.q_len * (f.q_heads // f.kv_heads), tile_m * q_stage(f))
    shares = least(f.num_sms // (f.batch * f.kv_heads * rows), least(tiles, MAX_SPLITS))
    return where(can & (tiles > 4), most(shares, 1), 1)


def is_bulk(f: Facts, tile_n: Num) -> Num:
    """Keys come by bulk copy where they are not paged, and from pages of just a tile."""
    return (is_hopper(f) | is_datacenter_blackwell(f)) & ((f.paged == 0) | (f.page == tile_n))


def choose_fa4(f: Facts) -> Choice:
    d, dv = round_up(f.dim, 16), round_up(f.dim_v, 16)
    hopper, blackwell = is_hopper(f), is_datacenter_blackwell(f)
    tile_m, tile_n = tile(f)
    stage = q_stage(f)
    shares = num_splits(f, tile_m, tile_n)
    bulk = is_bulk(f, tile_n)
    loaders = where(blackwell & (stage == 2), 64, 128)
    groups = where(blackwell, 3, where(hopper, tile_m // 64, 1))
    warps = where(blackwell, 16, where(hopper, 4 * (tile_m // 64 + 1), 4))
    stages, smem = stages_and_bytes(f, stage, shares, tile_m, tile_n)
    # Hopper's warpgroups give registers from the loader to those that multiply.
    working = where(groups == 3, 160, where(groups == 2, where(bulk, 240, 224), 255))
    loading = where(groups == 3, 32, where(groups == 2, where(bulk, 24, 40), 56))
    live = tile_m * (tile_n + dv) // (128 * groups)
    pages = live_pages(f)
    decode = f.paged & (f.q_len <= DECODE_QUERIES)
    # A pair of SMs shares heads of 256.
    pair = where(dv >= 256, 2, 1)
    return Choice(
        where(decode, DECODE, where(f.paged, EXTEND, VARLEN)),
        tile_m,
        tile_n,
        d,
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
    stage holds either a tile of keys or one of values; of three stages of (192, 128) one has the
    size of values."""
    d, dv = round_up(f.dim, 16), round_up(f.dim_v, 16)
    hopper, blackwell = is_hopper(f), is_datacenter_blackwell(f)
    pair = where(dv >= 256, 2, 1)
    q = stage * 128 * d * 2 // pair
    o = stage * 128 * dv * where(shares > 1, 4, 2) // pair
    over = (d == 192) | ((dv >= 128) & (shares > 1))
    held = where(over, most(q, o), q + o)
    one = tile_n * most(d, dv) * 2 // pair
    fits = most(least((BUDGET_BYTES - held) // one, 32), 2)
    uneven = (d == 192) & (dv == 128) & (fits <= 3)
    pairs = where(hopper, 2, 1)
    weights = hopper * (_weights_in_registers(f.dim) == 0) * tile_m * tile_n * 2
    plain = tile_m * d * 2 + pairs * tile_n * (d + dv) * 2 + weights + BARRIER_BYTES
    stages = where(uneven, 3, fits)
    state = STATE_BYTES * (stage + pair)
    large = held + (stages - uneven) * one + uneven * tile_n * dv * 2 + state
    return where(blackwell, stages, pairs), where(blackwell, large, plain)


def _dims_of_blackwell(f: Facts) -> Num:
    d, dv = f.dim, f.dim_v
    small = (d >= 8) & (d <= 128) & (dv >= 8) & (dv <= 128)
    return small | ((d == 192) & (dv == 128)) | ((d == 256) & (dv == 256))


def _dims_of_hopper(f: Facts) -> Num:
    return (f.dim >= 8) & (f.dim <= 256) & (f.dim_v >= 8) & (f.dim_v <= 256)


def _is_hd256(f: Facts) -> Num:
    return is_datacenter_blackwell(f) & (f.dim == 256)


_HEADS = "head_dim {f.dim} and {f.dim_v}"
_OTHER = "use the triton backend"

FA4_RULES: tuple[Rule, ...] = (
    Rule(
        "fa4_arch",
        "gpu",
        lambda f, c: (f.cc >= 80) & (f.cc < 120),
        "compute capability {f.cc}",
        "80 to 119",
        _OTHER,
    ),
    Rule(
        "fa4_dtype",
        "dtype",
        lambda f, c: (f.half == 1) & (f.kv_bytes == f.q_bytes),
        "queries of {f.q_bytes} bytes, keys of {f.kv_bytes}",
        "bfloat16 or float16, queries, keys and values alike",
        _OTHER,
    ),
    Rule(
        "fa4_alignment",
        "head_dim",
        lambda f, c: (f.dim % 8 == 0) & (f.dim_v % 8 == 0),
        _HEADS,
        "multiples of 8",
        _OTHER,
    ),
    Rule(
        "fa4_dims_ampere",
        "head_dim",
        lambda f, c: (f.cc >= 90) | ((f.dim <= 256) & (f.dim_v <= 256)),
        _HEADS,
        "at most 256 before compute capability 90",
        _OTHER,
    ),
    Rule(
        "fa4_dims_hopper",
        "head_dim",
        lambda f, c: (is_hopper(f) == 0) | _dims_of_hopper(f),
        _HEADS,
        "8 to 256",
        _OTHER,
    ),
    Rule(
        "fa4_dims_blackwell",
        "head_dim",
        lambda f, c: (is_datacenter_blackwell(f) == 0) | _dims_of_blackwell(f),
        _HEADS,
        "8 to 128, (192, 128) or (256, 256)",
        _OTHER,
    ),
    Rule(
        "fa4_paged_ampere",
        "page_size",
        lambda f, c: (f.cc >= 90) | (f.paged == 0),
        "pages of {f.page} on compute capability {f.cc}",
        "no pages before 90",
        _OTHER,
    ),
    Rule(
        "fa4_paged_dims",
        "head_dim",
        lambda f, c: (f.paged == 0) | ((f.dim % 16 == 0) & (f.dim_v % 16 == 0)),
        _HEADS + ", in pages",
        "multiples of 16 where keys are paged",
        _OTHER,
    ),
    Rule(
        "fa4_bulk_page",
        "page_size",
        lambda f, c: (c.loader != BY_BULK) | (f.paged == 0) | (f.page == c.tile_n),
        "a bulk copy of tiles of {c.tile_n} keys from pages of {f.page}",
        "a page is a tile",
        "use a page size of {c.tile_n}",
    ),
    # Seen on an H200: NaN behind the last key of a page of 128 made every output NaN.
    Rule(
        "fa4_tail",
        "page_size",
        lambda f, c: (is_hopper(f) == 0) | (f.paged == 0) | (c.loader != BY_BULK),
        "tiles of {c.tile_n} keys by bulk copy from pages of {f.page}",
        "nothing past the last key is read: a weight of zero does not silence a NaN there",
        "use a page size other than {c.tile_n}, or another backend",
    ),
    Rule(
        "fa4_tile_kept",
        "max_kv_len",
        lambda f, c: (c.tile_m == tile(f)[0]) & (c.tile_n == tile(f)[1]),
        "a tile of {c.tile_m} x {c.tile_n}",
        "the tile of this architecture and head, whatever is decided later",
        "report this plan",
    ),
    Rule(
        "fa4_bulk_kept",
        "page_size",
        lambda f, c: (is_bulk(f, tile(f)[1]) == 0) | (c.loader == BY_BULK),
        "tiles of {c.tile_n} keys copied row by row from pages of {f.page}",
        "what can come by bulk copy does",
        "report this plan",
    ),
    Rule(
        "fa4_split_arch",
        "max_kv_len",
        lambda f, c: (c.max_splits == 1) | is_datacenter_blackwell(f),
        "{c.max_splits} splits on compute capability {f.cc}",
        "splits on 100 to 119 alone",
        _OTHER,
    ),
    Rule(
        "fa4_split_unequal",
        "head_dim",
        lambda f, c: (c.max_splits == 1) | (f.dim == f.dim_v),
        "{c.max_splits} splits of {f.q_len} queries of {f.q_heads} heads, " + _HEADS,
        "unequal heads are not split: the key tile would halve",
        _OTHER,
    ),
    Rule(
        "fa4_hd256",
        "head_dim",
        lambda f, c: (_is_hd256(f) == 0) | ((f.softcap == 0) & (f.sink == 0) & (f.paged == 0)),
        _HEADS + ", softcap {f.softcap}, sink {f.sink}, pages of {f.page}",
        "heads of 256 have no softcap, sink or pages of sequences of several lengths",
        _OTHER,
    ),
    Rule(
        "fa4_hd256_pair",
        "max_q_len",
        lambda f, c: (
            (_is_hd256(f) == 0)
            | (
                (f.q_len * (f.q_heads // f.kv_heads) > 128)
                & (128 % most(f.q_heads // f.kv_heads, 1) == 0)
            )
        ),
        _HEADS + ", {f.q_len} queries of {f.q_heads} heads to {f.kv_heads}",
        "a pair of SMs has more than one tile of 128 rows, of whole groups: else its host chooses",
        _OTHER,
    ),
    Rule(
        "fa4_latent",
        "latent_rank",
        lambda f, c: f.latent == 0,
        "latent rank {f.latent}",
        "keys and values a head: its latent kernels are not planned",
        _OTHER,
    ),
    Rule(
        "fa4_sink",
        "sink",
        lambda f, c: (f.sink == 0) | (f.cc >= 90),
        "a sink, compute capability {f.cc}",
        "sinks on 90 to 119",
        _OTHER,
    ),
)
