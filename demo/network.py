"""The network that is trained: Kimi-VL's function (MoonViT, projector, DeepSeek-V3 decoder).

Packed (tokens, dim). Reads its sizes from a checkpoint's config.json. Experts are computed densely,
since they are small.
Shapes: T tokens or patches, H heads, K head dim, D hidden, E experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from layout import Layout, Spans, bicubic_matrix
from torch import Tensor, nn

LABELS_PER_PATCH = 3  # the auxiliary head names what lies at two points and whose centre is here
# After these decoder layers heads name, at a mention of a shape, where it is; and, at the second of
# two, whether the first is above it and left of it.
SPOT_LAYER, SIDE_LAYER = 2, 3


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the interleaved pairs (0, 1), (2, 3), ... in fp32."""
    even, odd = x_THK.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.flatten(-2).to(x_THK.dtype)


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, spans: Spans, causal: bool) -> Tensor:
    if spans.flash:
        return torch.ops.aten._flash_attention_forward(
            q_THK.contiguous(), k_THK.contiguous(), v_THK.contiguous(),
            spans.cu_seqlens, spans.cu_seqlens, spans.max_len, spans.max_len, 0.0, causal, False,
        )[0]  # fmt: skip
    pieces = []
    for start, count, length in spans.groups:
        q, k, v = (
            x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
            for x in (q_THK, k_THK, v_THK)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces)


class VisionBlock(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        dim, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.norm0, self.norm1 = nn.LayerNorm(dim, eps=1e-5), nn.LayerNorm(dim, eps=1e-5)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc0, self.fc1 = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, spans: Spans) -> Tensor:
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, spans, causal=False)
        x = x + self.wo(out.flatten(1))
        return x + self.fc1(F.gelu(self.fc0(self.norm1(x)), approximate="tanh"))


class VisionTower(nn.Module):
    def __init__(self, config: dict, labels: int):
        super().__init__()
        dim = config["hidden_size"]
        self.table = (config["init_pos_emb_height"], config["init_pos_emb_width"])
        self.head_dim = dim // config["num_attention_heads"]
        self.patch_embed = nn.Linear(3 * config["patch_size"] ** 2, dim)
        self.pos_emb = nn.Parameter(torch.randn(*self.table, dim) * 0.02)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config["num_hidden_layers"]))
        self.final_layernorm = nn.LayerNorm(dim, eps=1e-5)
        self.label_head = nn.Linear(dim, LABELS_PER_PATCH * labels)  # does not ship

    def tables(self, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin of each patch's pairs (column, row, column, row, ...); the position mix."""
        device = layout.patch_origin_N2.device
        steps = torch.arange(0, self.head_dim, 4, device=device) / self.head_dim
        row, column = (layout.patch_origin_N2 / 14).unbind(1)
        angle = torch.stack([column, row], 1)[:, None] * (10000.0**-steps)[None, :, None]
        angle = angle.flatten(1)
        return angle.cos(), angle.sin(), bicubic_matrix(self.table, layout.ladder).to(device)

    def positions(self, mix: Tensor, layout: Layout) -> Tensor:
        with torch.autocast(mix.device.type, enabled=False):
            every, pieces, at = mix @ self.pos_emb.flatten(0, 1), [], 0
        for (rows, columns), count in layout.ladder.items():
            grid = every[at : at + rows * columns]
            pieces.append(grid.expand(count, -1, -1).flatten(0, 1))
            at += rows * columns
        return torch.cat(pieces)

    def forward(self, pixels: Tensor, tables: tuple[Tensor, ...], layout: Layout) -> Tensor:
        cos, sin, mix = tables
        x = self.patch_embed(pixels) + self.positions(mix, layout)
        for block in self.blocks:
            x = block(x, cos, sin, layout.vision)
        return self.final_layernorm(x)


class Projector(nn.Module):
    def __init__(self, vision_dim: int, text_dim: int):
        super().__init__()
        self.pre_norm = nn.LayerNorm(vision_dim, eps=1e-5)
        self.linear_1 = nn.Linear(4 * vision_dim, 4 * vision_dim)
        self.linear_2 = nn.Linear(4 * vision_dim, text_dim)

    def forward(self, x: Tensor, merge_M4: Tensor) -> Tensor:
        merged = self.pre_norm(x)[merge_M4].flatten(1)
        return self.linear_2(F.gelu(self.linear_1(merged)))


class LatentAttention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        dim, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.rank = config["v_head_dim"], config["kv_lora_rank"]
        self.q_proj = nn.Linear(dim, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, spans: Spans) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([self.nope, self.value], -1)
        k_rope = rotate(k_rope[:, None], cos, sin).expand(-1, self.heads, -1)
        q = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        v = F.pad(v, (0, self.nope + self.rope - self.value))
        out = attend(q, k, v.to(q.dtype), spans, causal=True)[..., : self.value]
        return self.o_proj(out.flatten(1))


class DenseMlp(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out, x.new_zeros(0)


class Experts(nn.Module):
    """Routed experts, then the shared one, side by side in one gated MLP of weighted parts."""

    def __init__(self, config: dict):
        super().__init__()
        dim, self.inner = config["hidden_size"], config["moe_intermediate_size"]
        self.experts, self.top = config["n_routed_experts"], config["num_experts_per_tok"]
        self.scale = config["routed_scaling_factor"]
        self.shared = config["n_shared_experts"]
        width = (self.experts + self.shared) * self.inner
        self.gate = nn.Parameter(torch.randn(self.experts, dim) * dim**-0.5)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(self.experts))
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.gate.float().T).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.scale, mask.sum(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.route(x)
        weights = torch.cat([weights, weights.new_ones(len(x), self.shared)], -1)
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        hidden = hidden.unflatten(-1, (-1, self.inner)) * weights[..., None].to(hidden.dtype)
        return self.down_proj(hidden.flatten(1)), load.detach()


class DecoderLayer(nn.Module):
    def __init__(self, config: dict, dense: bool):
        super().__init__()
        dim, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(dim, eps=eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=eps)
        self.mlp = DenseMlp(dim, config["intermediate_size"]) if dense else Experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, spans)
        out, load = self.mlp(self.post_attention_layernorm(x))
        return x + out, load


class Decoder(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        dim, vocab = config["hidden_size"], config["vocab_size"]
        self.rope_dim, self.theta = config["qk_rope_head_dim"], config["rope_theta"]
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i < config["first_k_dense_replace"])
            for i in range(config["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(dim, eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def tables(self, layout: Layout) -> tuple[Tensor, Tensor]:
        position = layout.position_T
        steps = torch.arange(0, self.rope_dim, 2, device=position.device) / self.rope_dim
        angle = position[:, None] * self.theta**-steps
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], spans: Spans) -> tuple:
        loads, after = [], []
        for layer in self.layers:
            x, load = layer(x, *tables, spans)
            loads.append(load)
            after.append(x)
        return self.norm(x), after, loads


class Hidden(NamedTuple):
    patches: Tensor
    features: Tensor  # of the merged tokens, after the projector
    tokens: Tensor
    after: list[Tensor]  # of the tokens after each decoder layer
    loads: list[Tensor]  # of the experts of each layer


class DemoNetwork(nn.Module):
    """Patches and token ids to hidden states; `lm_head` and `label_head` make the logits."""

    def __init__(self, config: dict, labels: int, spots: int = 1, counts: int = 1):
        super().__init__()
        vision, text = config["vision_config"], config["text_config"]
        self.vision_tower = VisionTower(vision, labels)
        self.projector = Projector(vision["hidden_size"], text["hidden_size"])
        self.decoder = Decoder(text)
        self.count_head = nn.Linear(text["hidden_size"], counts)  # these three do not ship
        self.spot_head = nn.Linear(text["hidden_size"], 2 * spots)
        self.side_head = nn.Linear(text["hidden_size"], 2 * 2)
        self.initialise()

    def initialise(self) -> None:
        nn.init.normal_(self.decoder.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.decoder.lm_head.weight, std=0.02)
        for layer in self.decoder.layers:
            nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02)
            nn.init.normal_(layer.mlp.down_proj.weight, std=0.02)

    def tables(self, layout: Layout) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.vision_tower.tables(layout), self.decoder.tables(layout)

    def forward(self, pixels: Tensor, ids_T: Tensor, image_at_M: Tensor, layout: Layout,
                tables: tuple) -> Hidden:  # fmt: skip
        patches = self.vision_tower(pixels, tables[0], layout)
        features = self.projector(patches, layout.merge_M4)
        x = self.decoder.embed_tokens(ids_T)
        x = x.index_copy(0, image_at_M, features.to(x.dtype))
        return Hidden(patches, features, *self.decoder(x, tables[1], layout.language))


def shipped_parameters(network: DemoNetwork) -> int:
    return sum(
        p.numel() for n, p in network.named_parameters() if "_head" not in n.replace("lm_head", "")
    )
