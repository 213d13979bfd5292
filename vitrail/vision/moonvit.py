"""MoonViT: Kimi-VL's vision tower, at each picture's native resolution.

Parameters (published name): `patch_embed.{weight [M, C*P*P], bias}` (patch_embed.proj, its weight
flattened), `pos_embed [Hp, Wp, M]` (patch_embed.pos_emb.weight), `encoder.*` (see `encoder`; the
published norm0, norm1, wqkv, wo, mlp.fc0, mlp.fc1 of a block are norm1, norm2, attn.qkv, attn.out,
mlp.up, mlp.down; final_layernorm is encoder.norm).

Legend: N packed patches, F = C*P*P samples of a patch, M hidden channels, h w a grid's sides."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.model import CHANNELS, MoonVitConfig
from vitrail.ops.dispatch import select_vision
from vitrail.ops.vision.naive import Grids
from vitrail.vision.attention import RotaryTable, prepare_vision_attention_metadata
from vitrail.vision.encoder import Encoder, encoder_shape, tower_site
from vitrail.vision.linear import TowerLinear


class MoonVit(nn.Module):
    """Built on the current default device; weights are loaded by name."""

    def __init__(self, config: MoonVitConfig, dtype: torch.dtype):
        super().__init__()
        self.config = config
        features = CHANNELS * config.patch_size**2
        self.patch_embed = TowerLinear(features, config.hidden_size, dtype=dtype)
        table = torch.zeros((config.pos_height, config.pos_width, config.hidden_size), dtype=dtype)
        self.pos_embed = nn.Parameter(table)
        shape = encoder_shape(config, config.num_layers, rope_interleaved=True)
        self.encoder = Encoder(shape, dtype)
        self.requires_grad_(False)

    def sites(self) -> tuple[tuple[AttentionSite, Phase], ...]:
        """Every (site, phase) that `forward` can call."""
        return ((tower_site(self.config), Phase.ENCODE),)

    def forward(
        self,
        patches_NF: Float[Tensor, "N F"] | UInt8[Tensor, "N F"],
        grids: Sequence[tuple[int, int]] | Grids,
        plans: PlanTable,
    ) -> Float[Tensor, "N M"]:
        """Hidden states after the final norm, one row a patch, pictures concatenated in order.
        `patches_NF`: [C, P, P] flattened; uint8 samples, or floats already normalised. `grids`:
        (height, width) of each picture in patches, row-major; packed already where a graph is
        captured."""
        device, config = patches_NF.device, self.config
        packed, ops = Grids.over(grids, device), select_vision(device)
        count = patches_NF.shape[0]
        assert packed.num_patches == count, f"{count} patches for {grids}"
        rotary = RotaryTable(*ops.rope_tables(packed, config.head_dim, config.rope_theta, device))
        meta = prepare_vision_attention_metadata(packed, rotary, plans)
        x_NM = self.patch_embed.embed(patches_NF)
        return self.encoder(ops.add_positions(x_NM, self.pos_embed, packed), meta)
