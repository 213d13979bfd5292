"""`resolve`: a plan in which everything is used exactly once, or every reason against it, before a
byte of a weight is read."""

import json
import struct
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toy_vlm import (
    BLOCKS,
    HEAD,
    MAP,
    ROWS,
    TIED_MAP,
    meant,
    plan_ok,
    published,
    read_ok,
    save_shards,
    save_single,
    toy,
)

from vitrail.config.finding import Finding
from vitrail.weights import headers, load
from vitrail.weights.mapping import Alias, Copy, Experts, Ignore, Names, Tie, WeightMap, numel
from vitrail.weights.plan import LoadPlan, ParameterSpec, resolve
from vitrail.weights.problems import labels
from vitrail.weights.sharding import Layout, Segment, Shard, legal_sizes

SPECS = load.parameters_of(toy())


def in_memory(tensors: dict[str, torch.Tensor]) -> headers.Headers:
    """Headers of tensors that are in no file at all."""
    found: dict[str, headers.TensorHeader] = {}
    at = 8
    for name, tensor in tensors.items():
        found[name] = headers.TensorHeader(
            name=name,
            file="nowhere.safetensors",
            dtype=load.dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            start=at,
            stop=at + tensor.nbytes,
        )
        at += tensor.nbytes
    return headers.Headers(tensors=found)


def refused(
    tensors: dict[str, torch.Tensor],
    weight_map: WeightMap = MAP,
    specs: dict[str, ParameterSpec] = SPECS,
    layout: Layout | None = None,
) -> list[Finding]:
    layout = layout or Layout(rank=0, size=1)
    found = resolve(weight_map, in_memory(tensors), specs, layout)
    assert isinstance(found, list), "accepted"
    return found


def kinds(found: list[Finding]) -> dict[str, set[str]]:
    by_code: dict[str, set[str]] = {}
    for finding in found:
        by_code.setdefault(finding.code, set()).add(finding.where)
    return by_code


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_and_every_element_is_used_exactly_once(size: int) -> None:
    stored = published()
    taken: Counter[str] = Counter()
    for rank in range(size):
        plan = resolve(MAP, in_memory(stored), SPECS, Layout(rank=rank, size=size))
        assert isinstance(plan, LoadPlan)
        filled = {
            n: torch.zeros(spec.shape, dtype=torch.int) for n, spec in plan.parameters.items()
        }
        for read in plan.reads:
            filled[read.parameter][tuple(slice(*i) for i in read.target)] += 1
            taken[read.tensor] += numel([b - a for a, b in read.source])
            assert read.whole == (read.source == tuple((0, e) for e in stored[read.tensor].shape))
        assert all((times == 1).all() for times in filled.values())
        assert plan.parameters.keys() == SPECS.keys()
        assert set(plan.ignored) == stored.keys() - {r.tensor for r in plan.reads}
    kept = stored.keys() - set(plan.ignored)
    assert taken.keys() == kept
    assert all(taken[name] >= stored[name].numel() for name in kept)
    if size == 1:
        assert all(taken[name] == stored[name].numel() for name in kept)


def test_reads_follow_the_files_bytes(tmp_path: Path) -> None:
    save_shards(published(), tmp_path)
    found = read_ok(tmp_path)
    plan = plan_ok(tmp_path, toy())
    places = [(r.file, found.tensors[r.tensor].start) for r in plan.reads]
    assert places == sorted(places)


def test_everything_wrong_is_said_at_once() -> None:
    stored = published()
    stored["lm.model.layers.0.attn.o_proj.weight"] = torch.ones(12, 21)  # wrong shape
    del stored["vision.patch.bias"]
    del stored["lm.model.layers.1.experts.2.up.weight"]
    stored["lm.model.layers.1.experts.3.up.weight"] = torch.ones(8, 12)  # one too many
    stored["lm.model.layers.2.norm.weight"] = torch.ones(12)  # the model has two layers
    stored["stranger"] = torch.ones(2)
    stored["projector.weight"] = torch.ones(12, 7, dtype=torch.int8)
    specs = SPECS | {"layers.0.extra": ParameterSpec((3,), "float32")}
    found = refused(stored, MAP, specs)
    assert kinds(found) == {
        "wrong_shape": {"lm.model.layers.0.attn.o_proj.weight"},
        "missing_tensor": {"vision.patch.bias", "lm.model.layers.1.experts.2.up.weight"},
        "unexpected_tensor": {
            "lm.model.layers.1.experts.3.up.weight",
            "lm.model.layers.2.norm.weight",
            "stranger",
        },
        "wrong_dtype": {"projector.weight"},
        "unfilled_parameter": {"layers.0.extra"},
    }
    shape = next(f for f in found if f.code == "wrong_shape")
    assert "[12, 21]" in shape.saw
    assert "[12, 20] fills parameter layers.{layer}.out.weight" in shape.rule
    assert "int8 in the checkpoint for a float32" in next(
        f.saw for f in found if f.code == "wrong_dtype"
    )


def test_quantised_and_integer_tensors_are_not_cast() -> None:
    for dtype in (torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool):
        stored = published()
        stored["projector.weight"] = stored["projector.weight"].to(dtype)
        assert kinds(refused(stored)) == {"wrong_dtype": {"projector.weight"}}
    kept = WeightMap(rows=(Copy("ids", "ids"),))
    specs = {"ids": ParameterSpec((3,), "int64")}
    assert isinstance(resolve(kept, in_memory({"ids": torch.arange(3)}), specs), LoadPlan)
    assert kinds(refused({"ids": torch.ones(3)}, kept, specs)) == {"wrong_dtype": {"ids"}}


def test_a_module_renamed_without_its_row_names_both_sides() -> None:
    """The kind of crash that string replacement in loaders makes."""
    specs = {name.replace(".out.", ".output."): spec for name, spec in SPECS.items()}
    found = {f.code: f for f in refused(published(), MAP, specs)}
    assert found.keys() == {"unexpected_tensor", "unfilled_parameter"}
    lost, empty = found["unexpected_tensor"], found["unfilled_parameter"]
    assert lost.where == "lm.model.layers.{0..1}.attn.o_proj.weight"
    assert "layers.{layer}.out.weight, which the model lacks" in lost.saw
    assert "nearest: layers.0.output.weight" in lost.saw
    assert empty.where == "layers.{0..1}.output.weight"
    assert "nearest: layers.{layer}.out.weight" in empty.saw


PREFIXES = {
    "published": {},
    "re-saved by a newer library": {
        "lm.lm_head.": "lm_head.",
        "lm.model.": "model.lm.",
        "vision.": "model.vision.",
        "projector.": "model.projector.",
    },
    "inner vision model": {"vision.": "model.vision.vision_model."},
    "text only moved": {"lm.model.": "model.lm."},
}


def renamed(stored: dict[str, torch.Tensor], prefixes: dict[str, str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        for old, new in prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        found[name] = tensor
    return found


@pytest.mark.parametrize("writer", PREFIXES)
def test_e07_declared_prefixes_load_alike(tmp_path: Path, writer: str) -> None:
    stored = published()
    save_single(renamed(stored, PREFIXES[writer]), tmp_path)
    module = toy()
    load.load(plan_ok(tmp_path, module), module, tmp_path, torch.device("cpu"))
    want = meant(stored)
    assert all(torch.equal(p, want[name]) for name, p in module.named_parameters())


def test_e07_an_unknown_prefix_lists_the_nearest_names() -> None:
    found = refused(renamed(published(), {"vision.": "backbone.vision."}))
    assert kinds(found) == {
        "missing_tensor": {
            "vision.patch.weight",
            "vision.patch.bias",
            "vision.blocks.{0..4}.norm.weight",
            "vision.blocks.{0..4}.norm.bias",
        },
        "unexpected_tensor": {
            "backbone.vision.patch.weight",
            "backbone.vision.patch.bias",
            "backbone.vision.blocks.{0..4}.norm.weight",
            "backbone.vision.blocks.{0..4}.norm.bias",
        },
    }
    said = {f.where: f.saw for f in found}
    assert "nearest: backbone.vision.patch.bias" in said["vision.patch.bias"]
    assert "nearest: vision.patch.bias" in said["backbone.vision.patch.bias"]
    assert said["vision.blocks.{0..4}.norm.bias"].startswith(f"{BLOCKS} such names")


def test_e07_one_tensor_under_two_of_its_names_is_refused() -> None:
    stored = published()
    stored["model.vision.patch.bias"] = stored["vision.patch.bias"]
    assert kinds(refused(stored)) == {"duplicate_tensor": {"model.vision.patch.bias"}}


def test_e09_a_block_missing_from_the_index_is_refused(tmp_path: Path) -> None:
    stored = {n: t for n, t in published().items() if ".blocks.3." not in n}
    save_shards(stored, tmp_path)
    found = resolve(MAP, read_ok(tmp_path), SPECS)
    assert isinstance(found, list)
    lost = {"vision.blocks.3.norm.weight", "vision.blocks.3.norm.bias"}
    assert kinds(found) == {"missing_tensor": lost}


def test_nothing_is_read_of_a_checkpoint_of_300_gb(tmp_path: Path) -> None:
    """A sparse file: the plan of 300 GB takes a moment and no memory."""
    count, shape = 40, [60_000, 62_500]
    size = 2 * shape[0] * shape[1]
    entries = {
        f"layers.{i}.w": {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [i * size, i * size + size],
        }
        for i in range(count)
    }
    text = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + count * size)
    weight_map = WeightMap(rows=(Copy("layers.{layer}.w", "l.{layer}", Shard(dim=1)),))
    specs = {f"l.{i}": ParameterSpec(tuple(shape), "bfloat16") for i in range(count)}
    began = time.process_time()
    tracemalloc.start()
    found = resolve(weight_map, read_ok(tmp_path), specs, Layout(rank=3, size=4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, LoadPlan)
    assert found.read_bytes == 300_000_000_000 // 4
    assert peak < 2 << 20
    assert time.process_time() - began < 5
    del specs["l.7"]
    wrong = resolve(weight_map, read_ok(tmp_path), specs)
    assert isinstance(wrong, list)
    assert [f.where for f in wrong] == ["layers.7.w"]


def test_thousands_of_wrong_names_are_a_few_findings() -> None:
    rows = tuple(
        Experts(
            checkpoints=(f"m.{{layer}}.experts.{{expert}}.{x}",),
            parameter=f"l.{{layer}}.{x}",
            num_experts=100,
        )
        for x in ("gate", "up", "down")
    )
    stored = {
        f"m.{layer}.experts.{e}.{x}": torch.empty(2, 3, device="meta")
        for layer in range(3)
        for e in range(100)
        for x in ("gate", "up", "down")
    }
    specs = {
        f"l.{layer}.{x}": ParameterSpec((100, 2, 3), "float32")
        for layer in range(3)
        for x in ("gate", "up", "down")
    }
    plan = resolve(WeightMap(rows=rows), in_memory(stored), specs)
    assert isinstance(plan, LoadPlan)
    assert len(plan.reads) == 3 * 100 * 3
    wrong = refused({f"x.{n}": t for n, t in stored.items()}, WeightMap(rows=rows), specs)
    assert {f.where for f in wrong} == {
        f"{prefix}m.{{0..2}}.experts.{{0..99}}.{x}"
        for prefix in ("", "x.")
        for x in ("gate", "up", "down")
    }


# Sharding.


def test_sizes_that_do_not_divide_are_refused_with_the_legal_ones() -> None:
    found = refused(published(), MAP, SPECS, Layout(rank=0, size=3))
    where = {f.where: f for f in found}
    assert {f.code for f in found} == {"illegal_sharding"}
    assert "4 units of 3 along dim 0 over 3 ranks" in where["layers.{0..1}.qkv.weight"].saw
    assert where["layers.{0..1}.qkv.weight"].change == "use a size of 1, 2, 4"
    assert where["layers.{0..1}.gate_up"].change == "use a size of 1, 2, 4, 8"
    assert "layers.{0..1}.norm.weight" not in where


def test_legal_sizes_of_replicated_heads() -> None:
    q, kv = Segment(units=16, width=4), Segment(units=4, width=4, replicate=True)
    assert legal_sizes([q, kv]) == [1, 2, 4, 8, 16]
    assert legal_sizes([q, replace(kv, replicate=False)]) == [1, 2, 4]
    assert legal_sizes([replace(kv, units=6), q]) == [1, 2]


@settings(deadline=None)
@given(
    units=st.integers(1, 24),
    width=st.integers(1, 5),
    size=st.integers(1, 24),
    replicate=st.booleans(),
)
def test_segments_are_covered_in_order_by_equal_shares(
    units: int, width: int, size: int, replicate: bool
) -> None:
    segment = Segment(units=units, width=width, replicate=replicate)
    rule = Shard(dim=0, segments=(Segment(units=size), segment))
    shape = (size + units * width, 3)
    cuts = [rule.cut("w", shape, (), Layout(rank=rank, size=size)) for rank in range(size)]
    if size not in legal_sizes([segment]):
        assert all(isinstance(cut, Finding) for cut in cuts)
        return
    held: list[int] = []
    for rank, cut in enumerate(cuts):
        assert not isinstance(cut, Finding)
        own, share = cut.spans
        assert own == (rank, rank + 1, 0)
        assert (share.start - size) % width == 0
        assert share.at == 1
        assert cut.shape == (1 + share.stop - share.start, 3)
        held += range(share.start - size, share.stop - size)
    assert len({cut.shape for cut in cuts if not isinstance(cut, Finding)}) == 1
    times = Counter(held)
    assert times.keys() == set(range(units * width))
    assert set(times.values()) == {max(1, size // units)}


def test_experts_can_be_cut_between_experts() -> None:
    row = Experts(
        checkpoints=("e.{expert}.gate", "e.{expert}.up"),
        parameter="w",
        num_experts=6,
        shard=Shard(dim=0),
    )
    stored = {f"e.{e}.{x}": torch.empty(2, 5) for e in range(6) for x in ("gate", "up")}
    specs = {"w": ParameterSpec((6, 4, 5), "float32")}
    plan = resolve(WeightMap(rows=(row,)), in_memory(stored), specs, Layout(rank=1, size=3))
    assert isinstance(plan, LoadPlan)
    assert plan.parameters["w"].shape == (2, 4, 5)
    assert {read.tensor for read in plan.reads} == {
        f"e.{e}.{x}" for e in (2, 3) for x in ("gate", "up")
    }
    found = refused(stored, WeightMap(rows=(row,)), specs, Layout(rank=0, size=4))
    assert found[0].change == "use a size of 1, 2, 3, 6"


SHARED_ROWS = tuple(
    Experts(
        checkpoints=tuple(f"{stem}.{x}" for stem in ("e.{expert}", "shared") for x in kinds),
        parameter="_".join(kinds),
        num_experts=3,
        num_shared=2,
        dim=dim,
        shard=Shard(dim=dim + 1),
    )
    for kinds, dim in ((("gate", "up"), 0), (("down",), 1))
)


@pytest.mark.parametrize("size", [1, 2])
def test_shared_experts_are_stacked_after_the_numbered(size: int) -> None:
    """Each rank holds its part of every expert's intermediate channels (4), shared ones too."""
    stored = {f"e.{e}.{x}": torch.randn(4, 5) for e in range(3) for x in ("gate", "up")}
    stored |= {f"e.{e}.down": torch.randn(5, 4) for e in range(3)}
    stored |= {"shared.gate": torch.randn(8, 5), "shared.up": torch.randn(8, 5)}
    stored |= {"shared.down": torch.randn(5, 8)}
    gates = [*(stored[f"e.{e}.gate"] for e in range(3)), *stored["shared.gate"].split(4)]
    ups = [*(stored[f"e.{e}.up"] for e in range(3)), *stored["shared.up"].split(4)]
    downs = [*(stored[f"e.{e}.down"] for e in range(3)), *stored["shared.down"].split(4, 1)]
    specs = {"gate_up": (5, 8, 5), "down": (5, 5, 4)}
    specs = {name: ParameterSpec(shape, "float32") for name, shape in specs.items()}
    for rank in range(size):
        layout = Layout(rank=rank, size=size)
        plan = resolve(WeightMap(rows=SHARED_ROWS), in_memory(stored), specs, layout)
        assert isinstance(plan, LoadPlan)
        filled = {n: torch.full(p.shape, torch.nan) for n, p in plan.parameters.items()}
        for read in plan.reads:
            source = stored[read.tensor][tuple(slice(*i) for i in read.source)]
            filled[read.parameter][tuple(slice(*i) for i in read.target)] = source
        mine = slice(rank * 4 // size, (rank + 1) * 4 // size)
        want = torch.stack([torch.cat([g[mine], u[mine]]) for g, u in zip(gates, ups, strict=True)])
        assert torch.equal(filled["gate_up"], want)
        assert torch.equal(filled["down"], torch.stack(downs)[:, :, mine])


def test_a_shared_expert_of_another_width_is_refused() -> None:
    stored = {f"e.{e}.down": torch.empty(5, 4) for e in range(3)} | {
        "shared.down": torch.empty(5, 4)
    }
    found = refused(
        stored, WeightMap(rows=SHARED_ROWS[1:]), {"down": ParameterSpec((5, 5, 4), "float32")}
    )
    assert [(f.code, f.where) for f in found] == [("wrong_shape", "shared.down")]
    assert "[5, 8] fills parameter down [5, 5, 4]" in found[0].rule


# The map itself.


def test_a_tie_to_another_shape_is_refused() -> None:
    specs = SPECS | {"head.weight": ParameterSpec((41, 12), "float32")}
    stored = published()
    del stored["lm.lm_head.weight"]
    assert kinds(refused(stored, TIED_MAP, specs)) == {"wrong_tie": {"head.weight"}}
    specs = {name: spec for name, spec in SPECS.items() if name != "head.weight"}
    assert kinds(refused(stored, TIED_MAP, specs)) == {"wrong_tie": {"head.weight"}}


def test_a_stored_tied_tensor_of_another_shape_is_refused() -> None:
    stored = published()
    stored["lm.lm_head.weight"] = torch.ones(41, 12)
    assert kinds(refused(stored, TIED_MAP)) == {"wrong_shape": {"lm.lm_head.weight"}}


def test_malformed_maps_are_assertions() -> None:
    for rows in (
        (Copy("a.{x}", "b.{y}"),),
        (Copy("a.{x}", "b"),),
        (Copy("a", "b"), Copy("a", "c")),
        (Copy("a", "b"), Copy("c", "b")),
    ):
        with pytest.raises(AssertionError):
            WeightMap(rows=rows)
    with pytest.raises(AssertionError):
        WeightMap(rows=(*ROWS, HEAD), ties=(Tie(parameter="head.weight", to="embed.weight"),))


def test_names_match_whole_names_and_decimal_indices_only() -> None:
    names = Names(
        WeightMap(
            rows=(Copy("a.{n}.fc0.w", "p.{n}.w"), Copy("a.{n}.fc1.w", "p.{n}.v")),
            ignored=(Ignore("a.{n}.freq", "computed"), Ignore("mtp.*", "not served")),
            aliases=(Alias(prefix="m.", means=""), Alias(prefix="m.x.", means="a.")),
        )
    )
    assert names.match_tensor("a.12.fc1.w") == (1, (("n", "12"),))
    for name in ("a.1.fc2.w", "a.01.fc0.w", "a.-1.fc0.w", "xa.1.fc0.w", "a.1.fc0.w2", "a..fc0.w"):
        assert names.match_tensor(name) is None, name
    assert names.match_tensor("a.1xfc0.w") is None, "a dot is a dot"
    assert names.ignores("mtp.layers.0.w")
    assert names.ignores("a.3.freq")
    assert not names.ignores("a.3.freqs")
    assert names.canonical("m.x.1.fc0.w") == "a.1.fc0.w"
    assert names.canonical("m.a.1.fc0.w") == "a.1.fc0.w"


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40))
def test_labels_spell_the_names_that_are_there(pairs: set[tuple[int, int]]) -> None:
    names = [f"a.{i}.b{j}.w" for i, j in sorted(pairs, key=lambda p: p[::-1])]
    text = labels(names)
    spelled: list[str] = []
    for label in text.split("; "):
        if label.startswith("and "):
            assert len(text.split("; ")) == 9
            return
        assert label.startswith("a.")
        first, second = label.removeprefix("a.").removesuffix(".w").split(".b")
        spelled += [f"a.{i}.b{j}.w" for i in unfolded(first) for j in unfolded(second)]
    assert sorted(spelled) == sorted(names)


def unfolded(text: str) -> list[int]:
    found: list[int] = []
    for run in text.strip("{}").split(","):
        first, _, last = run.partition("..")
        found += range(int(first), int(last or first) + 1)
    assert all(a < b for a, b in pairwise(found))
    return found


def test_meta_modules_describe_themselves() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 5, dtype=torch.bfloat16)
    assert load.parameters_of(module) == {
        "weight": ParameterSpec((5, 3), "bfloat16"),
        "bias": ParameterSpec((5,), "bfloat16"),
    }
