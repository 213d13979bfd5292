"""The memory that `check` predicts against what a GPU measures, at the published shapes: within
5 %. Weights are random and the decoder small, which encoding does not see."""

import gc
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import nvila as nvila_shape
from bench.kimi_vl_shape import write_published
from tests.models.cases import KIMI_VL
from vitrail import LLM
from vitrail.attention.installed import releases
from vitrail.attention.plan import make_table
from vitrail.attention.warm import warm
from vitrail.check import sizes
from vitrail.check.encoder_peak import encoder_peak, product_bytes
from vitrail.config.finding import accept
from vitrail.config.hardware import from_device
from vitrail.config.model import ModelConfig
from vitrail.engine.measure import run_worst_steps
from vitrail.engine.side import SideStream
from vitrail.models.kimi_vl import model as kimi
from vitrail.models.nvila import model as nvila
from vitrail.vision.siglip import Siglip
from vitrail.weights import load

# cutlass warns of its own names while it compiles
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.suite("soak", minutes=5, owner="check", gpus=1),
]

VISION = {
    "patch_size": 14,
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
}
TILE = 1024


def kimi_config() -> ModelConfig:
    config = KIMI_VL | {"vision_config": KIMI_VL["vision_config"] | VISION}
    made = accept(kimi.read_config(config, {}))
    return replace(made, text=replace(made.text, hidden_size=2048))


def nvila_config(scales: bool) -> ModelConfig:
    from tests.check.test_encoder_peak import LITE, S2
    from tests.nvila import FOLDER
    from vitrail.models.checkpoint import open_checkpoint

    folder = FOLDER / ("nvila_s2" if scales else "nvila_lite") / "ckpt"
    made = accept(nvila.read_config(open_checkpoint(str(folder)).config, {}))
    text = replace(made.text, hidden_size=3584)
    return replace(made, text=text, vision=replace(S2 if scales else LITE, num_layers=27))


CASES: list[tuple[Any, ModelConfig, int, int | None]] = [
    (kimi, kimi_config(), 4356, None),
    (kimi, kimi_config(), 16_384, None),
    (nvila, nvila_config(True), 17 * TILE, 17 * TILE),
    (nvila, nvila_config(True), 4 * TILE, 17 * TILE),
    (nvila, nvila_config(False), 13 * TILE, 13 * TILE),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_encoding_takes_is_predicted_within_5_percent(case: int) -> None:
    entry, config, budget, largest = CASES[case]
    device = torch.device("cuda")
    p = torch.cuda.get_device_properties(device)
    gpu = from_device(p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory)
    with torch.device("meta"):
        model = entry.build(config, "bfloat16")
    del model.decoder.layers[1:]
    load.randomize(entry.weight_map(config), model, device, seed=0)
    limits = accept(sizes.image_limits(config.vision, "bfloat16", budget))
    plans = make_table(model.image_sites(), limits, gpu, None, releases())
    assert not warm(plans, gpu)
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_steps(
        model, plans, config.vision, torch.bfloat16, budget, largest, SideStream(device)
    )
    peak = torch.cuda.max_memory_allocated(device) - before
    hidden = config.text.hidden_size
    predicted = encoder_peak(config.vision, hidden, "bfloat16", budget, largest)
    predicted += product_bytes(gpu.cc)
    print(f"{type(model).__name__} {budget} patches: {peak} measured, {predicted} predicted")
    assert isinstance(model, kimi.KimiVL) or isinstance(model.tower, Siglip)
    assert predicted == pytest.approx(peak, rel=0.05)


def nvila_8b(folder: Path) -> None:
    nvila_shape.write(folder, nvila_shape.TEXT, nvila_shape.VISION)


@pytest.mark.parametrize("write", [write_published, nvila_8b])
def test_what_is_left_for_pages_is_predicted_within_5_percent(
    write: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Kimi-VL-A3B and NVILA-8B, whole, as start-up says it; nobody else is on the GPU."""
    write(tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    with caplog.at_level(logging.INFO, "vitrail.engine"):
        LLM(tmp_path, weights="random", device="cuda")
    found = re.search(r"left for pages: (\d+) MiB, (\d+) predicted", caplog.text)
    assert found is not None, caplog.text
    measured, predicted = map(int, found.groups())
    print(f"{write.__name__}: {measured} MiB measured, {predicted} predicted")
    assert predicted == pytest.approx(measured, rel=0.05)
