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
LINE_CHARS = 20  # of a receipt's line: a name, a gap, a price
MAX_LINES = 6  # of a receipt; other text has up to three
QUESTION_LEN = 76
ANSWER_LEN = 40

COLOURS = (
    "red", "green", "blue", "yellow", "purple", "orange", "black", "white", "pink", "brown", "gray",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle")
MAX_SHAPES = 14  # in a picture: up to 9 of one colour and kind, and others
SIDES = ("left of", "right of", "above", "below")
SIDE_WORDS = ("left", "right", "above", "below")
FAR_WORDS = ("furthest left", "furthest right", "highest", "lowest")
THIRDS = (
    "top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom",
    "bottom right",
)  # fmt: skip

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


# A receipt's lines: what was sold, what is asked for, what comes after it.
ITEMS = (
    "coffee", "tea", "milk", "bread", "eggs", "butter", "cheese", "apples", "bananas", "rice",
    "pasta", "soup", "salad", "pizza", "burger", "fries", "cola", "juice", "water", "beer",
    "cake", "cookies", "muffin", "bagel", "donut", "sandwich", "chicken", "fish", "beef",
    "wine", "tomatoes", "onions", "potatoes", "sugar", "salt", "honey", "soap", "paper", "pens",
    "candy", "ice cream", "yogurt", "lunch", "dinner", "ticket", "book", "socks", "lamp",
    "subtotal", "tax", "VAT", "tip",
)  # fmt: skip
TOTALS = ("total", "total", "total", "total:", "sum", "total due", "amount due", "to pay")
PAID = ("cash", "change", "card", "visa", "paid", "rounding")
CASES = (str.upper, str.capitalize, str.capitalize)
SUMS = (("~1.~9~9", "~1~9.~9~9", "~1.~90", "0.~9~9"), ("~1.~9~9", "~1~9.~9~9", "~1~9~9.~9~9"))
CURRENCIES = ("$", "")


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


@dataclass
class Receipts:
    """Names, case after case in the order ITEMS, TOTALS, PAID, and the templates of sums."""

    names: np.ndarray  # [cases * names, LINE_CHARS]
    name_len: np.ndarray
    sums: np.ndarray  # [currencies, 2 (an item's, a total's), templates, LINE_CHARS]
    sum_len: np.ndarray


def padded(codes: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    rows = [c + [0] * (LINE_CHARS - len(c)) for c in codes]
    return np.array(rows, np.int64), np.array([len(c) for c in codes], np.int64)


def build_receipts() -> Receipts:
    names = [encode_template(case(n)) for case in CASES for n in (*ITEMS, *TOTALS, *PAID)]
    each = max(len(s) for s in SUMS)
    sums = [
        encode_template(sign + forms[i % len(forms)])
        for sign in CURRENCIES
        for forms in SUMS
        for i in range(each)
    ]
    rows, lengths = padded(sums)
    shape = (len(CURRENCIES), len(SUMS), each)
    return Receipts(*padded(names), rows.reshape(*shape, -1), lengths.reshape(shape))


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
    "colour_is": ("Is the {k} {c}?", "Is the colour of the {k} {c}?"),
    "count_is": ("Are there {n} {c} {k}s?", "Do you see {n} {c} {k}s?"),
    "beside": ("What is {s} the {c} {k}?", "Which shape is {s} the {c} {k}?"),
    "relation": ("Is the {c} {k} {s} the {c2} {k2}?", "Is the {c} {k} {t} the {c2} {k2}?"),
    "relation_kind": ("Is the {k} {s} the {k2}?", "Is the {k} {t} the {k2}?"),
    "side_across": ("Is the {c} {k} left or right of the {c2} {k2}?",),
    "side_along": ("Is the {c} {k} above or below the {c2} {k2}?",),
    "further": ("Which is further {w}, the {c} {k} or the {c2} {k2}?",),
    "extreme": ("Which shape is {f}?", "What is {f}?"),
    "where": ("Where is the {c} {k}?", "In which part is the {c} {k}?"),
    "half": ("Is the {c} {k} on the left or on the right?",
             "Where is the {c} {k}: left or right?"),
    "total": ("What is the total?", "How much is the total?", "What is the total price?",
              "What is the sum?", "How much is it in total?", "Total?"),
    "item": ("How much is the {i}?", "What does the {i} cost?"),
}  # fmt: skip
FURTHER = ("left", "right", "up", "down")
TO_THE = ("to the left of", "to the right of", "above", "below")
FREE = {
    "s": SIDES, "t": TO_THE, "w": FURTHER, "f": FAR_WORDS, "n": tuple(map(str, range(10))),
    "i": tuple(n.upper() if n == "VAT" else n for n in ITEMS),
    "c": COLOURS, "k": SHAPES, "c2": COLOURS, "k2": SHAPES,
}  # fmt: skip
# Of the free words in a group's rows, the wording last; `s` and `t` say the same side.
ORDER = ("s", "w", "f", "n", "i", "c", "k", "c2", "k2")
MARKS = {"k": "\x01", "k2": "\x02"}  # stand behind the mention of a shape until it is found


@dataclass
class Table:
    """Rows of bytes with lengths; a group's rows lie together."""

    rows: np.ndarray  # [n, width]
    lengths: np.ndarray  # [n]
    start: dict[str, int]
    wordings: dict[str, int]
    marks: np.ndarray | None = None  # [n, 2], the last byte of each mention of a shape, or -1


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
        for values in product(*(range(len(FREE[f])) for f in free)):
            words = {f: FREE[f][v] for f, v in zip(free, values, strict=True)}
            words["t"] = TO_THE[values[0]] if "s" in free else ""
            words["a"] = "an" if words.get("c", "")[:1] in tuple("aeiou") else "a"
            words |= {f: words[f] + mark for f, mark in MARKS.items() if f in words}
            texts += [w.format(**words) for w in wordings]
    marks = np.full((len(texts), 2), -1, np.int64)
    for row, text in enumerate(texts):
        seen = 0
        for mention, mark in enumerate(MARKS.values()):
            if mark in text:
                marks[row, mention] = text.index(mark) - seen - 1
                seen += 1
    plain = [t.replace("\x01", "").replace("\x02", "") for t in texts]
    rows, lengths = to_table(plain, QUESTION_LEN)
    return Table(rows, lengths, start, {k: len(v) for k, v in QUESTIONS.items()}, marks)


def build_answers() -> Table:
    groups = {
        "yes": ["Yes"],
        "no": ["No"],
        "no_text": ["There is no text."],
        "no_price": ["There is no price."],
        "number": [str(i) for i in range(MAX_SHAPES + 1)],
        "colour": list(COLOURS),
        "shape": list(SHAPES),
        "both": [f"{c} {k}" for c in COLOURS for k in SHAPES],
        "side": list(SIDE_WORDS),
        "where": list(THIRDS),
    }
    texts, start = [], {}
    for name, answers in groups.items():
        start[name] = len(texts)
        texts += answers
    rows, lengths = to_table(texts, ANSWER_LEN)
    return Table(rows, lengths, start, dict.fromkeys(groups, 1))
