"""Pictures with questions and answers rendered by Pillow: what the model is measured on.

Shares the strings and colours of catalog.py with training and none of its drawing code.
"""

import random
from dataclasses import dataclass

from catalog import (
    COLOURS,
    KINDS,
    PROTOTYPES,
    QUESTIONS,
    SHAPES,
    SIDES,
    draw_string,
    instantiate,
    word_lists,
)
from PIL import Image, ImageDraw, ImageFont

SIZES = (
    (56, 112), (56, 224), (84, 140), (112, 112), (112, 224), (100, 200), (140, 140), (150, 250),
    (168, 168), (224, 224), (224, 336), (200, 300), (280, 280), (336, 448), (448, 448),
)  # fmt: skip
TASKS = (
    "random", "word", "price", "plate", "number", "sign", "no_text", "count", "colour_of",
    "exists", "relation", "beside",
)  # fmt: skip
TEXT_TASKS = TASKS[:6]
WORDS, NAMES = word_lists()
Box = tuple[float, float, float, float]


@dataclass
class Sample:
    task: str
    image: Image.Image
    question: str
    answer: str


def ground(rng: random.Random, height: int, width: int) -> tuple[Image.Image, tuple[int, ...]]:
    colour = tuple(rng.randrange(256) for _ in range(3))
    if rng.random() < 0.3:
        colour = (255, 255, 255)
    return Image.new("RGB", (width, height), colour), colour


def readable(rng: random.Random, under: tuple[int, ...]) -> tuple[int, ...]:
    """A colour whose lightness differs from the ground's."""
    while True:
        colour = tuple(rng.randrange(256) for _ in range(3))
        if abs(sum(colour) - sum(under)) > 240:
            return colour


def measure(text: str, path: str, size: int) -> tuple[ImageFont.FreeTypeFont, Box]:
    font = ImageFont.truetype(path, size)
    return font, font.getbbox(text)


def fitted(rng: random.Random, texts: list[str], path: str, room: tuple[int, int]) -> int | None:
    """A font size at which all lines fit `room` (width, height), or None where 12 does not."""

    def fits(size: int) -> bool:
        boxes = [measure(t, path, size)[1] for t in texts]
        tall = 1.3 * size * len(texts)
        return max(b[2] - b[0] for b in boxes) <= room[0] and tall <= room[1]

    if not fits(12):
        return None
    largest = 12
    while fits(largest + 2):
        largest += 2
    return rng.randint(12, largest)


def text_sample(rng: random.Random, task: str, fonts: list[str]) -> Sample:
    while True:
        height, width = rng.choice(SIZES)
        kinds = ["word", "price"] if task == "sign" else [task]
        texts = [instantiate(rng, draw_string(rng, k, WORDS, NAMES)) for k in kinds]
        path = rng.choice(fonts)
        size = fitted(rng, texts, path, (width - 8, height - 6))
        if size is not None:
            break
    image, colour = ground(rng, height, width)
    draw, ink = ImageDraw.Draw(image), readable(rng, colour)
    pitch = 1.3 * size
    top = rng.uniform(3, max(3.0, height - 3 - pitch * len(texts)))
    for i, text in enumerate(texts):
        font, box = measure(text, path, size)
        left = rng.uniform(4, max(4.0, width - 4 - (box[2] - box[0])))
        draw.text((left - box[0], top + i * pitch), text, font=font, fill=ink)
    if task in KINDS[:5] and rng.random() < 0.5:
        return Sample(task, image, rng.choice(QUESTIONS[task]), texts[0])
    if task == "sign" and rng.random() < 0.5:
        return Sample(task, image, rng.choice(QUESTIONS["price"]), texts[1])
    return Sample(task, image, rng.choice(QUESTIONS["read"]), " ".join(texts))


def draw_shape(draw: ImageDraw.ImageDraw, kind: str, box: Box, fill: tuple[int, ...]) -> None:
    x0, y0, x1, y1 = box
    if kind == "circle":
        draw.ellipse(box, fill=fill)
    elif kind == "square":
        draw.rectangle(box, fill=fill)
    else:
        draw.polygon([((x0 + x1) / 2, y0), (x0, y1), (x1, y1)], fill=fill)


def place_shapes(
    rng: random.Random, wanted: list[tuple[str, str]], under: tuple[int, ...], image: Image.Image
) -> list[tuple[float, float]]:
    """Draws (colour, kind) shapes in cells that do not touch; their centres as (x, y)."""
    width, height = image.size
    side = max(26.0, min(width, height) / rng.uniform(1.5, 6))
    while int(width // side) * int(height // side) < len(wanted):
        side *= 0.9
    cells = [(i, j) for i in range(int(width // side)) for j in range(int(height // side))]
    draw, centres = ImageDraw.Draw(image), []
    for (colour, kind), (i, j) in zip(wanted, rng.sample(cells, len(wanted)), strict=True):
        size = side * rng.uniform(0.55, 0.85)
        x, y = i * side + rng.uniform(0, side - size), j * side + rng.uniform(0, side - size)
        draw_shape(draw, kind, (x, y, x + size, y + size), rng.choice(PROTOTYPES[colour]))
        centres.append((x + size / 2, y + size / 2))
    return centres


def visible_colours(under: tuple[int, ...]) -> list[str]:
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


def side_sample(
    rng: random.Random, task: str, image: Image.Image, wanted: list, centres: list
) -> Sample | None:
    (x0, y0), (x1, y1) = centres[:2]
    dx, dy = x0 - x1, y0 - y1
    if max(abs(dx), abs(dy)) < 2 * min(abs(dx), abs(dy)):
        return None
    true = ("left of" if dx < 0 else "right of") if abs(dx) > abs(dy) else "above"
    true = "below" if abs(dy) >= abs(dx) and dy > 0 else true
    first, second = (" ".join(w) for w in wanted[:2])
    if task == "beside":
        question = rng.choice(QUESTIONS["beside"])
        colour, kind = wanted[1]
        return Sample(task, image, question.format(s=true, c=colour, k=kind), first)
    opposite = dict(zip(SIDES, ("right of", "left of", "below", "above"), strict=True))
    asked, answer = rng.choice(((true, "Yes"), (opposite[true], "No")))
    return Sample(task, image, f"Is the {first} {asked} the {second}?", answer)


def shape_sample(rng: random.Random, task: str) -> Sample | None:
    height, width = rng.choice(SIZES)
    image, under = ground(rng, height, width)
    colours = visible_colours(under)
    room = int(width // 26) * int(height // 26)
    if len(colours) < 3:
        return None
    if task in ("count", "no_text"):
        wanted, (colour, kind) = count_wanted(rng, colours, room)
        place_shapes(rng, wanted, under, image)
        if task == "no_text":
            return Sample(task, image, rng.choice(QUESTIONS["read"]), "There is no text.")
        question = rng.choice(QUESTIONS["count_both"]).format(c=colour, k=kind)
        return Sample(task, image, question, str(wanted.count((colour, kind))))
    number = 2 if task in ("relation", "beside") else rng.randint(1, 3)
    if room < 2 * number:
        return None
    named, kinds = rng.sample(colours, 3), rng.sample(SHAPES, 3)
    wanted = list(zip(named, kinds, strict=True))[:number]
    centres = place_shapes(rng, wanted, under, image)
    if task in ("relation", "beside"):
        return side_sample(rng, task, image, wanted, centres)
    colour, kind = wanted[0]
    if task == "colour_of":
        return Sample(task, image, rng.choice(QUESTIONS["colour_of"]).format(k=kind), colour)
    yes = rng.random() < 0.5
    colour = colour if yes else rng.choice([c for c in colours if c != colour])
    article = "an" if colour[0] in "aeiou" else "a"
    question = rng.choice(QUESTIONS["exists"]).format(a=article, c=colour, k=kind)
    return Sample(task, image, question, "Yes" if yes else "No")


def draw_sample(rng: random.Random, task: str, fonts: list[str]) -> Sample:
    if task in TEXT_TASKS:
        return text_sample(rng, task, fonts)
    while True:
        sample = shape_sample(rng, task)
        if sample is not None:
            return sample
