"""Replies are read strictly, shares have honest intervals; slower is said only where it is sure."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.bench.compare import spread
from vitrail.config.finding import Refused
from vitrail.nightly.choice import Score, conversation, parse, read_questions, score, wilson
from vitrail.nightly.speed import LEAST_SAMPLES, MARGIN, slower

CHOICES = ("red", "blue", "A car", "none")


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        (" B. blue", "B"),
        ("**B**", "B"),
        ("blue", "B"),
        (" Blue. ", "B"),
        ("The answer is B.", "B"),
        ("Answer: (C)", "C"),
        ("I see a car, so the answer is (C).", "C"),
        ("a car", "C"),
        ("◁think▷A or B?◁/think▷D", "D"),
        ("<think>(A)</think>\nB", "B"),
        ("", None),
        ("E", None),
        ("A or B", None),
        ("The answer is A or the answer is B", None),
        ("A car is red", None),
        ("I see nothing", None),
        ("Blue or red", None),
        ("AB", None),
    ],
)
def test_a_reply_is_one_choice_or_none(reply: str, letter: str | None):
    assert parse(reply, CHOICES, "letters") == letter


@pytest.mark.parametrize(
    ("reply", "letter"), [("RED", "A"), ("none.", "D"), ("A", None), ("red blue", None)]
)
def test_words_are_the_choice_itself(reply: str, letter: str | None):
    assert parse(reply, CHOICES, "words") == letter


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_reply_is_read(reply: str):
    assert parse(reply, CHOICES, "letters") in (None, "A", "B", "C", "D")


def test_wilson_s_interval():
    assert wilson(48, 48) == pytest.approx((0.92590, 1.0), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert wilson(50, 100) == pytest.approx((0.40383, 0.59617), abs=1e-4)
    for total in (1, 7, 300):
        for right in range(total + 1):
            low, high = wilson(right, total)
            assert 0 <= low <= right / total <= high <= 1
            assert low < high


def write(folder: Path, *lines: dict) -> Path:
    path = folder / "q.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


GOOD = {"image": "a.png", "question": "What?", "choices": ["x", "y"], "answer": "B"}


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "C"},
        {"answer": "x"},
        {"answer": ""},
        {"choices": ["x"]},
        {"choices": ["x", "x"]},
        {"more": 1},
        {"question": 3},
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, change: dict):
    with pytest.raises(Refused, match=r"q\.jsonl:2"):
        read_questions(write(tmp_path, GOOD, GOOD | change))
    with pytest.raises(Refused, match="no line"):
        read_questions(write(tmp_path))


def test_what_cannot_be_parsed_is_wrong(tmp_path: Path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    questions = read_questions(write(tmp_path, GOOD, GOOD, GOOD, GOOD))
    asked = []

    def ask(conversations):
        asked.extend(conversations)
        return ["B", "A", "perhaps", "The answer is B"]

    found = score(questions, tmp_path, ask, "letters")
    assert (found.total, found.right, found.unparsed) == (4, 2, 1)
    assert str(found) == "2 of 4 right, 50.0% (15.0% to 85.0% at 95 %); 1 replies not parsed"
    text = asked[0][0]["content"][1]["text"]
    assert text == "What?\nA. x\nB. y\nAnswer with the letter of the right choice."
    words = conversation(questions[0], tmp_path, "words")[0]["content"]
    assert words[1]["text"] == "What?"
    assert words[0]["image"] == str(tmp_path / "a.png")


def test_a_score_says_its_interval():
    low, high = wilson(9, 10)
    text = str(Score(total=10, right=9, unparsed=0, low=low, high=high))
    assert text.startswith("9 of 10 right, 90.0% (59.6% to 98.2% at 95 %)")


def noisy(mean: float, spread_of: float, count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [math.log(mean) + draw.gauss(0, spread_of) for _ in range(count)]


def test_equal_speeds_are_never_called_slower():
    """200 pairs of nights that differ by noise alone, of 3 and of 30 %."""
    for noise in (0.03, 0.3):
        said = [
            slower("m", noisy(2, noise, 12, 2 * i), noisy(2, noise, 12, 2 * i + 1))
            for i in range(100)
        ]
        assert sum(s is not None for s in said) <= 1


def test_a_slow_down_is_seen_above_the_margin_and_the_noise():
    before = noisy(1.0, 0.05, 12, 1)
    assert slower("step", noisy(1.5, 0.05, 12, 2), before) is not None
    assert slower("step", noisy(1.0 + MARGIN / 2, 0.01, 12, 3), noisy(1, 0.01, 12, 4)) is None
    assert slower("step", noisy(1.3, 0.6, 12, 5), noisy(1, 0.6, 12, 6)) is None
    text = slower("step", noisy(3.0, 0.02, 12, 7), before)
    assert text is not None
    assert text.startswith("slower: step takes 3.0")
    assert text.endswith("12 samples against 12)")


def test_faster_and_too_few_samples_are_not_slower():
    assert slower("m", noisy(0.5, 0.01, 12, 1), noisy(1, 0.01, 12, 2)) is None
    few = LEAST_SAMPLES - 1
    assert slower("m", noisy(9, 0.01, few, 1), noisy(1, 0.01, 12, 2)) is None


def test_the_spread_is_student_s():
    assert spread([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
