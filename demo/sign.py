"""Draws the picture that ships with the demo model, `python demo/sign.py FONT_DIR`: a shop's sign.

It is no training picture: Pillow draws it, in a font held out of training.
"""

import sys
from pathlib import Path

from atlas import font_paths
from PIL import Image, ImageDraw, ImageFont

SIZE = (392, 252)
WALL, BOARD, RIM, INK, LAMP = "#d9d2c3", "#1f4d3a", "#c9a35b", "#f7f1e3", "#d62828"


def draw_sign(font_path: str) -> Image.Image:
    image = Image.new("RGB", SIZE, WALL)
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((44, 28, 348, 176), radius=10, fill=BOARD, outline=RIM, width=5)
    for text, size, middle in (("COFFEE", 64, 78), ("$4.50", 48, 138)):
        font = ImageFont.truetype(font_path, size)
        draw.text((SIZE[0] / 2, middle), text, font=font, fill=INK, anchor="mm")
    draw.ellipse((172, 192, 220, 240), fill=LAMP)
    return image


if __name__ == "__main__":
    path = font_paths(Path(sys.argv[1]), ("OpenSans-Bold",))[0]
    draw_sign(path).save("vitrail/demo/picture.png", optimize=True)
