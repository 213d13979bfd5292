"""The shipped demo model gives transformers' logits: its files are a real checkpoint's.

Compared with: the engine that serves them, and the network that trained them, whose sizes come
from config.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail import LLM

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "vitrail" / "demo"
MEDIA_PAD, IMAGE_AT = 277, 13
LIMIT = 16 * 2**20


@pytest.fixture(scope="module")
def demo_path():
    """demo/ holds scripts that import each other by name; they are importable while this runs."""
    added = [str(ROOT / "demo"), str(ROOT / "tests")]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)


@pytest.fixture(scope="module")
def ours(demo_path):
    from export import load_published
    from network import DemoNetwork

    config = json.loads((FOLDER / "config.json").read_text())
    network = DemoNetwork(config, labels=1).eval()
    network.load_state_dict(load_published(FOLDER, config), strict=False)
    return network


@pytest.fixture(scope="module")
def theirs(demo_path):
    pytest.importorskip("transformers")
    from interop_kimi_k25 import load_kimi_k25

    return load_kimi_k25(FOLDER)


@pytest.mark.parametrize("grid", [(4, 6), (16, 16), (10, 18)])
def test_logits_equal_transformers(ours, theirs, grid):
    from layout import build_layout

    rows, columns = grid
    image_tokens = rows * columns // 4
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    layout = build_layout({grid: 1}, flash=False)
    pixels = torch.rand(rows * columns, 588, generator=generator) * 2 - 1
    ids = torch.randint(0, 256, (layout.tokens,), generator=generator)
    image_at = torch.arange(IMAGE_AT, IMAGE_AT + image_tokens)
    ids[image_at] = MEDIA_PAD
    with torch.no_grad():
        hidden = ours(pixels, ids, image_at, layout, ours.tables(layout))
        logits = ours.decoder.lm_head(hidden.tokens)
        expected = theirs(
            input_ids=ids[None],
            pixel_values=pixels.view(-1, 3, 14, 14),
            image_grid_thw=torch.tensor([[1, rows, columns]]),
        ).logits[0]
    assert (logits - expected).abs().max() <= 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("grid", [(4, 6), (16, 16), (10, 18)])
def test_the_engines_logits_equal_transformers(theirs, grid):
    rows, columns = grid
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    pixels = torch.rand(rows * columns, 588, generator=generator) * 2 - 1
    text = torch.randint(0, 256, (40,), generator=generator).tolist()
    ids = [*text[:IMAGE_AT], *[MEDIA_PAD] * (rows * columns // 4), *text[IMAGE_AT:]]
    llm = LLM(FOLDER, device="cpu", kv_cache_bytes=16 << 20, max_running=2)
    logits = llm.score(ids, [{"patches": pixels.numpy(), "grid": grid}])
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(ids)[None],
            pixel_values=pixels.view(-1, 3, 14, 14),
            image_grid_thw=torch.tensor([[1, rows, columns]]),
        ).logits[0]
    assert np.abs(logits - expected.numpy()).max() <= 1e-4
    assert (logits.argmax(-1) == expected.argmax(-1).numpy()).all()


def test_folder_is_small_and_holds_no_pickle():
    files = [p for p in FOLDER.iterdir() if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= LIMIT
    assert not {p.suffix for p in files} & {".bin", ".pt", ".pth", ".pkl", ".npz"}
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    assert {p.name for p in FOLDER.glob("*.safetensors")} == set(index["weight_map"].values())
