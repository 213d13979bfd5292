"""Kimi-VL with faults of code, as modules that the registry finds by name: what no files of a
checkpoint show, and what `check` must see before it runs."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.model import DType, ModelConfig
from vitrail.models import qwen2
from vitrail.models.kimi_vl import model as kimi
from vitrail.models.kimi_vl.model import KimiVL
from vitrail.vision.attention import VisionAttentionMetadata


class Stacking(KimiVL):
    """The crash `stack expects each tensor to be equal size`: one picture works, two of one size
    work."""

    def encode_patches(
        self, patches: Tensor, grids: Sequence[tuple[int, int]], plans: Any
    ) -> Tensor:
        parts = patches.split([height * width for height, width in grids])
        made = [self.tower(p, [grid], plans) for p, grid in zip(parts, grids, strict=True)]
        return torch.stack(made).flatten(0, 1)


class DenseAttention(nn.Module):
    """One mask over all patches of all pictures, one matrix of scores: out of memory with two
    large ones."""

    def __init__(self, attention: Any):
        super().__init__()
        self.qkv, self.out, self.site = attention.qkv, attention.out, attention.site

    def forward(self, x_NM: Tensor, meta: VisionAttentionMetadata) -> Tensor:
        heads = (3, self.site.num_q_heads, self.site.head_dim)
        q, k, v = self.qkv(x_NM).unflatten(1, heads).permute(1, 2, 0, 3)
        picture = torch.cat(
            [torch.full((n,), i, device=x_NM.device) for i, n in enumerate(meta.varlen.kv_lens)]
        )
        scores = q @ k.transpose(1, 2) * self.site.scale
        scores.masked_fill_(picture[:, None] != picture[None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


class Dense(KimiVL):
    def __init__(self, config: ModelConfig, dtype: DType):
        super().__init__(config, dtype)
        for block in self.tower.encoder.blocks:
            block.attn = DenseAttention(block.attn)


class Renamed(KimiVL):
    """A module with another name than the map's row: KeyError when it was loaded."""

    def __init__(self, config: ModelConfig, dtype: DType):
        super().__init__(config, dtype)
        block = self.tower.encoder.blocks[0]
        block.final_mlp = block.mlp
        del block.mlp


class Unread(KimiVL):
    """Vision sinks that are loaded and never used."""

    def __init__(self, config: ModelConfig, dtype: DType):
        super().__init__(config, dtype)
        for block in self.tower.encoder.blocks:
            block.attn.sinks = nn.Parameter(torch.zeros(2))


class Unplanned(KimiVL):
    """Sinks that attention is called with and was not planned for."""

    def __init__(self, config: ModelConfig, dtype: DType):
        super().__init__(config, dtype)
        for block in self.tower.encoder.blocks:
            heads = block.attn.site.num_q_heads
            block.attn.sink = nn.Parameter(torch.zeros(heads))


class Miscounting(KimiVL):
    """Half of a picture's tokens."""

    def project_images(self, features: Tensor, images: Any) -> Tensor:
        rows = super().project_images(features, images)
        return rows[: len(rows) // 2]


def entry(build: Callable[[ModelConfig, DType], Any], base: Any = kimi) -> ModuleType:
    """A `ModelEntry` that builds another module."""
    made = ModuleType("faulty_model")
    vars(made).update(read_config=base.read_config, weight_map=base.weight_map, build=build)
    return made


def mimo_like(config: ModelConfig, dtype: DType) -> Any:
    """A decoder whose keys are wider than its values, in pages: no model that is served, but the
    one whose kernel died."""
    model = qwen2.build(config, dtype)
    wide = AttentionSite(
        num_q_heads=8, num_kv_heads=1, head_dim=192, head_dim_v=128, scale=0.1, causal=True
    )
    model.text_sites = lambda: [(wide, Phase.EXTEND), (wide, Phase.DECODE)]
    return model


def windowless(config: ModelConfig, dtype: DType) -> Any:
    """A Qwen2 whose sites say nothing of its windows."""
    model = qwen2.build(config, dtype)
    declared = model.text_sites()

    def text_sites() -> Sequence[tuple[AttentionSite, Phase]]:
        return [(site, phase) for site, phase in declared if site.window is None]

    model.text_sites = text_sites
    return model
