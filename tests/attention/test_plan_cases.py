"""Crashes and losses of other engines' kernels, as shapes that our planner meets and as faulty
variants of it that the laws catch; and what the laws of copies mean, counted row by row."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.attention.fa4 import FA4_RULES, RELEASE, choose_fa4, q_stage
from vitrail.attention.legality import LAWS, broken, finding
from vitrail.attention.plan import (
    BACKENDS,
    CUTLASS_RELEASE,
    KERNEL_BACKENDS,
    AttentionPlan,
    Loader,
    passed_over,
    plan,
    plan_on,
)
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.attention.tiles import (
    BY_BULK,
    BY_ROWS,
    Choice,
    Facts,
    ceil_div,
    choose_cute,
    choose_triton,
    dim_blocks,
    facts,
)
from vitrail.config.hardware import CPU, GPUS, find

B300, H200 = find("B300"), find("H200")
# MiMo's full layers under tensor parallelism of 8.
MIMO = AttentionSite(
    num_q_heads=8, num_kv_heads=1, head_dim=192, head_dim_v=128, scale=0.1, causal=True
)
DECODE = AttentionShape(
    site=MIMO,
    phase=Phase.DECODE,
    dtype="bfloat16",
    page_size=128,
    batch=1,
    max_q_len=1,
    max_kv_len=300,
)
RULES = LAWS + FA4_RULES


def names(f: Facts, c: Choice) -> list[str]:
    return [rule.name for rule in broken(RULES, f, c)]


def shrinking(f: Facts, pool: int, floor: bool) -> Choice:
    """A published planner: where head_dim != head_dim_v and keys are split, it halves the key tile
    of 128, after the page size was chosen to be a tile and from the whole pool's length; its older
    releases divide the tile's rows by the loader's threads with floor, later ones with ceiling and
    then only for two tiles of queries."""
    c = choose_fa4(f)
    shares = f.num_sms // (f.batch * f.kv_heads)
    if f.dim == f.dim_v or shares <= 1 or ceil_div(pool, 128) < 64 or not (floor or q_stage(f) > 1):
        return c
    tile_n, threads = 64, c.loader_threads
    return c._replace(
        tile_n=tile_n,
        loader=BY_BULK if f.page == tile_n else BY_ROWS,
        rows_per_thread=tile_n // threads if floor else ceil_div(tile_n, threads),
        predicated=int(not floor),
        max_splits=min(shares, ceil_div(pool, tile_n)),
    )


def test_192_128_decode_with_a_pool_of_8192_tokens_is_planned_by_its_real_length():
    made = plan_on("fa4", DECODE, B300)
    assert isinstance(made, AttentionPlan)
    assert (made.tile_n, made.loader, made.max_splits) == (128, Loader.BULK, 1)
    long = plan_on("fa4", replace(DECODE, max_kv_len=65536), B300)
    assert isinstance(long, AttentionPlan)
    assert (long.tile_n, long.loader, long.max_splits) == (128, Loader.BULK, 1)
    equal = replace(DECODE, site=replace(MIMO, head_dim=128), max_kv_len=65536)
    split = plan_on("fa4", equal, B300)
    assert isinstance(split, AttentionPlan)
    assert (split.tile_n, split.loader, split.max_splits) == (128, Loader.BULK, 128)


def test_192_128_decode_with_a_pool_of_8192_tokens_leaves_zero_rows_in_the_faulty_planner():
    f = facts(DECODE, B300)
    assert not names(f, shrinking(f, 8064, floor=True))
    c = shrinking(f, 8192, floor=True)
    assert (c.rows_per_thread, c.loader_threads, c.tile_n) == (0, 128, 64)
    assert "rows" in names(f, c)
    (rule,) = (r for r in LAWS if r.name == "rows")
    assert "0 rows for each of 128 loader threads of a tile of 64 keys" in str(
        finding(rule, DECODE, "fa4", f, c)
    )
    # 300 keys are 3 tiles; 128 splits were those of the pool.
    assert c.max_splits == 128
    assert "splits" in names(f, c)


@pytest.mark.parametrize("batch", [1, 64])
def test_page_128_shrunk_to_tile_64_is_caught_whatever_the_rows(batch):
    f = facts(replace(DECODE, batch=batch, max_kv_len=65536), B300)
    c = shrinking(f, 1 << 20, floor=True)._replace(rows_per_thread=1, predicated=1)
    assert c.tile_n == 64
    assert {"fa4_tile_kept", "fa4_bulk_kept"} <= set(names(f, c))
    assert not names(f, choose_fa4(f))


def test_17_queries_keep_their_bulk_copy():
    """17 x 8 rows are two tiles of queries."""
    shape = replace(DECODE, max_q_len=17, max_kv_len=65536)
    f = facts(shape, B300)
    assert q_stage(f) == 2
    c = shrinking(f, 1 << 20, floor=False)
    assert "rows" not in names(f, c)
    assert {"fa4_bulk_kept", "fa4_tile_kept", "fa4_split_unequal"} <= set(names(f, c))
    made = plan_on("fa4", shape, B300)
    assert isinstance(made, AttentionPlan)
    assert (made.loader, made.tile_n, made.max_splits) == (Loader.BULK, 128, 1)
    assert q_stage(facts(replace(shape, max_q_len=16), B300)) == 1


def test_head_256_in_pages_of_1_with_tiles_of_80_on_hopper():
    site = replace(MIMO, num_q_heads=4, num_kv_heads=4, head_dim=256, head_dim_v=256)
    shape = replace(DECODE, site=site, page_size=1, max_kv_len=4096)
    made = plan_on("fa4", shape, H200)
    assert isinstance(made, AttentionPlan)
    assert (made.tile_n, made.loader, made.loader_threads) == (80, Loader.ROWS, 128)
    assert (made.rows_per_thread, made.predicated) == (1, True)
    f = facts(shape, H200)
    floor = choose_fa4(f)._replace(rows_per_thread=80 // 128)
    assert names(f, floor) == ["rows"]
    # 80 is no divisor or multiple of a power of two above 16: nothing would come by bulk.
    assert all(
        names(facts(replace(shape, page_size=p), H200), choose_fa4(f)._replace(loader=BY_BULK))
        for p in (32, 64, 128, 256)
    )


@given(page=st.integers(1, 256), tile=st.integers(1, 256))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_bulk_law_says_which_boxes_stay_within_a_page(page, tile):
    """Boxes of min(page, tile) rows from the start of each tile on: all of each lies in one page,
    and the last ends with the tile."""
    box = min(page, tile)
    starts = [t * tile + b for t in range(page) for b in range(0, tile, box)]
    whole = tile % box == 0 and all(s // page == (s + box - 1) // page for s in starts)
    f = facts(replace(DECODE, page_size=page), H200)
    c = choose_cute(f)._replace(tile_n=tile, loader=BY_BULK)
    assert ("bulk" not in names(f, c)) == whole


@given(
    tile=st.integers(1, 256),
    threads=st.sampled_from([32, 64, 96, 128, 256]),
    rows=st.integers(0, 9),
    guarded=st.booleans(),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_rows_law_says_which_loaders_copy_each_row_once(tile, threads, rows, guarded):
    copied = [thread * rows + i for thread in range(threads) for i in range(rows)]
    copied = [row for row in copied if row < tile] if guarded else copied
    f = facts(DECODE, H200)
    c = choose_cute(f)._replace(
        tile_n=tile,
        loader=BY_ROWS,
        loader_threads=threads,
        rows_per_thread=rows,
        predicated=int(guarded),
    )
    assert ("rows" not in names(f, c)) == (copied == list(range(tile)))


@pytest.mark.parametrize(
    ("gpu", "page", "heads"),
    [
        # Its 128 threads would spill the accumulators of 192 values and more.
        ("A100", 0, {(64, 64), (72, 72), (128, 128), (192, 128)}),
        ("A100", 128, set()),
        ("H200", 0, {(64, 64), (72, 72), (128, 128), (192, 128), (256, 256), (192, 192)}),
        ("H200", 64, {(64, 64), (128, 128), (192, 128), (256, 256), (192, 192)}),
        # Bulk copies of whole pages would read past the last key.
        ("H200", 128, {(256, 256), (192, 192)}),
        ("B300", 0, {(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)}),
        ("B300", 128, {(64, 64), (128, 128), (192, 128)}),
        ("Thor", 64, {(64, 64), (128, 128), (192, 128)}),
        ("RTX 5090", 0, set()),
    ],
)
def test_heads_that_flash_attention_4_takes(gpu, page, heads):
    taken = set()
    dims = ((64, 64), (72, 72), (100, 52), (128, 128), (192, 128), (192, 192), (256, 256))
    for d, dv in (*dims, (512, 64), (1024, 1024)):
        shape = replace(
            DECODE,
            site=replace(MIMO, head_dim=d, head_dim_v=dv),
            phase=Phase.DECODE if page else Phase.PREFILL,
            page_size=page or None,
            max_q_len=1 if page else 300,
        )
        if isinstance(plan_on("fa4", shape, find(gpu)), AttentionPlan):
            taken.add((d, dv))
    assert taken == heads


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
@pytest.mark.parametrize("page", [1, 16, 64, 128])
def test_our_decode_takes_every_page_and_each_gpu(gpu, page):
    made = plan(replace(DECODE, page_size=page, max_kv_len=65536), gpu, "triton")
    assert isinstance(made, AttentionPlan)
    assert (made.kernel, made.tile_m, made.pack_gqa) == ("decode", 16, True)
    assert made.dim_blocks == (128, 64)
    assert made.dim_v_blocks == (128, 0)
    assert 0 < made.smem_bytes <= gpu.smem_per_block_bytes
    assert made.max_splits > 1
    assert made.max_items == 1 + 2 * made.wave_items or made.max_items == made.max_splits
    assert made.min_item_pages * page % made.tile_n == 0


@pytest.mark.parametrize(
    ("phase", "page", "q_len", "latent", "kernel"),
    [
        (Phase.ENCODE, None, 900, 0, "varlen"),
        (Phase.PREFILL, None, 900, 0, "varlen"),
        (Phase.EXTEND, 64, 900, 0, "extend"),
        (Phase.EXTEND, 64, 32, 0, "decode"),
        (Phase.DECODE, 64, 33, 0, "extend"),
        (Phase.DECODE, 64, 1, 512, "latent"),
        (Phase.EXTEND, 64, 900, 512, "latent"),
    ],
)
def test_kernels_follow_phase_and_queries(phase, page, q_len, latent, kernel):
    site = replace(MIMO, head_dim=576, head_dim_v=512, latent_rank=512) if latent else MIMO
    shape = replace(
        DECODE, site=site, phase=phase, page_size=page, max_q_len=q_len, max_kv_len=9000
    )
    made = plan(shape, H200, "triton")
    assert isinstance(made, AttentionPlan)
    assert made.kernel == kernel
    assert (made.max_splits > 1) == (q_len <= 32)


def test_a_cpu_runs_the_reference_and_refuses_a_kernel():
    made = plan(DECODE, CPU)
    assert isinstance(made, AttentionPlan)
    assert (made.backend, made.loader, made.kernel) == ("reference", Loader.TORCH, "torch")
    found = plan(DECODE, CPU, "triton")
    assert isinstance(found, list)
    assert any(f.saw.startswith("compute capability 0") for f in found)


def test_only_what_has_a_module_is_planned():
    found = plan(DECODE, H200, "flashinfer")
    assert isinstance(found, list)
    assert "'flashinfer'" in found[0].saw
    assert set(BACKENDS) == {"reference", *KERNEL_BACKENDS}
    for gpu in (CPU, *GPUS):
        made = plan(DECODE, gpu)
        assert isinstance(made, AttentionPlan)
        assert made.backend in BACKENDS


@pytest.mark.parametrize(
    ("installed", "saw"),
    [
        ({}, "nvidia-cutlass-dsl is not installed"),
        ({"cute": "4.5.2"}, "nvidia-cutlass-dsl 4.5.2"),
    ],
)
def test_our_hopper_decode_needs_the_compiler_that_it_was_proved_with(installed, saw):
    (found,) = plan(DECODE, H200, "cute", installed)
    assert found.saw == saw
    assert found.change == f"pip install nvidia-cutlass-dsl=={CUTLASS_RELEASE}"
    made = plan(DECODE, H200, None, installed)
    assert isinstance(made, AttentionPlan)
    assert made.backend == "triton"
    assert [f.saw for f in passed_over(made, H200, ("cute", "triton"), installed)] == [saw]
    made = plan(DECODE, H200, None, {"cute": CUTLASS_RELEASE})
    assert isinstance(made, AttentionPlan)
    assert made.backend == "cute"


@pytest.mark.parametrize(
    ("rank", "heads", "taken"), [(320, 64, False), (320, 32, True), (256, 64, True)]
)
def test_two_warpgroups_halve_a_latent_s_rank(rank, heads, taken):
    """Each sums whole blocks of 64 channels: 320 has five."""
    site = replace(
        MIMO,
        num_q_heads=heads,
        num_kv_heads=1,
        head_dim=rank + 64,
        head_dim_v=rank,
        latent_rank=rank,
        window=None,
        sink=False,
    )
    made = plan_on("cute", replace(DECODE, site=site), H200)
    assert isinstance(made, AttentionPlan) == taken


def test_batch_invariant_images_have_one_backend():
    site = replace(MIMO, head_dim=72, head_dim_v=72, causal=False, window=None, sink=False)
    backends = set()
    for kv_len in (256, 512, 1024, 4096):
        shape = replace(
            DECODE,
            site=site,
            phase=Phase.ENCODE,
            page_size=None,
            max_q_len=kv_len,
            max_kv_len=kv_len,
            batch_invariant=True,
        )
        made = plan(shape, H200, None, {"fa4": RELEASE})
        assert isinstance(made, AttentionPlan)
        backends.add(made.backend)
    assert backends == {"fa4"}


def test_the_releases_that_plans_ask_for_are_those_that_the_extra_installs():
    extra = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"flash-attn-4=={RELEASE};' in extra
    assert f'"nvidia-cutlass-dsl=={CUTLASS_RELEASE};' in extra


def test_a_backend_passed_over_says_why():
    shape = replace(DECODE, site=replace(MIMO, head_dim=2048))
    made = plan(shape, H200)
    assert isinstance(made, AttentionPlan)
    assert made.backend == "reference"
    assert not passed_over(made, H200, ("reference", "triton"))
    found = passed_over(made, H200, ("triton", "reference"))
    assert {f.severity for f in found} == {"warning"}
    assert any("head_dim 2048 and 128 in blocks of" in f.saw for f in found)


def test_e4m3_keys_need_a_gpu_that_converts_them():
    shape = replace(DECODE, kv_dtype="float8_e4m3fn")
    assert isinstance(plan(shape, find("L40S"), "triton"), AttentionPlan)
    (found,) = plan(shape, find("A100"), "triton")
    assert found.where == "attention decode: kv_dtype"
    assert "compute capability 80" in found.saw
    (found,) = plan(replace(DECODE, kv_dtype="float16"), find("L40S"))
    assert found.saw == "float16 with queries in bfloat16"
    (found,) = plan(replace(shape, dtype="float32"), find("H200"), "triton")
    assert found.saw == "e4m3 keys and values under queries of 4 bytes (triton, cc 90)"
    packed = replace(shape, phase=Phase.PREFILL, page_size=None)
    (found,) = plan(packed, find("L40S"))
    assert found.saw == "float8_e4m3fn in phase prefill"


@given(dim=st.integers(1, 1024))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_dim_blocks_cover_a_head_with_little_waste(dim):
    a, b = dim_blocks(dim)
    assert dim <= a + b < max(2 * dim, 17)
    assert a & (a - 1) == 0
    assert b & (b - 1) == 0
    assert b == 0 or 16 <= b < a


@pytest.mark.parametrize(("name", "cold"), [("triton", 200e-6), ("reference", 100e-6)])
def test_planning_one_call_site_is_quick(name, cold):
    """`bench/plan_cost.py` has the figures (19 us for triton, 0.6 us once it is known); the bounds
    leave room for a busy machine."""
    new = [replace(DECODE, max_kv_len=777_000 + i) for i in range(600)]
    parts = [new[i : i + 20] for i in range(0, 600, 20)]
    made = min(_seconds(lambda p=p: [plan(s, H200, name) for s in p]) for p in parts)
    known = min(_seconds(lambda p=p: [plan(s, H200, name) for s in p]) for p in parts)
    assert made / 20 < cold
    assert known / 20 < min(20e-6, made / 20)


def test_equal_call_sites_have_one_plan_and_a_refusal_is_its_caller_s():
    assert plan(DECODE, H200, "triton") is plan(replace(DECODE), replace(H200), "triton")
    assert plan(DECODE, H200, "triton") != plan(replace(DECODE, batch=2), H200, "triton")
    assert plan(DECODE, H200, "triton") != plan(DECODE, B300, "triton")
    first = plan(replace(DECODE, batch=0), H200)
    assert isinstance(first, list)
    first.clear()
    assert plan(replace(DECODE, batch=0), H200) != []


def _seconds(run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def test_splits_fill_the_gpu_and_no_more():
    """One long sequence: an item or two for each program that runs at once. A full batch: few."""
    one = choose_triton(facts(replace(DECODE, max_kv_len=1 << 20), H200))
    assert one.max_splits == 2 * one.wave_items >= 2 * 132
    many = choose_triton(facts(replace(DECODE, batch=256, max_kv_len=8192), H200))
    assert many.max_items == 256 + 2 * many.wave_items
    short = choose_triton(facts(replace(DECODE, max_kv_len=256), H200))
    assert (short.max_splits, short.max_items, short.workspace_bytes) == (1, 1, 0)
    windowed = facts(replace(DECODE, site=replace(MIMO, window=127), max_kv_len=1 << 20), H200)
    assert choose_triton(windowed).max_splits == 1
