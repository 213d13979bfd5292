"""A benchmark of multiple-choice questions about pictures: a JSONL file, one question a line:

    {"image": "a.png", "question": "Which colour?", "choices": ["red", "blue"], "answer": "A"}

A reply from which no one choice can be read counts as wrong, and how many those were is said. With
`letters` the choices are written under the question and a letter is asked for; with `words` the
question stands alone and the reply must be one of the choices (for models that know no letters)."""

import math
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from vitrail.config.finding import Finding, Refused

Style = Literal["letters", "words"]
Ask = Callable[[list[list[dict[str, Any]]]], list[str]]  # conversations -> replies
Z95 = 1.959964
ENDS_OF_THOUGHT = ("</think>", "◁/think▷")


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`image` is a path from the file's folder; `answer` the letter of a choice."""

    image: str
    question: str
    choices: tuple[str, ...]
    answer: str


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """`low` and `high` bound the share of right replies (Wilson's interval, 95 %)."""

    total: int
    right: int
    unparsed: int
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.total} right, {self.right / self.total:.1%} "
            f"({self.low:.1%} to {self.high:.1%} at 95 %); {self.unparsed} replies not parsed"
        )


def read_questions(path: Path) -> list[Question]:
    """Every line, checked. Raises `Refused` with all lines that are wrong."""
    questions: list[Question] = []
    findings: list[Finding] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            made = msgspec.json.decode(line, type=Question)
        except msgspec.DecodeError as error:
            findings.append(_bad(f"{path.name}:{number}", str(error)))
            continue
        letters = string.ascii_uppercase[: len(made.choices)]
        if not 2 <= len(made.choices) <= 26 or len(set(made.choices)) < len(made.choices):
            findings.append(_bad(f"{path.name}:{number}", f"choices {list(made.choices)}"))
        elif len(made.answer) != 1 or made.answer not in letters:
            findings.append(_bad(f"{path.name}:{number}", f"answer {made.answer!r} of {letters}"))
        questions.append(made)
    if findings or not questions:
        raise Refused(findings or _bad(path.name, "no line"))
    return questions


def score(questions: Sequence[Question], folder: Path, ask: Ask, style: Style) -> Score:
    """Ask all, parse all. `folder` is that of the file."""
    replies = ask([conversation(q, folder, style) for q in questions])
    chosen = [parse(r, q.choices, style) for q, r in zip(questions, replies, strict=True)]
    right = sum(c == q.answer for c, q in zip(chosen, questions, strict=True))
    low, high = wilson(right, len(questions))
    return Score(total=len(questions), right=right, unparsed=chosen.count(None), low=low, high=high)


def conversation(question: Question, folder: Path, style: Style) -> list[dict[str, Any]]:
    text = question.question
    if style == "letters":
        listed = zip(string.ascii_uppercase, question.choices, strict=False)
        lines = [text, *(f"{letter}. {choice}" for letter, choice in listed)]
        text = "\n".join([*lines, "Answer with the letter of the right choice."])
    picture = {"type": "image", "image": str(folder / question.image)}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def parse(reply: str, choices: Sequence[str], style: Style) -> str | None:
    """The letter of the choice that a reply makes; None if it makes none, or more than one."""
    for end in ENDS_OF_THOUGHT:
        reply = reply.rpartition(end)[2]
    said = reply.strip()
    letters = string.ascii_uppercase[: len(choices)]
    whole = [letter for letter, c in zip(letters, choices, strict=True) if _bare(c) == _bare(said)]
    if len(whole) == 1:
        return whole[0]
    if style == "words":
        return None
    alone = re.match(rf"^[(\[*]*([{letters}])[)\]*]*(?:[.:,]|\s*$|\s*\n)", said)
    if alone:
        return alone[1]
    named = re.findall(rf"(?i:answer|choice|option)\W+(?:(?i:is)\W+)?([{letters}])\b", said)
    found = set(named) or set(re.findall(rf"\(([{letters}])\)", said))
    return found.pop() if len(found) == 1 else None


def _bare(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .!\"'")


def wilson(right: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share: inside [0, 1] and of some width even at 0 and at 1."""
    share, z2 = right / total, z * z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return (middle - half if right else 0.0), (middle + half if right < total else 1.0)


def _bad(where: str, saw: str) -> Finding:
    return Finding(
        where=where,
        saw=saw,
        rule='{"image", "question", "choices": 2 to 26 different ones, "answer": a letter of them}',
        change="mend the line",
    )
