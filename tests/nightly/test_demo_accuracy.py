"""Multiple-choice questions about pictures: drawn ones to the demo model, and any file's to any
checkpoint (`vitrail nightly --suite accuracy --model M --questions FILE --at-least 0.6`)."""

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from vitrail import LLM, SamplingParams
from vitrail.cli import DEMO
from vitrail.nightly.choice import Score, Style, read_questions, score

pytestmark = pytest.mark.nightly
COLOURS = {
    "red": (220, 40, 40),
    "blue": (60, 90, 220),
    "yellow": (235, 205, 40),
    "green": (40, 160, 70),
}
WORDS = ("OPEN", "EXIT", "Bakery", "$3.20", "Taxi", "24 hours", "SALE", "Hotel")
FLOOR = 0.9
# What the shipped weights are held to: the goal where docs/notes/demo-training.md measures it as
# met, else what they reach (counting: goal 0.95). Text here is in a font that was never trained on.
FIGURES = dict.fromkeys(("random", "word", "price", "plate", "number", "sign", "receipt"), 0.85) | {
    "no_text": 0.95, "count": 0.9, "colour_of": 0.98, "yes_no": 0.95, "relation": 0.95,
    "side": 0.95, "beside": 0.95,
}  # fmt: skip
PICTURES = 100


def ask(llm: LLM, max_tokens: int) -> Callable[[list[list[dict[str, Any]]]], list[str]]:
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    return lambda conversations: [g.outputs[0].text for g in llm.chat(conversations, greedy)]


def told(found: Score, name: str, record_property: Callable[[str, str], None]) -> None:
    print(f"{name}: {found}")
    record_property(f"figure accuracy, {name}", str(found))


def draw(folder: Path) -> Path:
    """questions.jsonl with its pictures: colours of shapes, and words to read."""
    lines = []
    grounds = ((200, 200, 205), (245, 240, 230), (120, 130, 140))
    for (colour, ink), kind, ground in itertools.product(
        COLOURS.items(), ("circle", "square"), grounds
    ):
        image = Image.new("RGB", (112, 84), ground)
        pen = ImageDraw.Draw(image)
        (pen.ellipse if kind == "circle" else pen.rectangle)((40, 28, 68, 56), fill=ink)
        question = f"What colour is the {kind}?"
        lines.append(line(folder, len(lines), image, question, sorted(COLOURS), colour))
    for word, size in itertools.product(WORDS, (28, 34, 40)):
        image = Image.new("RGB", (40 + 24 * len(word), 84), (240, 238, 230))
        font = ImageFont.load_default(size)
        ImageDraw.Draw(image).text((20, 22), word, font=font, fill=(30, 40, 60))
        lines.append(line(folder, len(lines), image, "Read the text.", sorted(WORDS), word))
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines))
    return path


def line(
    folder: Path, number: int, image: Image.Image, question: str, choices: list[str], right: str
) -> str:
    image.save(folder / f"{number}.png")
    letter = "ABCDEFGH"[choices.index(right)]
    named = {"image": f"{number}.png", "question": question}
    return json.dumps({**named, "choices": choices, "answer": letter})


@pytest.mark.suite("accuracy", minutes=1, owner="demo")
def test_the_demo_model_s_choices(tmp_path: Path, record_property: Callable[[str, str], None]):
    llm = LLM(DEMO, device="cpu", kv_cache_bytes=16 << 20, max_running=16)
    found = score(read_questions(draw(tmp_path)), tmp_path, ask(llm, 32), "words")
    told(found, "demo", record_property)
    assert found.right / found.total >= FLOOR, f"the demo model's choices: {found}"


@pytest.fixture(scope="module")
def demo_scripts():
    """demo/ holds scripts that import each other by name; they are importable while this runs."""
    sys.path.insert(0, str(DEMO.parents[1] / "demo"))
    yield
    sys.path.pop(0)


@pytest.mark.suite("accuracy", minutes=10, owner="demo", statistical=True)
@pytest.mark.parametrize("task", FIGURES)
def test_the_demo_model_s_figures(
    demo_scripts: None, task: str, record_property: Callable[[str, str], None]
):
    """Fails where the 95 % interval of what is measured lies below the figure."""
    from evaluate import as_messages
    from evaluate import score as exactly
    from pictures import draw_sample

    rng = random.Random(f"night {task}")
    drawn = [("unseen", draw_sample(rng, task, [""])) for _ in range(PICTURES)]
    llm = LLM(DEMO, device="cpu", kv_cache_bytes=16 << 20, max_running=16)
    (found,) = exactly(drawn, ask(llm, 48)([as_messages(sample) for _, sample in drawn]))
    print(found.row())
    record_property(f"figure accuracy, {task}", f"{found.right}/{found.total}")
    assert found.interval()[1] >= FIGURES[task], found.row() + f" {found.wrong[:8]}"


@pytest.mark.suite("accuracy", minutes=60, owner="models")
def test_a_given_checkpoint_s_choices(
    request: pytest.FixtureRequest, record_property: Callable[[str, str], None]
):
    model, questions, style = (
        request.config.getoption(f"--{name}") for name in ("checkpoint", "questions", "style")
    )
    if model is None:
        pytest.skip("no checkpoint was given; vitrail nightly --model M --questions FILE")
    chosen: Style = style
    path = Path(questions)
    found = score(read_questions(path), path.parent, ask(LLM(model), 1024), chosen)
    told(found, model, record_property)
    least = float(request.config.getoption("--at-least"))
    assert found.high >= least, f"surely below {least}: {found}"
