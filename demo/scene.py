"""Draws by lot what each picture of a step shows: its ground, its lines of text, its shapes.

Everything is a tensor over the P pictures of the layout, made on the device without a sync, so that
a CUDA graph can hold it. Text is lettering.py's, pixels paint.py's, questions dialogue.py's.
Shapes: P pictures, S shapes, W waves and B blobs of clutter.
"""

import math
from dataclasses import dataclass

import torch
from catalog import COLOURS, MAX_SHAPES, SHAPES
from layout import Layout
from lettering import MAX_TURN, Text, draw_text
from stock import Knobs, Lot, Tables, colour_distance
from torch import Tensor

MIN_SIDE = 23  # pixels of a shape's cell; the pictures that measure have 23.4 or more
MAX_CELLS = 256
WAVES, BLOBS = 4, 4


@dataclass
class ShapeSet:
    shown_PS: Tensor
    kind_PS: Tensor
    colour_PS: Tensor
    rgb_PS3: Tensor
    centre_PS2: Tensor  # y, x
    radius_PS: Tensor
    angle_P: Tensor
    target_P2: Tensor  # colour and kind worth asking for


@dataclass
class Clutter:
    """Waves and soft blobs behind everything, as a photograph's ground has them."""

    wave_PW2: Tensor  # radians a pixel, down and across
    phase_PW: Tensor
    wave_PW3: Tensor  # amplitude of each colour
    centre_PB2: Tensor
    radius_PB2: Tensor
    blob_PB3: Tensor  # added in the middle of the blob


@dataclass
class Scene:
    size_P2: Tensor  # of the content; the rest is the processor's padding
    ground_P3: Tensor
    slope_P23: Tensor  # change of the ground's colour over the picture, down and across
    noise_P: Tensor
    quality_P: Tensor  # scale of JPEG's table of quanta, 0 where there is no JPEG
    clutter: Clutter
    text: Text
    shapes: ShapeSet


def draw_scene(layout: Layout, tables: Tables, knobs: Knobs, lot: Lot) -> Scene:
    P = layout.pictures
    size = layout.size_P2.float()
    cut = lot.below(28, P, 2) * lot.chance(0.4, P, 1)
    size = size - torch.minimum(cut.float(), size - 40).clamp(min=0)
    ground = lot.unit(P, 3)
    white = lot.chance(0.15, P, 1)
    ground = torch.where(white, lot.between(0.9, 1.0, P, 1), ground)
    slope = lot.between(-0.2, 0.2, P, 2, 3) * lot.chance(0.5, P, 1, 1)
    noise = lot.between(0.0, 0.08, P) * lot.chance(0.45, P)
    quality = lot.between(0.1, 1.0, P) ** 2 * 1.7 * lot.chance(0.4, P)
    mode = lot.unit(P)
    has_text, has_shapes = (mode < 0.42) | (mode > 0.88), mode >= 0.42
    text = draw_text(size, ground, has_text, tables, knobs, lot)
    shapes = draw_shapes(size, ground, has_shapes, text.box_P4, tables, lot)
    loud = torch.where((text.panel_P > 0) & ~has_shapes, 3.0, 1.0)
    clutter = draw_clutter(size, loud * lot.chance(0.3, P), lot)
    return Scene(size, ground, slope, noise, quality, clutter, text, shapes)


def draw_clutter(size: Tensor, loud: Tensor, lot: Lot) -> Clutter:
    P = len(size)
    pitch = 3 * 60 ** lot.unit(P, WAVES)  # pixels a wave
    turn = lot.unit(P, WAVES, 1) * 2 * math.pi
    along = torch.cat([turn.sin(), turn.cos()], -1) * (2 * math.pi / pitch)[..., None]
    colour = lot.between(-1, 1, P, 1, 3) * 0.5 + lot.between(-1, 1, P, WAVES, 3)
    strength = 0.05 * loud[:, None, None] * lot.unit(P, 1, 1)
    blob = lot.between(-1, 1, P, BLOBS, 3) * 0.12 * loud[:, None, None]
    radius = size.amin(1)[:, None, None] * lot.between(0.05, 0.5, P, BLOBS, 2)
    return Clutter(
        along, lot.unit(P, WAVES) * 2 * math.pi, colour * strength,
        lot.unit(P, BLOBS, 2) * size[:, None], radius, blob,
    )  # fmt: skip


def draw_side(size: Tensor, wanted: Tensor, lot: Lot) -> Tensor:
    """The side of the cells: most often small, and small enough for as many cells as are wanted."""
    least, steps = size.amin(1), torch.arange(16, device=size.device)
    side = MIN_SIDE * (least / MIN_SIDE).clamp(min=1) ** (lot.unit(len(size)) ** 1.4)
    sides = (side[:, None] * 0.9**steps).clamp(min=MIN_SIDE)
    enough = (size[:, None] / sides[..., None]).long().prod(-1) >= wanted[:, None]
    enough = enough | (steps == len(steps) - 1)
    return sides.gather(1, enough.long().argmax(1)[:, None])[:, 0]


def draw_cells(size: Tensor, box: Tensor, side: Tensor, lot: Lot) -> tuple[Tensor, Tensor]:
    """Centres of MAX_SHAPES cells in random order, and how many of them are free of text.

    The cells fill the picture or lie close, anywhere in it: small shapes are hard to count where
    two lie in one merged token, or one where four meet.
    """
    P = len(size)
    counts = (size / side[:, None]).long() - lot.chance(0.3, P, 2).long()  # room to lie anywhere
    counts = counts.clamp(min=1, max=16)
    loose = lot.unit(P, 1) * lot.chance(0.5, P, 1)
    pitch = side[:, None] + (size / counts - side[:, None]) * loose
    start = (size - pitch * counts) * lot.unit(P, 2) * lot.chance(0.7, P, 1)
    cell, columns = torch.arange(MAX_CELLS, device=size.device), counts[:, 1:]
    cy = start[:, :1] + (cell // columns + 0.5) * pitch[:, :1]
    cx = start[:, 1:] + (cell % columns + 0.5) * pitch[:, 1:]
    half = side[:, None] * 0.5 + 3
    left, top, right, bottom = (b[:, None] for b in box.unbind(1))
    covered = (cx + half > left) & (cx - half < right) & (cy + half > top) & (cy - half < bottom)
    free = (cell < counts.prod(1)[:, None]) & ~covered
    order = torch.where(free, lot.unit(P, MAX_CELLS), 2.0).argsort(1)[:, :MAX_SHAPES]
    centre = torch.stack([cy.gather(1, order), cx.gather(1, order)], -1)
    return centre, free.sum(1).clamp(max=MAX_SHAPES)


def mix_many(count: Tensor, order: Tensor, pick: Tensor, kind: Tensor, lot: Lot) -> tuple:
    """`count` shapes of a target colour and kind, then others that often share one of the two."""
    P, S = pick.shape
    is_target = torch.arange(S, device=pick.device) < count[:, None]
    target_colour, target_kind = order[:, :1], kind[:, :1]
    near_kind = lot.chance(0.4, P, S)
    colours = torch.where(lot.chance(0.3, P, S), target_colour, pick)
    kinds = torch.where(near_kind, target_kind, kind)
    same = (colours == target_colour) & (kinds == target_kind)
    kinds = torch.where(same, (target_kind + 1 + lot.below(2, P, S)) % 3, kinds)
    colours = torch.where(is_target, target_colour, colours)
    kinds = torch.where(is_target, target_kind, kinds)
    return colours, kinds, torch.cat([target_colour, target_kind], 1)


def draw_few(room: Tensor, order: Tensor, pick: Tensor, kind: Tensor, lot: Lot) -> tuple:
    """Up to five shapes of different colours, most often of different kinds (the first three)."""
    P = len(pick)
    distinct = lot.unit(P, len(SHAPES)).argsort(1)
    kinds = torch.cat([distinct, kind[:, 3:]], 1)
    kinds = torch.where(lot.chance(0.4, P, 1), kind, kinds)
    colours = torch.cat([order[:, :5], pick[:, 5:]], 1)
    return torch.minimum(1 + lot.below(5, P), room), colours, kinds


def draw_shapes(
    size: Tensor, ground: Tensor, has_shapes: Tensor, box: Tensor, tables: Tables, lot: Lot
) -> ShapeSet:
    P, S = len(size), MAX_SHAPES
    many = lot.chance(0.45, P)
    targets, others = lot.below(10, P), lot.below(7, P)  # as many of each number as of another
    side = draw_side(size, (targets + others) * many, lot)
    centre, room = draw_cells(size, box, side, lot)
    room = room * has_shapes
    # Colours that stand out, in random order.
    near = colour_distance(tables.colours[:, 0], ground[:, None]) < 0.5
    order = torch.where(near, 2.0, 0.0).add(lot.unit(P, len(COLOURS))).argsort(1)
    usable = (~near).sum(1).clamp(min=2)
    pick = order.gather(1, lot.below(usable[:, None], P, S))
    kind = lot.below(len(SHAPES), P, S)
    targets = torch.minimum(targets, room)
    many_colours, many_kinds, target = mix_many(targets, order, pick, kind, lot)
    few_count, few_colours, few_kinds = draw_few(room, order, pick, kind, lot)

    count = torch.where(many, torch.minimum(targets + others, room), few_count)
    many = many[:, None]
    shown = torch.arange(S, device=size.device) < count[:, None]
    colour = torch.where(many, many_colours, few_colours)
    kinds = torch.where(many, many_kinds, few_kinds)
    rgb = tables.colours[colour, lot.below(tables.colours.shape[1], P, S)]
    rgb = (rgb + lot.between(-0.05, 0.05, P, S, 3)).clamp(0, 1)
    radius = side[:, None] * lot.between(0.27, 0.43, P, S)
    jitter = (side[:, None] * 0.49 - radius)[..., None] * lot.between(-1, 1, P, S, 2)
    angle = lot.between(-MAX_TURN, MAX_TURN, P) * lot.chance(0.4, P)
    target = torch.where(many, target, torch.cat([colour[:, :1], kinds[:, :1]], 1))
    return ShapeSet(shown, kinds, colour, rgb, centre + jitter, radius, angle, target)
