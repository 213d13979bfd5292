"""Tiny random NVILAs with everything a published folder has, in both layouts."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.cases import NVILA, NVILA_FOLDERS, NVILA_LITE, QWEN2, SIGLIP
from tests.models.nvila.test_nvila_processor import SIGLIP as PREPROCESSOR
from tests.server.checkpoint import IM_END, MEDIA_PAD, TOKENIZER, VOCAB
from tests.weights.write import write_checkpoint
from vitrail.config.finding import accept
from vitrail.models.registry import load_entry
from vitrail.weights.load import parameters_of

SIDE = 28
TEMPLATE = (
    "{% for m in messages %}<|im_user|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|media_pad|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
TEXT = QWEN2 | {"vocab_size": VOCAB, "max_position_embeddings": 4096}


def config_of(lite: bool, side: int) -> dict[str, Any]:
    return (NVILA_LITE if lite else NVILA) | {
        "text_config": TEXT,
        "vision_config": SIGLIP | {"image_size": side, "patch_size": 14},
        "image_token_id": MEDIA_PAD,
        "video_token_id": MEDIA_PAD + 1,
    }


def write_nvila(folder: Path, *, lite: bool = False, side: int = SIDE) -> Path:
    """One folder, tiles of `side` pixels; weights are drawn wide enough that answers vary."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(lite, side)
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"eos_token_id": [424, IM_END]})
    size = {"height": side, "width": side}
    _dump(folder / "preprocessor_config.json", PREPROCESSOR | {"size": size})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    entry = load_entry(config["architectures"][0])
    read = accept(entry.read_config(config, {}))
    with torch.device("meta"):
        model = entry.build(read, "float32")
    write_checkpoint(entry.weight_map(read), parameters_of(model), folder, 3, std=0.3)
    return folder


def in_sub_folders(source: Path, folder: Path) -> Path:
    """The same tensors as the authors' own layout has them, each part under its own names, with a
    last tower layer that nobody reads."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    made = NVILA_FOLDERS | {"llm_cfg": TEXT, "vision_tower_cfg": config["vision_config"]}
    for part in ("llm", "vision_tower", "mm_projector"):
        (folder / part).mkdir(parents=True)
        own = {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{part}.")
        }
        if part == "vision_tower":
            own["vision_model.encoder.layers.2.mlp.fc1.bias"] = torch.zeros(3)
        save_file(own, folder / part / "model.safetensors")
    _dump(folder / "config.json", made)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / "llm" / name)
    shutil.copy(source / "preprocessor_config.json", folder / "vision_tower")
    return folder


def _dump(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")
