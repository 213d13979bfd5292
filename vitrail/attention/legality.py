"""What must hold of a shape and of a choice: each rule is stated once, here or (FlashAttention-4's
own) in `fa4`, and is used by the planner, the tests and nobody else.

A `Rule` holds of numbers or of arrays of them, as `tiles` does; its sentence is filled in from the
same numbers (`f`: facts, `c`: choice). A `ShapeRule` is about a shape alone."""

from collections.abc import Callable
from typing import NamedTuple

from vitrail.attention.shape import PAGED, AttentionShape, Phase
from vitrail.attention.tiles import (
    BY_BULK,
    BY_ROWS,
    DECODE,
    LATENT,
    Choice,
    Facts,
    Num,
    ceil_div,
    least,
    live_pages,
    most,
    row_blocks,
    where,
)
from vitrail.config.finding import Finding

MAX_WORKSPACE_BYTES = 2 << 30
MAX_BOX_ROWS = 256


class Rule(NamedTuple):
    """`holds` of facts and choice; `saw` and `change` are format strings of both."""

    name: str
    field: str
    holds: Callable[[Facts, Choice], Num]
    saw: str
    rule: str
    change: str


def broken(rules: tuple[Rule, ...], f: Facts, c: Choice) -> list[Rule]:
    return [rule for rule in rules if not rule.holds(f, c)]


def finding(rule: Rule, shape: AttentionShape, backend: str, f: Facts, c: Choice) -> Finding:
    return Finding(
        where=f"attention {shape.phase}: {rule.field}",
        saw=f"{rule.saw.format(f=f, c=c)} ({backend}, cc {f.cc})",
        rule=rule.rule,
        change=rule.change.format(f=f, c=c),
        code=f"attention_{rule.name}",
        evidence=(backend, _ints(f), _ints(c)),
    )


def _ints(numbers: Facts | Choice) -> dict[str, int]:
    return {name: int(value) for name, value in numbers._asdict().items()}


def _box_rows(f: Facts, c: Choice) -> Num:
    """Rows that one bulk copy moves: of a page, or of a whole tile where there are none."""
    return where(f.paged, least(f.page, c.tile_n), c.tile_n)


# Of every choice, whichever backend made it.
LAWS: tuple[Rule, ...] = (
    Rule(
        "shared_memory",
        "head_dim",
        lambda f, c: c.smem_bytes <= f.smem_block,
        "{c.smem_bytes} bytes of shared memory for a tile of {c.tile_m} x {c.tile_n}, "
        "{c.stages} stages",
        "at most what a program of this GPU can have",
        "use a smaller head, or a GPU with more shared memory",
    ),
    Rule(
        "registers",
        "head_dim",
        lambda f, c: c.live_registers <= c.registers,
        "{c.live_registers} live registers a thread for a tile of {c.tile_m} x {c.tile_n} in "
        "{c.warps} warps, {c.registers} allowed",
        "accumulators and operands stay in registers",
        "use a smaller head",
    ),
    Rule(
        "register_file",
        "head_dim",
        lambda f, c: c.program_registers <= f.registers_sm,
        "{c.program_registers} registers of {c.warps} warps",
        "a program's registers fit an SM",
        "report this plan",
    ),
    Rule(
        "rows",
        "page_size",
        lambda f, c: (
            (c.loader != BY_ROWS)
            | (
                (c.rows_per_thread >= 1)
                & (c.rows_per_thread * c.loader_threads >= c.tile_n)
                & ((c.predicated == 1) | (c.rows_per_thread * c.loader_threads == c.tile_n))
            )
        ),
        "{c.rows_per_thread} rows for each of {c.loader_threads} loader threads of a tile of "
        "{c.tile_n} keys",
        "the loader's rows cover the tile, at least one a thread, and an uneven tail is guarded",
        "use a page size that the tile divides",
    ),
    Rule(
        "bulk",
        "page_size",
        lambda f, c: (
            (c.loader != BY_BULK)
            | (f.paged == 0)
            | (f.page % c.tile_n == 0)
            | (c.tile_n % most(f.page, 1) == 0)
        ),
        "a bulk copy of tiles of {c.tile_n} keys from pages of {f.page}",
        "bulk copies move whole boxes: the page divides the tile or the tile the page",
        "use a page size of 64 or 128",
    ),
    Rule(
        "box",
        "head_dim",
        lambda f, c: (
            (c.loader != BY_BULK)
            | (
                (_box_rows(f, c) <= MAX_BOX_ROWS)
                & (f.dim * f.kv_bytes % 16 == 0)
                & (f.dim_v * f.kv_bytes % 16 == 0)
            )
        ),
        "boxes of {c.tile_n} rows of {f.dim} and {f.dim_v} elements of {f.kv_bytes} bytes",
        f"a bulk box has at most {MAX_BOX_ROWS} rows of whole 16-byte pieces",
        "use a head size that is a multiple of 8",
    ),
    Rule(
        "dims",
        "head_dim",
        lambda f, c: (c.dim_a + c.dim_b >= f.dim) & (c.dim_v_a + c.dim_v_b >= f.dim_v),
        "head_dim {f.dim} and {f.dim_v} in blocks of {c.dim_a} + {c.dim_b} and {c.dim_v_a} + "
        "{c.dim_v_b}",
        "the blocks cover the head",
        "use a head of at most 576",
    ),
    Rule(
        "tmem",
        "head_dim",
        lambda f, c: c.tmem_columns <= f.tmem,
        "{c.tmem_columns} columns of tensor memory, {f.tmem} there",
        "accumulators fit the tensor memory",
        "use a smaller head",
    ),
    Rule(
        "splits",
        "max_kv_len",
        lambda f, c: (
            (c.max_splits == 1)
            | (
                (c.max_splits >= 1)
                & (c.max_splits <= ceil_div(live_pages(f) * most(f.page, 1), c.tile_n))
                & ((c.kernel == DECODE) | (c.kernel == LATENT))
            )
        ),
        "{c.max_splits} splits of {f.kv_len} keys in tiles of {c.tile_n}, {f.q_len} queries",
        "a decode is split into at most its real length's tiles, anything else never",
        "report this plan",
    ),
    Rule(
        "items",
        "batch",
        lambda f, c: (
            (c.max_items >= f.batch * row_blocks(f, c.tile_m))
            & (c.max_items <= f.batch * row_blocks(f, c.tile_m) * c.max_splits)
        ),
        "{c.max_items} work items for {f.batch} sequences of {f.q_len} queries in tiles of "
        "{c.tile_m} rows, at most {c.max_splits} splits each",
        "one item a tile of rows at least, max_splits at most",
        "lower the batch",
    ),
    Rule(
        "grid",
        "num_q_heads",
        lambda f, c: c.max_items * f.kv_heads < 1 << 31,
        "{c.max_items} work items of {f.kv_heads} key heads",
        "below 2^31 programs a launch",
        "lower max_q_len",
    ),
    Rule(
        "workspace",
        "batch",
        lambda f, c: c.workspace_bytes <= MAX_WORKSPACE_BYTES,
        "{c.workspace_bytes} bytes of partial outputs for {c.max_items} work items",
        f"at most {MAX_WORKSPACE_BYTES} bytes",
        "lower the batch or the longest sequence, or allow sums that depend on the batch",
    ),
    Rule(
        "invariant",
        "batch_invariant",
        lambda f, c: (f.invariant == 0) | (c.max_splits == 1) | (c.item_pages > 0),
        "{c.max_splits} splits whose size follows the batch",
        "batch-invariant sums are cut at fixed pages",
        "allow sums that depend on the batch",
    ),
)

TRITON_RULES: tuple[Rule, ...] = (
    Rule(
        "triton_arch",
        "gpu",
        lambda f, c: f.cc >= 80,
        "compute capability {f.cc}",
        "80 or newer",
        "use the reference backend",
    ),
    Rule(
        "triton_e4m3",
        "kv_dtype",
        lambda f, c: (f.kv_bytes > 1) | (f.cc >= 89),
        "e4m3 keys and values on compute capability {f.cc}",
        "89 or newer converts e4m3",
        "store keys and values as bfloat16",
    ),
    Rule(
        "triton_e4m3_dtype",
        "dtype",
        lambda f, c: (f.kv_bytes > 1) | (f.half == 1),
        "e4m3 keys and values under queries of {f.q_bytes} bytes",
        "e4m3 is converted to bfloat16 or float16; as float32 a tile leaves the registers",
        "compute in bfloat16, or use the reference backend",
    ),
)

CUTE_RULES: tuple[Rule, ...] = (
    Rule(
        "cute_arch",
        "gpu",
        lambda f, c: f.cc == 90,
        "compute capability {f.cc}",
        "90: the kernel is made of Hopper's instructions",
        "use another backend",
    ),
    Rule(
        "cute_phase",
        "phase",
        lambda f, c: (c.kernel == DECODE) | (c.kernel == LATENT),
        "{f.q_len} queries, pages of {f.page}",
        "the kernel decodes keys in pages, at most 32 queries a sequence",
        "use another backend",
    ),
    Rule(
        "cute_dtype",
        "dtype",
        lambda f, c: (f.half == 1) & (f.kv_bytes == 2),
        "queries of {f.q_bytes} bytes, keys of {f.kv_bytes}",
        "bfloat16 or float16, keys alike",
        "use another backend",
    ),
    Rule(
        "cute_dims",
        "head_dim",
        lambda f, c: (
            (f.dim % 64 == 0)
            & (f.dim_v % 64 == 0)
            & (f.dim <= 576)
            & ((f.latent == 0) | (f.dim - f.latent >= 64))
            & ((f.latent == 0) | (c.tile_m < 64) | (f.dim_v % 128 == 0))
        ),
        "head_dim {f.dim} and {f.dim_v}, latent rank {f.latent}, tiles of {c.tile_m} rows",
        "multiples of 64 up to 576; a latent has 64 rotary channels or more, and a rank that two "
        "warpgroups halve where a tile has 64 rows",
        "use another backend",
    ),
    Rule(
        "cute_box",
        "page_size",
        lambda f, c: (c.loader != BY_BULK) | (_box_rows(f, c) % 8 == 0),
        "boxes of {c.tile_n} keys from pages of {f.page}",
        "a bulk box is whole swizzled blocks of 8 rows",
        "report this plan",
    ),
)


class ShapeRule(NamedTuple):
    """What must hold of a shape for any backend. `saw` is a format string of shape and site."""

    field: str
    holds: Callable[[AttentionShape], bool]
    saw: str
    rule: str
    change: str


def _positive(holds: Callable[[AttentionShape], bool], path: str) -> ShapeRule:
    field = path.split(".")[-1]
    return ShapeRule(field, holds, f"{{{path}}}", "at least 1", "give a positive size")


SHAPE_RULES: tuple[ShapeRule, ...] = (
    _positive(lambda s: s.site.num_q_heads >= 1, "site.num_q_heads"),
    _positive(lambda s: s.site.num_kv_heads >= 1, "site.num_kv_heads"),
    _positive(lambda s: s.site.head_dim >= 1, "site.head_dim"),
    _positive(lambda s: s.site.head_dim_v >= 1, "site.head_dim_v"),
    _positive(lambda s: s.batch >= 1, "shape.batch"),
    _positive(lambda s: s.max_q_len >= 1, "shape.max_q_len"),
    _positive(lambda s: s.max_kv_len >= 1, "shape.max_kv_len"),
    ShapeRule(
        "num_q_heads",
        lambda s: s.site.num_kv_heads < 1 or s.site.num_q_heads % s.site.num_kv_heads == 0,
        "{site.num_q_heads} query heads for {site.num_kv_heads} key heads",
        "query heads are a multiple of key heads",
        "change the head counts or pad the heads",
    ),
    ShapeRule(
        "page_size",
        lambda s: (s.phase in PAGED) == (s.page_size is not None),
        "{shape.page_size} in phase {shape.phase}",
        "extend and decode have pages, encode and prefill have none",
        "set page_size to match the phase",
    ),
    ShapeRule(
        "page_size",
        lambda s: s.page_size is None or 1 <= s.page_size <= 256,
        "{shape.page_size}",
        "1 to 256 tokens",
        "use 64",
    ),
    ShapeRule(
        "causal",
        lambda s: s.phase is Phase.ENCODE or s.site.causal,
        "a bidirectional site in phase {shape.phase}",
        "queries see no later key than their own outside encode",
        "set causal, or call it in the encode phase",
    ),
    ShapeRule(
        "kv_dtype",
        lambda s: s.kv_dtype in (None, s.dtype, "float8_e4m3fn"),
        "{shape.kv_dtype} with queries in {shape.dtype}",
        "keys and values are stored as the queries' dtype or as float8_e4m3fn",
        "use one of these",
    ),
    ShapeRule(
        "kv_dtype",
        lambda s: s.phase in PAGED or s.kv_dtype in (None, s.dtype),
        "{shape.kv_dtype} in phase {shape.phase}",
        "only pages are stored in another dtype",
        "leave kv_dtype out",
    ),
    ShapeRule(
        "window",
        lambda s: s.site.window is None or s.site.window >= 0,
        "{site.window}",
        "at least 0 keys",
        "use None for no window",
    ),
    ShapeRule(
        "softcap",
        lambda s: s.site.softcap is None or s.site.softcap > 0,
        "{site.softcap}",
        "above 0",
        "use None for no cap",
    ),
)
LATENT_RULES: tuple[ShapeRule, ...] = (
    ShapeRule(
        "latent_rank",
        lambda s: (
            s.site.num_kv_heads == 1 and s.site.head_dim_v == s.site.latent_rank <= s.site.head_dim
        ),
        "rank {site.latent_rank} with {site.num_kv_heads} key heads, head_dim {site.head_dim}, "
        "head_dim_v {site.head_dim_v}",
        "a latent has one key head, head_dim_v equal to its rank and head_dim at least that",
        "describe the absorbed form of the layer",
    ),
    ShapeRule(
        "phase",
        lambda s: s.phase in PAGED,
        "{shape.phase}",
        "latent rows live in pages",
        "use extend or decode",
    ),
    ShapeRule("sink", lambda s: not s.site.sink, "a sink", "latent sites have none", "drop it"),
)


def shape_findings(shape: AttentionShape) -> list[Finding]:
    """Why no backend can run `shape`, whatever the GPU."""
    rules = SHAPE_RULES + LATENT_RULES if shape.site.latent_rank else SHAPE_RULES
    return [
        Finding(
            where=f"attention {shape.phase}: {rule.field}",
            saw=rule.saw.format(shape=shape, site=shape.site),
            rule=rule.rule,
            change=rule.change,
            code="illegal_shape",
        )
        for rule in rules
        if not rule.holds(shape)
    ]
