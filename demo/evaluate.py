"""Measures a checkpoint through the engine's offline API, on pictures that Pillow renders.

`python demo/evaluate.py FONT_DIR [--model vitrail/demo] [--per-task 1000]` prints the share of
exactly right answers of each task with its 95 % Wilson interval, for fonts of training and fonts
held out. `--part 3/16 --json FILE` does one of 16 equal parts, `--merge FILE...` adds them up.
Where the engine is quick (`--device cuda`) it waits for pictures: `--workers 14` draw them.
"""

import argparse
import functools
import itertools
import json
import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from atlas import HELD_FONTS, TRAIN_FONTS, font_paths
from pictures import TASKS, TEXT_TASKS, Sample, draw_sample

from vitrail import LLM, SamplingParams

CHUNK = 25  # pictures drawn from one seed
TOGETHER = 40  # chunks that the engine is asked at once
LOOK_ALIKES = ("O0oQ", "lI1!", "5Ss", "2Zz", "8B", "Cc", "Uu", "Vv", "Ww", "Xx", "Kk", "Pp", ".,")


@dataclass
class Score:
    task: str
    fonts: str  # "seen", "unseen", or "-" for tasks without text
    right: int = 0
    total: int = 0
    look_alikes: int = 0  # wrong only where two characters look alike
    wrong: list[tuple[str, str, str]] = field(default_factory=list)  # question, answer, answered

    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the share."""
        z, n, p = 1.96, self.total, self.right / self.total
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def row(self) -> str:
        low, high = self.interval()
        share = 100 * self.right / self.total
        return (
            f"| {self.task} | {self.fonts} | {self.right}/{self.total} | {share:.1f} % | "
            f"{100 * low:.1f} to {100 * high:.1f} % | {self.look_alikes} |"
        )


def alike(said: str, meant: str) -> bool:
    """Whether two texts differ only where characters look alike."""
    return len(said) == len(meant) and all(
        a == b or any(a in g and b in g for g in LOOK_ALIKES)
        for a, b in zip(said, meant, strict=True)
    )


class Chunk(NamedTuple):
    """Pictures of one seed."""

    fonts: str
    task: str
    first: int
    many: int


def chunks(per_task: int, part: tuple[int, int] = (0, 1)) -> list[Chunk]:
    """The chunks of one part; the same chunk holds the same pictures, whatever parts there are."""
    kinds = [("seen" if task in TEXT_TASKS else "-", task) for task in TASKS]
    kinds += [("unseen", task) for task in TEXT_TASKS]
    every = [
        Chunk(fonts, task, first, min(CHUNK, per_task - first))
        for fonts, task in kinds
        for first in range(0, per_task, CHUNK)
    ]
    return [c for i, c in enumerate(every, 1) if i % part[1] == part[0]]


def draw_chunk(directory: Path, seed: int, chunk: Chunk) -> list[tuple[str, Sample]]:
    """(fonts, sample) pairs."""
    names = {"seen": TRAIN_FONTS, "unseen": HELD_FONTS, "-": ()}[chunk.fonts]
    paths = font_paths(directory, names)
    rng = random.Random(f"{seed} {chunk.fonts} {chunk.task} {chunk.first}")
    return [(chunk.fonts, draw_sample(rng, chunk.task, paths)) for _ in range(chunk.many)]


def as_messages(sample: Sample) -> list[dict]:
    picture = {"type": "image", "image": sample.image}
    return [{"role": "user", "content": [picture, {"type": "text", "text": sample.question}]}]


def score(drawn: list[tuple[str, Sample]], answers: list[str]) -> list[Score]:
    scores: dict[tuple[str, str], Score] = {}
    for (fonts, sample), answer in zip(drawn, answers, strict=True):
        entry = scores.setdefault((sample.task, fonts), Score(sample.task, fonts))
        entry.total += 1
        if answer == sample.answer:
            entry.right += 1
        else:
            entry.look_alikes += alike(answer, sample.answer)
            entry.wrong.append((sample.question, sample.answer, answer))
    return list(scores.values())


def add_up(scores: dict[tuple[str, str], Score], more: list[Score]) -> None:
    for part in more:
        entry = scores.setdefault((part.task, part.fonts), part)
        if entry is not part:
            for name in ("right", "total", "look_alikes", "wrong"):
                setattr(entry, name, getattr(entry, name) + getattr(part, name))


def merge(paths: list[Path]) -> list[Score]:
    """The scores of several parts added up."""
    scores: dict[tuple[str, str], Score] = {}
    for path in paths:
        add_up(scores, [Score(**part) for part in json.loads(path.read_text())])
    order = {task: i for i, task in enumerate(TASKS)}
    return sorted(scores.values(), key=lambda s: (s.fonts == "unseen", order[s.task]))


def measure(args: argparse.Namespace) -> list[Score]:
    """One engine answers while `workers` processes draw what is asked next."""
    part = tuple(int(n) for n in args.part.split("/"))
    todo, scores = chunks(args.per_task, (part[0], part[1])), {}
    draw = functools.partial(draw_chunk, args.fonts, args.seed)
    llm = LLM(args.model, device=args.device, dtype=args.dtype)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        ahead = pool.map(draw, todo[:TOGETHER])
        for end in range(TOGETHER, len(todo) + TOGETHER, TOGETHER):
            drawn = list(itertools.chain.from_iterable(ahead))
            ahead = pool.map(draw, todo[end : end + TOGETHER])
            outputs = llm.chat([as_messages(sample) for _, sample in drawn], params)
            add_up(scores, score(drawn, [output.outputs[0].text for output in outputs]))
    return list(scores.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fonts", type=Path, help="a folder with the fonts that atlas.py names")
    parser.add_argument("--model", default="vitrail/demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--per-task", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--part", default="0/1", help="which of how many equal parts, from 0")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw")
    parser.add_argument("--merge", type=Path, nargs="+", help="JSON of parts: adds them up")
    parser.add_argument("--json", type=Path, help="where the scores go as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    scores = merge(args.merge) if args.merge else measure(args)
    print("| task | fonts | right | share | 95 % interval | look-alikes |")
    print("|---|---|---|---|---|---|")
    for entry in scores:
        print(entry.row())
    for entry in scores:
        for question, answer, answered in entry.wrong[:4]:
            print(f"{entry.task}: {question!r} {answer!r}, answered {answered!r}")
    if args.json:
        args.json.write_text(json.dumps([asdict(s) for s in scores], indent=1) + "\n")


if __name__ == "__main__":
    main()
