"""Tokenizers of the golden folder, from each of its files, and the template in Kimi's form."""

import json
import shutil
from pathlib import Path

import pytest

from vitrail.tokenizer.chat import ChatTemplate
from vitrail.tokenizer.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_kimi"
TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture(scope="session")
def kimi() -> Tokenizer:
    return Tokenizer.load(GOLDEN)


@pytest.fixture(scope="session")
def from_json(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The golden tokenizer.json, without tiktoken.model beside it."""
    folder = tmp_path_factory.mktemp("json")
    shutil.copy(GOLDEN / "tokenizer.json", folder)
    return Tokenizer.load(folder)


@pytest.fixture(params=["tiktoken.model", "tokenizer.json"])
def tokenizer(request: pytest.FixtureRequest, kimi: Tokenizer, from_json: Tokenizer) -> Tokenizer:
    return {"tiktoken.model": kimi, "tokenizer.json": from_json}[request.param]


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate({"default": (TEMPLATES / "kimi.jinja").read_text()}, {})


@pytest.fixture
def golden_copy(tmp_path: Path) -> Path:
    """The golden folder with only what tiktoken needs, to break."""
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="session")
def cases() -> dict[str, list[int]]:
    return json.loads((GOLDEN / "cases.json").read_text())
