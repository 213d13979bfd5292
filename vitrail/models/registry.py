"""Which module serves an architecture. Names only: importing this imports no model and no torch, so
a frontend process can load a processor from here."""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from vitrail.config.finding import Refused
from vitrail.config.reader import there

if TYPE_CHECKING:
    from vitrail.models.interface import GgufEntry, ModelEntry
    from vitrail.vision.preprocess import ImageProcessor
else:  # both would import what a frontend does without
    GgufEntry = ModuleType
    ModelEntry = ModuleType
    ImageProcessor = object


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """`model`: a module that is a `ModelEntry`; `processor`: module and class of its image
    processor, None for a text model. `folders`: where a checkpoint lies in sub-folders, those of
    the decoder with its tokenizer, of the tower with its image rule, and any others."""

    model: str
    processor: tuple[str, str] | None = None
    folders: tuple[str, ...] = ()

    def tokenizer_folder(self, folder: Path) -> Path:
        """Where the tokenizer's files of the checkpoint in `folder` are."""
        return folder / self.folders[0] if self.folders else folder

    def processor_folder(self, folder: Path) -> Path:
        """Where its preprocessor_config.json is."""
        return folder / self.folders[1] if self.folders else folder

    def has_processor(self, folder: Path) -> bool:
        """Whether the checkpoint in `folder` has its image rule."""
        return there(self.processor_folder(folder) / "preprocessor_config.json")


_NVILA = "vitrail.models.nvila.model"
_NVILA_PROCESSOR = ("vitrail.models.nvila.processor", "NvilaProcessor")
_NVILA_FOLDERS = ("llm", "vision_tower", "mm_projector")

ARCHITECTURES = {
    "DeepseekV3ForCausalLM": Registered(model="vitrail.models.deepseek_v3"),
    "KimiVLForConditionalGeneration": Registered(
        model="vitrail.models.kimi_vl.model",
        processor=("vitrail.models.kimi_vl.processor", "KimiVLProcessor"),
    ),
    "LlavaLlamaModel": Registered(model=_NVILA, processor=_NVILA_PROCESSOR, folders=_NVILA_FOLDERS),
    "NVILAForConditionalGeneration": Registered(model=_NVILA, processor=_NVILA_PROCESSOR),
    "NVILALiteForConditionalGeneration": Registered(model=_NVILA, processor=_NVILA_PROCESSOR),
    "VILAForCasualLM": Registered(model=_NVILA, processor=_NVILA_PROCESSOR, folders=_NVILA_FOLDERS),
    "LlamaForCausalLM": Registered(model="vitrail.models.llama"),
    "Qwen2ForCausalLM": Registered(model="vitrail.models.qwen2"),
}


def find(architecture: str) -> Registered:
    """The row of `architecture`. Raises `Refused`, naming the known ones and the nearest."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    nearest = get_close_matches(architecture, ARCHITECTURES, n=1)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    raise Refused.because(
        where="config.json: architectures",
        saw=repr(architecture),
        rule=f"one of {', '.join(sorted(ARCHITECTURES))}{hint}",
        change="serve a model of one of these architectures",
        code="unknown_architecture",
    )


def load_entry(architecture: str) -> ModelEntry:
    """The model's module. Imports torch."""
    return import_module(find(architecture).model)  # pyright: ignore[reportReturnType]


def load_gguf_entry(architecture: str) -> GgufEntry:
    """The module of a model that `models.gguf` names. Imports torch."""
    return import_module(find(architecture).model)  # pyright: ignore[reportReturnType]


def load_processor(architecture: str, folder: Path) -> ImageProcessor | None:
    """The image processor of the checkpoint in `folder`; None for a text model. Imports no torch.
    Raises `Refused` for a folder that does not describe one."""
    row = find(architecture)
    if row.processor is None:
        return None
    module, name = row.processor
    return vars(import_module(module))[name].load(folder)
