"""What scenes are drawn from: catalog and atlas on the device, the schedule's knobs, the lot."""

from dataclasses import dataclass

import numpy as np
import torch
from atlas import LEVEL_EM, Atlas
from catalog import (
    CHARS,
    CLASSES,
    COLOURS,
    KIND_SHARES,
    KINDS,
    MAX_LINES,
    PROTOTYPES,
    Receipts,
    Strings,
)
from torch import Tensor

LABEL_X = (3.5, 10.5)  # where in a patch its label is read
OTHER = KINDS.index("other")
PRICE, WORD = KINDS.index("price"), KINDS.index("word")


@dataclass
class Knobs:
    """What the schedule turns, as device scalars that a CUDA graph reads."""

    min_em: Tensor  # smallest size of text, pixels per em
    max_chars: Tensor  # of a line
    label_weight: Tensor
    bias_rate: Tensor
    spot_weight: Tensor


class Tables:
    """The catalog and the atlas on the device."""

    def __init__(self, strings: Strings, receipts: Receipts, atlas: Atlas, device: str):
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.codes, self.code_len = put(strings.codes), put(strings.lengths)
        self.names, self.name_len = put(receipts.names), put(receipts.name_len)
        self.sums, self.sum_len = put(receipts.sums), put(receipts.sum_len)
        self.kind_start = torch.tensor(strings.start, device=device)
        self.kind_count = torch.tensor(strings.count, device=device)
        self.kind_cum = torch.tensor([KIND_SHARES[k] for k in KINDS], device=device).cumsum(0)
        members = torch.zeros(len(CLASSES), len(CHARS), dtype=torch.long)
        for i, text in enumerate(CLASSES.values()):
            members[i, : len(text)] = torch.tensor([CHARS.index(c) for c in text])
        self.members = members.to(device)
        self.member_count = torch.tensor([len(t) for t in CLASSES.values()], device=device)
        self.ink, self.offset = put(atlas.ink), put(atlas.offset)
        self.width, self.cell = put(atlas.width), put(atlas.height).float()
        self.em = torch.tensor(LEVEL_EM, device=device, dtype=torch.float)
        self.label_x = torch.tensor(LABEL_X, device=device)
        self.offer = torch.tensor(
            [WORD, PRICE, *[OTHER] * (MAX_LINES - 2)], device=device
        )  # a word, its price below
        self.advance = self.width[-1].float() / LEVEL_EM[-1]  # [fonts, chars], in em
        colours = [PROTOTYPES[c] for c in COLOURS]
        self.colours = torch.tensor(colours, device=device) / 255  # [colours, prototypes, 3]


class Lot:
    """Random draws on the device."""

    def __init__(self, device: str):
        self.device = device

    def unit(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * self.unit(*shape)

    def below(self, bound: Tensor | int, *shape: int) -> Tensor:
        return (self.unit(*shape) * bound).long()

    def chance(self, p: float, *shape: int) -> Tensor:
        return self.unit(*shape) < p


def colour_distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1)
