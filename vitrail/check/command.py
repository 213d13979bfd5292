"""`vitrail check` as a command: flags to a question, the report to a terminal or a program."""

import re
import sys
from collections.abc import Sequence

from vitrail.attention.installed import releases as installed_releases
from vitrail.attention.plan import DISTRIBUTIONS
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.config.hardware import CPU, Hardware, find


def run(
    choices: EngineConfig,
    *,
    gpu: str | None,
    sizes: Sequence[int],
    images: Sequence[str],
    releases: Sequence[str],
    as_json: bool,
    compiles: bool,
) -> int:
    """Prints the report; its exit code. Raises `Refused` for flags that mean nothing, before
    anything heavy is imported."""
    device = None if gpu is None else find(gpu)
    ranks = tuple(_size(size) for size in dict.fromkeys(sizes))
    pictures = tuple(_image(text) for text in images)
    installed = installed_releases() | dict(_release(text) for text in releases)

    from rich.console import Console

    from vitrail.check.report import show
    from vitrail.check.run import check
    from vitrail.check.subject import Question

    question = Question(
        choices=choices,
        gpu=device or _here(choices),
        sizes=ranks,
        images=pictures,
        installed=installed,
        compile=compiles,
    )
    report = check(question)
    if as_json:
        print(report.to_json())
    else:
        show(report, Console(file=sys.stdout))
    return report.exit_code


def _here(choices: EngineConfig) -> Hardware:
    """What start-up would take on this machine."""
    import torch

    if choices.device == "cpu" or not torch.cuda.is_available():
        if choices.device == "cuda":
            raise Refused.because(
                where="device",
                saw="--device cuda, and no CUDA device here",
                rule="without --gpu the checkpoint is checked for this machine",
                change="name the GPU that is meant: --gpu h200",
            )
        return CPU
    from vitrail.ops.record import gpu_of

    return gpu_of(torch.device("cuda", 0))


def _size(size: int) -> int:
    if size >= 1:
        return size
    raise Refused.because("tp", str(size), "at least 1 rank", "pass --tp 1")


def _image(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if found is None:
        rule = "WIDTHxHEIGHT in pixels, 1 to 999999 each"
        raise Refused.because("image-size", repr(text), rule, "pass --image-size 1024x768")
    return int(found[1]), int(found[2])


def _release(text: str) -> tuple[str, str]:
    name, _, release = text.partition("==")
    for backend, distribution in DISTRIBUTIONS.items():
        if distribution == name and release:
            return backend, release
    rule = f"NAME==RELEASE of {' or '.join(DISTRIBUTIONS.values())}"
    raise Refused.because("release", repr(text), rule, "pass --release flash-attn-4==4.0.0b36")
