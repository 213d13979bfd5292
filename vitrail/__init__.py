"""Vitrail, a serving engine for vision-language models. Public names: `LLM`, `SamplingParams`,
`Refused`. Importing the package imports no torch; `LLM` does, when it is first used."""

from typing import TYPE_CHECKING

from vitrail.config.finding import Refused
from vitrail.engine.request import SamplingParams

if TYPE_CHECKING:
    from vitrail.engine.llm import LLM

__all__ = ["LLM", "Refused", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from vitrail.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
