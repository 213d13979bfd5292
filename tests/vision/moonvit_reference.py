"""Kimi-VL's vision tower and projector written out picture by picture, from the published
description and in the published tensor names; and the golden checkpoint for both, ours and this.

Legend: N patches of one picture, M hidden channels, H heads, D head_dim."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.config.hardware import CPU
from vitrail.config.model import MoonVitConfig
from vitrail.vision.moonvit import MoonVit
from vitrail.vision.projector import MergeProjector

GOLDEN = Path(__file__).parents[1] / "golden" / "kimi_vl"
CONFIG = MoonVitConfig(
    patch_size=14,
    hidden_size=144,
    num_layers=2,
    num_heads=2,
    intermediate_size=200,
    pos_height=16,
    pos_width=16,
    merge=2,
)
TEXT_HIDDEN = 64
RENAMED = (
    ("vision_tower.patch_embed.pos_emb.weight", "tower.pos_embed"),
    ("vision_tower.patch_embed.proj.", "tower.patch_embed."),
    ("vision_tower.encoder.final_layernorm.", "tower.encoder.norm."),
    ("vision_tower.", "tower."),
    ("multi_modal_projector.pre_norm.", "projector.norm."),
    ("multi_modal_projector.linear_1.", "projector.up."),
    ("multi_modal_projector.linear_2.", "projector.down."),
    (".norm1.", ".norm2."),
    (".norm0.", ".norm1."),
    (".wqkv.", ".attn.qkv."),
    (".wo.", ".attn.out."),
    (".fc0.", ".up."),
    (".fc1.", ".down."),
)


def published() -> dict[str, Tensor]:
    """The golden checkpoint's vision tensors, fp32."""
    tensors = load_file(GOLDEN / "ckpt" / "model.safetensors")
    return {k: v.float() for k, v in tensors.items() if not k.startswith("language_model.")}


def reference() -> dict[str, Tensor]:
    with np.load(GOLDEN / "reference.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def ours(dtype: torch.dtype = torch.float32) -> tuple[MoonVit, MergeProjector]:
    """Tower and projector with the golden weights."""
    state: dict[str, dict[str, Tensor]] = {"tower": {}, "projector": {}}
    for name, tensor in published().items():
        for old, new in RENAMED:
            name = name.replace(old, new)
        part, _, rest = name.partition(".")
        state[part][rest] = tensor.flatten(1) if rest == "patch_embed.weight" else tensor
    tower = MoonVit(CONFIG, dtype)
    projector = MergeProjector(CONFIG, TEXT_HIDDEN, dtype)
    tower.load_state_dict(state["tower"])
    projector.load_state_dict(state["projector"])
    return tower, projector


def plans(tower: MoonVit, max_patches: int, max_batch: int = 8, dtype="float32") -> PlanTable:
    limits = PlanLimits(
        dtype=dtype, page_size=None, max_batch=max_batch, max_q_len=1, max_kv_len=max_patches
    )
    return make_table(tower.sites(), limits, CPU, None)


def written_out(w: dict[str, Tensor], pixels: Tensor, height: int, width: int) -> list[Tensor]:
    """Hidden states [N, M]: embedded, after each block, after the final norm; then the features.
    `pixels` [N, 3, 14, 14], normalised."""
    embed = "vision_tower.patch_embed."
    x = F.conv2d(pixels, w[embed + "proj.weight"], w[embed + "proj.bias"]).flatten(1)
    table = w[embed + "pos_emb.weight"]
    if (height, width) != tuple(table.shape[:2]):
        table = F.interpolate(
            table.permute(2, 0, 1)[None], size=(height, width), mode="bicubic", align_corners=False
        )[0].permute(1, 2, 0)
    x = x + table.reshape(height * width, -1)
    states = [x]
    for i in range(CONFIG.num_layers):
        x = block(w, f"vision_tower.encoder.blocks.{i}.", x, height, width)
        states.append(x)
    x = norm(w, "vision_tower.encoder.final_layernorm.", x)
    y = norm(w, "multi_modal_projector.pre_norm.", x)
    rows = [
        torch.cat([y[(2 * r + kh) * width + 2 * c + kw] for kh in (0, 1) for kw in (0, 1)])
        for r in range(height // 2)
        for c in range(width // 2)
    ]
    y = linear(w, "multi_modal_projector.linear_1.", torch.stack(rows))
    y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    return [*states, x, linear(w, "multi_modal_projector.linear_2.", y)]


def block(w: dict[str, Tensor], name: str, x: Tensor, height: int, width: int) -> Tensor:
    heads, dim = CONFIG.num_heads, CONFIG.head_dim
    qkv = linear(w, name + "wqkv.", norm(w, name + "norm0.", x))
    q, k, v = (t.reshape(len(x), heads, dim) for t in qkv.chunk(3, -1))
    frequencies = 10000.0 ** (-torch.arange(0, dim, 4).float() / dim)
    at = torch.arange(len(x))
    columns, rows = (at % width)[:, None] * frequencies, (at // width)[:, None] * frequencies
    turn = torch.polar(torch.ones(()), torch.stack([columns, rows], -1).flatten(1))[:, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn)
        for t in (q, k)
    )
    q, k, v = (t.flatten(2) if t.ndim == 4 else t for t in (q, k, v))
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    attended = torch.softmax(q @ k.transpose(1, 2) * dim**-0.5, -1) @ v
    x = x + linear(w, name + "wo.", attended.transpose(0, 1).flatten(1))
    y = linear(w, name + "mlp.fc0.", norm(w, name + "norm1.", x))
    y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    return x + linear(w, name + "mlp.fc1.", y)


def norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * w[name + "weight"] + w[name + "bias"]


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[name + "weight"].T + w[name + "bias"]
