"""Measures a checkpoint through the engine's offline API, on pictures that Pillow renders.

`python demo/evaluate.py FONT_DIR [--model vitrail/demo] [--per-task 100]` prints the share of
exactly right answers of each task with its 95 % Wilson interval, for fonts of training and fonts
held out.
"""

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from atlas import HELD_FONTS, TRAIN_FONTS, font_paths
from pictures import TASKS, TEXT_TASKS, Sample, draw_sample

from vitrail import LLM, SamplingParams


@dataclass
class Score:
    task: str
    fonts: str  # "seen", "unseen", or "-" for tasks without text
    right: int
    total: int

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
            f"{100 * low:.1f} to {100 * high:.1f} % |"
        )


def draw_all(directory: Path, per_task: int, seed: int) -> list[tuple[str, Sample]]:
    """(fonts, sample) pairs; the same seed draws the same pictures."""
    drawn = []
    for fonts, names in (("seen", TRAIN_FONTS), ("unseen", HELD_FONTS)):
        rng, paths = random.Random(f"{seed} {fonts}"), font_paths(directory, names)
        for task in TASKS:
            if task not in TEXT_TASKS and fonts == "unseen":
                continue
            mark = fonts if task in TEXT_TASKS else "-"
            drawn += [(mark, draw_sample(rng, task, paths)) for _ in range(per_task)]
    return drawn


def as_messages(sample: Sample) -> list[dict]:
    picture = {"type": "image", "image": sample.image}
    return [{"role": "user", "content": [picture, {"type": "text", "text": sample.question}]}]


def score(drawn: list[tuple[str, Sample]], answers: list[str]) -> list[Score]:
    scores: dict[tuple[str, str], Score] = {}
    for (fonts, sample), answer in zip(drawn, answers, strict=True):
        entry = scores.setdefault((sample.task, fonts), Score(sample.task, fonts, 0, 0))
        entry.right += answer == sample.answer
        entry.total += 1
    return list(scores.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fonts", type=Path, help="a folder with the fonts that atlas.py names")
    parser.add_argument("--model", default="vitrail/demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--per-task", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the scores go as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    drawn = draw_all(args.fonts, args.per_task, args.seed)
    llm = LLM(args.model, device=args.device, dtype=args.dtype)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    outputs = llm.chat([as_messages(sample) for _, sample in drawn], params)
    answers = [output.outputs[0].text for output in outputs]
    scores = score(drawn, answers)
    print("| task | fonts | right | share | 95 % interval |\n|---|---|---|---|---|")
    for entry in scores:
        print(entry.row())
    wrong = [(s, a) for (_, s), a in zip(drawn, answers, strict=True) if a != s.answer]
    for sample, answer in wrong[:20]:
        print(f"{sample.task}: {sample.question!r} {sample.answer!r}, answered {answer!r}")
    if args.json:
        args.json.write_text(json.dumps([asdict(s) for s in scores], indent=1) + "\n")


if __name__ == "__main__":
    main()
