"""The golden Kimi-VL: a tiny checkpoint under published names, and what another implementation
computed from it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.driver import fill, image_plans, read_folder
from vitrail.config.model import DType, ModelConfig
from vitrail.layers.attention import MlaForms
from vitrail.models.interface import ImageShape
from vitrail.models.kimi_vl.model import KimiVL

FOLDER = Path(__file__).parents[1] / "golden" / "kimi_vl"


@dataclass(frozen=True)
class Golden:
    """`features` are ours, computed once from the golden pixels."""

    folder: Path
    config: ModelConfig
    reference: dict[str, Tensor]
    features: Tensor
    models: dict[MlaForms, KimiVL]

    @property
    def prompt(self) -> list[int]:
        return self.reference["input_ids"].tolist()

    @property
    def text(self) -> list[int]:
        return self.reference["text_ids"].tolist()

    def model(self, prefill: str = "expanded", decode: str = "absorbed") -> KimiVL:
        return self.models[MlaForms(prefill=prefill, decode=decode)]


@pytest.fixture(autouse=True, scope="session")
def one_thread(poisoned_memory: None) -> None:
    """A second thread costs tiny matrices more than it gives, and much more on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Golden:
    with np.load(FOLDER / "reference.npz") as arrays:
        reference = {name: torch.from_numpy(arrays[name]) for name in arrays}
    config = read_folder(FOLDER / "ckpt")
    models = {
        MlaForms(prefill=p, decode=d): build(config, MlaForms(prefill=p, decode=d))
        for p in ("expanded", "absorbed")
        for d in ("expanded", "absorbed")
    }
    grids = [(h, w) for h, w in reference["image_grid_hws"].tolist()]
    model = models[MlaForms()]
    plans = image_plans(model, "float32", max(h * w for h, w in grids))
    patches = model.encode_patches(reference["pixel_values"].flatten(1), grids, plans)
    features = model.project_images(patches, [ImageShape(*grid) for grid in grids])
    return Golden(FOLDER / "ckpt", config, reference, features, models)


def build(config: ModelConfig, forms: MlaForms, dtype: DType = "float32") -> KimiVL:
    with torch.device("meta"):
        model = KimiVL(config, dtype, forms)
    return fill(model, config, FOLDER / "ckpt")
