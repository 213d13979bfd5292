"""`vitrail bench vision`: the vision tower and projector alone, on packed patches of noise, several
pictures at once, through the encoder that serves. Processing of pictures is not in these times; the
copy of their patches to the device is."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from vitrail.bench.record import Spread, spread
from vitrail.bench.workload import parse_size
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.config.model import CHANNELS
from vitrail.engine.step import EncodeJob
from vitrail.engine.tower_alone import Tower, build_tower
from vitrail.models.assets import load_assets
from vitrail.models.checkpoint import open_checkpoint
from vitrail.vision.preprocess import ImageGrid, ImageProcessor

WARM_UP = 3
_PART = re.compile(r"(?:(\d{1,4})\*)?(\d+x\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Pictures encoded at once, as (height, width) in pixels; `text` as it was asked for."""

    text: str
    sizes: tuple[tuple[int, int], ...]


class MixFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One mix. `sequences`: attention sequences of all its pictures. `time` in milliseconds a
    pass; the rates are of the median."""

    mix: str
    pictures: int
    sequences: int
    patches: int
    tokens: int
    time: Spread
    pictures_per_s: float
    patches_per_s: float


class VisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """All mixes on one device."""

    kind: str
    model: str
    device: str
    dtype: str
    mixes: list[MixFigures]


def parse_mix(text: str) -> Mix:
    """COUNT*WIDTHxHEIGHT, joined by commas. Raises `Refused`."""
    sizes: list[tuple[int, int]] = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None or found[1] == "0":
            raise Refused.because(
                where="--mix",
                saw=repr(part),
                rule="COUNT*WIDTHxHEIGHT or WIDTHxHEIGHT, joined by commas",
                change="for example 8*1024x1024 or 224x224,640x480",
            )
        sizes += [parse_size(found[2], "--mix")] * int(found[1] or 1)
    return Mix(text=text, sizes=tuple(sizes))


def bench_vision(config: EngineConfig, mixes: Sequence[Mix], runs: int, out: Path | None) -> int:
    """Exit code 0. Raises `Refused`, for a model without a tower too."""
    checkpoint = open_checkpoint(config.model, config.revision)
    processor = load_assets(checkpoint).processor
    if processor is None:
        raise Refused.because(
            where="--model",
            saw=f"{config.model} has no preprocessor_config.json that it reads",
            rule="a vision model's processor says what patches a picture makes",
            change="give a vision model with that file",
        )
    grids = [grids_of(processor, mix) for mix in mixes]
    most = max(sum(g.num_patches for g in each) for each in grids)
    tower = build_tower(replace(config, encoder_patches=most), checkpoint, processor)
    found = [time_mix(tower, mix, each, runs) for mix, each in zip(mixes, grids, strict=True)]
    report = VisionReport(
        kind="vision",
        model=config.model,
        device=tower.hardware.name,
        dtype=tower.dtype,
        mixes=found,
    )
    print(show_vision(report))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0


def grids_of(processor: ImageProcessor, mix: Mix) -> list[ImageGrid]:
    """The parts of all pictures. Raises `Refused` for a size that the model cannot take."""
    parts: list[ImageGrid] = []
    for height, width in mix.sizes:
        made = processor.grids(height, width, len(mix.sizes) == 1)
        if isinstance(made, Finding):
            raise Refused(made)
        parts += made
    return parts


@torch.inference_mode()
def time_mix(tower: Tower, mix: Mix, grids: Sequence[ImageGrid], runs: int) -> MixFigures:
    """`runs` timed passes after a few that are not, the device waited for at both ends. Raises
    `RuntimeError` where a picture cannot be encoded."""
    jobs = [
        EncodeJob(
            entry=i,
            height=g.height,
            width=g.width,
            num_tokens=g.num_tokens,
            count=g.sequences,
            sequences=g.sequences,
            block=g.block,
        )
        for i, g in enumerate(grids)
    ]
    features = CHANNELS * tower.vision.patch_size**2
    draw = np.random.default_rng(0)
    pixels = [draw.integers(0, 256, (j.num_patches, features), dtype=np.uint8) for j in jobs]
    seconds: list[float] = []
    for _ in range(WARM_UP + runs):
        _wait(tower.device)
        began = time.perf_counter()
        failed = tower.encoder.run(jobs, pixels)
        _wait(tower.device)
        seconds.append(time.perf_counter() - began)
        tower.pool.drop(range(len(jobs)))
        if failed:
            raise RuntimeError(f"{mix.text}: {next(iter(failed.values()))}")
    taken = spread(seconds[WARM_UP:])
    assert taken.p50 is not None, "there are runs"
    patches = sum(g.num_patches for g in grids)
    return MixFigures(
        mix=mix.text,
        pictures=len(mix.sizes),
        sequences=sum(g.sequences for g in grids),
        patches=patches,
        tokens=sum(g.num_tokens for g in grids),
        time=taken,
        pictures_per_s=len(mix.sizes) / taken.p50 * 1e3,
        patches_per_s=patches / taken.p50 * 1e3,
    )


def show_vision(report: VisionReport) -> str:
    """The table."""
    lines = [
        f"{report.model} on {report.device} in {report.dtype}, ms a pass",
        f"  {'pictures':<44}{'patches':>9}{'p50':>10}{'p90':>10}{'picture/s':>11}{'patch/s':>12}",
    ]
    lines += [
        f"  {f'{m.pictures}: {m.mix}':<44.44}{m.patches:>9}{m.time.p50:>10.2f}{m.time.p90:>10.2f}"
        f"{m.pictures_per_s:>11.1f}{m.patches_per_s:>12.0f}"
        for m in report.mixes
    ]
    return "\n".join(lines)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
