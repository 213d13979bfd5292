"""Pictures with questions and answers rendered by Pillow: what the model is measured on.

Shares the strings and colours of catalog.py with training and none of its drawing code.
"""

import io
import math
import random
from dataclasses import dataclass

import numpy as np
from catalog import (
    CASES,
    COLOURS,
    ITEMS,
    KINDS,
    PAID,
    PROTOTYPES,
    QUESTIONS,
    SHAPES,
    SIDE_WORDS,
    SIDES,
    TO_THE,
    TOTALS,
    draw_string,
    instantiate,
    word_lists,
)
from PIL import Image, ImageDraw, ImageFilter, ImageFont

LEAST, MOST, ASPECT = 56, 448, 6.0  # pixels a side
MIN_EM = 16  # smallest text
MAX_TURN = 5.0  # degrees
TASKS = (
    "random", "word", "price", "plate", "number", "sign", "receipt", "no_text", "count",
    "colour_of", "yes_no", "relation", "side", "beside",
)  # fmt: skip
TEXT_TASKS = TASKS[:7]
WORDS, NAMES = word_lists()
Box = tuple[float, float, float, float]
Colour = tuple[int, ...]


@dataclass
class Sample:
    task: str
    image: Image.Image
    question: str
    answer: str


def draw_size(rng: random.Random) -> tuple[int, int]:
    """Height and width: sides from 56 to 448, up to 6:1 either way, wide more often than tall."""
    while True:
        area, aspect = rng.uniform(8.6, 12.2), rng.uniform(-0.9, math.log(ASPECT))
        height = round(math.exp((area - aspect) / 2))
        width = round(math.exp((area + aspect) / 2))
        if min(height, width) >= LEAST and max(height, width) <= MOST:
            return height, width


def fractal(rng: random.Random, height: int, width: int) -> np.ndarray:
    """Noise with a photograph's spectrum, [height, width, 3], about 0 with a deviation of 1."""
    draw = np.random.default_rng(rng.getrandbits(32))
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    fall = 1 / np.maximum(np.hypot(fy, fx), 1 / max(height, width)) ** rng.uniform(1.0, 1.6)
    shared, planes = draw.normal(size=(height, width)), []
    for _ in range(3):
        mixed = np.fft.rfft2(shared + 0.5 * draw.normal(size=(height, width))) * fall
        planes.append(np.fft.irfft2(mixed, (height, width)))
    out = np.stack(planes, -1)
    return (out - out.mean()) / out.std()


def ground(rng: random.Random, height: int, width: int, loud: bool) -> tuple[Image.Image, Colour]:
    """A plain, graded or cluttered ground and its colour; where it is loud, clutter is strong."""
    colour = tuple(rng.randrange(256) for _ in range(3))
    if rng.random() < 0.25:
        colour = (255, 255, 255)
    pixels, roll = np.broadcast_to(np.array(colour, float), (height, width, 3)), rng.random()
    if roll < 0.3:
        turn, steps = rng.uniform(0, 2 * math.pi), np.array([rng.uniform(-50, 50) for _ in "rgb"])
        y, x = np.mgrid[:height, :width]
        ramp = np.cos(turn) * (x / width - 0.5) + np.sin(turn) * (y / height - 0.5)
        pixels = pixels + ramp[..., None] * steps
    elif roll < 0.6:
        pixels = pixels + fractal(rng, height, width) * rng.uniform(3, 60 if loud else 14)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if loud and roll < 0.6:
        draw = ImageDraw.Draw(image)
        for _ in range(rng.randint(0, 5)):
            ends = [
                (rng.randrange(width), rng.randrange(height)) for _ in range(rng.choice((2, 4)))
            ]
            ink = tuple(rng.randrange(256) for _ in range(3))
            draw.line(ends, ink, rng.randint(1, 6)) if len(ends) == 2 else draw.polygon(ends, ink)
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 3)))
    return image, colour


def degrade(rng: random.Random, image: Image.Image) -> Image.Image:
    """Noise in a third of the pictures, JPEG of quality 40 to 95 in a third."""
    if rng.random() < 1 / 3:
        draw = np.random.default_rng(rng.getrandbits(32))
        pixels = np.asarray(image, float)
        pixels = pixels + draw.normal(size=pixels.shape) * rng.uniform(2, 15)
        image = Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))
    if rng.random() < 1 / 3:
        stored = io.BytesIO()
        image.save(stored, "JPEG", quality=rng.randint(40, 95))
        image = Image.open(stored).convert("RGB")
    return image


def readable(rng: random.Random, under: Colour) -> Colour:
    """A colour whose lightness differs from the ground's."""
    while True:
        colour = tuple(rng.randrange(256) for _ in range(3))
        if abs(sum(colour) - sum(under)) > 240:
            return colour


def measure(text: str, path: str, size: int) -> tuple[ImageFont.FreeTypeFont, Box]:
    """A font, Pillow's own where the path is empty, and the box of the text in it."""
    font = ImageFont.truetype(path, size) if path else ImageFont.load_default(size)
    return font, font.getbbox(text)


@dataclass
class Lines:
    """Text to set: a line is one string at the left, or two, the second flush with the right."""

    texts: list[tuple[str, ...]]
    path: str
    size: int = MIN_EM
    block: float = 0.0  # width that all lines share, where they have two strings

    def extent(self, size: int) -> tuple[float, float]:
        widths = []
        for parts in self.texts:
            boxes = [measure(t, self.path, size)[1] for t in parts]
            widths.append(sum(b[2] - b[0] for b in boxes) + size * (len(parts) - 1))
        return max(widths), 1.3 * size * len(self.texts)


def fit(rng: random.Random, lines: Lines, room: tuple[int, int]) -> bool:
    """Draws a font size at which all lines fit `room` (width, height), MIN_EM or more."""

    def fits(size: int) -> bool:
        return all(a <= b for a, b in zip(lines.extent(size), room, strict=True))

    if not fits(MIN_EM):
        return False
    largest = MIN_EM
    while fits(largest + 2):
        largest += 2
    lines.size = rng.randint(MIN_EM, largest)
    wide = lines.extent(lines.size)[0]
    lines.block = min(room[0], wide * rng.uniform(1.0, 1.5))
    return True


def set_lines(rng: random.Random, image: Image.Image, lines: Lines, ink: Colour) -> Image.Image:
    """The lines laid over the picture, turned by up to 5 degrees where the picture has the room."""
    width, height = image.size
    pitch, edge = 1.3 * lines.size, 60
    layer = Image.new("RGBA", (width + 2 * edge, height + 2 * edge), (*ink, 0))
    draw = ImageDraw.Draw(layer)
    top = rng.uniform(3, max(3.0, height - 3 - pitch * len(lines.texts)))
    start = rng.uniform(4, max(4.0, width - 4 - lines.block))
    for i, parts in enumerate(lines.texts):
        font, box = measure(parts[0], lines.path, lines.size)
        left = start
        if len(lines.texts[-1]) == 1:
            left = rng.uniform(4, max(4.0, width - 4 - (box[2] - box[0])))
        at = edge + top + i * pitch
        draw.text((edge + left - box[0], at), parts[0], font=font, fill=ink)
        if len(parts) == 2:
            right = edge + start + lines.block
            box = font.getbbox(parts[1])
            draw.text((right - box[2], at), parts[1], font=font, fill=ink)
    if rng.random() < 0.5:
        y = edge + top + pitch * len(lines.texts) / 2
        turned = layer.rotate(
            rng.uniform(-MAX_TURN, MAX_TURN), Image.Resampling.BICUBIC, center=(edge + width / 2, y)
        )
        found = turned.getchannel("A").getbbox()
        if (
            found
            and min(found[:2]) >= edge
            and found[2] <= edge + width
            and found[3] <= edge + height
        ):
            layer = turned
    layer = layer.crop((edge, edge, edge + width, edge + height))
    return Image.alpha_composite(image.convert("RGBA"), layer).convert("RGB")


def receipt(rng: random.Random) -> tuple[list[tuple[str, ...]], str]:
    """Two to six lines and the total, which is the sum of the items."""
    case, sign = rng.choice(CASES), rng.choice(("$", ""))
    items = rng.sample(ITEMS, rng.randint(1, 4))
    cents = [rng.choice((rng.randint(50, 2999), rng.randint(1, 59) * 50)) for _ in items]
    total, money = sum(cents), lambda n: f"{sign}{n / 100:.2f}"
    lines = [(case(name), money(n)) for name, n in zip(items, cents, strict=True)]
    lines.append((case(rng.choice(TOTALS)), money(total)))
    if len(lines) < 6 and rng.random() < 0.3:
        given = total if rng.random() < 0.5 else -(-total // 1000) * 1000
        lines.append((case(rng.choice(PAID)), money(given)))
    if len(lines) < 6 and rng.random() < 0.4:
        lines.insert(0, (rng.choice(NAMES).upper(),))
    return lines, money(total)


def text_sample(rng: random.Random, task: str, fonts: list[str]) -> Sample:
    while True:
        height, width = draw_size(rng)
        kinds = ["word", "price"] if task == "sign" else [task]
        if task == "receipt":
            texts, answer = receipt(rng)
        else:
            texts = [(instantiate(rng, draw_string(rng, k, WORDS, NAMES)),) for k in kinds]
            answer = " ".join(t[0] for t in texts)
        lines = Lines(texts, rng.choice(fonts))
        if fit(rng, lines, (width - 8, height - 6)):
            break
    panel = rng.random() < 0.4
    image, colour = ground(rng, height, width, loud=panel)
    if panel:
        colour = tuple(rng.randrange(256) for _ in range(3))
        edge = rng.randint(0, 3)
        box = (edge, edge, width - 1 - edge, height - 1 - edge)
        ImageDraw.Draw(image).rectangle(box, colour, readable(rng, colour), rng.randint(0, 3))
    image = set_lines(rng, image, lines, readable(rng, colour))
    image = degrade(rng, image)
    if task == "receipt":
        return Sample(task, image, rng.choice(QUESTIONS["total"]), answer)
    if task in KINDS[:5] and rng.random() < 0.5:
        return Sample(task, image, rng.choice(QUESTIONS[task]), answer)
    if task == "sign" and rng.random() < 0.5:
        return Sample(task, image, rng.choice(QUESTIONS["price"]), texts[1][0])
    return Sample(task, image, rng.choice(QUESTIONS["read"]), answer)


def draw_shape(draw: ImageDraw.ImageDraw, kind: str, box: Box, fill: Colour, turn: float) -> None:
    x0, y0, x1, y1 = box
    if kind == "circle":
        draw.ellipse(box, fill=fill)
        return
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    if kind == "triangle":
        corners = [((x0 + x1) / 2, y0), (x0, y1), (x1, y1)]
    y, x, cos, sin = (y0 + y1) / 2, (x0 + x1) / 2, math.cos(turn), math.sin(turn)
    turned = [
        (x + cos * (a - x) - sin * (b - y), y + sin * (a - x) + cos * (b - y)) for a, b in corners
    ]
    draw.polygon(turned, fill=fill)


def place_shapes(
    rng: random.Random, wanted: list[tuple[str, str]], image: Image.Image
) -> tuple[list[tuple[float, float]], float]:
    """Draws (colour, kind) shapes in cells that do not touch; their centres as (x, y), and the
    side of the largest."""
    width, height = image.size
    side = max(26.0, min(width, height) / rng.uniform(1.5, 6))
    while int(width // side) * int(height // side) < len(wanted):
        side *= 0.9
    cells = [(i, j) for i in range(int(width // side)) for j in range(int(height // side))]
    draw, centres, largest = ImageDraw.Draw(image), [], 0.0
    turn = math.radians(rng.uniform(-MAX_TURN, MAX_TURN)) * (rng.random() < 0.5)
    for (colour, kind), (i, j) in zip(wanted, rng.sample(cells, len(wanted)), strict=True):
        size = side * rng.uniform(0.55, 0.85)
        x, y = i * side + rng.uniform(0, side - size), j * side + rng.uniform(0, side - size)
        box = (x, y, x + size, y + size)
        draw_shape(draw, kind, box, rng.choice(PROTOTYPES[colour]), turn)
        centres.append((x + size / 2, y + size / 2))
        largest = max(largest, size)
    return centres, largest


def visible_colours(under: Colour) -> list[str]:
    def apart(name: str) -> int:
        shades = PROTOTYPES[name]
        return min(sum(abs(a - b) for a, b in zip(s, under, strict=True)) for s in shades)

    return [c for c in COLOURS if apart(c) > 130]


def count_wanted(rng: random.Random, colours: list[str], room: int) -> tuple[list, tuple]:
    target = (rng.choice(colours), rng.choice(SHAPES))
    count = rng.randint(0, min(9, room))
    wanted = [target] * count
    for _ in range(rng.randint(0, min(5, room - count))):
        other = (rng.choice(colours), rng.choice(SHAPES))
        if other != target:
            wanted.append(other)
    return wanted, target


def side_sample(rng: random.Random, task: str, wanted: list, at: list, largest: float) -> tuple:
    """Question and answer on two of the shapes, or () where they do not stand apart."""
    (x0, y0), (x1, y1) = at[:2]
    (c, k), (c2, k2) = wanted[:2]
    dx, dy = x0 - x1, y0 - y1
    along = [-dx, dx, -dy, dy]  # how far the first is left of, right of, above, below the second
    if task == "beside":
        side = max(range(4), key=lambda i: along[i])
        if along[side] < 2 * min(abs(dx), abs(dy)):
            return ()
        return rng.choice(QUESTIONS["beside"]).format(s=SIDES[side], c=c2, k=k2), f"{c} {k}"
    side = rng.randrange(4)
    if abs(along[side]) < 0.75 * largest:
        return ()
    if task == "relation":
        alone = all(sum(w[1] == kind for w in wanted) == 1 for kind in (k, k2))
        group = "relation_kind" if alone and rng.random() < 0.3 else "relation"
        words = {"s": SIDES[side], "t": TO_THE[side], "c": c, "k": k, "c2": c2, "k2": k2}
        asked = rng.choice(QUESTIONS[group]).format(**words)
        return asked, "Yes" if along[side] > 0 else "No"
    group = "side_across" if side < 2 else "side_along"
    asked = QUESTIONS[group][0].format(c=c, k=k, c2=c2, k2=k2)
    return asked, SIDE_WORDS[side if along[side] > 0 else side ^ 1]


def yes_no(rng: random.Random, wanted: list, colours: list[str]) -> tuple[str, str]:
    """Is there such a shape, is it of this colour, are there so many: Yes as often as No."""
    yes, (colour, kind) = rng.random() < 0.5, rng.choice(wanted)
    group = rng.choice(("exists", "colour_is", "count_is"))
    if group == "colour_is" and sum(k == kind for _, k in wanted) > 1:
        group = "exists"
    number = wanted.count((colour, kind))
    if group == "count_is" and number < 2:
        group = "exists"
    if group == "count_is" and not yes:
        number = rng.choice([n for n in range(max(2, number - 2), number + 3) if n != number])
    elif not yes:
        others = [c for c in colours if (c, kind) not in wanted]
        colour = rng.choice(others)
    article = "an" if colour[0] in "aeiou" else "a"
    words = {"a": article, "c": colour, "k": kind, "n": number}
    return rng.choice(QUESTIONS[group]).format(**words), "Yes" if yes else "No"


def shape_sample(rng: random.Random, task: str) -> Sample | None:
    height, width = draw_size(rng)
    image, under = ground(rng, height, width, loud=False)
    colours = visible_colours(under)
    room = int(width // 26) * int(height // 26)
    if len(colours) < 5:
        return None
    if task in ("count", "no_text") or (task == "yes_no" and rng.random() < 0.4):
        wanted, (colour, kind) = count_wanted(rng, colours, room)
        place_shapes(rng, wanted, image)
        image = degrade(rng, image)
        if task == "no_text":
            return Sample(task, image, rng.choice(QUESTIONS["read"]), "There is no text.")
        if task == "yes_no":
            return Sample(task, image, *yes_no(rng, wanted, colours)) if wanted else None
        question = rng.choice(QUESTIONS["count_both"]).format(c=colour, k=kind)
        return Sample(task, image, question, str(wanted.count((colour, kind))))
    number = {"relation": rng.randint(2, 5), "side": rng.randint(2, 5), "beside": 2}
    number = number.get(task, rng.randint(1, 4))
    if room < 2 * number:
        return None
    if task in ("relation", "side"):
        pairs = [(c, k) for c in colours for k in SHAPES]
        wanted = rng.sample(pairs, number)
    else:
        kinds = [*rng.sample(SHAPES, 3), rng.choice(SHAPES)]
        wanted = list(zip(rng.sample(colours, 4), kinds, strict=True))[:number]
    centres, largest = place_shapes(rng, wanted, image)
    image, (colour, kind) = degrade(rng, image), wanted[0]
    if task in ("relation", "side", "beside"):
        asked = side_sample(rng, task, wanted, centres, largest)
        return Sample(task, image, *asked) if asked else None
    if task == "yes_no":
        return Sample(task, image, *yes_no(rng, wanted, colours))
    if sum(k == kind for _, k in wanted) > 1:
        return None
    return Sample(task, image, rng.choice(QUESTIONS["colour_of"]).format(k=kind), colour)


def draw_sample(rng: random.Random, task: str, fonts: list[str]) -> Sample:
    if task in TEXT_TASKS:
        return text_sample(rng, task, fonts)
    while True:
        sample = shape_sample(rng, task)
        if sample is not None:
            return sample
