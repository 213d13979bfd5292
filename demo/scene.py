"""Draws by lot what each picture of a step shows: its ground, its lines of text, its shapes.

Everything is a tensor over the P pictures of the layout, made on the device without a sync, so that
a CUDA graph can hold it. Pixels are paint.py's, questions dialogue.py's.
Shapes: P pictures, L lines, C characters of a line, S shapes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from atlas import CELL, LEVEL_EM, Atlas
from catalog import (
    CHARS,
    CLASS_BASE,
    CLASSES,
    COLOURS,
    KIND_SHARES,
    KINDS,
    MAX_CHARS,
    MAX_LINES,
    PROTOTYPES,
    SHAPES,
    Strings,
)
from layout import Layout
from torch import Tensor

FAR = 1e9  # where what is not shown lies
MAX_SHAPES = 12
MAX_CELLS = 256
LABEL_X = (3.5, 10.5)  # where in a patch its label is read
SPACE = CHARS.index(" ")
RANDOM, OTHER = KINDS.index("random"), KINDS.index("other")
PRICE, WORD = KINDS.index("price"), KINDS.index("word")


@dataclass
class Knobs:
    """What the schedule turns, as device scalars that a CUDA graph reads."""

    min_em: Tensor  # smallest size of text, pixels per em
    max_chars: Tensor  # of a line
    label_weight: Tensor
    bias_rate: Tensor


class Tables:
    """The catalog and the atlas on the device."""

    def __init__(self, strings: Strings, atlas: Atlas, device: str):
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.codes, self.code_len = put(strings.codes), put(strings.lengths)
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
        self.offer = torch.tensor([WORD, PRICE, OTHER], device=device)  # a word, its price below
        self.advance = self.width[-1].float() / LEVEL_EM[-1]  # [fonts, chars], in em
        colours = [PROTOTYPES[c] for c in COLOURS]
        self.colours = torch.tensor(colours, device=device) / 255  # [colours, prototypes, 3]


@dataclass
class Text:
    count_P: Tensor
    chars_PLC: Tensor
    length_PL: Tensor
    kind_PL: Tensor
    font_PL: Tensor
    level_PL: Tensor
    start_PLC: Tensor  # of each character, in pixels of the level
    scale_PL: Tensor  # picture pixels for a pixel of the level
    stretch_P: Tensor
    slant_P: Tensor
    x_PL: Tensor
    y_PL: Tensor
    height_PL: Tensor
    angle_P: Tensor
    box_P4: Tensor  # left, top, right, bottom of the whole block
    colour_PL3: Tensor
    name_P: Tensor  # index of the text's colour, -1 where it has no name
    sharp_P: Tensor
    bold_P: Tensor
    panel_P: Tensor  # 1 where the text stands on a panel
    panel_P3: Tensor
    border_P: Tensor
    border_P3: Tensor


@dataclass
class ShapeSet:
    shown_PS: Tensor
    kind_PS: Tensor
    colour_PS: Tensor
    rgb_PS3: Tensor
    centre_PS2: Tensor  # y, x
    radius_PS: Tensor
    target_P2: Tensor  # colour and kind worth asking for


@dataclass
class Scene:
    size_P2: Tensor  # of the content; the rest is the processor's padding
    ground_P3: Tensor
    slope_P23: Tensor  # change of the ground's colour over the picture, down and across
    noise_P: Tensor
    text: Text
    shapes: ShapeSet


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


def draw_scene(layout: Layout, tables: Tables, knobs: Knobs, lot: Lot) -> Scene:
    P = layout.pictures
    size = layout.size_P2.float()
    cut = lot.below(28, P, 2) * lot.chance(0.4, P, 1)
    size = size - torch.minimum(cut.float(), size - 40).clamp(min=0)
    ground = lot.unit(P, 3)
    white = lot.chance(0.15, P, 1)
    ground = torch.where(white, lot.between(0.9, 1.0, P, 1), ground)
    slope = lot.between(-0.2, 0.2, P, 2, 3) * lot.chance(0.5, P, 1, 1)
    noise = lot.between(0.0, 0.06, P) * lot.chance(0.4, P)
    mode = lot.unit(P)
    has_text, has_shapes = (mode < 0.5) | (mode > 0.88), mode >= 0.5
    text = draw_text(size, ground, has_text, tables, knobs, lot)
    shapes = draw_shapes(size, ground, has_shapes, text.box_P4, tables, lot)
    return Scene(size, ground, slope, noise, text, shapes)


def draw_kinds(count_P: Tensor, tables: Tables, lot: Lot) -> Tensor:
    P = len(count_P)
    draw = lot.unit(P, MAX_LINES, 1) * tables.kind_cum[-1]
    kind = (draw > tables.kind_cum).sum(-1)
    offer = (lot.chance(0.4, P) & (count_P == 2))[:, None]
    return torch.where(offer, tables.offer, kind)


def draw_chars(kind_PL: Tensor, tables: Tables, lot: Lot) -> tuple[Tensor, Tensor]:
    row = tables.kind_start[kind_PL] + lot.below(tables.kind_count[kind_PL], *kind_PL.shape)
    codes = tables.codes[row]
    which = (codes - CLASS_BASE).clamp(min=0)
    drawn = tables.members[which, lot.below(tables.member_count[which], *codes.shape)]
    return torch.where(codes >= CLASS_BASE, drawn, codes), tables.code_len[row]


def colour_distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1)


def draw_ink(under: Tensor, tables: Tables, lot: Lot) -> tuple[Tensor, Tensor]:
    """A colour that can be read on `under` [P, 3], and its index where it has a name."""
    P = len(under)
    name = lot.below(len(COLOURS), P)
    named = tables.colours[name, lot.below(tables.colours.shape[1], P)]
    named = (named + lot.between(-0.04, 0.04, P, 3)).clamp(0, 1)
    free, light = lot.unit(P, 3), under.mean(-1, keepdim=True)
    near = (free.mean(-1, keepdim=True) - light).abs() < 0.3
    apart = torch.where(light > 0.5, free * 0.25, 1 - (1 - free) * 0.25)
    free = torch.where(near, apart, free)
    fits = (colour_distance(named, under) > 0.6) & ((named - under).mean(-1).abs() > 0.12)
    use = fits & lot.chance(0.6, P)
    return torch.where(use[:, None], named, free), torch.where(use, name, -1)


@dataclass
class Setting:
    """How a picture's lines are set: what fits is decided, where they lie is not."""

    live_PL: Tensor
    live_PLC: Tensor
    chars_PLC: Tensor
    length_PL: Tensor
    kind_PL: Tensor
    font_PL: Tensor
    stretch_P: Tensor
    spacing_P: Tensor  # between characters, in em
    width_PL: Tensor  # in em


def set_type(size: Tensor, count: Tensor, tables: Tables, knobs: Knobs, lot: Lot) -> Setting:
    """Draws strings and fonts, and keeps the characters that fit at the smallest size."""
    P, w = len(size), size[:, 1]
    live_PL = torch.arange(MAX_LINES, device=size.device) < count[:, None]
    kind = draw_kinds(count, tables, lot)
    chars, length = draw_chars(kind, tables, lot)
    one_font = lot.chance(0.8, P, 1)
    font = lot.below(len(tables.advance), P, MAX_LINES)
    font = torch.where(one_font, font[:, :1], font)
    stretch = torch.where(lot.chance(0.5, P), lot.between(0.82, 1.2, P), torch.ones_like(w))
    spacing = lot.between(0.0, 0.2, P) * lot.chance(0.25, P)
    wide = tables.advance[font[..., None], chars] * stretch[:, None, None] + spacing[:, None, None]
    place = torch.arange(MAX_CHARS, device=size.device)
    fit = (wide * (place < length[..., None])).cumsum(-1) * knobs.min_em <= w[:, None, None] - 6
    kept = torch.minimum(torch.minimum(length, fit.sum(-1).clamp(min=1)), knobs.max_chars)
    last = chars.gather(-1, (kept - 1)[..., None])[..., 0]
    kept = torch.where((last == SPACE) & (kept > 1), kept - 1, kept)
    kind = torch.where(kept < length, torch.full_like(kind, OTHER), kind)
    live = (place < kept[..., None]) & live_PL[..., None]
    return Setting(
        live_PL, live, chars, kept * live_PL, torch.where(live_PL, kind, -1), font, stretch,
        spacing, (wide * live).sum(-1).clamp(min=0.2),
    )  # fmt: skip


def draw_em(size: Tensor, count: Tensor, setting: Setting, knobs: Knobs, lot: Lot) -> Tensor:
    """The size of each line, in pixels per em."""
    P, (h, w) = len(size), size.unbind(1)
    lines = count.clamp(min=1)[:, None]
    cap = torch.minimum((w[:, None] - 6) / setting.width_PL, (h[:, None] - 4) / (CELL * lines))
    em = knobs.min_em + (cap - knobs.min_em).clamp(min=0) * lot.unit(P, MAX_LINES) ** 1.4
    em = torch.minimum(em, cap)
    least = torch.where(setting.live_PL, em, FAR).amin(-1, keepdim=True)
    return torch.where(lot.chance(0.4, P, 1), torch.minimum(least, em), em).clamp(min=6)


def draw_text(
    size: Tensor, ground: Tensor, has_text: Tensor, tables: Tables, knobs: Knobs, lot: Lot
) -> Text:
    P, (h, w) = len(size), size.unbind(1)
    roll = lot.unit(P)
    count = 1 + (roll > 0.66).long() + (roll > 0.92).long()
    count = torch.minimum(count, (h / (knobs.min_em * 1.5)).long().clamp(min=1)) * has_text
    setting = set_type(size, count, tables, knobs, lot)
    stretch, live_PL = setting.stretch_P[:, None], setting.live_PL
    em = draw_em(size, count, setting, knobs, lot)

    # The level whose size is nearest, and its own advances.
    level = (em[..., None] / tables.em).log().abs().argmin(-1)
    level_em = tables.em[level]
    glyph = tables.width[level[..., None], setting.font_PL[..., None], setting.chars_PLC].float()
    step = glyph + (setting.spacing_P[:, None, None] / stretch[..., None]) * level_em[..., None]
    total = (step * setting.live_PLC).sum(-1)
    em = em * (setting.width_PL * level_em / (total * stretch).clamp(min=1)).clamp(max=1)
    scale = em / level_em
    start = torch.where(setting.live_PLC, (step * setting.live_PLC).cumsum(-1) - step, FAR)

    height, lines = CELL * em * live_PL, count.clamp(min=1)
    slack = (h - 2 - height.sum(-1)).clamp(min=0)
    gap = slack * lot.unit(P) * 0.25 / lines
    top = 1 + (slack - gap * (lines - 1)).clamp(min=0) * lot.unit(P)
    line = torch.arange(MAX_LINES, device=size.device)
    y = top[:, None] + height.cumsum(-1) - height + gap[:, None] * line
    length_px = total * scale * stretch
    align = torch.where(lot.chance(0.5, P), lot.below(3, P) / 2, lot.unit(P))
    x = 3 + (w[:, None] - 6 - length_px).clamp(min=0) * align[:, None]
    x = torch.where(lot.chance(0.15, P, 1), x, 3 + (x - 3) * lot.unit(P, 1))
    near = [torch.where(live_PL, edge, FAR).amin(-1) for edge in (x, y)]
    far = [torch.where(live_PL, edge, -FAR).amax(-1) for edge in (x + length_px, y + height)]
    turn = torch.minimum(0.6 * slack / w, torch.full_like(w, 0.05))
    return Text(
        count, setting.chars_PLC, setting.length_PL, setting.kind_PL, setting.font_PL, level,
        start, scale, setting.stretch_P, lot.between(-0.15, 0.25, P) * lot.chance(0.25, P), x,
        torch.where(live_PL, y, FAR), height, lot.between(-1, 1, P) * turn * lot.chance(0.5, P),
        torch.stack(near + far, -1),
        *draw_inks(ground, has_text, scale, tables, lot),
    )  # fmt: skip


def draw_inks(
    ground: Tensor, has_text: Tensor, scale_PL: Tensor, tables: Tables, lot: Lot
) -> tuple[Tensor, ...]:
    """The last fields of Text: colours, sharpness and the panel."""
    P = len(ground)
    panel = lot.chance(0.4, P) & has_text
    panel_colour = torch.where(lot.chance(0.3, P, 1), lot.between(0.85, 1.0, P, 1), lot.unit(P, 3))
    under = torch.where(panel[:, None], panel_colour, ground)
    ink, name = draw_ink(under, tables, lot)
    other, _ = draw_ink(under, tables, lot)
    mixed = lot.chance(0.2, P, 1, 1)
    lines = torch.stack([ink, other, other], 1)
    colour = torch.where(mixed, lines, ink[:, None].expand(-1, MAX_LINES, -1))
    name = torch.where(mixed[:, 0, 0], -1, name)
    sharp = 1 + lot.unit(P) * (scale_PL.amax(-1) - 1).clamp(0, 4)
    bold = lot.between(-0.1, 0.15, P) * lot.chance(0.3, P)
    border = lot.between(1, 5, P) * lot.chance(0.5, P)
    border_colour = torch.where(lot.chance(0.6, P, 1), ink, lot.unit(P, 3))
    return (
        colour, torch.where(has_text, name, -1), sharp, bold, panel.float(), panel_colour, border,
        border_colour,
    )  # fmt: skip


def draw_cells(size: Tensor, box: Tensor, lot: Lot) -> tuple[Tensor, Tensor, Tensor]:
    """Centres of MAX_SHAPES cells in random order, how many are free of text, the cells' side."""
    P, least = len(size), size.amin(1)
    side = 26 * (least / 26).clamp(min=1) ** (lot.unit(P) ** 1.4)
    rows, columns = (size / side[:, None]).long().clamp(min=1, max=16).unbind(1)
    cell = torch.arange(MAX_CELLS, device=size.device)
    cy = (cell // columns[:, None] + 0.5) * (size[:, :1] / rows[:, None])
    cx = (cell % columns[:, None] + 0.5) * (size[:, 1:] / columns[:, None])
    half = side[:, None] * 0.5 + 3
    left, top, right, bottom = (b[:, None] for b in box.unbind(1))
    covered = (cx + half > left) & (cx - half < right) & (cy + half > top) & (cy - half < bottom)
    free = (cell < (rows * columns)[:, None]) & ~covered
    order = torch.where(free, lot.unit(P, MAX_CELLS), 2.0).argsort(1)[:, :MAX_SHAPES]
    centre = torch.stack([cy.gather(1, order), cx.gather(1, order)], -1)
    return centre, free.sum(1).clamp(max=MAX_SHAPES), side


def draw_many(room: Tensor, order: Tensor, pick: Tensor, kind: Tensor, lot: Lot) -> tuple:
    """`count` shapes of a target colour and kind, then others that often share one of the two."""
    P, S = pick.shape
    place = torch.arange(S, device=pick.device)
    count = lot.below(room.clamp(max=9) + 1, P)
    others = torch.minimum(lot.below(7, P), room - count)
    is_target = place < count[:, None]
    target_colour, target_kind = order[:, :1], kind[:, :1]
    near_kind = lot.chance(0.4, P, S)
    colours = torch.where(lot.chance(0.3, P, S), target_colour, pick)
    kinds = torch.where(near_kind, target_kind, kind)
    same = (colours == target_colour) & (kinds == target_kind)
    kinds = torch.where(same, (target_kind + 1 + lot.below(2, P, S)) % 3, kinds)
    colours = torch.where(is_target, target_colour, colours)
    kinds = torch.where(is_target, target_kind, kinds)
    return count + others, colours, kinds, torch.cat([target_colour, target_kind], 1)


def draw_few(room: Tensor, order: Tensor, pick: Tensor, kind: Tensor, lot: Lot) -> tuple:
    """Up to four shapes, of different kinds (the first three) and of different colours."""
    P = len(pick)
    distinct = lot.unit(P, len(SHAPES)).argsort(1)
    kinds = torch.cat([distinct, kind[:, 3:]], 1)
    colours = torch.cat([order[:, :4], pick[:, 4:]], 1)
    return torch.minimum(1 + lot.below(4, P), room), colours, kinds


def draw_shapes(
    size: Tensor, ground: Tensor, has_shapes: Tensor, box: Tensor, tables: Tables, lot: Lot
) -> ShapeSet:
    P, S = len(size), MAX_SHAPES
    centre, room, side = draw_cells(size, box, lot)
    room = room * has_shapes
    # Colours that stand out, in random order.
    near = colour_distance(tables.colours[:, 0], ground[:, None]) < 0.5
    order = torch.where(near, 2.0, 0.0).add(lot.unit(P, len(COLOURS))).argsort(1)
    usable = (~near).sum(1).clamp(min=2)
    pick = order.gather(1, lot.below(usable[:, None], P, S))
    kind = lot.below(len(SHAPES), P, S)
    many_count, many_colours, many_kinds, target = draw_many(room, order, pick, kind, lot)
    few_count, few_colours, few_kinds = draw_few(room, order, pick, kind, lot)

    many = lot.chance(0.55, P)[:, None]
    count = torch.where(many[:, 0], many_count, few_count)
    shown = torch.arange(S, device=size.device) < count[:, None]
    colour = torch.where(many, many_colours, few_colours)
    kinds = torch.where(many, many_kinds, few_kinds)
    rgb = tables.colours[colour, lot.below(tables.colours.shape[1], P, S)]
    rgb = (rgb + lot.between(-0.05, 0.05, P, S, 3)).clamp(0, 1)
    radius = side[:, None] * lot.between(0.27, 0.42, P, S)
    jitter = (side[:, None] * 0.45 - radius)[..., None] * lot.between(-1, 1, P, S, 2)
    target = torch.where(many, target, torch.cat([colour[:, :1], kinds[:, :1]], 1))
    return ShapeSet(shown, kinds, colour, rgb, centre + jitter, radius, target)
