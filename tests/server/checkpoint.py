"""A tiny random Kimi-VL with everything a published folder has: config, weights, tokenizer,
template, image processor. Written once a session."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.models.cases import KIMI_VL, TEXT
from tests.weights.write import write_checkpoint
from vitrail.config.finding import accept
from vitrail.models.registry import load_entry
from vitrail.weights.load import parameters_of

TESTS = Path(__file__).parents[1]
TOKENIZER = TESTS / "golden" / "tokenizer_kimi"
TEMPLATE = TESTS / "tokenizer" / "templates" / "kimi.jinja"
IM_END, MEDIA_PAD, PAD = 425, 444, 678
VOCAB = 687  # the tokenizer's 679 and some rows that no token has
MAX_LEN = 8192
IN_TOKEN_LIMIT = 256
PATCH = 14

_TEXT = TEXT | {
    "vocab_size": VOCAB,
    "bos_token_id": 423,
    "eos_token_id": 424,
    "pad_token_id": PAD,
    "max_position_embeddings": MAX_LEN,
}
CONFIG: dict[str, Any] = KIMI_VL | {
    "text_config": _TEXT,
    "vision_config": KIMI_VL["vision_config"] | {"patch_size": PATCH},
    "media_placeholder_token_id": MEDIA_PAD,
    "vocab_size": VOCAB,
}
PREPROCESSOR = {
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": IN_TOKEN_LIMIT,
    "merge_kernel_size": [2, 2],
    "patch_size": PATCH,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_kimi(folder: Path, *, seed: int = 3, in_token_limit: int = IN_TOKEN_LIMIT) -> Path:
    """The whole folder; weights are drawn wide enough that greedy answers vary."""
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "config.json", CONFIG)
    _dump(folder / "generation_config.json", {"eos_token_id": [424, IM_END]})
    _dump(folder / "preprocessor_config.json", PREPROCESSOR | {"in_token_limit": in_token_limit})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    entry = load_entry("KimiVLForConditionalGeneration")
    config = accept(entry.read_config(CONFIG, {"eos_token_id": [424, IM_END]}))
    with torch.device("meta"):
        model = entry.build(config, "float32")
    write_checkpoint(entry.weight_map(config), parameters_of(model), folder, seed, std=0.3)
    return folder


def _dump(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")
