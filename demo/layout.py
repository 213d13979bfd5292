"""The packed layout of a training step: which picture owns which patch and token, fixed once.

Pictures of many grids lie end to end, (tokens, dim) everywhere: a step has one static shape.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH = 14
TEXT_BUDGET = 112  # tokens of a picture's slot beside its image tokens

# (patch rows, patch columns): pictures a step
LADDER = {
    (4, 4): 12, (4, 6): 16, (4, 8): 36, (4, 12): 32, (4, 16): 24, (4, 22): 10, (6, 8): 22,
    (6, 10): 20, (6, 14): 20, (6, 20): 14, (8, 6): 12, (8, 8): 22, (8, 12): 20, (8, 16): 16,
    (8, 24): 8, (10, 10): 14, (10, 14): 12, (10, 18): 8, (12, 8): 10, (12, 12): 12, (12, 16): 10,
    (12, 20): 6, (14, 22): 5, (16, 10): 6, (16, 16): 6, (16, 24): 5, (18, 14): 4, (20, 20): 4,
    (24, 16): 3, (24, 32): 2, (28, 20): 2, (32, 32): 1,
    (4, 24): 8, (6, 32): 4, (8, 4): 8, (12, 4): 6, (20, 6): 3, (24, 4): 4, (6, 4): 8, (12, 32): 2,
    (16, 20): 4, (22, 14): 2, (30, 10): 1,
}  # fmt: skip


@dataclass
class Spans:
    """Packed sequences of one attention call."""

    cu_seqlens: Tensor  # int32 [sequences + 1]
    max_len: int
    groups: list[tuple[int, int, int]]  # (first token, sequences, length) of equal neighbours
    flash: bool


@dataclass
class Layout:
    """Index tensors of a step. P pictures, N patches, T language tokens."""

    ladder: dict[tuple[int, int], int]
    size_P2: Tensor  # height, width in pixels
    image_tokens_P: Tensor
    patch_picture_N: Tensor
    patch_origin_N2: Tensor  # y, x of the patch's first pixel
    merge_M4: Tensor  # the four patches of a merged token, in (row, column) order
    token_picture_M: Tensor
    token_index_M: Tensor  # within its picture
    slot_start_P: Tensor
    slot_len_P: Tensor
    position_T: Tensor  # within the slot
    vision: Spans
    language: Spans

    @property
    def pictures(self) -> int:
        return self.size_P2.shape[0]

    @property
    def tokens(self) -> int:
        return self.position_T.shape[0]


def merge_order(rows: int, columns: int) -> Tensor:
    index = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2)
    return index.permute(0, 2, 1, 3).reshape(-1, 4)


def spans(lengths: list[int], flash: bool) -> Spans:
    groups, at = [], 0
    for length in lengths:
        if groups and groups[-1][2] == length:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1, length)
        else:
            groups.append((at, 1, length))
        at += length
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return Spans(cu_seqlens, max(lengths), groups, flash)


def build_layout(ladder: dict[tuple[int, int], int], flash: bool) -> Layout:
    grids = [grid for grid, count in ladder.items() for _ in range(count)]
    patches = [h * w for h, w in grids]
    slots = [n // 4 + TEXT_BUDGET for n in patches]
    origin, merge, at = [], [], 0
    for h, w in grids:
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        origin.append(torch.stack([y.flatten(), x.flatten()], 1) * PATCH)
        merge.append(merge_order(h, w) + at)
        at += h * w
    picture = torch.arange(len(grids))
    merged = torch.tensor(patches) // 4
    return Layout(
        ladder=ladder,
        size_P2=torch.tensor(grids) * PATCH,
        image_tokens_P=merged,
        patch_picture_N=picture.repeat_interleave(torch.tensor(patches)),
        patch_origin_N2=torch.cat(origin),
        merge_M4=torch.cat(merge),
        token_picture_M=picture.repeat_interleave(merged),
        token_index_M=torch.cat([torch.arange(n) for n in merged.tolist()]),
        slot_start_P=torch.tensor([0, *slots[:-1]]).cumsum(0),
        slot_len_P=torch.tensor(slots),
        position_T=torch.cat([torch.arange(n) for n in slots]),
        vision=spans(patches, flash),
        language=spans(slots, flash),
    )


def move(group, device: str):
    """A dataclass's tensors, and those of the spans in it, brought to `device`."""
    for name, value in vars(group).items():
        if isinstance(value, Tensor):
            setattr(group, name, value.to(device))
        elif isinstance(value, Spans):
            move(value, device)
    return group


def bicubic_matrix(table: tuple[int, int], ladder: dict[tuple[int, int], int]) -> Tensor:
    """Rows of each grid of the ladder, in order: how its positions mix the table's entries."""
    rows, columns = table
    identity = torch.eye(rows * columns).view(1, rows * columns, rows, columns)
    pieces = []
    for grid in ladder:
        mixed = identity
        if grid != table:
            mixed = F.interpolate(identity, size=grid, mode="bicubic", align_corners=False)
        pieces.append(mixed[0].flatten(1).T)
    return torch.cat(pieces)
