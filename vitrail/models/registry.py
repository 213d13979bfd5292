"""Which module serves an architecture. Names only: importing this imports no model and no torch, so
a frontend process can load a processor from here."""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from vitrail.config.finding import Finding, Refused

if TYPE_CHECKING:
    from vitrail.models.interface import ModelEntry
    from vitrail.vision.preprocess import ImageProcessor
else:  # both would import what a frontend does without
    ModelEntry = ModuleType
    ImageProcessor = object


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """`model`: a module that is a `ModelEntry`; `processor`: module and class of its image
    processor, None for a text model."""

    model: str
    processor: tuple[str, str] | None = None


ARCHITECTURES = {
    "DeepseekV3ForCausalLM": Registered(model="vitrail.models.deepseek_v3"),
    "KimiVLForConditionalGeneration": Registered(
        model="vitrail.models.kimi_vl.model",
        processor=("vitrail.models.kimi_vl.processor", "KimiVLProcessor"),
    ),
    "LlamaForCausalLM": Registered(model="vitrail.models.llama"),
    "Qwen2ForCausalLM": Registered(model="vitrail.models.qwen2"),
}


def find(architecture: str) -> Registered:
    """The row of `architecture`. Raises `Refused`, naming the known ones and the nearest."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    nearest = get_close_matches(architecture, ARCHITECTURES, n=1)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    raise Refused(
        Finding(
            where="config.json: architectures",
            saw=repr(architecture),
            rule=f"one of {', '.join(sorted(ARCHITECTURES))}{hint}",
            change="serve a model of one of these architectures",
            code="unknown_architecture",
        )
    )


def load_entry(architecture: str) -> ModelEntry:
    """The model's module. Imports torch."""
    return import_module(find(architecture).model)  # pyright: ignore[reportReturnType]


def load_processor(architecture: str, folder: Path) -> ImageProcessor | None:
    """The image processor of the checkpoint in `folder`; None for a text model. Imports no torch.
    Raises `Refused` for a folder that does not describe one."""
    row = find(architecture)
    if row.processor is None:
        return None
    module, name = row.processor
    return vars(import_module(module))[name].load(folder)
