"""Glyphs of the training fonts, drawn once by Pillow at several sizes into one flat array.

`python demo/atlas.py FONT_DIR OUT.npz` bakes it. Knows which fonts train and which are held out.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from catalog import CHARS
from PIL import Image, ImageDraw, ImageFont

LEVEL_EM = (11, 15, 21, 30, 42, 60)  # pixels per em of each level
CELL = 1.3  # height of a line's cell in em
BASELINE = 1.0  # of the cell, from its top, in em

TRAIN_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansCondensed",
    "DejaVuSansCondensed-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "LiberationSans-Regular", "LiberationSans-Bold",
    "LiberationSans-Italic", "LiberationSerif-Regular", "LiberationSerif-Bold",
    "LiberationSerif-Italic", "LiberationMono-Regular", "LiberationMono-Bold", "Lato-Regular",
    "Lato-Bold", "Lato-Black", "Lato-Italic", "Lato-Light", "Roboto-Regular", "Roboto-Bold",
    "Roboto-Italic", "Roboto-Black", "RobotoCondensed-Regular", "RobotoCondensed-Bold",
    "RobotoSlab-Regular", "RobotoSlab-Bold", "CourierPrime", "CourierPrimeBold",
    "Carlito-Regular", "Carlito-Bold", "Dosis-Medium", "Dosis-Bold", "EBGaramond12-Regular",
    "EBGaramond12-Bold", "JetBrainsMono-Regular", "JetBrainsMono-Bold", "LeagueSpartan-Bold",
    "LeagueSpartan-Regular", "Quicksand-Medium", "Quicksand-Bold", "Vollkorn-Regular",
    "Vollkorn-Bold", "YanoneKaffeesatz-Regular", "YanoneKaffeesatz-Bold", "Comfortaa-Regular",
    "Comfortaa-Bold", "Cantarell-Regular", "Cantarell-Bold",
)  # fmt: skip
HELD_FONTS = (
    "OpenSans-Regular", "OpenSans-Bold", "Caladea-Regular", "Caladea-Bold", "Cabin-Regular",
    "Cabin-Bold", "Karla-Regular", "Karla-Bold", "B612-Regular", "B612Mono-Regular",
)  # fmt: skip


def font_paths(directory: Path, names: tuple[str, ...]) -> list[str]:
    found = {
        p.stem.replace(" ", ""): str(p)
        for p in directory.rglob("*")
        if p.suffix in (".ttf", ".otf")
    }
    missing = [n for n in names if n not in found]
    if missing:
        raise ValueError(f"{directory} lacks the fonts {missing}; see docs/notes/demo-training.md")
    return [found[n] for n in names]


@dataclass
class Atlas:
    """Glyph g of level l, font f is ink[offset : offset + height[l] * width], row-major."""

    ink: np.ndarray  # uint8, flat
    offset: np.ndarray  # [levels, fonts, chars]
    width: np.ndarray  # [levels, fonts, chars], the advance
    height: np.ndarray  # [levels]


def draw_glyph(font: ImageFont.FreeTypeFont, char: str, em: int) -> np.ndarray:
    width = max(2, round(font.getlength(char)))
    image = Image.new("L", (width, round(CELL * em)), 0)
    ImageDraw.Draw(image).text((0, round(BASELINE * em)), char, font=font, fill=255, anchor="ls")
    return np.asarray(image)


def bake(paths: list[str]) -> Atlas:
    shape = (len(LEVEL_EM), len(paths), len(CHARS))
    offset, width = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    pieces, at = [], 0
    for level, em in enumerate(LEVEL_EM):
        for f, path in enumerate(paths):
            font = ImageFont.truetype(path, em, layout_engine=ImageFont.Layout.BASIC)
            for c, char in enumerate(CHARS):
                glyph = draw_glyph(font, char, em)
                offset[level, f, c], width[level, f, c] = at, glyph.shape[1]
                pieces.append(glyph.ravel())
                at += glyph.size
    height = np.array([round(CELL * em) for em in LEVEL_EM], np.int64)
    return Atlas(np.concatenate(pieces), offset, width, height)


def load_atlas(path: Path) -> Atlas:
    with np.load(path) as data:
        return Atlas(data["ink"], data["offset"], data["width"], data["height"])


if __name__ == "__main__":
    baked = bake(font_paths(Path(sys.argv[1]), TRAIN_FONTS))
    np.savez_compressed(
        sys.argv[2], ink=baked.ink, offset=baked.offset, width=baked.width, height=baked.height
    )
    print(f"{len(TRAIN_FONTS)} fonts, {baked.ink.size / 1e6:.1f} MB of glyphs")
