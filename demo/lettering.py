"""Draws by lot what the text of each picture says and how it is set: signs, labels and receipts.

Shapes: P pictures, L lines, C characters of a line.
"""

from dataclasses import dataclass

import torch
from atlas import CELL
from catalog import (
    CHARS,
    CLASS_BASE,
    COLOURS,
    ITEMS,
    LINE_CHARS,
    MAX_CHARS,
    MAX_LINES,
    PAID,
    TOTALS,
)
from stock import OTHER, Knobs, Lot, Tables, colour_distance
from torch import Tensor

FAR = 1e9  # where what is not shown lies
SPACE = CHARS.index(" ")
MAX_TURN = 0.0873  # 5 degrees


@dataclass
class Text:
    count_P: Tensor
    chars_PLC: Tensor
    length_PL: Tensor
    kind_PL: Tensor
    quote_PL: Tensor  # the character at which an answer that quotes the line begins
    item_PL: Tensor  # index into ITEMS of a receipt's line, or -1
    total_P: Tensor  # the line of a receipt's total, or -1
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


def draw_kinds(count_P: Tensor, tables: Tables, lot: Lot) -> Tensor:
    P = len(count_P)
    draw = lot.unit(P, MAX_LINES, 1) * tables.kind_cum[-1]
    kind = (draw > tables.kind_cum).sum(-1)
    offer = (lot.chance(0.4, P) & (count_P == 2))[:, None]
    return torch.where(offer, tables.offer, kind)


def draw_chars(kind_PL: Tensor, tables: Tables, lot: Lot) -> tuple[Tensor, Tensor]:
    row = tables.kind_start[kind_PL] + lot.below(tables.kind_count[kind_PL], *kind_PL.shape)
    codes = tables.codes[row]
    wider = codes.new_zeros(*codes.shape[:-1], LINE_CHARS - MAX_CHARS)
    return torch.cat([codes, wider], -1), tables.code_len[row]


def draw_classes(codes: Tensor, tables: Tables, lot: Lot) -> Tensor:
    which = (codes - CLASS_BASE).clamp(min=0)
    drawn = tables.members[which, lot.below(tables.member_count[which], *codes.shape)]
    return torch.where(codes >= CLASS_BASE, drawn, codes)


@dataclass
class Slips:
    """Lines of receipts, of whatever picture."""

    codes_PLC: Tensor
    length_PL: Tensor
    gap_PL: Tensor  # the character that is stretched, or -1
    item_PL: Tensor
    total_P: Tensor


def draw_slips(count: Tensor, slip: Tensor, tables: Tables, lot: Lot) -> Slips:
    """Items, the total, and below it perhaps what was paid: names, a gap and sums."""
    P, L = len(count), MAX_LINES
    line = torch.arange(L, device=count.device)
    below = (lot.chance(0.3, P) & (count > 2)).long()
    total = (count - 1 - below)[:, None]
    item = lot.unit(P, len(ITEMS)).argsort(1)[:, :L]
    wanted = len(ITEMS) + lot.below(len(TOTALS), P, 1)
    paid = len(ITEMS) + len(TOTALS) + lot.below(len(PAID), P, 1)
    name = torch.where(line == total, wanted, torch.where(line > total, paid, item))
    each = len(ITEMS) + len(TOTALS) + len(PAID)
    case, own = lot.below(len(tables.names) // each, P, 1), lot.below(3, P, L)
    name = name + each * torch.where(lot.chance(0.3, P, 1), own, case)
    money, kind = lot.below(tables.sums.shape[0], P, 1), (line >= total).long()
    form = lot.below(tables.sums.shape[2], P, L)
    gap, sums = tables.name_len[name], tables.sums[money, kind, form]
    place = torch.arange(LINE_CHARS, device=count.device).expand(P, L, -1)
    behind = (place - gap[..., None] - 1).clamp(min=0)
    codes = torch.where(place < gap[..., None], tables.names[name], sums.gather(-1, behind))
    codes = torch.where(place == gap[..., None], SPACE, codes)
    length = gap + 1 + tables.sum_len[money, kind, form]
    header = lot.chance(0.4, P) & (total[:, 0] > 1)  # line 0 says the shop's name
    sold = slip[:, None] & (line >= header[:, None]) & (line < count[:, None])
    gap = torch.where(sold, gap, -1)
    item = torch.where(sold & (line < total), item, -1)
    return Slips(codes, length, gap, item, torch.where(slip, total[:, 0], -1))


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
    slips: Slips


def set_type(
    size: Tensor, count: Tensor, slip: Tensor, tables: Tables, knobs: Knobs, lot: Lot
) -> Setting:
    """Draws strings and fonts, and keeps the characters that fit at the smallest size."""
    P, w = len(size), size[:, 1]
    live_PL = torch.arange(MAX_LINES, device=size.device) < count[:, None]
    kind = draw_kinds(count, tables, lot)
    chars, length = draw_chars(kind, tables, lot)
    slips = draw_slips(count, slip, tables, lot)
    sold = slips.gap_PL >= 0
    chars = draw_classes(torch.where(sold[..., None], slips.codes_PLC, chars), tables, lot)
    length = torch.where(sold, slips.length_PL, length)
    one_font = lot.chance(0.8, P, 1) | slip[:, None]
    font = lot.below(len(tables.advance), P, MAX_LINES)
    font = torch.where(one_font, font[:, :1], font)
    stretch = torch.where(lot.chance(0.5, P), lot.between(0.82, 1.2, P), torch.ones_like(w))
    spacing = lot.between(0.0, 0.2, P) * (lot.chance(0.25, P) & ~slip)
    wide = tables.advance[font[..., None], chars] * stretch[:, None, None] + spacing[:, None, None]
    place = torch.arange(LINE_CHARS, device=size.device)
    wide = wide + (place == slips.gap_PL[..., None]) * 0.7
    fit = (wide * (place < length[..., None])).cumsum(-1) * knobs.min_em <= w[:, None, None] - 6
    kept = torch.minimum(torch.minimum(length, fit.sum(-1).clamp(min=1)), knobs.max_chars)
    last = chars.gather(-1, (kept - 1)[..., None])[..., 0]
    kept = torch.where((last == SPACE) & (kept > 1), kept - 1, kept)
    kept = torch.where(sold, length, kept)
    kind = torch.where(kept < length, torch.full_like(kind, OTHER), kind)
    live = (place < kept[..., None]) & live_PL[..., None]
    width = (wide * live).sum(-1).clamp(min=0.2)
    widest = torch.where(sold, width, 0.0).amax(-1)
    room = torch.maximum(widest, (w - 6) / knobs.min_em)
    block = torch.minimum(widest * lot.between(1.0, 1.5, P), room)[:, None]
    return Setting(
        live_PL, live, chars, kept * live_PL, torch.where(live_PL & ~slip[:, None], kind, -1),
        font, stretch, spacing, torch.where(sold, block, width), slips,
    )  # fmt: skip


def draw_em(size: Tensor, count: Tensor, setting: Setting, knobs: Knobs, lot: Lot) -> Tensor:
    """The size of each line, in pixels per em."""
    P, (h, w) = len(size), size.unbind(1)
    lines = count.clamp(min=1)[:, None]
    cap = torch.minimum((w[:, None] - 6) / setting.width_PL, (h[:, None] - 4) / (CELL * lines))
    em = knobs.min_em + (cap - knobs.min_em).clamp(min=0) * lot.unit(P, MAX_LINES) ** 1.4
    em = torch.minimum(em, cap)
    same = lot.chance(0.4, P, 1) | (setting.slips.total_P >= 0)[:, None]
    least = torch.where(setting.live_PL, em, FAR).amin(-1, keepdim=True)
    return torch.where(same, torch.minimum(least, em), em).clamp(min=6)


def stretch_gaps(step: Tensor, setting: Setting, level_em: Tensor) -> tuple[Tensor, Tensor]:
    """Steps with a receipt's gaps as wide as its block asks, and their sum over each line."""
    gap = setting.slips.gap_PL[..., None]
    at = (torch.arange(LINE_CHARS, device=step.device) == gap) & (gap >= 0)
    step = torch.where(at, 0.0, step)
    total = (step * setting.live_PLC).sum(-1)
    wanted = setting.width_PL * level_em / setting.stretch_P[:, None]
    step = torch.where(at, (wanted - total).maximum(0.3 * level_em)[..., None], step)
    return step, (step * setting.live_PLC).sum(-1)


def room_to_turn(size: Tensor, box: Tensor) -> Tensor:
    """The largest angle at which the block stays within the picture, up to MAX_TURN."""
    left, top, right, bottom = box.unbind(1)
    half_h, half_w = (bottom - top) / 2, (right - left) / 2
    y, x = (top + bottom) / 2, (left + right) / 2
    free_y = torch.minimum(y, size[:, 0] - y) - 0.8 * half_h
    free_x = torch.minimum(x, size[:, 1] - x) - half_w + 3
    turn = torch.minimum(free_y / half_w.clamp(min=1), free_x / half_h.clamp(min=1))
    return turn.clamp(0, MAX_TURN)


def draw_text(
    size: Tensor, ground: Tensor, has_text: Tensor, tables: Tables, knobs: Knobs, lot: Lot
) -> Text:
    P, (h, w) = len(size), size.unbind(1)
    roll = lot.unit(P)
    count = 1 + (roll > 0.66).long() + (roll > 0.92).long()
    slip = (w >= 150) & (h >= 56) & lot.chance(0.35, P) & has_text
    count = torch.where(slip, 2 + lot.below(MAX_LINES - 1, P), count)
    count = torch.minimum(count, (h / (knobs.min_em * 1.4)).long().clamp(min=1)) * has_text
    setting = set_type(size, count, slip & (count > 1), tables, knobs, lot)
    stretch, live_PL = setting.stretch_P[:, None], setting.live_PL
    em = draw_em(size, count, setting, knobs, lot)

    # The level whose size is nearest, and its own advances.
    level = (em[..., None] / tables.em).log().abs().argmin(-1)
    level_em = tables.em[level]
    glyph = tables.width[level[..., None], setting.font_PL[..., None], setting.chars_PLC].float()
    step = glyph + (setting.spacing_P[:, None, None] / stretch[..., None]) * level_em[..., None]
    step, total = stretch_gaps(step, setting, level_em)
    em = em * (setting.width_PL * level_em / (total * stretch).clamp(min=1)).clamp(max=1)
    least = torch.where(setting.live_PL, em, FAR).amin(-1, keepdim=True)
    em = torch.where((setting.slips.total_P >= 0)[:, None], least, em)
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
    box = torch.stack(near + far, -1)
    angle = lot.between(-1, 1, P) * room_to_turn(size, box) * lot.chance(0.6, P)
    slips = setting.slips
    return Text(
        count, setting.chars_PLC, setting.length_PL, setting.kind_PL,
        slips.gap_PL + 1, slips.item_PL, slips.total_P, setting.font_PL, level,
        start, scale, setting.stretch_P, lot.between(-0.15, 0.25, P) * lot.chance(0.25, P), x,
        torch.where(live_PL, y, FAR), height, angle, box,
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
    lines = torch.stack([ink] + [other] * (MAX_LINES - 1), 1)
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
