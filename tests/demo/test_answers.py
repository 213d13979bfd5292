"""The shipped demo model through the engine, on a CPU: it answers the README's picture and simple
ones like it, drawn here by Pillow in a font that it was never trained on."""

from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from vitrail import LLM, SamplingParams
from vitrail.cli import DEMO, DEMO_PICTURE, DEMO_QUESTION

pytestmark = pytest.mark.suite("accuracy", minutes=1, owner="demo")

GREEDY = SamplingParams(temperature=0, max_tokens=32)
COLOURS = {"red": (220, 40, 40), "blue": (60, 90, 220), "yellow": (235, 205, 40)}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO, device="cpu", kv_cache_bytes=16 << 20, max_running=16)


def ask(llm: LLM, pairs: list[tuple[Any, str]]) -> list[str]:
    conversations = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": image}, {"type": "text", "text": text}],
            }
        ]
        for image, text in pairs
    ]
    return [g.outputs[0].text for g in llm.chat(conversations, GREEDY)]


def sign(text: str) -> Image.Image:
    image = Image.new("RGB", (40 + 24 * len(text), 84), (240, 238, 230))
    ImageDraw.Draw(image).text((20, 22), text, font=ImageFont.load_default(36), fill=(30, 40, 60))
    return image


def shape(colour: str, kind: str) -> Image.Image:
    image = Image.new("RGB", (112, 84), (200, 200, 205))
    draw, box = ImageDraw.Draw(image), (40, 28, 68, 56)
    (draw.ellipse if kind == "circle" else draw.rectangle)(box, fill=COLOURS[colour])
    return image


def test_the_readmes_picture(llm: LLM):
    questions = [DEMO_QUESTION, "What is the price?", "What colour is the circle?"]
    answers = ask(llm, [(DEMO_PICTURE, q) for q in questions])
    assert answers == ["COFFEE $4.50", "$4.50", "red"]


@pytest.mark.parametrize("entry", ["path", "text path", "bytes", "pil", "array"])
def test_every_kind_of_image_that_the_offline_api_takes(llm: LLM, entry: str):
    with Image.open(DEMO_PICTURE) as opened:
        pil = opened.convert("RGB")
    picture: Any = {
        "path": DEMO_PICTURE,
        "text path": str(DEMO_PICTURE),
        "bytes": DEMO_PICTURE.read_bytes(),
        "pil": pil,
        "array": np.asarray(pil),
    }[entry]
    assert ask(llm, [(picture, DEMO_QUESTION)]) == ["COFFEE $4.50"]


def test_words_and_prices_in_a_font_never_trained_on(llm: LLM):
    texts = ["OPEN", "EXIT", "Bakery", "$3.20", "Taxi", "24 hours"]
    answers = ask(llm, [(sign(t), "Read the text.") for t in texts])
    right = sum(a == t for a, t in zip(answers, texts, strict=True))
    assert right >= len(texts) - 1, answers


def test_colours(llm: LLM):
    cases = [(c, k) for c in COLOURS for k in ("circle", "square")]
    answers = ask(llm, [(shape(c, k), f"What colour is the {k}?") for c, k in cases])
    assert answers == [c for c, _ in cases]


def test_progress_is_shown_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]):
    prompt = [{"role": "user", "content": "Hello"}]
    llm.chat([prompt], SamplingParams(max_tokens=2), progress=True)
    assert "answers" in capsys.readouterr().out
    llm.chat([prompt], SamplingParams(max_tokens=2))
    assert capsys.readouterr().out == ""
