"""Trains the demo model on pictures composed on the GPU: one static step, compiled and captured.

`python demo/train.py --seconds 900 --out DIR` wants a CUDA device, atlas.npz (atlas.py) and
exam.npz (examine.py). The recipe: dense labels on every patch whose weight falls, short big text
first, experts computed densely and kept busy by nudging the router's bias, AdamW with a cosine.

Checkpoints are weights in fp32, in two safetensors files; `--resume` takes them, or a checkpoint
folder, with AdamW anew after a warm-up. With `--keep-state` a third file holds the optimizer, the
step and the state of the draws: resumed with it, a run goes on as if it had not stopped.
"""

import argparse
import json
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from atlas import load_atlas
from catalog import build_answers, build_questions, build_receipts, build_strings
from dialogue import IGNORE, PAIRS, SPOTS, Dialogue, Phrases, draw_turns, write_dialogue
from examine import Exam, build_exam, examine, load_samples
from export import load_published
from jpeg import build_blocks, compress
from layout import LADDER, PATCH, build_layout, move
from network import SIDE_LAYER, SPOT_LAYER, DemoNetwork, Experts, shipped_parameters
from paint import (
    LABELS,
    MOST_CENTRES,
    as_patches,
    centre_counts,
    character_lookup,
    paint,
    patch_labels,
)
from safetensors.torch import load_file, save_file
from scene import draw_scene
from stock import Knobs, Lot, Tables
from torch import Tensor

STATE = "state.safetensors"
MAX_CHARS_UNTIL = ((600, 3), (1600, 6), (3200, 9))  # before this step, at most so many characters
MIN_EM_UNTIL = ((800, 22), (2500, 17), (6000, 13))  # before this step, at least so many pixels
MIN_EM = 14


def until(table: tuple[tuple[int, int], ...], step: int, final: int) -> int:
    return next((value for limit, value in table if step < limit), final)


def text_loss(network: DemoNetwork, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    logits = network.decoder.lm_head(hidden).float()
    each = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    return (each * weight).sum() / weight.sum()


def label_loss(network: DemoNetwork, patches: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    logits = network.vision_tower.label_head(patches).float().unflatten(-1, (-1, LABELS))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight)


def count_loss(network: DemoNetwork, features: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """How many centres of each colour and kind a merged token holds, read from its features."""
    logits = network.count_head(features).float().unflatten(-1, (-1, MOST_CENTRES + 1))
    return F.cross_entropy(logits.flatten(0, 1), counts.flatten(), weight=weight)


def spot_loss(network: DemoNetwork, after: list[Tensor], spots: Tensor) -> Tensor:
    """Where mentioned shapes are and on which side of each other; 0 where none is mentioned."""
    place = network.spot_head(after[SPOT_LAYER]).float().unflatten(-1, (2, SPOTS))
    side = network.side_head(after[SIDE_LAYER]).float().unflatten(-1, (2, 2))
    total = torch.zeros((), device=spots.device)
    for logits, labels in ((place, spots[:, :2]), (side, spots[:, 2:])):
        each = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        total = total + each / (labels != IGNORE).sum().clamp(min=1)
    return total


class Trainer:
    """Owns the network, its optimizer and the step; `run` replays the step on a schedule."""

    def __init__(self, args: argparse.Namespace, config: dict):
        self.args, self.device = args, args.device
        torch.manual_seed(args.seed)
        ladder = LADDER if not args.tiny else {(4, 6): 2, (8, 8): 2}
        flash = self.device == "cuda" and args.attention == "flash"
        layout = build_layout(ladder, flash)
        self.layout, self.blocks = (
            move(layout, self.device),
            move(build_blocks(layout), self.device),
        )
        self.tables = Tables(
            build_strings(args.seed), build_receipts(), load_atlas(args.atlas), self.device
        )
        self.phrases = Phrases(build_questions(), build_answers(), self.device)
        self.network = DemoNetwork(config, LABELS, SPOTS, PAIRS * (MOST_CENTRES + 1)).to(
            self.device
        )
        stored = [p for p in args.resume if Path(p).name == STATE]
        for path in args.resume:
            if path not in stored:
                self.resume(path)
        self.rope = self.network.tables(self.layout)
        self.lot = Lot(self.device)
        self.knobs = Knobs(*(torch.zeros((), device=self.device) for _ in range(5)))
        self.knobs.max_chars = self.knobs.max_chars.long()
        self.lr = torch.zeros((), device=self.device)
        self.class_weight = torch.ones(LABELS, device=self.device)
        self.class_weight[0] = 0.2
        self.count_weight = torch.ones(MOST_CENTRES + 1, device=self.device)
        self.count_weight[0] = 0.02  # 32 of 33 pairs, and more, are in no token
        self.meter = torch.zeros(5, device=self.device)  # losses: text, labels, counts, spots; norm
        self.curriculum = not args.resume  # short big text first
        self.optimizer, self.done = self.build_optimizer(), 0  # steps
        self.draw_scene, self.draw_turns = draw_scene, draw_turns
        self.write_dialogue = write_dialogue
        self.paint, self.labels_of, self.counts_of = paint, patch_labels, centre_counts
        self.compress, self.as_patches = compress, as_patches
        self.text_loss, self.label_loss = text_loss, label_loss
        self.count_loss, self.spot_loss = count_loss, spot_loss
        for path in stored:
            self.load_state(path)
        if args.compile:
            self.compile()

    def resume(self, path: str) -> None:
        """Takes the weights of a resume file, or of a checkpoint folder, that have our shapes."""
        own = self.network.state_dict()
        if Path(path).is_dir():
            state = load_published(Path(path), json.loads(self.args.config.read_text()))
        else:
            state = load_file(path, device=self.device)
        fitting = {k: v for k, v in state.items() if v.shape == own[k].shape}
        print("not resumed, of another shape:", sorted(state.keys() - fitting.keys()))
        self.network.load_state_dict(fitting, strict=False)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state, the step, and the state of the random draws."""
        draws = torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()
        flags = {"done": self.done, "curriculum": self.curriculum}
        out = {"draws": draws} | {k: torch.tensor(int(v)) for k, v in flags.items()}
        for name, parameter in self.network.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                out[f"{key} {name}"] = value.detach().cpu().clone()
        return out

    def load_state(self, path: str) -> None:
        stored = load_file(path)
        draws, self.done = stored.pop("draws"), int(stored.pop("done"))
        self.curriculum = bool(stored.pop("curriculum"))
        named = dict(self.network.named_parameters())
        for name, value in stored.items():
            key, parameter = name.split(" ")
            self.optimizer.state[named[parameter]][key] = value.to(self.device)
        torch.cuda.set_rng_state(draws) if self.device == "cuda" else torch.set_rng_state(draws)

    def build_optimizer(self) -> torch.optim.Optimizer:
        groups: dict[float, list[Tensor]] = {0.03: [], 0.0: []}  # by weight decay
        for name, parameter in self.network.named_parameters():
            free = "norm" in name or name.endswith(("bias", ".gate", "pos_emb", "tokens.weight"))
            groups[0.0 if free else 0.03].append(parameter)
        cuda = self.device == "cuda"
        return torch.optim.AdamW(
            [{"params": v, "weight_decay": k} for k, v in groups.items()],
            lr=self.lr,
            betas=(0.9, 0.98),
            fused=cuda,
            capturable=cuda,
        )

    def compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64
        torch._inductor.config.assert_indirect_indexing = False
        blocks = [*self.network.vision_tower.blocks, *self.network.decoder.layers]
        for block in [*blocks, self.network.projector]:
            block.compile(dynamic=False)
        names = ["paint", "compress", "as_patches"]
        names += ["text_loss", "label_loss", "count_loss", "spot_loss"]
        if self.args.fuse_draws:
            names += ["draw_scene", "draw_turns", "write_dialogue"]
        for name in names:
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    @torch.no_grad()
    def compose(self) -> tuple[Tensor, Tensor, Tensor, Dialogue]:
        """Patches, their dense labels, the merged tokens', and what is said about the pictures."""
        scene = self.draw_scene(self.layout, self.tables, self.knobs, self.lot)
        lookup = character_lookup(scene)
        patches = len(self.layout.patch_picture_N)
        noise = torch.randn(patches, 3, PATCH, PATCH, device=self.device)
        image = self.paint(scene, self.tables, lookup, self.layout, noise)
        image = self.compress(image, scene.quality_P, self.blocks)
        pixels = self.as_patches(image, scene, self.layout)
        dense = self.labels_of(scene, self.tables, lookup, self.layout)
        counts = self.counts_of(scene, self.layout)
        turns = self.draw_turns(scene, self.layout, self.phrases, self.lot)
        return (
            pixels,
            dense,
            counts,
            self.write_dialogue(turns, self.layout, self.phrases, self.lot),
        )

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        pixels, dense, counts, said = self.compose()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            out = self.network(pixels, said.ids, said.image_at, self.layout, self.rope)
            text = self.text_loss(self.network, out.tokens, said.labels, said.weight)
            label = self.label_loss(self.network, out.patches, dense, self.class_weight)
            count = self.count_loss(self.network, out.features, counts, self.count_weight)
            spot = self.spot_loss(self.network, out.after, said.spots)
        seen, placed = self.knobs.label_weight, self.knobs.spot_weight
        (text + seen * (label + count) + placed * spot).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for layer, load in zip(self.network.decoder.layers, out.loads, strict=True):
                if isinstance(layer.mlp, Experts):
                    nudge = torch.sign(load.mean() - load) * self.knobs.bias_rate
                    layer.mlp.e_score_correction_bias.add_(nudge)
            self.meter.lerp_(torch.stack([text, label, count, spot, norm]).detach(), 0.02)

    def set_schedule(self, step: int, fraction: float) -> None:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))
        heat = min(1.0, (step + 1) / self.args.warmup) * (0.98 * cosine + 0.02)
        late = step if self.curriculum else 10**9
        self.lr.fill_(self.args.lr * heat)
        self.knobs.bias_rate.fill_(1e-3 * heat)
        self.knobs.max_chars.fill_(until(MAX_CHARS_UNTIL, late, 12))
        self.knobs.min_em.fill_(until(MIN_EM_UNTIL, late, MIN_EM))
        self.knobs.label_weight.fill_(max(0.05, 0.6 * (1 - 1.5 * fraction)))
        self.knobs.spot_weight.fill_(max(0.03, 0.3 * (1 - 1.5 * fraction)))

    def ready_step(self) -> Callable[[], None]:
        """The step as a callable: a graph's replay on CUDA, itself elsewhere."""
        self.set_schedule(self.done, self.args.start)
        if self.device != "cuda" or not self.args.graph:
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.done += 3
        return graph.replay

    def save(self) -> None:
        """Weights in fp32 in two files of about equal size."""
        state = {k: v.detach().cpu() for k, v in self.network.state_dict().items()}
        half, files, total = sum(v.nbytes for v in state.values()) / 2, ({}, {}), 0
        for name, value in state.items():
            files[total > half][name] = value.contiguous()
            total += value.nbytes
        for i, tensors in enumerate(files):
            path = self.args.out / f"resume-{i}.safetensors"
            save_file(tensors, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # a run that is killed leaves whole files
        if self.args.keep_state:
            save_file(self.state(), self.args.out / STATE)

    def examine(self, exam: Exam, examples: int) -> dict[str, float]:
        with torch.compiler.set_stance("force_eager"):
            shares, failures = examine(self.network, exam)
        print("  " + " ".join(f"{k} {v:.3f}" for k, v in shares.items()), flush=True)
        for line in failures[:: max(1, len(failures) // max(1, examples))][:examples]:
            print("    wrong:", line)
        return shares

    def run(self, exam: Exam | None) -> None:
        """Steps until the seconds or the steps are over, whichever is first; the schedule follows
        the steps where their number is given, else the clock."""
        args, begun = self.args, time.time()
        replay = self.ready_step()
        self.sync()
        used = time.time() - args.began
        print(f"ready after {time.time() - begun:.1f} s, {used:.1f} s in all", flush=True)
        seconds = max(1.0, min(args.seconds, args.limit - used))
        start, history, next_exam = time.time(), [], args.exam_seconds
        while True:
            elapsed = time.time() - start
            part = self.done / args.steps if args.steps else elapsed / seconds
            fraction = args.start + (1 - args.start) * part
            over = part >= 1 or elapsed >= seconds
            if over or elapsed > next_exam:
                next_exam = elapsed + args.exam_seconds
                self.report(elapsed, exam, history)
            if over:
                break
            for _ in range(1 if args.steps else 10):
                self.set_schedule(self.done, fraction)
                replay()
                self.done += 1
            self.sync()
            if self.done % 500 < 10:
                self.log(elapsed, history)

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def log(self, elapsed: float, history: list) -> None:
        losses = zip(("text", "label", "count", "spot", "norm"), self.meter.tolist(), strict=True)
        line = {"step": self.done, "seconds": round(elapsed, 1)}
        line |= {name: round(value, 4) for name, value in losses}
        history.append(line)
        print(" ".join(f"{k} {v}" for k, v in line.items()), flush=True)

    def report(self, elapsed: float, exam: Exam | None, history: list) -> None:
        self.log(elapsed, history)
        self.save()
        seen = self.done * self.layout.pictures
        print(f"  saved; {seen / 1e6:.2f} M pictures", flush=True)
        if exam:
            history[-1]["exam"] = self.examine(exam, 12)
        args = {k: str(v) for k, v in vars(self.args).items()}
        facts = {"commit": commit(), "args": args, "pictures": seen, "history": history}
        (self.args.out / "run.json").write_text(json.dumps(facts, indent=1))


def commit() -> str:
    """The commit of the code, with a `+` where files differ from it; empty outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False)
    return head.stdout.strip() + ("+" if head.stdout and clean.returncode else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, the start's included")
    parser.add_argument("--began", type=float, default=time.time(), help="when they began to count")
    parser.add_argument("--warmup", type=int, default=400, help="steps")
    parser.add_argument("--steps", type=int, default=0, help="of the whole run")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=float, default=0.0, help="fraction of the schedule done")
    parser.add_argument("--resume", nargs="*", default=[], help="resume files or a folder")
    parser.add_argument("--keep-state", action="store_true")
    parser.add_argument("--exam-seconds", type=float, default=120)
    parser.add_argument("--atlas", type=Path, default=Path("build/demo/atlas.npz"))
    parser.add_argument("--exam", default="build/demo/exam.npz", help="'none' for no exams")
    parser.add_argument("--config", type=Path, default=Path("vitrail/demo/config.json"))
    parser.add_argument("--out", type=Path, default=Path("build/demo/run"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", choices=("flash", "grouped"), default="flash")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--fuse-draws", action="store_true")
    parser.add_argument("--no-graph", dest="graph", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="four small pictures a step")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(args, json.loads(args.config.read_text()))
    lay = trainer.layout
    print(
        f"{shipped_parameters(trainer.network) / 1e6:.3f} M parameters; a step has {lay.pictures} "
        f"pictures, {len(lay.patch_picture_N)} patches, {lay.tokens} tokens",
        flush=True,
    )
    exam = None
    if args.exam != "none":
        samples = load_samples(Path(args.exam))
        exam = build_exam(samples if not args.tiny else samples[::40], args.device)
    trainer.run(exam)


if __name__ == "__main__":
    main()
