"""Loading: every value where it belongs, nothing unwritten, nothing left on meta; ranks; ties; and
writing as the inverse of loading."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from toy_vlm import (
    EXPERTS,
    HEADS,
    INTER,
    KV_HEADS,
    MAP,
    QK,
    TIED_MAP,
    Toy,
    V,
    meant,
    plan_ok,
    published,
    read_ok,
    save_shards,
    save_single,
    toy,
)

from tests.weights import write
from vitrail.config.finding import Refused
from vitrail.weights import load, plan
from vitrail.weights.mapping import Copy, Fuse, WeightMap
from vitrail.weights.sharding import Layout, Segment, Shard

CPU = torch.device("cpu")


def equal(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert torch.equal(have[name], tensor), name


def named(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("count", [1, 4])
def test_load_fills_every_row_kind_bitwise(tmp_path: Path, count: int) -> None:
    stored = published()
    save_shards(stored, tmp_path, count)
    module = toy()
    loading = plan_ok(tmp_path, module)
    seen: list[tuple[int, int, str]] = []
    load.load(loading, module, tmp_path, CPU, lambda *step: seen.append(step))
    equal(named(module), meant(stored))
    assert not any(t.isnan().any() for t in named(module).values())
    assert not any(p.is_meta or p.requires_grad for p in module.parameters())
    taken = sum(t.nbytes for n, t in stored.items() if "inv_freq" not in n and "mtp" not in n)
    assert loading.read_bytes == taken
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert seen[-1][:2] == (taken, taken)
    files = [read.file for read in loading.reads]
    assert files == sorted(files), "each file is opened once"
    assert torch.equal(module.layers[0].frequencies, torch.arange(5.0))


def test_floats_are_cast_to_the_parameters_dtype_and_fp32_ones_stay(tmp_path: Path) -> None:
    stored = published(dtype=torch.float16)
    save_single(stored, tmp_path)
    module = toy(torch.bfloat16)
    load.load(plan_ok(tmp_path, module), module, tmp_path, CPU)
    found = named(module)
    assert found["layers.0.router_bias"].dtype == torch.float32
    for name, tensor in meant(stored).items():
        dtype = torch.float32 if name.endswith("router_bias") else torch.bfloat16
        assert torch.equal(found[name], tensor.to(dtype)), name


def test_unplanned_elements_would_be_seen(tmp_path: Path) -> None:
    """The poison works: a plan short of one read leaves NaN."""
    save_single(published(), tmp_path)
    module = toy()
    whole = plan_ok(tmp_path, module)
    short = plan.LoadPlan(
        layout=whole.layout,
        parameters=whole.parameters,
        reads=whole.reads[1:],
        ties=(),
        checks=(),
        ignored=(),
        warnings=(),
    )
    load.load(short, module, tmp_path, CPU)
    assert named(module)[whole.reads[0].parameter].isnan().any()


def test_a_module_that_is_not_the_plans_is_an_assertion(tmp_path: Path) -> None:
    save_single(published(), tmp_path)
    loading = plan_ok(tmp_path, toy())
    other = toy()
    other.layers[0].router_bias = nn.Parameter(torch.empty(EXPERTS + 1, device="meta"))
    with pytest.raises(AssertionError, match="router_bias"):
        load.load(loading, other, tmp_path, CPU)


def test_persistent_and_meta_buffers_are_assertions(tmp_path: Path) -> None:
    save_single(published(), tmp_path)
    module = toy()
    module.register_buffer("table", torch.empty(3, device="meta"), persistent=True)
    with pytest.raises(AssertionError, match="table"):
        load.parameters_of(module)
    module.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(AssertionError, match="table"):
        load.load(plan_ok(tmp_path, module), module, tmp_path, CPU)


# Tensor parallelism: the plan is right for every rank before any engine uses it.


def share(name: str, tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a whole toy parameter, written out with torch alone."""

    def cut(part: Tensor, dim: int = 0) -> Tensor:
        return part.chunk(layout.size, dim)[layout.rank]

    if name.endswith("qkv.weight"):
        q, k, v = tensor.split([HEADS * QK, KV_HEADS * QK, KV_HEADS * V])
        mine = layout.rank * KV_HEADS // layout.size
        per = max(1, KV_HEADS // layout.size)
        k, v = (x.unflatten(0, (KV_HEADS, -1))[mine : mine + per].flatten(0, 1) for x in (k, v))
        return torch.cat([cut(q), k, v])
    if name.endswith("gate_up"):
        return torch.cat([cut(half, 1) for half in tensor.split(INTER, 1)], 1)
    dims = {"out.weight": 1, "down": 2, "kv_up": 0, "embed.weight": 0}
    dims["head.weight"] = 0
    for ending, dim in dims.items():
        if name.endswith(ending):
            return cut(tensor, dim)
    return tensor


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_loads_its_own_slices(tmp_path: Path, size: int) -> None:
    stored = published()
    save_shards(stored, tmp_path, 2)
    taken = 0
    for rank in range(size):
        layout = Layout(rank=rank, size=size)
        loading = plan_ok(tmp_path, toy(), MAP, layout)
        want = {n: share(n, t, layout) for n, t in meant(stored).items()}
        module = toy()
        for name, tensor in want.items():
            owner, _, leaf = name.rpartition(".")
            local = nn.Parameter(torch.empty_like(tensor, device="meta"))
            module.get_submodule(owner).register_parameter(leaf, local)
        load.load(loading, module, tmp_path, CPU)
        equal(named(module), want)
        assert loading.read_bytes == sum(t.nbytes for t in want.values()), "only its own bytes"
        taken += loading.read_bytes
    assert size == 1 or taken < size * sum(t.nbytes for t in meant(stored).values())


@pytest.mark.parametrize("fused_file", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_e01_fused_qkv_is_cut_by_head_not_by_rank(
    tmp_path: Path, size: int, fused_file: bool
) -> None:
    """q = 1 (16 heads x 4), k = 2 (4 x 4), v = 3 (4 x 2): every rank holds all three."""
    q, k, v = torch.full((64, 5), 1.0), torch.full((16, 5), 2.0), torch.full((8, 5), 3.0)
    # a kv head's number in its decimals, so that which head a rank got is seen too
    k = k + torch.arange(4).repeat_interleave(4)[:, None] / 8
    v = v + torch.arange(4).repeat_interleave(2)[:, None] / 8
    rule = Shard(
        dim=0,
        segments=(
            Segment(units=16, width=4),
            Segment(units=4, width=4, replicate=True),
            Segment(units=4, width=2, replicate=True),
        ),
    )
    if fused_file:
        save_single({"qkv": torch.cat([q, k, v])}, tmp_path)
        weight_map = WeightMap(rows=(Copy("qkv", "weight", rule),))
    else:
        save_single({"q": q, "k": k, "v": v}, tmp_path)
        row = Fuse(checkpoints=("q", "k", "v"), parameter="weight", sizes=(64, 16, 8), shard=rule)
        weight_map = WeightMap(rows=(row,))
    heads, kv_heads = 16 // size, max(1, 4 // size)
    for rank in range(size):
        layout = Layout(rank=rank, size=size)
        with torch.device("meta"):
            whole = nn.Linear(5, 88, bias=False)
            local = nn.Linear(5, heads * 4 + kv_heads * 6, bias=False)
        loading = plan_ok(tmp_path, whole, weight_map, layout)
        load.load(loading, local, tmp_path, CPU)
        rows = local.weight[:, 0].detach()
        first = rank * 4 // size
        numbers = torch.arange(first, first + kv_heads) / 8
        mine = [torch.full((heads * 4,), 1.0)]
        mine += [2 + numbers.repeat_interleave(4), 3 + numbers.repeat_interleave(2)]
        assert torch.equal(rows, torch.cat(mine))
        assert torch.equal(local.weight, rows[:, None].expand(-1, 5))


# Ties.


def tied(folder: Path, stored: dict[str, Tensor]) -> Toy:
    save_single(stored, folder)
    module = toy()
    load.load(plan_ok(folder, module, TIED_MAP), module, folder, CPU)
    return module


def test_e10_a_tied_head_without_a_tensor_is_the_embedding_itself(tmp_path: Path) -> None:
    stored = published()
    del stored["lm.lm_head.weight"]
    module = tied(tmp_path, stored)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.head.weight, stored["lm.model.embed.weight"])
    hidden = torch.randn(3, module.embed.embedding_dim)
    assert torch.equal(module.head(hidden), hidden @ stored["lm.model.embed.weight"].T)


def test_e10_an_untied_head_without_a_tensor_is_refused(tmp_path: Path) -> None:
    stored = published()
    del stored["lm.lm_head.weight"]
    save_single(stored, tmp_path)
    found = plan.resolve(MAP, read_ok(tmp_path), load.parameters_of(toy()))
    assert isinstance(found, list)
    assert [(f.code, f.where) for f in found] == [("missing_tensor", "lm.lm_head.weight")]


@pytest.mark.parametrize("name", ["lm.lm_head.weight", "lm_head.weight"])
def test_e11_a_tied_head_that_is_stored_equal_is_skipped_with_a_warning(
    tmp_path: Path, name: str
) -> None:
    stored = published()
    del stored["lm.lm_head.weight"]
    stored[name] = stored["lm.model.embed.weight"].clone()
    save_single(stored, tmp_path)
    module = toy()
    loading = plan_ok(tmp_path, module, TIED_MAP)
    assert [(w.severity, w.code, w.where) for w in loading.warnings] == [
        ("warning", "tied_tensor_present", name)
    ]
    load.load(loading, module, tmp_path, CPU)
    assert module.head.weight is module.embed.weight


def test_e11_a_tied_head_that_differs_is_refused_before_the_engine_is_ready(
    tmp_path: Path,
) -> None:
    stored = published()
    stored["lm.lm_head.weight"] = stored["lm.model.embed.weight"].clone()
    stored["lm.lm_head.weight"][-1, -2:] += 1
    with pytest.raises(Refused, match="2 of 480 values differ from embed.weight") as error:
        tied(tmp_path, stored)
    assert error.value.findings[0].code == "tied_tensor_differs"
    assert "lm.lm_head.weight" in error.value.findings[0].where


# Writing is the inverse of loading.


@settings(max_examples=12, deadline=None)
@given(shards=st.integers(1, 7), seed=st.integers(0, 9), bf16=st.booleans(), tie=st.booleans())
def test_written_checkpoints_load_back_bitwise(
    tmp_path_factory: pytest.TempPathFactory, shards: int, seed: int, bf16: bool, tie: bool
) -> None:
    folder = tmp_path_factory.mktemp("written") / "new"
    dtype = torch.bfloat16 if bf16 else torch.float32
    weight_map = TIED_MAP if tie else MAP
    source = toy(dtype)
    load.randomize(weight_map, source, CPU, seed)
    write.write_parameters(weight_map, named(source), folder, shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    target = toy(dtype)
    load.load(plan_ok(folder, target, weight_map), target, folder, CPU)
    equal(named(target), named(source))
    assert (target.head.weight is target.embed.weight) == tie


class Paired(nn.Module):
    """Two query heads and one key head of 6 rows each, 3 value rows, in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(5, 21)


PAIRED_MAP = WeightMap(
    rows=tuple(
        Fuse(
            checkpoints=(f"q.{leaf}", f"k.{leaf}", f"v.{leaf}"),
            parameter=f"qkv.{leaf}",
            sizes=(12, 6, 3),
            pairs=(6, 6, 0),
            shard=Shard(
                dim=0,
                segments=(
                    Segment(units=2, width=6),
                    Segment(units=1, width=6, replicate=True),
                    Segment(units=1, width=3, replicate=True),
                ),
            ),
        )
        for leaf in ("weight", "bias")
    )
)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_stored_by_rotary_pair_become_halves_on_every_rank(tmp_path: Path, size: int) -> None:
    """A value names its head (10s) and its row within it as halves count them (1s)."""
    halves = torch.tensor([[10.0 * h + i for i in range(6)] for h in range(3)])
    pairs = halves[:, [0, 3, 1, 4, 2, 5]].flatten()
    stored = {"q.bias": pairs[:12], "k.bias": pairs[12:], "v.bias": torch.tensor([90.0, 91, 92])}
    stored |= {n.replace("bias", "weight"): t[:, None].expand(-1, 5) for n, t in stored.items()}
    save_single({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path)
    for rank in range(size):
        with torch.device("meta"):
            module = Paired()
        made = plan.resolve(
            PAIRED_MAP, read_ok(tmp_path), load.parameters_of(module), Layout(rank=rank, size=size)
        )
        assert isinstance(made, plan.LoadPlan), made
        with torch.device("meta"):
            module.qkv = nn.Linear(5, made.parameters["qkv.bias"].shape[0])
        load.load(made, module, tmp_path, CPU)
        heads = halves[:2].chunk(size)[rank]
        want = torch.cat((heads.flatten(), halves[2], torch.tensor([90.0, 91, 92])))
        assert torch.equal(module.qkv.bias, want)
        assert torch.equal(module.qkv.weight, want[:, None].expand(-1, 5))
        if size == 1:
            written = write.tensors_of(PAIRED_MAP, named(module))
            equal(written, {name: tensor.contiguous() for name, tensor in stored.items()})


def test_written_tensors_are_the_published_ones(tmp_path: Path) -> None:
    stored = {n: t for n, t in published().items() if "inv_freq" not in n and "mtp" not in n}
    write.write_parameters(MAP, meant(stored), tmp_path / "new")
    equal(load_file(tmp_path / "new" / "model.safetensors"), stored)


def test_random_checkpoints_depend_on_seed_and_names_only(tmp_path: Path) -> None:
    specs = load.parameters_of(toy(torch.bfloat16))
    loaded = []
    for folder, seed, shards in (("a", 1, 1), ("b", 1, 3), ("c", 2, 1)):
        write.write_checkpoint(MAP, specs, tmp_path / folder, seed, shards)
        module = toy(torch.bfloat16)
        load.load(plan_ok(tmp_path / folder, module), module, tmp_path / folder, CPU)
        loaded.append(named(module))
    equal(loaded[0], loaded[1])
    assert not torch.equal(loaded[0]["embed.weight"], loaded[2]["embed.weight"])
    assert not torch.equal(loaded[0]["layers.0.down"], loaded[0]["layers.1.down"])
    assert (loaded[0]["layers.0.norm.weight"] == 1).all()
    assert (loaded[0]["patch.bias"] == 0).all()
    assert loaded[0]["layers.0.router_bias"].dtype == torch.float32
    spread = loaded[0]["embed.weight"].float().std().item()
    assert 0.017 < spread < 0.023


def test_random_checkpoint_in_another_dtype(tmp_path: Path) -> None:
    write.write_checkpoint(MAP, load.parameters_of(toy()), tmp_path / "a", 0, dtype="float16")
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.float16}


def test_a_checkpoint_is_not_written_over_another(tmp_path: Path) -> None:
    save_single(published(), tmp_path)
    with pytest.raises(Refused, match="model.safetensors"):
        write.write_checkpoint(MAP, load.parameters_of(toy()), tmp_path, 0)


def test_plans_need_no_torch() -> None:
    code = "import sys, vitrail.weights.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused_by_the_tensors_that_hold_them(
    tmp_path: Path, dtype: torch.dtype, bad: float
) -> None:
    """Of fused ones the part, of stacked ones the expert; equal names together. A router's bias
    that is NaN would have its expert chosen by every token, and logits stay finite."""
    stored = published(dtype=dtype)
    there = "lm.model.layers"
    for name in (
        f"{there}.0.router.bias",
        f"{there}.1.router.bias",
        f"{there}.1.attn.k_proj.weight",
    ):
        stored[name].view(-1)[-1] = bad
    stored[f"{there}.0.experts.2.up.weight"][3, 1] = bad
    save_single(stored, tmp_path)
    module = toy(dtype)
    with pytest.raises(Refused) as refused:
        load.load(plan_ok(tmp_path, module), module, tmp_path, CPU)
    assert {f.where for f in refused.value.findings} == {
        f"{there}.{{0..1}}.router.bias",
        f"{there}.1.attn.k_proj.weight",
        f"{there}.0.experts.2.up.weight",
    }
    assert {f.code for f in refused.value.findings} == {"weights_not_finite"}


def test_a_value_that_another_dtype_cannot_hold_is_refused_with_that_dtype(tmp_path: Path) -> None:
    stored = published(dtype=torch.bfloat16)
    stored["vision.patch.bias"][0] = 1e38
    save_single(stored, tmp_path)
    module = toy(torch.bfloat16)
    load.load(plan_ok(tmp_path, module), module, tmp_path, CPU)
    module = toy(torch.float16)
    with pytest.raises(Refused, match="vision.patch.bias: NaN or infinite values as float16"):
        load.load(plan_ok(tmp_path, module), module, tmp_path, CPU)
