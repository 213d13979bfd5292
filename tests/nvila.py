"""The golden NVILA checkpoints: what another implementation computed from them, their pictures as
the offline API takes them, and small engines."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import LLM

FOLDER = Path(__file__).parent / "golden"
KINDS = ("nvila_s2", "nvila_lite")
IMAGE = 500
LF = 198


class GoldenNvila:
    """reference.npz by name. The pixels are drawn again: they were 4.8 MB of noise, whose checksum
    is kept in their place."""

    def __init__(self, kind: str):
        self.kind = kind
        self.folder = FOLDER / kind / "ckpt"
        with np.load(FOLDER / kind / "reference.npz") as data:
            self.data = {name: data[name] for name in data.files}
        generator = torch.Generator().manual_seed(int(self.data["pixel_seed"]))
        pixels = torch.randn(tuple(self.data["pixel_shape"]), generator=generator).numpy()
        assert zlib.crc32(pixels.tobytes()) == int(self.data["pixel_crc"])
        self.tiles = patches_of(pixels)
        self.ids: list[int] = self.data["input_ids"].tolist()
        self.greedy: list[int] = self.data["greedy"].tolist()
        self.logits: np.ndarray = self.data["logits"]
        self.features = self.data["image_features"].reshape(-1, 64)
        sizes = self.data.get("block_sizes", np.zeros((len(self.tiles), 2), int)).tolist()
        self.blocks = [(rows, columns) if rows else None for rows, columns in sizes]
        self.images: list[dict[str, Any]] = []
        at = 0
        for block in self.blocks:
            count = 1 if block is None else 5 + block[0] * block[1]
            tiles = self.tiles[at : at + count].reshape(count * 64, -1)
            self.images.append({"patches": tiles, "grid": (8, 8), "block": block})
            at += count

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.ids, "images": self.images}

    def llm(self, **choices: Any) -> LLM:
        """fp32 on the CPU, a small pool."""
        small = {"kv_cache_bytes": 2 << 20, "page_size": 16, "max_running": 16}
        return LLM(self.folder, device="cpu", dtype="float32", **(small | choices))


def patches_of(pixels: np.ndarray, size: int = 14) -> np.ndarray:
    """[tiles, 3, H, W] -> [tiles, patches, 3 * size * size]."""
    tiles, channels, height, width = pixels.shape
    cut = pixels.reshape(tiles, channels, height // size, size, width // size, size)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(tiles, -1, channels * size * size)


def tokens_of(block: tuple[int, int] | None, kind: str) -> int:
    rows, columns = block or (1, 1)
    return rows * columns * (16 if kind == "nvila_s2" else 9)
