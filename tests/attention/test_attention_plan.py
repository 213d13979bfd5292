"""Plans: bounds kept for every shape, refusals with numbers, lookups that hold the batch."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.attention.backends.triton import launches
from vitrail.attention.plan import (
    REFERENCE_KEY_BYTES,
    REFERENCE_SCORE_BYTES,
    AttentionPlan,
    PlanLimits,
    buckets,
    make_table,
    plan,
)
from vitrail.attention.shape import PAGED, AttentionShape, AttentionSite, Phase
from vitrail.config.finding import Refused
from vitrail.config.hardware import CPU, find

GPU = find("H200")
SITE = AttentionSite(
    num_q_heads=16, num_kv_heads=4, head_dim=72, head_dim_v=72, scale=0.1, causal=True
)
SHAPE = AttentionShape(
    site=SITE,
    phase=Phase.DECODE,
    dtype="bfloat16",
    page_size=64,
    batch=8,
    max_q_len=1,
    max_kv_len=4096,
)
LATENT = replace(SITE, num_kv_heads=1, head_dim=576, head_dim_v=512, latent_rank=512)


def refusal(shape: AttentionShape, prefer: str | None = None):
    found = plan(shape, CPU, prefer)
    assert isinstance(found, list), f"planned {found}"
    return found


@given(
    heads=st.integers(1, 128),
    group=st.integers(1, 8),
    dims=st.tuples(st.integers(1, 576), st.integers(1, 512)),
    phase=st.sampled_from(list(Phase)),
    lens=st.tuples(st.integers(1, 1 << 17), st.integers(1, 1 << 20)),
    batch=st.integers(1, 1024),
    gpu=st.sampled_from([CPU, GPU]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_reference_s_blocks_are_within_the_limits(heads, group, dims, phase, lens, batch, gpu):
    site = replace(
        SITE,
        num_q_heads=heads * group,
        num_kv_heads=heads,
        head_dim=dims[0],
        head_dim_v=dims[1],
    )
    shape = AttentionShape(
        site=site,
        phase=phase,
        dtype="float32",
        page_size=64 if phase in PAGED else None,
        batch=batch,
        max_q_len=lens[0],
        max_kv_len=lens[1],
    )
    made = plan(shape, gpu, "reference")
    assert isinstance(made, AttentionPlan)
    blocks = (made.block_batch, made.block_heads, made.block_q, made.block_kv)
    bounds = (batch, heads * group, *lens)
    assert all(1 <= block <= bound for block, bound in zip(blocks, bounds, strict=True))
    product = made.block_batch * made.block_heads * made.block_q * made.block_kv
    assert made.score_bytes == 4 * product <= REFERENCE_SCORE_BYTES
    row = 4 * heads * sum(dims)
    assert made.block_batch * made.block_kv * row <= REFERENCE_KEY_BYTES


@pytest.mark.parametrize(
    ("change", "saw", "field"),
    [
        ({"batch": 0}, "0", "batch"),
        ({"max_kv_len": -3}, "-3", "max_kv_len"),
        ({"page_size": 257}, "257", "page_size"),
        ({"page_size": 0}, "0", "page_size"),
        ({"page_size": None}, "None in phase decode", "page_size"),
        ({"phase": Phase.PREFILL}, "64 in phase prefill", "page_size"),
        ({"num_q_heads": 15}, "15 query heads for 4 key heads", "num_q_heads"),
        ({"num_kv_heads": 0}, "0", "num_kv_heads"),
        ({"head_dim": 0}, "0", "head_dim"),
        ({"window": -1}, "-1", "window"),
        ({"softcap": 0.0}, "0.0", "softcap"),
        ({"causal": False}, "a bidirectional site in phase decode", "causal"),
        ({"latent_rank": 64}, "rank 64 with 4 key heads", "latent_rank"),
    ],
)
def test_what_cannot_run_is_refused_with_its_numbers(change, saw, field):
    of_shape = {k: v for k, v in change.items() if k in AttentionShape.__dataclass_fields__}
    of_site = {k: v for k, v in change.items() if k not in of_shape}
    found = refusal(replace(SHAPE, site=replace(SITE, **of_site), **of_shape))
    assert any(f.where.endswith(f": {field}") and saw in f.saw for f in found), found


def test_a_latent_lives_in_pages_and_has_no_sink():
    assert isinstance(plan(replace(SHAPE, site=LATENT), CPU), AttentionPlan)
    (found,) = refusal(replace(SHAPE, site=LATENT, phase=Phase.PREFILL, page_size=None))
    assert found.where == "attention prefill: phase"
    (found,) = refusal(replace(SHAPE, site=replace(LATENT, sink=True)))
    assert found.where == "attention decode: sink"
    (found,) = refusal(replace(SHAPE, site=replace(LATENT, head_dim=500)))
    assert "head_dim 500" in found.saw


def test_every_reason_is_reported_at_once():
    bad = replace(SHAPE, batch=0, page_size=300, site=replace(SITE, num_q_heads=7, window=-2))
    assert len(refusal(bad, prefer="cudnn")) == 5


def test_a_preferred_backend_is_never_replaced():
    (found,) = refusal(SHAPE, prefer="triton9")
    assert "'triton9'" in found.saw
    assert "reference" in found.rule
    assert plan(SHAPE, CPU, "reference") == plan(SHAPE, CPU)


@pytest.mark.parametrize(
    ("limit", "smallest", "sizes"),
    [(1, 1, [1]), (5, 1, [1, 2, 4, 5]), (8, 1, [1, 2, 4, 8]), (100, 256, [100])],
)
def test_buckets_end_with_the_limit(limit, smallest, sizes):
    assert buckets(limit, smallest) == sizes


LIMITS = PlanLimits(dtype="float32", page_size=16, max_batch=200, max_q_len=512, max_kv_len=5000)

# A site named twice is planned once.
SITES = [(SITE, Phase.DECODE), (SITE, Phase.EXTEND), (SITE, Phase.DECODE)]
TABLE = make_table(SITES, LIMITS, CPU, None)


def test_a_table_holds_every_bucket_of_every_site_once():
    assert len(TABLE) == 2 * len(buckets(200)) * len(buckets(5000, 256))


@given(batch=st.integers(0, 200), kv_len=st.integers(0, 5000))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_select_takes_the_smallest_bucket_that_holds_the_batch(batch, kv_len):
    for phase in PAGED:
        shape = TABLE.select(SITE, phase, batch, kv_len).shape
        assert shape.phase is phase
        assert shape.batch == min(b for b in buckets(200) if b >= batch)
        assert shape.max_kv_len == min(n for n in buckets(5000, 256) if n >= kv_len)
        assert shape.max_q_len == (1 if phase is Phase.DECODE else min(512, shape.max_kv_len))


def test_a_table_s_shapes_are_those_of_its_limits():
    limits = replace(LIMITS, dtype="bfloat16", kv_dtype="float8_e4m3fn", batch_invariant=True)
    table = make_table([(SITE, Phase.DECODE)], limits, GPU, "triton")
    made = table.select(SITE, Phase.DECODE, 7, 5000)
    assert made.shape.kv_dtype == "float8_e4m3fn"
    assert made.item_pages * 16 == 2048
    assert made.max_splits == 3
    assert not table.warnings


def test_packed_keys_are_in_the_queries_dtype_whatever_the_pages_hold():
    """Expanded from e4m3 pages, they are not stored again."""
    limits = replace(LIMITS, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    table = make_table([(SITE, Phase.PREFILL), (SITE, Phase.EXTEND)], limits, GPU, "triton")
    assert table.select(SITE, Phase.PREFILL, 3, 900).shape.kv_dtype is None
    assert table.select(SITE, Phase.EXTEND, 3, 900).shape.kv_dtype == "float8_e4m3fn"


def test_e4m3_pages_on_a_gpu_that_cannot_convert_them_are_refused_at_start_up():
    limits = replace(LIMITS, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    with pytest.raises(Refused) as refused:
        make_table([(SITE, Phase.DECODE)], limits, find("A100"), "triton")
    assert {f.code for f in refused.value.findings} == {"attention_triton_e4m3"}


def test_an_encoder_is_planned_for_whole_pictures():
    site = replace(SITE, causal=False)
    limits = replace(LIMITS, page_size=None)
    table = make_table([(site, Phase.ENCODE)], limits, CPU, None)
    shape = table.select(site, Phase.ENCODE, 3, 1000).shape
    assert shape.max_q_len == shape.max_kv_len == 1024
    assert shape.page_size is None


def test_beyond_the_limits_is_our_own_fault():
    table = make_table([(SITE, Phase.DECODE)], LIMITS, CPU, None)
    with pytest.raises(AssertionError, match="201 sequences of 200"):
        table.select(SITE, Phase.DECODE, 201, 1)
    with pytest.raises(AssertionError, match="5001 keys of 5000"):
        table.select(SITE, Phase.DECODE, 1, 5001)
    with pytest.raises(KeyError):
        table.select(SITE, Phase.EXTEND, 1, 1)


def test_a_table_reports_each_reason_once():
    sites = [(replace(SITE, num_q_heads=7), Phase.DECODE), (replace(SITE, window=-1), Phase.EXTEND)]
    with pytest.raises(Refused) as refused:
        make_table(sites, LIMITS, CPU, "nothing")
    assert len(refused.value.findings) == 3


def test_planning_needs_no_torch():
    code = (
        "import sys, vitrail.attention.plan, vitrail.attention.shape;"
        "assert not {'torch', 'triton', 'cutlass'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("latent_rank", [0, 512])
def test_one_kernel_serves_prompts_and_decodes_where_decodes_extend(latent_rank: int):
    """Deterministic: whatever the bucket, a row's keys are read by the same code in the same tiles,
    never split, in one loop."""
    latent = {"num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent_rank": 512}
    site = replace(SITE, num_q_heads=16, **(latent if latent_rank else {}))
    limits = replace(
        LIMITS, dtype="bfloat16", max_q_len=8192, batch_invariant=True, decodes_extend=True
    )
    table = make_table([(site, Phase.EXTEND), (site, Phase.DECODE)], limits, GPU, "triton")
    assert len({repr(launches(plan)) for plan in table}) == 1
    made = table.select(site, Phase.DECODE, 3, 700)
    assert made == table.select(site, Phase.EXTEND, 3, 700)
    assert made.max_splits == 1
    assert not launches(made)[0].constants["PEELED"]
