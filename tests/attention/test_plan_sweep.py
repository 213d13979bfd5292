"""The planner's rules over every GPU and every shape we serve, and each rule broken once."""

import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import tests.attention.sweep as sw
from vitrail.attention.backends.triton import join_launch
from vitrail.attention.fa4 import choose_fa4
from vitrail.attention.legality import Rule, finding
from vitrail.attention.plan import KERNEL_BACKENDS, AttentionPlan, plan_on
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.attention.tiles import (
    BY_BULK,
    BY_ROWS,
    Choice,
    Choose,
    Facts,
    choose_cute,
    choose_triton,
    facts,
)
from vitrail.config.hardware import GPUS, find

pytestmark = pytest.mark.suite("kernels", minutes=2, owner="attention")


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_every_plan_is_legal(name):
    """And our own kernels refuse no shape of a model we serve, on any GPU."""
    backend = KERNEL_BACKENDS[name]
    seen = sw.sweep(backend.choose, backend.rules, backend.rules, sw.cases())
    assert seen.combinations >= 10_000_000
    assert not seen.broken
    assert seen.planned > seen.combinations // 50
    if name == "triton":
        assert not seen.missed


def test_e4m3_is_swept_under_every_dtype_and_planned_in_half_precision():
    assert {kind[::2] for kind in sw.DTYPES if kind[1] == 1} == {(2, 1), (4, 0)}
    rules, planned = KERNEL_BACKENDS["triton"].rules, set()
    for _, f in sw.cases(sw.FEW):
        c, e4m3 = choose_triton(f), (f.kv_bytes == 1) & (f.kv_len >= 0)
        legal = sw.truth(e4m3, np.broadcast_shapes(*(np.shape(x) for x in f)))
        for rule in rules:
            legal = legal & rule.holds(f, c)
        if legal.any():
            planned.add((f.cc, f.latent > 0))
    assert planned == {(cc, latent) for cc in (89, 90, 103, 120) for latent in (False, True)}


def altered(choose: Choose, **changes) -> Choose:
    """`choose` with fields computed by faulty rules of (facts, choice)."""

    def faulty(f: Facts) -> Choice:
        c = choose(f)
        return c._replace(**{name: change(f, c) for name, change in changes.items()})

    return faulty


def from_the_pool(f: Facts) -> Choice:
    """Splits from a pool of a million tokens."""
    c = choose_triton(f)
    return c._replace(
        max_splits=choose_triton(f._replace(kv_len=f.kv_len * 0 + (1 << 20))).max_splits
    )


twice_the_items = {"max_items": lambda f, c: c.max_items * 2}

# Rule -> a backend that has it, and a chooser that breaks it: the planner's own where shapes alone
# break it.
MUTATIONS: dict[str, tuple[str, Choose]] = {
    "shared_memory": ("triton", altered(choose_triton, smem_bytes=lambda f, c: c.smem_bytes * 2)),
    "registers": (
        "triton",
        altered(choose_triton, live_registers=lambda f, c: c.live_registers * 2),
    ),
    "register_file": (
        "triton",
        altered(choose_triton, program_registers=lambda f, c: 64 * c.warps * c.registers),
    ),
    "rows": (
        "fa4",
        altered(choose_fa4, rows_per_thread=lambda f, c: c.tile_n // c.loader_threads),
    ),
    "bulk": ("cute", altered(choose_cute, loader=lambda f, c: BY_BULK)),
    "box": ("triton", altered(choose_triton, loader=lambda f, c: BY_BULK)),
    "dims": ("triton", altered(choose_triton, dim_b=lambda f, c: 0)),
    "tmem": ("fa4", altered(choose_fa4, tmem_columns=lambda f, c: c.tmem_columns * 2)),
    "splits": ("triton", from_the_pool),
    "items": ("triton", altered(choose_triton, max_items=lambda f, c: f.batch)),
    "grid": ("triton", choose_triton),
    "workspace": ("triton", choose_triton),
    "invariant": ("triton", altered(choose_triton, item_pages=lambda f, c: 0)),
    "triton_arch": ("triton", choose_triton),
    "triton_e4m3": ("triton", choose_triton),
    "triton_e4m3_dtype": ("triton", choose_triton),
    "cute_arch": ("cute", choose_cute),
    "cute_phase": ("cute", choose_cute),
    "cute_dtype": ("cute", choose_cute),
    "cute_dims": ("cute", choose_cute),
    "cute_box": ("cute", altered(choose_cute, loader=lambda f, c: BY_BULK)),
    "fa4_arch": ("fa4", choose_fa4),
    "fa4_dtype": ("fa4", choose_fa4),
    "fa4_alignment": ("fa4", choose_fa4),
    "fa4_dims_ampere": ("fa4", choose_fa4),
    "fa4_dims_hopper": ("fa4", choose_fa4),
    "fa4_dims_blackwell": ("fa4", choose_fa4),
    "fa4_paged_ampere": ("fa4", choose_fa4),
    "fa4_paged_dims": ("fa4", choose_fa4),
    "fa4_bulk_page": ("fa4", altered(choose_fa4, loader=lambda f, c: BY_BULK)),
    "fa4_tail": ("fa4", choose_fa4),
    "fa4_tile_kept": ("fa4", altered(choose_fa4, tile_n=lambda f, c: c.tile_n // 2)),
    "fa4_bulk_kept": ("fa4", altered(choose_fa4, loader=lambda f, c: BY_ROWS)),
    "fa4_split_arch": ("fa4", altered(choose_fa4, max_splits=lambda f, c: 2, **twice_the_items)),
    "fa4_split_unequal": (
        "fa4",
        altered(choose_fa4, max_splits=lambda f, c: 2, **twice_the_items),
    ),
    "fa4_hd256": ("fa4", choose_fa4),
    "fa4_hd256_pair": ("fa4", choose_fa4),
    "fa4_latent": (
        "fa4",
        altered(choose_fa4, smem_bytes=lambda f, c: 0, live_registers=lambda f, c: 0),
    ),
    "fa4_sink": ("fa4", choose_fa4),
}


def test_every_rule_has_a_mutation():
    rules = [rule.name for backend in KERNEL_BACKENDS.values() for rule in backend.rules]
    assert set(MUTATIONS) == set(rules)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_rule_alone_stands_before_a_fault(name):
    """Without the rule the planner plans what it forbids, and the sweep sees it."""
    backend, choose = MUTATIONS[name]
    rules = KERNEL_BACKENDS[backend].rules
    (rule,) = (r for r in rules if r.name == name)
    others = tuple(r for r in rules if r is not rule)
    seen = sw.sweep(choose, others, (rule,), sw.cases(sw.FEW))
    assert seen.broken[name] > 0, f"{name} forbids nothing that the other rules allow"


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_refusal_says_what_it_saw_in_numbers(name):
    backend, choose = MUTATIONS[name]
    (rule,) = (r for r in KERNEL_BACKENDS[backend].rules if r.name == name)
    f, c = first_refused(rule, choose)
    shape = AttentionShape(
        site=AttentionSite(
            num_q_heads=1, num_kv_heads=1, head_dim=1, head_dim_v=1, scale=1.0, causal=True
        ),
        phase=Phase.DECODE,
        dtype="bfloat16",
        page_size=1,
        batch=1,
        max_q_len=1,
        max_kv_len=1,
    )
    found = finding(rule, shape, backend, f, c)
    assert re.search(r"\d", found.saw), found
    assert "{" not in str(found)
    assert found.code == f"attention_{name}"
    assert found.where.startswith("attention decode: ")


def first_refused(rule: Rule, choose: Choose) -> tuple[Facts, Choice]:
    for _, f in sw.cases(sw.FEW):
        shape = np.broadcast_shapes(*(np.shape(x) for x in f))
        wrong = np.argwhere(~sw.truth(rule.holds(f, choose(f)), shape))
        if len(wrong):
            at = tuple(wrong[0])
            one = Facts(*(int(np.broadcast_to(x, shape)[at]) for x in f))
            assert not rule.holds(one, choose(one))
            return one, choose(one)
    raise AssertionError(f"{rule.name} refuses nothing")


@pytest.mark.parametrize("name", KERNEL_BACKENDS)
def test_ints_and_arrays_give_the_same_choices(name):
    """The planner's numbers are the sweep's."""
    backend, random = KERNEL_BACKENDS[name], Random(3)
    for _, f in random.sample(list(sw.cases(sw.FEW)), 40):
        shape = np.broadcast_shapes(*(np.shape(x) for x in f))
        at = tuple(random.randrange(n) for n in shape)
        one = Facts(*(int(np.broadcast_to(x, shape)[at]) for x in f))
        many = backend.choose(f)
        assert backend.choose(one) == tuple(int(np.broadcast_to(x, shape)[at]) for x in many)


def test_facts_are_those_of_the_shape():
    site = AttentionSite(
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=192,
        head_dim_v=128,
        scale=0.1,
        causal=True,
        window=127,
        sink=True,
        softcap=30.0,
    )
    shape = AttentionShape(
        site=site,
        phase=Phase.DECODE,
        dtype="bfloat16",
        page_size=48,
        batch=7,
        max_q_len=3,
        max_kv_len=1000,
        kv_dtype="float8_e4m3fn",
        batch_invariant=True,
    )
    f = facts(shape, find("B300"))
    assert f == Facts(
        cc=103,
        num_sms=148,
        smem_block=227 << 10,
        smem_sm=228 << 10,
        registers_sm=65536,
        tmem=512,
        paged=1,
        batch=7,
        q_len=3,
        kv_len=1000,
        page=48,
        q_heads=64,
        kv_heads=8,
        dim=192,
        dim_v=128,
        latent=0,
        causal=1,
        window=127,
        sink=1,
        softcap=1,
        q_bytes=2,
        kv_bytes=1,
        half=1,
        invariant=1,
    )
    plain = replace(
        shape, kv_dtype=None, dtype="float16", site=replace(site, window=None, softcap=None)
    )
    g = facts(plain, find("A100"))
    assert (g.window, g.softcap, g.kv_bytes, g.half) == (-1, 0, 2, 1)


def test_fixed_splits_depend_on_nothing_but_the_site():
    """Batch-invariant: the tile, the pages of an item and the order in which partial results are
    joined are the same for every bucket."""
    plain = AttentionSite(
        num_q_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, scale=0.1, causal=True
    )
    latent = replace(
        plain, num_q_heads=16, num_kv_heads=1, head_dim=576, head_dim_v=512, latent_rank=512
    )
    for gpu, site in ((gpu, site) for gpu in GPUS for site in (plain, latent)):
        kept: set[tuple[int, ...]] = set()
        for batch in (1, 2, 32, 200):
            for kv_len in (256, 4096, 65536):
                shape = AttentionShape(
                    site=site,
                    phase=Phase.DECODE,
                    dtype="bfloat16",
                    page_size=16,
                    batch=batch,
                    max_q_len=1,
                    max_kv_len=kv_len,
                    batch_invariant=True,
                )
                made = plan_on("triton", shape, gpu)
                assert isinstance(made, AttentionPlan)
                join = tuple(join_launch(made).constants.values())
                kept.add((made.tile_m, made.tile_n, made.num_warps, made.item_pages, *join))
        assert len(kept) == 1
