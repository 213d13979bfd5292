"""A toy with every kind of row: a module, its map, published-name tensors, and, written out by
hand, the parameters that these tensors mean."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.weights import headers, load, plan
from vitrail.weights.mapping import (
    Alias,
    Copy,
    Experts,
    Flatten,
    Fuse,
    Ignore,
    Piece,
    Source,
    Tie,
    WeightMap,
    whole,
)
from vitrail.weights.sharding import SINGLE, Layout, Segment, Shard

LAYERS, BLOCKS, EXPERTS = 2, 5, 3
VOCAB, HIDDEN, INTER = 40, 12, 8
HEADS, KV_HEADS, QK, V = 4, 2, 3, 5  # heads; rows of a q or k head, of a v head
VISION = 7


class Transpose(Copy):
    """A tensor whose elements lie in another order than the parameter's: its dims swapped."""

    def sources(self, shape: tuple[int, ...]) -> tuple[Source, ...]:
        stored = shape[::-1]
        return (Source(self.checkpoint, stored, (Piece(whole(stored), whole(shape), (1, 0)),)),)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = HEADS * QK + KV_HEADS * (QK + V)
        self.qkv = nn.Linear(HIDDEN, rows, bias=False)
        self.out = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.kv_up = nn.Parameter(torch.empty(HEADS * (QK + V), 6))
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INTER, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTER))
        self.router_bias = nn.Parameter(torch.empty(EXPERTS, dtype=torch.float32))
        self.norm = nn.RMSNorm(HIDDEN)
        frequencies = torch.arange(5.0, device="cpu")
        self.register_buffer("frequencies", frequencies, persistent=False)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.patch = nn.Linear(3 * 2 * 2, VISION)
        self.blocks = nn.ModuleList([nn.LayerNorm(VISION) for _ in range(BLOCKS)])
        self.projector = nn.Parameter(torch.empty(VISION, HIDDEN))


def toy(dtype: torch.dtype = torch.float32) -> Toy:
    """On the meta device; the router's bias stays fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Toy()
    finally:
        torch.set_default_dtype(before)


_QKV = Shard(
    dim=0,
    segments=(
        Segment(units=HEADS, width=QK),
        Segment(units=KV_HEADS, width=QK, replicate=True),
        Segment(units=KV_HEADS, width=V, replicate=True),
    ),
)


HEAD = Copy("lm.lm_head.weight", "head.weight", Shard(dim=0))
ROWS = (
    Copy("lm.model.embed.weight", "embed.weight", Shard(dim=0)),
    Fuse(
        checkpoints=tuple(f"lm.model.layers.{{layer}}.attn.{x}_proj.weight" for x in "qkv"),
        parameter="layers.{layer}.qkv.weight",
        sizes=(HEADS * QK, KV_HEADS * QK, KV_HEADS * V),
        shard=_QKV,
    ),
    Copy("lm.model.layers.{layer}.attn.o_proj.weight", "layers.{layer}.out.weight", Shard(dim=1)),
    Copy(
        "lm.model.layers.{layer}.attn.kv_b.weight",
        "layers.{layer}.kv_up",
        Shard(dim=0, segments=(Segment(units=HEADS, width=QK + V),)),
    ),
    Experts(
        checkpoints=(
            "lm.model.layers.{layer}.experts.{expert}.gate.weight",
            "lm.model.layers.{layer}.experts.{expert}.up.weight",
        ),
        parameter="layers.{layer}.gate_up",
        num_experts=EXPERTS,
        shard=Shard(dim=1),
    ),
    Experts(
        checkpoints=("lm.model.layers.{layer}.experts.{expert}.down.weight",),
        parameter="layers.{layer}.down",
        num_experts=EXPERTS,
        shard=Shard(dim=2),
    ),
    Copy("lm.model.layers.{layer}.router.bias", "layers.{layer}.router_bias"),
    Copy("lm.model.layers.{layer}.norm.weight", "layers.{layer}.norm.weight", init="ones"),
    Flatten("vision.patch.weight", "patch.weight", inner=(3, 2, 2)),
    Copy("vision.patch.bias", "patch.bias", init="zeros"),
    Copy("vision.blocks.{block}.norm.weight", "blocks.{block}.weight", init="ones"),
    Copy("vision.blocks.{block}.norm.bias", "blocks.{block}.bias", init="zeros"),
    Transpose("projector.weight", "projector"),
)
IGNORED = (Ignore("lm.model.layers.{layer}.inv_freq", "computed"), Ignore("mtp.*", "not served"))
ALIASES = (
    Alias(prefix="model.lm.", means="lm.model."),
    Alias(prefix="lm_head.", means="lm.lm_head."),
    Alias(prefix="model.vision.", means="vision."),
    Alias(prefix="model.vision.vision_model.", means="vision."),
    Alias(prefix="model.projector.", means="projector."),
)
MAP = WeightMap(rows=(*ROWS, HEAD), ignored=IGNORED, aliases=ALIASES)
TIED_MAP = WeightMap(
    rows=ROWS,
    ties=(Tie(parameter="head.weight", to="embed.weight", checkpoint="lm.lm_head.weight"),),
    ignored=IGNORED,
    aliases=ALIASES,
)


def published(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The checkpoint's tensors."""
    g = torch.Generator().manual_seed(seed)

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    found = {"lm.model.embed.weight": new(VOCAB, HIDDEN), "lm.lm_head.weight": new(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"lm.model.layers.{layer}"
        found[f"{at}.attn.q_proj.weight"] = new(HEADS * QK, HIDDEN)
        found[f"{at}.attn.k_proj.weight"] = new(KV_HEADS * QK, HIDDEN)
        found[f"{at}.attn.v_proj.weight"] = new(KV_HEADS * V, HIDDEN)
        found[f"{at}.attn.o_proj.weight"] = new(HIDDEN, HEADS * V)
        found[f"{at}.attn.kv_b.weight"] = new(HEADS * (QK + V), 6)
        for expert in range(EXPERTS):
            found[f"{at}.experts.{expert}.gate.weight"] = new(INTER, HIDDEN)
            found[f"{at}.experts.{expert}.up.weight"] = new(INTER, HIDDEN)
            found[f"{at}.experts.{expert}.down.weight"] = new(HIDDEN, INTER)
        found[f"{at}.router.bias"] = new(EXPERTS, dtype=torch.float32)
        found[f"{at}.norm.weight"] = new(HIDDEN)
        found[f"{at}.inv_freq"] = new(5)
    found["vision.patch.weight"] = new(VISION, 3, 2, 2)
    found["vision.patch.bias"] = new(VISION)
    for block in range(BLOCKS):
        found[f"vision.blocks.{block}.norm.weight"] = new(VISION)
        found[f"vision.blocks.{block}.norm.bias"] = new(VISION)
    found["projector.weight"] = new(HIDDEN, VISION)
    found["mtp.layers.0.anything"] = new(2, 2)
    return found


def meant(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the untied toy."""
    found = {
        "embed.weight": stored["lm.model.embed.weight"],
        "head.weight": stored["lm.lm_head.weight"],
        "patch.weight": stored["vision.patch.weight"].flatten(1),
        "patch.bias": stored["vision.patch.bias"],
        "projector": stored["projector.weight"].T,
    }
    for block in range(BLOCKS):
        for leaf in ("weight", "bias"):
            found[f"blocks.{block}.{leaf}"] = stored[f"vision.blocks.{block}.norm.{leaf}"]
    for layer in range(LAYERS):
        at, to = f"lm.model.layers.{layer}", f"layers.{layer}"
        found[f"{to}.qkv.weight"] = torch.cat([stored[f"{at}.attn.{x}_proj.weight"] for x in "qkv"])
        found[f"{to}.out.weight"] = stored[f"{at}.attn.o_proj.weight"]
        found[f"{to}.kv_up"] = stored[f"{at}.attn.kv_b.weight"]
        each = [
            {x: stored[f"{at}.experts.{e}.{x}.weight"] for x in ("gate", "up", "down")}
            for e in range(EXPERTS)
        ]
        found[f"{to}.gate_up"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        found[f"{to}.down"] = torch.stack([e["down"] for e in each])
        found[f"{to}.router_bias"] = stored[f"{at}.router.bias"]
        found[f"{to}.norm.weight"] = stored[f"{at}.norm.weight"]
    return found


def save_shards(tensors: dict[str, Tensor], folder: Path, count: int = 3) -> list[str]:
    """`count` files, tensors dealt out in turn, and their index. Returns the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    index = {name: files[i % count] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if index[n] == file}, folder / file)
    (folder / headers.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return files


def save_single(tensors: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / headers.SINGLE_FILE)
    return folder


def read_ok(folder: Path) -> headers.Headers:
    found = headers.read(folder)
    assert isinstance(found, headers.Headers), [str(f) for f in found]
    return found


def plan_ok(
    folder: Path, module: nn.Module, weight_map: WeightMap = MAP, layout: Layout = SINGLE
) -> plan.LoadPlan:
    found = plan.resolve(weight_map, read_ok(folder), load.parameters_of(module), layout)
    assert isinstance(found, plan.LoadPlan), [str(f) for f in found]
    return found
