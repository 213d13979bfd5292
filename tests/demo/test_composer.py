"""What the training pictures show is what their answers say: scenes beside Pillow's drawing of the
same shapes, and every answer beside one found from the list of shapes by reading the question."""

import io
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFilter import MaxFilter, MinFilter

ROOT = Path(__file__).resolve().parents[2]
LADDER = {(8, 14): 6, (12, 20): 12, (16, 16): 10, (4, 12): 4, (24, 4): 2}
SPECIAL = 256
TOKEN = 28  # pixels of a merged token


@pytest.fixture(scope="module")
def demo():
    """The scripts of demo/, with an atlas of Pillow's own font."""
    sys.path.insert(0, str(ROOT / "demo"))
    import atlas
    import catalog
    import dialogue
    import jpeg
    import layout
    import paint
    import pictures
    import scene
    import stock

    fonts = SimpleNamespace(
        truetype=lambda path, em, **_: ImageFont.load_default(em), Layout=ImageFont.Layout
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atlas, "ImageFont", fonts)
        baked = atlas.bake(["", ""])
    yield SimpleNamespace(
        atlas=baked, catalog=catalog, dialogue=dialogue, jpeg=jpeg, layout=layout, paint=paint,
        pictures=pictures, scene=scene, stock=stock,
    )  # fmt: skip
    sys.path.remove(str(ROOT / "demo"))


@pytest.fixture(scope="module")
def stage(demo: Any):
    lay = demo.layout.build_layout(LADDER, flash=False)
    tables = demo.stock.Tables(
        demo.catalog.build_strings(1, 400), demo.catalog.build_receipts(), demo.atlas, "cpu"
    )
    phrases = demo.dialogue.Phrases(
        demo.catalog.build_questions(), demo.catalog.build_answers(), "cpu"
    )
    zero = torch.tensor(0.0)
    knobs = demo.stock.Knobs(torch.tensor(11.0), torch.tensor(12), zero, zero, zero)
    return SimpleNamespace(
        layout=lay, tables=tables, phrases=phrases, knobs=knobs, lot=demo.stock.Lot("cpu")
    )


def draw(demo: Any, stage: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return demo.scene.draw_scene(stage.layout, stage.tables, stage.knobs, stage.lot)


def pixels_of(demo: Any, stage: Any, scene: Any) -> list[np.ndarray]:
    """Each picture of a scene without noise, [height, width, 3], of 0 to 1."""
    patches = len(stage.layout.patch_picture_N)
    lookup = demo.paint.character_lookup(scene)
    packed = demo.paint.paint(
        scene, stage.tables, lookup, stage.layout, torch.zeros(patches, 3, 14, 14)
    )
    out, at = [], 0
    for (rows, columns), count in LADDER.items():
        for _ in range(count):
            own = packed[at : at + rows * columns].view(rows, columns, 3, 14, 14)
            out.append(own.permute(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3).numpy())
            at += rows * columns
    return out


def shapes_of(demo: Any, scene: Any, picture: int) -> list[Any]:
    found, shapes = [], scene.shapes
    for s in range(demo.catalog.MAX_SHAPES):
        if shapes.shown_PS[picture, s]:
            y, x = shapes.centre_PS2[picture, s].tolist()
            found.append(
                SimpleNamespace(
                    colour=demo.catalog.COLOURS[shapes.colour_PS[picture, s]],
                    kind=demo.catalog.SHAPES[shapes.kind_PS[picture, s]],
                    rgb=shapes.rgb_PS3[picture, s].tolist(),
                    y=y, x=x, r=float(shapes.radius_PS[picture, s]),
                )
            )  # fmt: skip
    return found


def test_shapes_are_where_pillow_draws_them(demo: Any, stage: Any):
    scene, checked = draw(demo, stage, 3), 0
    scene.shapes.angle_P.zero_()
    bare = draw(demo, stage, 3)
    bare.shapes.shown_PS.zero_()
    pairs = zip(pixels_of(demo, stage, scene), pixels_of(demo, stage, bare), strict=True)
    for picture, (full, ground) in enumerate(pairs):
        shapes = shapes_of(demo, scene, picture)
        if not shapes or scene.text.count_P[picture]:
            continue
        mask = Image.new("L", (full.shape[1], full.shape[0]))
        pen = ImageDraw.Draw(mask)
        for s in shapes:
            r = s.r * (0.92 if s.kind == "square" else 1.0)
            box = (s.x - r - 0.5, s.y - r - 0.5, s.x + r - 0.5, s.y + r - 0.5)
            if s.kind == "circle":
                pen.ellipse(box, fill=1)
            elif s.kind == "square":
                pen.rectangle(box, fill=1)
            else:
                pen.polygon([(s.x - 0.5, box[1]), (box[0], box[3]), (box[2], box[3])], fill=1)
            at = full[int(s.y), int(s.x)]
            assert np.abs(at - s.rgb).max() < 0.02, (picture, s)
        drawn = np.abs(full - ground).max(-1) > 0.1
        core, reach = (np.asarray(mask.filter(f(3))) for f in (MinFilter, MaxFilter))
        assert drawn[core > 0].mean() > 0.97, picture
        assert (reach[drawn] > 0).mean() > 0.97, picture
        checked += 1
    assert checked > 8


def test_ink_lies_where_the_lines_say_and_nowhere_else(demo: Any, stage: Any):
    scene, slips = draw(demo, stage, 5), 0
    scene.text.panel_P.zero_()
    scene.text.angle_P.zero_()
    scene.text.slant_P.zero_()
    full = pixels_of(demo, stage, scene)
    scene.text.level_PL.zero_()
    text, blank = scene.text, draw(demo, stage, 5)
    blank.text.y_PL.fill_(1e9)
    blank.text.panel_P.zero_()
    for picture, (a, b) in enumerate(zip(full, pixels_of(demo, stage, blank), strict=True)):
        ink = np.abs(a - b).max(-1) > 0.02
        left, top, right, bottom = text.box_P4[picture].tolist()
        if not text.count_P[picture]:
            assert not ink.any()
            continue
        outside = ink.copy()
        outside[max(0, int(top) - 1) : int(bottom) + 2, max(0, int(left) - 1) : int(right) + 2] = 0
        assert not outside.any(), picture
        slips += int(text.total_P[picture] >= 0)
        for line in range(int(text.count_P[picture])):
            y = int(text.y_PL[picture, line])
            height = int(text.height_PL[picture, line])
            assert ink[max(0, y) : y + height].any(), (picture, line)
    assert slips


class Oracle:
    """Answers questions on a list of shapes, knowing nothing of how training answers them."""

    def __init__(self, demo: Any, scene: Any, picture: int):
        self.shapes = shapes_of(demo, scene, picture)
        self.height, self.width = scene.size_P2[picture].tolist()

    def the(self, colour: str | None, kind: str | None) -> Any:
        (only,) = [s for s in self.shapes if colour in (None, s.colour) and kind in (None, s.kind)]
        return only

    def count(self, colour: str | None, kind: str | None) -> int:
        return sum(colour in (None, s.colour) and kind in (None, s.kind) for s in self.shapes)

    @staticmethod
    def far(side: str, s: Any) -> float:
        return {"left": -s.x, "right": s.x, "above": -s.y, "below": s.y}[side]

    def ask(self, q: str) -> str | None:
        """The answer, or None to a question that is not of shapes."""
        c, k = "(red|green|blue|yellow|purple|orange|black|white|pink|brown|gray)", "(\\w+?)"
        word = {"up": "above", "down": "below", "furthest left": "left", "furthest right": "right",
                "highest": "above", "lowest": "below"}  # fmt: skip
        side = "(?:to the )?(left|right|above|below)(?: of)?"
        if m := re.fullmatch(f"Is the {c} {k} {side} the {c} {k}\\?", q):
            return self.yes(self.compare(m[3], self.the(m[1], m[2]), self.the(m[4], m[5])))
        if m := re.fullmatch(f"Is the {k} {side} the {k}\\?", q):
            return self.yes(self.compare(m[2], self.the(None, m[1]), self.the(None, m[3])))
        if m := re.fullmatch(f"Is the {c} {k} (left|above) or (right of|below) the {c} {k}\\?", q):
            other = m[4].split()[0]
            first = self.compare(m[3], self.the(m[1], m[2]), self.the(m[5], m[6]))
            return m[3] if first else other
        if m := re.fullmatch(f"Which is further (\\w+), the {c} {k} or the {c} {k}\\?", q):
            a, b = self.the(m[2], m[3]), self.the(m[4], m[5])
            return self.name(a if self.compare(word.get(m[1], m[1]), a, b) else b)
        if m := re.fullmatch(
            "(?:Which shape|What) is (furthest left|furthest right|highest|lowest)\\?", q
        ):
            return self.name(max(self.shapes, key=lambda s: self.far(word[m[1]], s)))
        if m := re.fullmatch(
            f"(?:Is the {c} {k} on the left or on the right"
            f"|Where is the {c} {k}: left or right)\\?",
            q,
        ):
            s = self.the(m[1] or m[3], m[2] or m[4])
            return "left" if s.x < self.width / 2 else "right"
        if m := re.fullmatch(f"(?:Where|In which part) is the {c} {k}\\?", q):
            s = self.the(m[1], m[2])
            down = ("top", "", "bottom")[int(s.y / self.height * 3)]
            across = ("left", "", "right")[int(s.x / self.width * 3)]
            return f"{down} {across}".strip() or "middle"
        if m := re.fullmatch(f"(?:What|Which shape) is {side} the {c} {k}\\?", q):
            (other,) = [s for s in self.shapes if s is not self.the(m[2], m[3])]
            assert self.compare(m[1], other, self.the(m[2], m[3]))
            return self.name(other)
        return self.ask_what(q, c, k)

    def ask_what(self, q: str, c: str, k: str) -> str | None:
        many = "(?:How many |Count the )"
        if m := re.fullmatch(f"How many shapes are {c}\\?", q):
            return str(self.count(m[1], None))
        if m := re.fullmatch(f"{many}(?:{c} )?(shape|circle|square|triangle)s.*", q):
            return str(self.count(m[1], None if m[2] == "shape" else m[2]))
        if m := re.fullmatch(f"(?:Are there|Do you see) (\\d+) {c} {k}s\\?", q):
            return self.yes(self.count(m[2], m[3]) == int(m[1]))
        if m := re.fullmatch(
            f"(?:Is there|Do you see|Can you see) an? {c} {k}( in the picture)?\\?", q
        ):
            return self.yes(self.count(m[1], m[2]) > 0)
        if m := re.fullmatch(f"Is the (?:colour of the )?{k} {c}\\?", q):
            return self.yes(self.the(None, m[1]).colour == m[2])
        if m := re.fullmatch(".*colou?r (?:is|of) the (circle|square|triangle)\\?", q):
            return self.the(None, m[1]).colour
        if m := re.fullmatch(f"(?:What|Which)(?: shape)? is (?:the )?{c}(?: shape)?\\?", q):
            return self.the(m[1], None).kind
        return None

    def compare(self, side: str, a: Any, b: Any) -> bool:
        gap = self.far(side, a) - self.far(side, b)
        assert abs(gap) > max(s.r for s in self.shapes), "too near to be asked"
        return gap > 0

    @staticmethod
    def yes(true: bool) -> str:
        return "Yes" if true else "No"

    @staticmethod
    def name(s: Any) -> str:
        return f"{s.colour} {s.kind}"


def turns_of(demo: Any, stage: Any, scene: Any) -> list[tuple[int, str, str, list]]:
    """(picture, question, answer, spots) of every turn."""
    turns = demo.dialogue.draw_turns(scene, stage.layout, stage.phrases, stage.lot)
    out = []
    for p in range(len(scene.size_P2)):
        for t in range(demo.dialogue.TURNS):
            row = turns.row[p, t]
            length = stage.phrases.question_len[row]
            question = bytes(stage.phrases.question_rows[row, :length].tolist()).decode()
            said = turns.answer.tokens[p, t, : turns.answer.length[p, t] - 1].tolist()
            assert turns.answer.tokens[p, t, turns.answer.length[p, t] - 1] == demo.dialogue.IM_END
            out.append((p, question, bytes(said).decode(), turns.spot[p, t].tolist()))
    return out


def test_every_answer_about_shapes_is_the_oracles(demo: Any, stage: Any):
    asked: dict[str, int] = {}
    for seed in range(40):
        scene = draw(demo, stage, seed)
        for picture, question, answer, _ in turns_of(demo, stage, scene):
            found = Oracle(demo, scene, picture).ask(question)
            if found is not None:
                assert answer == found, (seed, picture, question)
                key = "relation" if re.search(" (of|above|below) the .*\\?", question) else "else"
                asked[key] = asked.get(key, 0) + 1
    assert asked["relation"] > 150
    assert asked["else"] > 500


def lines_of(demo: Any, scene: Any, picture: int) -> list[str]:
    text = scene.text
    return [
        "".join(
            demo.catalog.CHARS[c] for c in text.chars_PLC[picture, n, : text.length_PL[picture, n]]
        )
        for n in range(int(text.count_P[picture]))
    ]


def test_totals_and_prices_are_the_receipts(demo: Any, stage: Any):
    totals = items = read = 0
    names = "|".join(sorted({t.upper() for t in demo.catalog.TOTALS}, key=len, reverse=True))
    for seed in range(40):
        scene = draw(demo, stage, 100 + seed)
        for picture, question, answer, _ in turns_of(demo, stage, scene):
            lines = lines_of(demo, scene, picture)
            if question in demo.catalog.QUESTIONS["total"]:
                (line,) = [s for s in lines if re.fullmatch(f"({names}) \\$?[\\d.]+", s.upper())]
                assert line.split()[-1] == answer
                totals += 1
            elif m := re.fullmatch("How much is the (.+)\\?|What does the (.+) cost\\?", question):
                item = (m[1] or m[2]).upper() + " "
                (line,) = [s for s in lines if s.upper().startswith(item)]
                assert line.split()[-1] == answer
                items += 1
            elif question in demo.catalog.QUESTIONS["read"]:
                assert answer == (" ".join(lines) if lines else "There is no text.")
                read += 1
    assert min(totals, items, read) > 30


def test_yes_and_no_are_equally_frequent(demo: Any, stage: Any):
    said: dict[str, list[bool]] = {}
    for seed in range(120):
        for _, question, answer, _ in turns_of(demo, stage, draw(demo, stage, 1000 + seed)):
            kind = "relation" if re.search(" (of|above|below) the", question) else question[:6]
            if answer in ("Yes", "No") and "text" not in question:
                said.setdefault(kind, []).append(answer == "Yes")
    for kind, answers in said.items():
        assert len(answers) > 30, kind
        off = abs(sum(answers) - len(answers) / 2)
        assert off < 0.08 * len(answers) + 1.5 * len(answers) ** 0.5, (kind, sum(answers))


def spots_checked(demo: Any, stage: Any, seed: int) -> tuple[int, int]:
    """How many mentions, and how many second mentions, of a draw are labelled; all rightly."""
    scene = draw(demo, stage, seed)
    turns = demo.dialogue.draw_turns(scene, stage.layout, stage.phrases, stage.lot)
    said = demo.dialogue.write_dialogue(turns, stage.layout, stage.phrases, stage.lot)
    marked, pairs, lay = 0, 0, stage.layout
    for picture, start in enumerate(lay.slot_start_P.tolist()):
        for at in range(start, start + int(lay.slot_len_P[picture])):
            if said.spots[at, 0] == demo.dialogue.IGNORE:
                continue
            text = bytes(i for i in said.ids[start : at + 1].tolist() if i < SPECIAL).decode()
            kind = re.search("(circle|square|triangle)$", text)[1]
            spot = said.spots[at].tolist()
            grid = lay.size_P2[picture].tolist()
            bins = [
                [int(v / g * demo.dialogue.SPOTS) for v, g in zip((s.y, s.x), grid, strict=True)]
                for s in shapes_of(demo, scene, picture)
                if s.kind == kind
            ]
            assert spot[:2] in bins, (picture, text)
            marked += 1
            colour = "|".join(demo.catalog.COLOURS)
            if pair := re.search(
                f"({colour}) (\\w+) [a-z ]+ the ({colour}) (\\w+)$", text.replace("or the", "the")
            ):
                oracle = Oracle(demo, scene, picture)
                a, b = oracle.the(pair[1], pair[2]), oracle.the(pair[3], pair[4])
                assert spot[2:] == [a.y < b.y, a.x < b.x], (picture, text)
                pairs += 1
    return marked, pairs


def test_spots_name_the_mentioned_shapes_place(demo: Any, stage: Any):
    totals = [spots_checked(demo, stage, seed) for seed in range(9, 13)]
    marked, pairs = (sum(t) for t in zip(*totals, strict=True))
    assert marked > 40
    assert pairs > 8


def tokens_of(shapes: list[Any]) -> Counter:
    """How many centres lie in each merged token, by row, column."""
    return Counter((int(s.y // TOKEN), int(s.x // TOKEN)) for s in shapes)


@pytest.mark.parametrize(("closer", "most"), [(1.0, 1), (0.5, 2), (0.1, 4)])
def test_a_merged_tokens_label_counts_the_centres_in_it(
    demo: Any, stage: Any, closer: float, most: int
):
    scene, at, seen = draw(demo, stage, 4), 0, 0
    scene.shapes.centre_PS2.mul_(closer)
    counts = demo.paint.centre_counts(scene, stage.layout)
    for picture, (height, width) in enumerate(stage.layout.size_P2.tolist()):
        rows, columns = height // TOKEN, width // TOKEN
        expected = np.zeros((rows, columns, counts.shape[1]), int)
        for s in shapes_of(demo, scene, picture):
            colour, kind = demo.catalog.COLOURS.index(s.colour), demo.catalog.SHAPES.index(s.kind)
            expected[int(s.y // TOKEN), int(s.x // TOKEN), colour * 3 + kind] += 1
        own = counts[at : at + rows * columns].view(rows, columns, -1).numpy()
        assert (own == expected.clip(max=demo.paint.MOST_CENTRES)).all(), picture
        seen = max(seen, expected.max())
        at += rows * columns
    assert at == len(counts)
    assert seen >= most


def pillows_crowds(demo: Any, many: int) -> list[tuple[int, list[Any]]]:
    """The number asked for and the shapes of as many of the measuring pictures."""
    drawn, found, place = random.Random(1), [], demo.pictures.place_shapes
    with pytest.MonkeyPatch.context() as patch:

        def placed(rng: random.Random, wanted: list, image: Image.Image):
            centres, largest = place(rng, wanted, image)
            shapes.extend(SimpleNamespace(x=x, y=y) for x, y in centres)
            return centres, largest

        patch.setattr(demo.pictures, "place_shapes", placed)
        for _ in range(many):
            shapes: list[Any] = []
            sample = demo.pictures.draw_sample(drawn, "count", [])
            found.append((int(sample.answer), shapes))
    return found


def crowding(found: list[tuple[int, list[Any]]]) -> dict[str, float]:
    """Of pictures with five or more of what is asked for: how close the closest are, the share of
    seven and more, the most shapes; and where two shapes are less than a merged token apart, the
    share of pictures in which a token holds two centres, and of centres near a token's sides."""
    crowds = [(n, shapes, nearest(shapes)) for n, shapes in found if n >= 5]
    close = [shapes for _, shapes, least in crowds if least < TOKEN]
    assert len(close) > 100
    aside = [abs(s.x % TOKEN - TOKEN / 2) > 10 for shapes in close for s in shapes]
    return {
        "shared": float(np.mean([max(tokens_of(shapes).values()) > 1 for shapes in close])),
        "aside": float(np.mean(aside)),
        "closeness": 1 / float(np.percentile([least for *_, least in crowds], 5)),
        "many": float(np.mean([n >= 7 for n, *_ in crowds])),
        "most": max(len(shapes) for _, shapes, _ in crowds),
    }


def nearest(shapes: list[Any]) -> float:
    return min(
        float(np.hypot(a.y - b.y, a.x - b.x)) for i, a in enumerate(shapes) for b in shapes[:i]
    )


def test_training_shows_crowds_as_close_and_as_many_as_those_that_measure(demo: Any, stage: Any):
    lay = demo.layout.build_layout(demo.layout.LADDER, flash=False)
    torch.manual_seed(8)
    found = []
    for _ in range(6):
        scene = demo.scene.draw_scene(lay, stage.tables, stage.knobs, stage.lot)
        shapes = scene.shapes
        for p, (colour, kind) in enumerate(shapes.target_P2.tolist()):
            mine = (
                shapes.shown_PS[p] & (shapes.colour_PS[p] == colour) & (shapes.kind_PS[p] == kind)
            )
            found.append((int(mine.sum()), shapes_of(demo, scene, p)))
    training, measuring = crowding(found), crowding(pillows_crowds(demo, 400))
    assert measuring["shared"] > 0.01
    assert measuring["aside"] > 0.1
    short = {k for k, v in training.items() if v < 0.95 * measuring[k]}
    assert not short, (training, measuring)


@pytest.mark.parametrize("quality", [30, 50, 80])
def test_compression_is_jpegs(demo: Any, quality: int):
    lay = demo.layout.build_layout({(10, 14): 1, (4, 6): 1}, flash=False)
    rng, losses = np.random.default_rng(0), []
    scale = torch.full((2,), 50 / quality if quality < 50 else 2 - quality / 50)
    smooth = np.add.outer(np.linspace(30, 200, 140), 30 * np.sin(np.arange(196) / 9))
    picture = (smooth + rng.normal(size=(140, 196)) * 12).clip(0, 255).round().astype(np.uint8)
    grey = np.repeat(picture[..., None], 3, -1)
    packed = grey.reshape(10, 14, 14, 14, 3).transpose(0, 2, 4, 1, 3).reshape(140, 3, 14, 14)
    image = torch.cat([torch.from_numpy(packed / 255).float(), torch.rand(24, 3, 14, 14)])
    blocks = demo.jpeg.build_blocks(lay)
    out = demo.jpeg.compress(image, scale, blocks)[:140].view(10, 14, 3, 14, 14)
    ours = out.permute(0, 3, 1, 4, 2).reshape(140, 196, 3).numpy() * 255
    stored = io.BytesIO()
    Image.fromarray(grey).save(stored, "JPEG", quality=quality)
    theirs = np.asarray(Image.open(stored).convert("RGB"), float)
    losses = [np.abs(grey - x)[:136, :192].mean() for x in (ours, theirs)]
    assert losses[1] > 1.5
    assert np.abs(ours - theirs)[:136, :192].mean() < 0.15 * losses[1]
    whole = demo.jpeg.compress(image, scale * 0, blocks)
    assert (whole - image).abs().max() < 1e-6


def test_blobs_and_waves_lie_where_the_scene_says(demo: Any, stage: Any):
    scene, lay = draw(demo, stage, 2), stage.layout
    clutter, picture = scene.clutter, lay.patch_picture_N
    clutter.wave_PW3.zero_()
    clutter.blob_PB3[:, 1:] = 0
    clutter.blob_PB3[:, 0] = 1
    clutter.centre_PB2[:, 0] = lay.size_P2 * torch.tensor([0.25, 0.75])
    clutter.radius_PB2[:, 0] = 20.0
    y, x = ((lay.patch_origin_N2[:, i].float() + 7).view(-1, 1, 1) for i in (0, 1))
    at = demo.paint.clutter_at(scene, picture, y, x)[:, 0, 0, 0]
    off = lay.patch_origin_N2 + 7 - (lay.size_P2 * torch.tensor([0.25, 0.75]))[picture]
    assert torch.allclose(at, torch.exp(-(off / 20).square().sum(1)), atol=1e-5)
