"""Measures a checkpoint through the engine's offline API, on pictures that Pillow renders.

`python demo/evaluate.py FONT_DIR [--model vitrail/demo] [--per-task 1000]` prints the share of
exactly right answers of each task with its 95 % Wilson interval, for fonts of training and fonts
held out. `--part 3/16 --json FILE` does one of 16 equal parts, `--merge FILE...` adds them up.
"""

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

from atlas import HELD_FONTS, TRAIN_FONTS, font_paths
from pictures import TASKS, TEXT_TASKS, Sample, draw_sample

from vitrail import LLM, SamplingParams

CHUNK = 25  # pictures drawn from one seed
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


def draw_part(
    directory: Path, per_task: int, seed: int, part: tuple[int, int] = (0, 1)
) -> list[tuple[str, Sample]]:
    """(fonts, sample) pairs of one part; the same seed draws the same pictures, whatever parts."""
    drawn, chunk = [], 0
    for fonts, names in (("seen", TRAIN_FONTS), ("unseen", HELD_FONTS)):
        paths = font_paths(directory, names)
        for task in TASKS:
            if task not in TEXT_TASKS and fonts == "unseen":
                continue
            mark = fonts if task in TEXT_TASKS else "-"
            for first in range(0, per_task, CHUNK):
                chunk += 1
                if chunk % part[1] != part[0]:
                    continue
                rng = random.Random(f"{seed} {mark} {task} {first}")
                many = min(CHUNK, per_task - first)
                drawn += [(mark, draw_sample(rng, task, paths)) for _ in range(many)]
    return drawn


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


def merge(paths: list[Path]) -> list[Score]:
    """The scores of several parts added up."""
    scores: dict[tuple[str, str], Score] = {}
    for path in paths:
        for part in json.loads(path.read_text()):
            entry = scores.setdefault((part["task"], part["fonts"]), Score(**part))
            if entry.wrong is not part["wrong"]:
                for name in ("right", "total", "look_alikes", "wrong"):
                    setattr(entry, name, getattr(entry, name) + part[name])
    order = {task: i for i, task in enumerate(TASKS)}
    return sorted(scores.values(), key=lambda s: (s.fonts == "unseen", order[s.task]))


def measure(args: argparse.Namespace) -> list[Score]:
    part = tuple(int(n) for n in args.part.split("/"))
    drawn = draw_part(args.fonts, args.per_task, args.seed, (part[0], part[1]))
    llm = LLM(args.model, device=args.device, dtype=args.dtype)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    outputs = llm.chat([as_messages(sample) for _, sample in drawn], params)
    return score(drawn, [output.outputs[0].text for output in outputs])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fonts", type=Path, help="a folder with the fonts that atlas.py names")
    parser.add_argument("--model", default="vitrail/demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--per-task", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--part", default="0/1", help="which of how many equal parts, from 0")
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
