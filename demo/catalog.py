"""What the pictures may say and what may be asked: strings, colours, questions, answers, as tables.

Plain Python and numpy. Knows nothing of pixels, of fonts or of the device.
"""

import random
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 .,:-/$%&!?#+'()"
MAX_CHARS = 12  # of one line of text
MAX_LINES = 3
QUESTION_LEN = 64
ANSWER_LEN = 40

COLOURS = (
    "red", "green", "blue", "yellow", "purple", "orange", "black", "white", "pink", "brown", "gray",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle")
SIDES = ("left of", "right of", "above", "below")

# Several prototypes of each colour, since people disagree about what is green.
PROTOTYPES = {
    "red": ((220, 40, 40), (255, 0, 0), (180, 20, 30), (235, 60, 50)),
    "green": ((40, 170, 60), (0, 128, 0), (0, 220, 0), (60, 150, 90)),
    "blue": ((80, 100, 230), (0, 0, 255), (30, 60, 160), (40, 120, 220)),
    "yellow": ((235, 205, 40), (255, 255, 0), (250, 230, 80), (245, 215, 0)),
    "purple": ((150, 50, 180), (128, 0, 128), (165, 75, 215), (110, 40, 150)),
    "orange": ((240, 140, 30), (255, 165, 0), (255, 120, 0), (245, 130, 50)),
    "black": ((20, 20, 20), (0, 0, 0), (35, 35, 40), (10, 10, 10)),
    "white": ((245, 245, 245), (255, 255, 255), (235, 235, 230), (250, 250, 250)),
    "pink": ((255, 150, 190), (255, 105, 180), (255, 182, 193), (245, 140, 175)),
    "brown": ((140, 80, 40), (120, 70, 20), (139, 69, 19), (100, 60, 35)),
    "gray": ((128, 128, 128), (150, 150, 150), (110, 110, 115), (140, 140, 145)),
}

# Kinds of a line of text. The first six have questions of their own.
KINDS = ("price", "number", "time", "plate", "name", "word", "other", "random")
KIND_SHARES = {
    "price": 0.12, "number": 0.06, "time": 0.04, "plate": 0.06, "name": 0.04, "word": 0.24,
    "other": 0.06, "random": 0.38,
}  # fmt: skip

# A template holds indices into CHARS and, from CLASS_BASE on, classes drawn anew for each picture.
CLASS_BASE = 100
CLASSES = {
    "A": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "a": "abcdefghijklmnopqrstuvwxyz",
    "9": "0123456789",
    "1": "123456789",
    "X": "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "*": CHARS.replace(" ", ""),
}

SYSTEM_MESSAGES = (
    "You are a helpful assistant", "Answer briefly.", "You read signs.", "Be exact.",
)  # fmt: skip


def word_lists() -> tuple[list[str], list[str]]:
    """The words and the names of words.txt, in lower case."""
    text = (Path(__file__).parent / "words.txt").read_text().split("\n", 1)[1]
    words, names = text.split("[names]")
    return sorted(set(words.split())), sorted(set(names.split()))


def random_template(rng: random.Random) -> str:
    """A string of classes, as `~X~X~X`; a space is itself."""
    length, share = rng.randint(1, MAX_CHARS), rng.random()
    if share < 0.4:
        picked = ["~X"] * length
    elif share < 0.6:
        picked = ["~a"] * length
    elif share < 0.75:
        picked = ["~A"] + ["~a"] * (length - 1)
    else:
        picked = ["~*"] * length
    for i in range(1, length - 1):
        if picked[i - 1] != " " and rng.random() < 0.07:
            picked[i] = " "
    return "".join(picked)


def cased(rng: random.Random, word: str) -> str:
    return rng.choice((word.upper(), word.upper(), word.capitalize(), word))


def word_template(rng: random.Random, words: list[str]) -> str:
    if rng.random() < 0.3:
        for _ in range(8):
            pair = rng.choice(words) + " " + rng.choice(words)
            if len(pair) <= MAX_CHARS:
                return rng.choice((pair.upper(), pair.title(), pair))
    word = cased(rng, rng.choice([w for w in words if len(w) <= MAX_CHARS]))
    return word + rng.choice(("", "", "", "", "!", ".")) if len(word) < MAX_CHARS else word


FORMS = {
    "price": ("$~1.~9~9", "$~1.~9~9", "$~1.~90", "$~1.50", "$~1~9.~9~9", "$~1~9.50", "$~1", "$~1~9",
              "$~1~9~9", "$0.~9~9", "$~1.99", "$~1~9~9.~9~9"),
    "number": ("~1", "~1~9", "~1~9~9", "~1~9~9~9", "~1~9~9~9~9", "~9~9~9~9~9~9", "~1,~9~9~9",
               "~1~9,~9~9~9", "~1.~9", "~1~9.~9~9"),
    "time": ("~1:~9~9", "1~9:~9~9", "~1:~9~9 AM", "~1:~9~9 PM", "0~1:~9~9", "~1:00", "~1:30",
             "1~9:00", "2~9:~9~9"),
    "plate": ("~A~A~A ~9~9~9~9", "~A~A~9~9 ~A~A~A", "~A~A-~9~9~9-~A~A", "~9~9~9 ~A~A~A",
              "~A~A~A-~9~9~9", "~A~A ~9~9~9~9", "~9~A~A~A~9~9~9"),
    "other": ("~1~9% OFF", "-~1~9%", "~19%", "Room ~1~9~9", "ROOM ~1~9", "GATE ~A~9", "Gate ~9~9",
              "No. ~1~9", "#~1~9", "EXIT ~9~A", "Open 24/7", "~A & ~A", "~A+~A", "~Ax~9~9",
              "Mon-Fri", "(~9~9~9)", "Bus ~1~9~9", "Line ~9", "~1 for ~1", "Why not?", "Don't run",
              "Size ~A", "~1~9 km", "~1~9/~1~9", "Track ~1~9", "Seat ~1~9~A", "A~9~9: ~9~9"),
}  # fmt: skip


def encode_template(text: str) -> list[int]:
    codes, classes = [], list(CLASSES)
    i = 0
    while i < len(text):
        if text[i] == "~":
            codes.append(CLASS_BASE + classes.index(text[i + 1]))
            i += 2
        else:
            codes.append(CHARS.index(text[i]))
            i += 1
    return codes


def draw_string(rng: random.Random, kind: str, words: list[str], names: list[str]) -> str:
    """One template of a kind, in the `~` notation."""
    if kind == "random":
        return random_template(rng)
    if kind == "word":
        return word_template(rng, words)
    if kind == "name":
        return cased(rng, rng.choice(names))
    return rng.choice(FORMS[kind])


def instantiate(rng: random.Random, template: str) -> str:
    """A template with its classes drawn: for pictures that Pillow renders."""
    classes = list(CLASSES.values())
    return "".join(
        rng.choice(classes[code - CLASS_BASE]) if code >= CLASS_BASE else CHARS[code]
        for code in encode_template(template)
    )


@dataclass
class Strings:
    """Templates sorted by kind: rows start[k] .. start[k] + count[k] are of KINDS[k]."""

    codes: np.ndarray  # [n, MAX_CHARS]
    lengths: np.ndarray  # [n]
    start: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)


def build_strings(seed: int, per_kind: int = 6000) -> Strings:
    rng = random.Random(seed)
    words, names = word_lists()
    rows, lengths, start, count = [], [], [], []
    for kind in KINDS:
        start.append(len(rows))
        count.append(per_kind)
        for _ in range(per_kind):
            codes = encode_template(draw_string(rng, kind, words, names))[:MAX_CHARS]
            lengths.append(len(codes))
            rows.append(codes + [0] * (MAX_CHARS - len(codes)))
    return Strings(np.array(rows, np.int64), np.array(lengths, np.int64), start, count)


QUESTIONS = {
    "read": ("Read the text.", "What does the sign say?", "What is written here?",
             "What does it say?", "Read the sign.", "What is the text?", "read the text",
             "What text is in the picture?", "What does the label say?", "Read this."),
    "price": ("What is the price?", "How much is it?", "How much does it cost?", "Price?"),
    "number": ("What is the number?", "Which number is written here?", "Read the number.",
               "What number is it?"),
    "time": ("What time is it?", "What is the time?", "Which time is written here?", "What time?"),
    "plate": ("What is the plate?", "What is the plate number?", "Read the plate.",
              "What is on the plate?"),
    "name": ("What is the name?", "Whose name is it?", "Which name is written here?",
             "Read the name."),
    "word": ("What is the word?", "Which word is written here?", "Read the word.",
             "What word is it?"),
    "first": ("What is on the first line?", "Read the first line."),
    "second": ("What is on the second line?", "Read the second line."),
    "last": ("What is on the last line?", "Read the last line."),
    "text_colour": ("What colour is the text?", "What color is the text?",
                    "What colour are the letters?", "What color is the writing?"),
    "any_text": ("Is there any text?", "Is there text in the picture?"),
    "count_all": ("How many shapes are there?", "How many shapes?", "Count the shapes.",
                  "How many shapes are in the picture?"),
    "count_shape": ("How many {k}s are there?", "How many {k}s?", "Count the {k}s.",
                    "How many {k}s are in the picture?"),
    "count_colour": ("How many {c} shapes are there?", "How many {c} shapes?",
                     "Count the {c} shapes.", "How many shapes are {c}?"),
    "count_both": ("How many {c} {k}s are there?", "How many {c} {k}s?", "Count the {c} {k}s.",
                   "How many {c} {k}s are in the picture?"),
    "colour_of": ("What colour is the {k}?", "What color is the {k}?", "Which colour is the {k}?",
                  "What is the colour of the {k}?"),
    "shape_of": ("What shape is {c}?", "Which shape is {c}?", "What is {c}?",
                 "What is the {c} shape?"),
    "exists": ("Is there {a} {c} {k}?", "Is there {a} {c} {k} in the picture?",
               "Do you see {a} {c} {k}?", "Can you see {a} {c} {k}?"),
    "beside": ("What is {s} the {c} {k}?", "Which shape is {s} the {c} {k}?"),
    "relation": ("Is the {c} {k} {s} the {c2} {k2}?",),
}  # fmt: skip
FREE = {"k": SHAPES, "c": COLOURS, "s": SIDES, "c2": COLOURS, "k2": SHAPES}
ORDER = ("s", "c", "k", "c2", "k2")  # of the free words in a group's rows, the wording last


@dataclass
class Table:
    """Rows of bytes with lengths; a group's rows lie together."""

    rows: np.ndarray  # [n, width]
    lengths: np.ndarray  # [n]
    start: dict[str, int]
    wordings: dict[str, int]


def to_table(texts: list[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros((len(texts), width), np.int64)
    for i, text in enumerate(texts):
        rows[i, : len(text)] = np.frombuffer(text.encode(), np.uint8)
    return rows, np.array([len(t) for t in texts], np.int64)


def build_questions() -> Table:
    """Row of a group: ((side * colours + c) * shapes + k ...) * wordings + wording."""
    texts, start = [], {}
    for name, wordings in QUESTIONS.items():
        start[name] = len(texts)
        free = [f for f in ORDER if "{" + f + "}" in wordings[0]]
        for values in product(*(FREE[f] for f in free)):
            words = dict(zip(free, values, strict=True))
            words["a"] = "an" if words.get("c", "")[:1] in tuple("aeiou") else "a"
            texts += [w.format(**words) for w in wordings]
    rows, lengths = to_table(texts, QUESTION_LEN)
    return Table(rows, lengths, start, {k: len(v) for k, v in QUESTIONS.items()})


def build_answers() -> Table:
    groups = {
        "yes": ["Yes"],
        "no": ["No"],
        "no_text": ["There is no text."],
        "no_price": ["There is no price."],
        "number": [str(i) for i in range(13)],
        "colour": list(COLOURS),
        "shape": list(SHAPES),
        "both": [f"{c} {k}" for c in COLOURS for k in SHAPES],
    }
    texts, start = [], {}
    for name, answers in groups.items():
        start[name] = len(texts)
        texts += answers
    rows, lengths = to_table(texts, ANSWER_LEN)
    return Table(rows, lengths, start, dict.fromkeys(groups, 1))
