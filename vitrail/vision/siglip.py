"""SigLIP: a vision tower over square tiles of one size, each an attention sequence of its own. Its
features are the hidden states before the last layer, as the NVILA models read them, so that layer
and the norm after it are neither computed nor held.

Parameters (published name): `patch_embed.{weight [M, C*P*P], bias}` (embeddings.patch_embedding,
its weight flattened), `pos_embed [n, M]` (embeddings.position_embedding), `blocks.L.*` (see
`encoder`; the published layer_norm1, self_attn.{q,k,v}_proj, self_attn.out_proj, layer_norm2,
mlp.fc1, mlp.fc2 of a layer are norm1, attn.qkv, attn.out, norm2, mlp.up, mlp.down).

Legend: N packed patches, F = C*P*P samples of a patch, M hidden channels, n patches of a tile."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.attention.plan import PlanTable
from vitrail.attention.shape import AttentionSite, Phase
from vitrail.config.model import CHANNELS, SiglipConfig
from vitrail.ops.vision.naive import Grids, normalise
from vitrail.vision.attention import prepare_vision_attention_metadata
from vitrail.vision.encoder import EncoderBlock, Residual, encoder_shape, tower_site
from vitrail.vision.linear import TowerLinear


class Siglip(nn.Module):
    """Built on the current default device; weights are loaded by name."""

    def __init__(self, config: SiglipConfig, dtype: torch.dtype):
        super().__init__()
        self.config = config
        features = CHANNELS * config.patch_size**2
        self.patch_embed = TowerLinear(features, config.hidden_size, dtype=dtype)
        table = torch.zeros((config.tile**2, config.hidden_size), dtype=dtype)
        self.pos_embed = nn.Parameter(table)
        shape = encoder_shape(config, config.num_layers - 1, rope_interleaved=False)
        self.blocks = nn.ModuleList(EncoderBlock(shape, dtype) for _ in range(shape.num_layers))
        self.requires_grad_(False)

    def sites(self) -> tuple[tuple[AttentionSite, Phase], ...]:
        """Every (site, phase) that `forward` can call."""
        return ((tower_site(self.config), Phase.ENCODE),)

    def forward(
        self,
        patches_NF: Float[Tensor, "N F"] | UInt8[Tensor, "N F"],
        plans: PlanTable,
        grids: Grids | None = None,
    ) -> Float[Tensor, "N M"]:
        """Features of packed whole tiles, one row a patch, row-major. `patches_NF`: [C, P, P]
        flattened; uint8 samples, or floats already normalised. `grids`: the tiles, where they are
        packed already."""
        length = self.config.tile**2
        tiles, rest = divmod(patches_NF.shape[0], length)
        assert rest == 0, f"{patches_NF.shape[0]} patches are not whole tiles of {length}"
        device = patches_NF.device
        side = self.config.tile
        packed = Grids.of([(side, side)] * tiles, device) if grids is None else grids
        meta = prepare_vision_attention_metadata(packed, None, plans)
        x_NM = self._embed(patches_NF)
        x = Residual((x_NM.unflatten(0, (tiles, length)) + self.pos_embed).flatten(0, 1), None)
        for block in self.blocks:
            x = block(x, meta)
        return x.x if x.delta is None else x.x + x.delta

    def _embed(
        self, patches_NF: Float[Tensor, "N F"] | UInt8[Tensor, "N F"]
    ) -> Float[Tensor, "N M"]:
        """A product with each patch. On a CPU it is the published convolution, whose order of sums
        decides the logits' fifth digit (docs/notes/nvila.md); a GPU has the product."""
        layer, side = self.patch_embed, self.config.patch_size
        if patches_NF.device.type != "cpu":
            return layer.embed(patches_NF)
        patches_NF = normalise(patches_NF, layer.weight.dtype)
        patches, kernels = (
            x.unflatten(1, (CHANNELS, side, side)) for x in (patches_NF, layer.weight)
        )
        return F.conv2d(patches, kernels, layer.bias, stride=side).flatten(1)
