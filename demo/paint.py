"""Paints a scene straight into 14 x 14 patches, and names what lies under points of each patch.

Shapes: N patches, P pictures, L lines, C characters; y and x of pixels broadcast as [N, 14, 14].
"""

import torch
from catalog import CHARS, COLOURS, MAX_LINES, SHAPES
from layout import PATCH, Layout
from lettering import SPACE
from scene import Scene
from stock import Tables
from torch import Tensor

REACH = 800  # pixels of a level that a line may span
MOST_CENTRES = 3  # of one colour and kind in a merged token, that the auxiliary head tells apart
LABELS = 1 + len(CHARS) + len(COLOURS) * len(SHAPES)  # nothing, a character, a coloured shape


def character_lookup(scene: Scene) -> Tensor:
    """[P * L, REACH]: which character of the line covers each pixel of the level."""
    start = scene.text.start_PLC.flatten(0, 1).contiguous()
    pixel = torch.arange(REACH, device=start.device, dtype=start.dtype)
    found = torch.searchsorted(start, pixel.expand(len(start), -1).contiguous(), right=True)
    return (found - 1).clamp(min=0)


def block_frame(scene: Scene, picture: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Pixel coordinates turned into the text block's own, unrotated frame."""
    text, view = scene.text, (-1,) + (1,) * (y.dim() - 1)
    centre = (text.box_P4[:, :2] + text.box_P4[:, 2:]) / 2
    cx, cy = (centre[picture, i].view(view) for i in (0, 1))
    cos, sin = (f(text.angle_P)[picture].view(view) for f in (torch.cos, torch.sin))
    dx, dy = x - cx, y - cy
    return cy + cos * dy - sin * dx, cx + cos * dx + sin * dy


def line_frame(scene: Scene, picture: Tensor, by: Tensor, bx: Tensor) -> tuple[Tensor, ...]:
    """The line at a point of the block's frame and the point in pixels of the line's level."""
    text, view = scene.text, (-1,) + (1,) * (by.dim() - 1)
    y = text.y_PL[picture]
    index = sum((by >= y[:, i].view(view)).long() for i in range(1, MAX_LINES))
    line = index + picture.view(view) * MAX_LINES
    scale, top = text.scale_PL.flatten()[line], text.y_PL.flatten()[line]
    middle = top + text.height_PL.flatten()[line] / 2
    lean = text.slant_P[picture].view(view) * (by - middle)
    across = bx - text.x_PL.flatten()[line] + lean
    u = across / (scale * text.stretch_P[picture].view(view))
    return line, u, (by - top) / scale


def glyph_at(scene: Scene, tables: Tables, lookup: Tensor, line: Tensor, u: Tensor) -> tuple:
    """The character index at u, where its glyph lies in the atlas, and u within the glyph."""
    text, chars = scene.text, scene.text.chars_PLC.shape[-1]
    place = lookup.flatten()[line * REACH + u.long().clamp(0, REACH - 1)]
    at = line * chars + place
    level, font = text.level_PL.flatten()[line], text.font_PL.flatten()[line]
    char = text.chars_PLC.flatten()[at]
    fonts, kinds = tables.width.shape[1:]
    glyph = (level * fonts + font) * kinds + char
    return char, glyph, u - text.start_PLC.flatten()[at], level


def text_alpha(scene: Scene, tables: Tables, lookup: Tensor, picture: Tensor, by: Tensor,
               bx: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Coverage by ink, and the line each pixel belongs to."""
    text = scene.text
    line, u, v = line_frame(scene, picture, by, bx)
    _, glyph, gx, level = glyph_at(scene, tables, lookup, line, u)
    width, cell = tables.width.flatten()[glyph], tables.cell[level]
    base = tables.offset.flatten()[glyph]
    sx, sy = gx - 0.5, v - 0.5
    x0, y0 = sx.floor(), sy.floor()
    fx, fy, total = sx - x0, sy - y0, 0.0
    for dy in (0, 1):
        for dx in (0, 1):
            px, py = x0 + dx, y0 + dy
            inside = (px >= 0) & (px < width) & (py >= 0) & (py < cell)
            column = px.long().minimum(width - 1).clamp(min=0)
            row = py.minimum(cell - 1).clamp(min=0).long()
            ink = tables.ink[base + row * width + column].float() / 255
            weight = (fx if dx else 1 - fx) * (fy if dy else 1 - fy)
            total = total + ink * inside * weight
    shown = (v >= 0) & (v < cell) & (u >= 0)
    sharp, bold = (t[picture].view(-1, 1, 1) for t in (text.sharp_P, text.bold_P))
    return ((total - 0.5 + bold) * sharp + 0.5).clamp(0, 1) * shown * (total > 0.02), line


def panel_masks(scene: Scene, picture: Tensor, by: Tensor, bx: Tensor) -> tuple[Tensor, Tensor]:
    """Coverage by the panel and by its border, in the block's frame."""
    text = scene.text
    left, top, right, bottom = (text.box_P4[picture, i].view(-1, 1, 1) for i in range(4))
    margin = 3 + 0.12 * (bottom - top)
    border = text.border_P[picture].view(-1, 1, 1)
    dy = (by - (top + bottom) / 2).abs() - (bottom - top) / 2 - margin
    dx = (bx - (left + right) / 2).abs() - (right - left) / 2 - margin
    distance = torch.maximum(dx, dy)
    on = text.panel_P[picture].view(-1, 1, 1)
    inside = (0.5 - distance).clamp(0, 1) * on
    rim = (border - distance).clamp(0, 1) * (border > 0.5) * on
    return inside, rim


def shape_alpha(scene: Scene, picture: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Coverage by each shape, [N, S, ...] for coordinates [N, ...]."""
    shapes, view = scene.shapes, (len(picture), -1) + (1,) * (y.dim() - 1)
    cy, cx = (shapes.centre_PS2[picture, :, i].view(view) for i in (0, 1))
    r, kind = shapes.radius_PS[picture].view(view), shapes.kind_PS[picture].view(view)
    cos, sin = (f(shapes.angle_P)[picture].view(view) for f in (torch.cos, torch.sin))
    down, across = y[:, None] - cy, x[:, None] - cx
    dy, dx = cos * down - sin * across, sin * down + cos * across
    circle = (dx * dx + dy * dy).sqrt() - r
    square = torch.maximum(dx.abs(), dy.abs()) - r * 0.92
    triangle = torch.maximum(dy - r, (dx.abs() * 2 - dy - r) / 2.236)
    distance = torch.where(kind == 0, circle, torch.where(kind == 1, square, triangle))
    return (0.5 - distance).clamp(0, 1) * shapes.shown_PS[picture].view(view)


def over(image: Tensor, alpha: Tensor, colour: Tensor) -> Tensor:
    """`colour` [N, 3] or [N, 3, 14, 14] laid over `image` [N, 3, 14, 14]."""
    colour = colour[..., None, None] if colour.dim() == 2 else colour
    return image + (colour - image) * alpha[:, None]


def mixed(alpha: Tensor, colour: Tensor) -> Tensor:
    """[N, S, 14, 14] and [N, S, 3] to the sum over S, [N, 3, 14, 14]."""
    return (alpha[:, :, None] * colour[..., None, None]).sum(1)


def clutter_at(scene: Scene, picture: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """What the clutter adds to the ground, [N, 3, 14, 14]."""
    clutter, y, x = scene.clutter, y[:, None], x[:, None]
    down, across = clutter.wave_PW2[picture][..., None, None].unbind(2)
    waves = torch.sin(down * y + across * x + clutter.phase_PW[picture][..., None, None])
    cy, cx = clutter.centre_PB2[picture][..., None, None].unbind(2)
    ry, rx = clutter.radius_PB2[picture][..., None, None].unbind(2)
    blobs = torch.exp(-(((y - cy) / ry) ** 2) - ((x - cx) / rx) ** 2)
    return mixed(waves, clutter.wave_PW3[picture]) + mixed(blobs, clutter.blob_PB3[picture])


def paint(scene: Scene, tables: Tables, lookup: Tensor, layout: Layout, noise: Tensor) -> Tensor:
    """Pixels from 0 to 1, [N, 3, 14, 14]. `noise` is normal, of the same shape."""
    picture, text = layout.patch_picture_N, scene.text
    step = torch.arange(PATCH, device=picture.device)
    y = (layout.patch_origin_N2[:, 0].view(-1, 1, 1) + step.view(1, -1, 1)).float() + 0.5
    x = (layout.patch_origin_N2[:, 1].view(-1, 1, 1) + step.view(1, 1, -1)).float() + 0.5
    y, x = torch.broadcast_tensors(y, x)
    h, w = (scene.size_P2[picture, i].view(-1, 1, 1) for i in (0, 1))
    slope = scene.slope_P23[picture]
    image = scene.ground_P3[picture][..., None, None]
    image = image + slope[:, 0, :, None, None] * (y / h - 0.5)[:, None]
    image = image + slope[:, 1, :, None, None] * (x / w - 0.5)[:, None]
    image = (image + clutter_at(scene, picture, y, x)).clamp(0, 1)
    by, bx = block_frame(scene, picture, y, x)
    inside, rim = panel_masks(scene, picture, by, bx)
    image = over(image, rim, text.border_P3[picture])
    image = over(image, inside, text.panel_P3[picture])
    alpha = shape_alpha(scene, picture, y, x)  # shapes do not overlap
    image = image * (1 - alpha.sum(1)[:, None]) + mixed(alpha, scene.shapes.rgb_PS3[picture])
    alpha, line = text_alpha(scene, tables, lookup, picture, by, bx)
    ink = text.colour_PL3.flatten(0, 1)[line].permute(0, 3, 1, 2)
    image = over(image, alpha, ink)
    image = image + noise * scene.noise_P[picture].view(-1, 1, 1, 1)
    return image.clamp(0, 1)


def as_patches(image: Tensor, scene: Scene, layout: Layout) -> Tensor:
    """Normalised patches [N, 588]; what lies beyond a picture's content is black."""
    picture = layout.patch_picture_N
    step = torch.arange(PATCH, device=picture.device)
    y = layout.patch_origin_N2[:, :1] + step
    x = layout.patch_origin_N2[:, 1:] + step
    h, w = (scene.size_P2[picture, i, None] for i in (0, 1))
    inside = (y < h)[:, None, :, None] & (x < w)[:, None, None, :]
    return (image * inside * 2 - 1).flatten(1)


def patch_labels(scene: Scene, tables: Tables, lookup: Tensor, layout: Layout) -> Tensor:
    """[N, points + 1]: the character whose cell covers the point, else the shape that does, else 0;
    and the shape whose centre lies in the patch, or 0."""
    picture, shapes = layout.patch_picture_N, scene.shapes
    y = layout.patch_origin_N2[:, :1].float() + PATCH / 2
    x = layout.patch_origin_N2[:, 1:].float() + tables.label_x
    y, x = torch.broadcast_tensors(y, x)
    by, bx = block_frame(scene, picture, y, x)
    line, u, v = line_frame(scene, picture, by, bx)
    char, glyph, gx, level = glyph_at(scene, tables, lookup, line, u)
    cell = tables.cell[level]
    inside = (v > 0.15 * cell) & (v < 0.9 * cell) & (u >= 0) & (gx >= 0)
    inside &= (gx < tables.width.flatten()[glyph]) & (char != SPACE)
    pair = 1 + len(CHARS) + shapes.colour_PS * len(SHAPES) + shapes.kind_PS
    covered = (shape_alpha(scene, picture, y, x) > 0.5) * pair[picture][..., None]
    off = shapes.centre_PS2[picture] - layout.patch_origin_N2[:, None]
    here = ((off >= 0) & (off < PATCH)).all(-1) & shapes.shown_PS[picture]
    middle = (here * pair[picture]).amax(1)
    return torch.cat([torch.where(inside, char + 1, covered.amax(1)), middle[:, None]], 1)


def centre_counts(scene: Scene, layout: Layout) -> Tensor:
    """[M, pairs]: how many shapes of each colour and kind have their centre in a merged token, up
    to MOST_CENTRES."""
    shapes, pairs = scene.shapes, len(COLOURS) * len(SHAPES)
    row, column = (shapes.centre_PS2.long() // (2 * PATCH)).unbind(-1)
    columns = layout.size_P2[:, 1:] // (2 * PATCH)
    first = (layout.image_tokens_P.cumsum(0) - layout.image_tokens_P)[:, None]
    at = (first + row * columns + column) * pairs + shapes.colour_PS * len(SHAPES) + shapes.kind_PS
    count = torch.zeros(len(layout.merge_M4) * pairs, dtype=torch.long, device=at.device)
    # What is not shown may lie anywhere, and adds nothing.
    at = torch.where(shapes.shown_PS, at, 0)
    count.scatter_add_(0, at.flatten(), shapes.shown_PS.long().flatten())
    return count.clamp(max=MOST_CENTRES).unflatten(0, (-1, pairs))
