"""Measures the network during training on Pillow's pictures, by teacher forcing.

Greedy decoding gives the answer exactly when the most likely token is right at each of its places,
so one forward decides. `python demo/examine.py FONT_DIR OUT.npz` renders the set beforehand.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from atlas import HELD_FONTS, TRAIN_FONTS, font_paths
from dialogue import FRAGMENTS, IGNORE, IM_END, MEDIA_PAD, PAD
from layout import PATCH, Layout, build_layout, move
from network import DemoNetwork
from pictures import TASKS, TEXT_TASKS, draw_sample
from torch import Tensor

PER_TASK = 48


def patches_of(image: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """The processor's padding, scale and patches of an RGB picture: [N, 588] and the grid."""
    height, width = image.shape[:2]
    rows, columns = -(-height // 28) * 2, -(-width // 28) * 2
    padded = np.zeros((rows * PATCH, columns * PATCH, 3), np.float32)
    padded[:height, :width] = image
    x = torch.from_numpy(padded / 255 * 2 - 1)
    x = x.view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 4, 1, 3)
    return x.reshape(rows * columns, -1), (rows, columns)


def prompt_of(question: str, image_tokens: int) -> list[int]:
    part = FRAGMENTS
    head = part["user"] + part["media"] + [MEDIA_PAD] * image_tokens + part["media_end"]
    return head + list(question.encode()) + part["assistant"]


@dataclass
class Exam:
    names: list[str]  # task, with `*` for fonts never trained on
    answers: list[str]
    pixels: Tensor
    ids: Tensor
    labels: Tensor
    image_at: Tensor
    layout: Layout


def build_exam(samples: list[tuple[str, np.ndarray, str, str]], device: str) -> Exam:
    """Samples are (name, picture, question, answer)."""
    cut = [patches_of(s[1]) for s in samples]
    order = sorted(range(len(samples)), key=lambda i: cut[i][1])
    ladder: dict[tuple[int, int], int] = {}
    for i in order:
        ladder[cut[i][1]] = ladder.get(cut[i][1], 0) + 1
    layout = build_layout(ladder, flash=device == "cuda")
    ids = torch.full((layout.tokens,), PAD)
    labels, places = torch.full((layout.tokens,), IGNORE), []
    for slot, i in enumerate(order):
        start, (rows, columns) = int(layout.slot_start_P[slot]), cut[i][1]
        prompt = prompt_of(samples[i][2], rows * columns // 4)
        answer = [*samples[i][3].encode(), IM_END]
        end = start + len(prompt)
        ids[start : end + len(answer)] = torch.tensor(prompt + answer)
        labels[end - 1 : end - 1 + len(answer)] = torch.tensor(answer)
        image = start + len(FRAGMENTS["user"] + FRAGMENTS["media"])
        places.append(torch.arange(image, image + rows * columns // 4))
    return Exam(
        [samples[i][0] for i in order], [samples[i][3] for i in order],
        torch.cat([cut[i][0] for i in order]).to(device), ids.to(device), labels.to(device),
        torch.cat(places).to(device), move(layout, device),
    )  # fmt: skip


@torch.no_grad()
def examine(network: DemoNetwork, exam: Exam) -> tuple[dict[str, float], list[str]]:
    """Share of exactly right answers of each name, and some wrong ones as text."""
    device = exam.ids.device.type
    lay = exam.layout
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        tables = network.tables(lay)
        hidden = network(exam.pixels, exam.ids, exam.image_at, lay, tables)
        best = network.decoder.lm_head(hidden.tokens).argmax(-1)
    asked = exam.labels != IGNORE
    wrong, best, labels = (asked & (best != exam.labels)).cpu(), best.cpu(), exam.labels.cpu()
    right: dict[str, list[bool]] = {}
    failures = []
    slots = zip(lay.slot_start_P.tolist(), lay.slot_len_P.tolist(), strict=True)
    for (start, length), name, answer in zip(slots, exam.names, exam.answers, strict=True):
        ok = not wrong[start : start + length].any()
        right.setdefault(name, []).append(ok)
        if not ok:
            span = labels[start : start + length] != IGNORE
            said = best[start : start + length][span].tolist()
            text = "".join(chr(t) if 31 < t < 127 else "~" for t in said[:-1])
            failures.append(f"{name} {answer!r} {text!r}")
    return {k: sum(v) / len(v) for k, v in sorted(right.items())}, failures


def render(directory: Path, seed: int) -> list[tuple[str, np.ndarray, str, str]]:
    rng, samples = random.Random(seed), []
    for mark, names in (("", TRAIN_FONTS), ("*", HELD_FONTS)):
        fonts = font_paths(directory, names)
        for task in TEXT_TASKS if mark else TASKS:
            for _ in range(PER_TASK):
                s = draw_sample(rng, task, fonts)
                samples.append((task + mark, np.asarray(s.image), s.question, s.answer))
    return samples


def load_samples(path: Path) -> list[tuple[str, np.ndarray, str, str]]:
    with np.load(path) as data:
        facts, pixels = json.loads(bytes(data["facts"]).decode()), data["pixels"]
    samples, at = [], 0
    for name, height, width, question, answer in facts:
        size = height * width * 3
        samples.append((name, pixels[at : at + size].reshape(height, width, 3), question, answer))
        at += size
    return samples


if __name__ == "__main__":
    drawn = render(Path(sys.argv[1]), seed=20261130)
    facts = [[s[0], *s[1].shape[:2], s[2], s[3]] for s in drawn]
    flat = np.concatenate([s[1].ravel() for s in drawn])
    text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    np.savez_compressed(sys.argv[2], pixels=flat, facts=text)
    print(f"{len(drawn)} pictures, {flat.size / 1e6:.1f} MB")
