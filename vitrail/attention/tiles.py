"""Tiles, threads, loaders, splits and bytes of every kernel, as arithmetic. `facts` turns a shape
and a GPU into numbers; a `choose_*` turns those into a `Choice`; `legality` holds the rules that a
choice must keep.

Everything here works on ints and, unchanged, on NumPy arrays of them (a truth is then an array of
truths): the planner calls it with ints, the sweep in the tests with millions of combinations at
once. So there is no `if` on a number, no `min`, no `and`: only operators. Neither torch nor a
kernel language is imported. Lengths in tokens, sizes in elements, `*_bytes` in bytes."""

from collections.abc import Callable
from typing import NamedTuple

from vitrail.attention.shape import PAGED, AttentionShape
from vitrail.config.hardware import Hardware
from vitrail.config.model import ITEM_BYTES

# An int, or an array of them.
Num = int

# Kernels and loaders by number; `plan` has their names.
TORCH, VARLEN, EXTEND, DECODE, LATENT = range(5)
BY_TORCH, BY_TRITON, BY_ROWS, BY_BULK = range(4)

DECODE_QUERIES = 32  # more queries than these a sequence are an extend
MIN_ITEM_KEYS = 256  # fewer keys an item cost more to combine than they save
INVARIANT_ITEM_KEYS = 2048  # keys of an item where it may depend on nothing else
WAVES = 2  # items beyond one a sequence: so many rounds of all SMs
SMEM_RESERVED_BYTES = 1024  # what the driver keeps of an SM's shared memory for each program
MAX_REGISTERS = 255
SPARE_REGISTERS = 56  # addresses, masks, softmax state


class Facts(NamedTuple):
    """A shape on a GPU. Truths are 0 or 1; `page` 0: no pages; `window` -1: none."""

    cc: Num
    num_sms: Num
    smem_block: Num
    smem_sm: Num
    registers_sm: Num
    tmem: Num
    paged: Num
    batch: Num
    q_len: Num
    kv_len: Num
    page: Num
    q_heads: Num
    kv_heads: Num
    dim: Num
    dim_v: Num
    latent: Num
    causal: Num
    window: Num
    sink: Num
    softcap: Num
    q_bytes: Num
    kv_bytes: Num
    half: Num  # queries are bfloat16 or float16
    invariant: Num


class Choice(NamedTuple):
    """The numbers of a plan; `AttentionPlan` says what each means. `program_registers`: of all its
    threads. `live_registers`: what the accumulators and operands of a thread need, an estimate
    from below."""

    kernel: Num
    tile_m: Num
    tile_n: Num
    dim_a: Num
    dim_b: Num
    dim_v_a: Num
    dim_v_b: Num
    pack: Num
    warps: Num
    stages: Num
    loader: Num
    loader_threads: Num
    rows_per_thread: Num
    predicated: Num
    max_splits: Num
    wave_items: Num
    max_items: Num
    min_item_pages: Num
    item_pages: Num
    smem_bytes: Num
    registers: Num
    program_registers: Num
    live_registers: Num
    tmem_columns: Num
    workspace_bytes: Num


Choose = Callable[[Facts], Choice]


def facts(shape: AttentionShape, gpu: Hardware) -> Facts:
    site, dtype = shape.site, shape.dtype
    return Facts(
        gpu.cc,
        gpu.num_sms,
        gpu.smem_per_block_bytes,
        gpu.smem_per_sm_bytes,
        gpu.registers_per_sm,
        gpu.tmem_columns,
        shape.phase in PAGED,
        shape.batch,
        shape.max_q_len,
        shape.max_kv_len,
        0 if shape.page_size is None else shape.page_size,
        site.num_q_heads,
        site.num_kv_heads,
        site.head_dim,
        site.head_dim_v,
        site.latent_rank,
        site.causal,
        -1 if site.window is None else site.window,
        site.sink,
        site.softcap is not None,
        ITEM_BYTES[dtype],
        ITEM_BYTES[shape.kv_dtype or dtype],
        dtype != "float32",
        shape.batch_invariant,
    )


def where(truth: Num, a: Num, b: Num) -> Num:
    return b + (a - b) * truth


def least(a: Num, b: Num) -> Num:
    return a + (b - a) * (b < a)


def most(a: Num, b: Num) -> Num:
    return a + (b - a) * (b > a)


def ceil_div(a: Num, b: Num) -> Num:
    return -(-a // b)


def round_up(a: Num, b: Num) -> Num:
    return -(-a // b) * b


def power_of_two(n: Num) -> Num:
    """The smallest power of two from 16 to 1024 that is at least `n`."""
    return (
        16
        + 16 * (n > 16)
        + 32 * (n > 32)
        + 64 * (n > 64)
        + 128 * (n > 128)
        + 256 * (n > 256)
        + 512 * (n > 512)
    )


def dim_blocks(dim: Num) -> tuple[Num, Num]:
    """Powers of two (a, b) that together cover `dim`, b < a or b = 0: 72 is (64, 16), 128
    (128, 0), 112 (128, 0), 576 (512, 64). Each is at least what a matrix instruction takes."""
    whole = power_of_two(dim)
    half = whole // 2
    rest = power_of_two(dim - half)
    split = (rest < half) & (half >= 16)
    return where(split, half, whole), rest * split


def live_pages(f: Facts) -> Num:
    """The most pages of a sequence that its queries can see: under a window, those of
    window + q_len keys wherever they fall."""
    page = most(f.page, 1)
    pages = ceil_div(f.kv_len, page)
    seen = ceil_div(f.window + f.q_len, page) + 1
    return where((f.window >= 0) & (seen < pages), seen, pages)


class Splits(NamedTuple):
    max_splits: Num
    wave_items: Num
    max_items: Num
    min_item_pages: Num
    item_pages: Num


def row_blocks(f: Facts, tile_m: Num) -> Num:
    """Tiles of packed rows of one sequence."""
    return ceil_div(f.q_len * (f.q_heads // f.kv_heads), tile_m)


def splits(f: Facts, tile_m: Num, tile_n: Num, slots: Num, min_keys: Num = MIN_ITEM_KEYS) -> Splits:
    """How the keys of a row block are cut into items of at least `min_keys`, each a program a key
    head, where `slots` programs run at once; 0 slots: not at all. From the real lengths: a pool's
    size is nowhere in `Facts`."""
    page = most(f.page, 1)
    blocks = f.batch * row_blocks(f, tile_m)
    whole_tiles = most(tile_n // page, 1)
    smallest = round_up(ceil_div(min_keys, page), whole_tiles)
    fixed = round_up(ceil_div(INVARIANT_ITEM_KEYS, page), whole_tiles) * f.invariant
    item = most(smallest, fixed)
    longest = ceil_div(live_pages(f), item)
    wave = slots // f.kv_heads
    # So many items beyond one a block, however lengths lie: sum ceil(pages / size) is at most
    # blocks + total / size, and a size of total / extra is always there.
    extra = WAVES * wave
    most_splits = where((slots > 0) & f.invariant, longest, most(least(longest, extra), 1))
    items = least(blocks * most_splits, blocks + where(f.invariant, blocks * most_splits, extra))
    return Splits(most_splits, wave, items, item, fixed)


def resident(f: Facts, smem_bytes: Num, threads: Num, registers: Num) -> Num:
    """Programs that an SM holds at once."""
    by_smem = f.smem_sm // (smem_bytes + SMEM_RESERVED_BYTES)
    return least(by_smem, f.registers_sm // (threads * registers))


def workspace_bytes(f: Facts, max_splits: Num, max_items: Num, tile_m: Num) -> Num:
    """fp32 outputs and lse of the tiles of all items, where there is anything to combine."""
    return (max_splits > 1) * max_items * f.kv_heads * tile_m * (f.dim_v + 1) * 4


def choose_triton(f: Facts) -> Choice:
    """Our Triton kernels. The compiler makes the loads, so pages of any size do; K and V of a tile
    are padded to `dim_blocks`. A latent row is loaded once and is key and value. What a compiled
    kernel really takes is held to this arithmetic by `compile.prove`; tiles are those that were
    quickest on an H200, and elsewhere those that spill no registers."""
    latent = f.latent > 0
    decode = f.paged & (f.q_len <= DECODE_QUERIES)
    kernel = where(latent, LATENT, where(f.paged, where(decode, DECODE, EXTEND), VARLEN))
    group = f.q_heads // f.kv_heads
    dim_a, dim_b, dim_v_a, dim_v_b = _triton_dims(f, latent)
    dim, dim_v = dim_a + dim_b, dim_v_a + dim_v_b
    row_bytes = where(latent, dim, dim + dim_v) * f.kv_bytes + 8
    # A tile converted from e4m3 stands beside the loaded ones.
    convert = (f.kv_bytes < f.q_bytes) * most(dim, dim_v) * f.q_bytes
    # A row of a tile: the query, its scores as an operand.
    query_bytes = (dim + 64) * f.q_bytes
    wide = (f.cc >= 90) & (f.cc < 120)  # matrix instructions of a whole warpgroup, 64 rows
    # Rows: 16 to 128, no more than there are, than 64 fp32 registers a thread accumulate (latents
    # on wide GPUs: 128, but for converted keys) and than leave room for two stages of 16 keys.
    by_smem = (f.smem_block - 16 * ((2 + wide) * row_bytes + convert)) // query_bytes
    by_registers = where(latent & wide & (convert == 0), 32768, 16384) // dim_v
    limit = where(wide & (f.paged | (dim_v >= 128)), 128, 64)
    cap = least(least(by_registers, by_smem), limit)
    tile_m = least(power_of_two(f.q_len * group), most(power_of_two(cap + 1) // 2, 16))
    warps = where(tile_m * dim_v >= 8192, 8, 4)
    # There the compiler keeps one more stage, and scores stay in registers.
    wide = wide & (tile_m >= 64)
    fixed = tile_m * where(wide, dim * f.q_bytes, query_bytes) + wide * 1024
    # A decode leaves room for a second program of an SM, whose loads go on while this one computes.
    room = where(decode & (latent == 0), least(f.smem_sm // 2 - 1024, f.smem_block), f.smem_block)
    few = (latent & wide) | ((f.paged == 0) & (dim_v < 128))  # two stages were quicker than three
    tile_n, stages = _triton_keys(room - fixed, row_bytes, convert, wide, few)
    smem, threads = fixed + tile_n * ((stages + wide) * row_bytes + convert), 32 * warps
    live = (tile_m * (dim_v + tile_n + tile_n // 2)) // threads + SPARE_REGISTERS
    cut = decode | (latent & (f.q_len <= DECODE_QUERIES))
    slots = f.num_sms * most(resident(f, smem, threads, least(live, MAX_REGISTERS)), 1) * cut
    part = splits(f, tile_m, tile_n, slots)
    return Choice(
        kernel,
        tile_m,
        tile_n,
        dim_a,
        dim_b,
        dim_v_a,
        dim_v_b,
        group > 1,
        warps,
        stages,
        BY_TRITON,
        threads,
        ceil_div(tile_n, threads),
        1,
        *part,
        smem,
        MAX_REGISTERS,
        threads * MAX_REGISTERS,
        live,
        0,
        workspace_bytes(f, part.max_splits, part.max_items, tile_m),
    )


def _triton_dims(f: Facts, latent: Num) -> tuple[Num, Num, Num, Num]:
    """Blocks of head_dim (a latent's: its rank, then its rotary channels) and of head_dim_v."""
    dim_a, dim_b = dim_blocks(where(latent, f.latent, f.dim))
    rope = f.dim - f.latent
    return dim_a, where(latent, power_of_two(rope) * (rope > 0), dim_b), *dim_blocks(f.dim_v)


def _triton_keys(room: Num, row_bytes: Num, convert: Num, wide: Num, few: Num) -> tuple[Num, Num]:
    """Keys of a tile and its stages: the most that fit in `room` bytes; `few`: two stages."""
    tile_n, stages = 16, 1
    for n, s in ((16, 2), (32, 2), (32, 3), (64, 2), (64, 3)):
        fits = (n * ((s + wide) * row_bytes + convert) <= room) & (few <= (s == 2))
        tile_n, stages = where(fits, n, tile_n), where(fits, s, stages)
    return tile_n, stages


def choose_cute(f: Facts) -> Choice:
    """Our CuTe DSL decode for Hopper: a warpgroup computes (two share a latent tile of 64 rows),
    the keys as rows of its matrix instruction and the query rows as columns; one warp (bulk) or
    one warpgroup (rows) loads. A latent row is loaded once and is key and value."""
    latent, group = f.latent > 0, f.q_heads // f.kv_heads
    dim, dim_v = round_up(f.dim, 64), round_up(f.dim_v, 64)
    rows = f.q_len * group
    tile_m, tile_n = 8 + 8 * (rows > 8) + 16 * (rows > 16) + 32 * (rows > 32), 64
    # Two warpgroups share a latent tile of 64 rows.
    computing = where(latent & (tile_m == 64), 256, 128)
    bulk = f.paged & (f.page >= 8) & ((f.page % tile_n == 0) | (tile_n % most(f.page, 1) == 0))
    loaders = where(bulk, 32, 128)
    # A stage holds keys and values, or latents; these have two tiles of rotary channels beside
    # them, where their weights go as well. Maxima, factors and borders; queries; weights.
    stage_bytes = tile_n * where(latent, dim_v, dim + dim_v) * f.kv_bytes
    fixed = round_up(20 * tile_m + 256, 1024) + round_up(tile_m * dim * f.q_bytes, 1024)
    fixed = fixed + where(latent, 2 * (dim - dim_v), tile_m) * tile_n * f.q_bytes
    # Two programs an SM where two stages each leave room for them.
    half = least(f.smem_sm // 2 - SMEM_RESERVED_BYTES, f.smem_block)
    room = where(fixed + 2 * stage_bytes <= half, half, f.smem_block)
    stages = most(least((room - fixed) // stage_bytes, 8), 2)
    smem = fixed + stages * stage_bytes
    decode = f.paged & (f.q_len <= DECODE_QUERIES)
    # Two hand registers from a whole loading warpgroup to those that compute.
    threads = where(computing == 256, 384, computing + loaders)
    registers = where(computing == 256, 168, MAX_REGISTERS)
    live = (tile_m * (dim_v + 2 * tile_n)) // computing + SPARE_REGISTERS
    # Beyond the average of the program's threads: what the loading ones hand over to each.
    live = where(computing == 256, live - 56, live)
    slots = f.num_sms * most(resident(f, smem, threads, least(live, MAX_REGISTERS)), 1) * decode
    # A tile of a latent takes a program as long as two of any other.
    part = splits(f, tile_m, tile_n, slots, where(latent, MIN_ITEM_KEYS // 2, MIN_ITEM_KEYS))
    return Choice(
        where(decode, where(latent, LATENT, DECODE), TORCH),
        tile_m,
        tile_n,
        dim,
        0,
        dim_v,
        0,
        group > 1,
        threads // 32,
        stages,
        where(bulk, BY_BULK, BY_ROWS),
        loaders,
        8 * tile_n // 128,  # eight threads share a row
        1,
        *part,
        smem,
        registers,
        threads * registers,
        live,
        0,
        workspace_bytes(f, part.max_splits, part.max_items, tile_m),
    )
