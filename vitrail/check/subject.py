"""What is checked: the user's choices, the device they are made for, and what was read of the
checkpoint. Reading and building happen here, once; the rows judge."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import nn

from vitrail.check.compiled import CACHE
from vitrail.check.fixed import model_of
from vitrail.check.sizes import encoder_budget, served_dtype
from vitrail.config.engine import EngineConfig
from vitrail.config.hardware import Hardware
from vitrail.config.model import DType, ModelConfig
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.interface import Model, ModelEntry
from vitrail.vision.preprocess import ImageProcessor
from vitrail.weights.load import parameters_of
from vitrail.weights.plan import ParameterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`choices`: as for `vitrail serve`. `sizes`: sizes of the tensor-parallel axis. `images`:
    (width, height) in pixels that the user named. `installed`: releases by backend, as
    `attention.installed` finds them. `compile`: also compile every planned kernel, and remember
    what it takes in `cache`."""

    choices: EngineConfig
    gpu: Hardware
    sizes: tuple[int, ...] = (1,)
    images: tuple[tuple[int, int], ...] = ()
    installed: Mapping[str, str] = field(default_factory=dict[str, str])
    compile: bool = False
    cache: Path = CACHE


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A question and the checkpoint it is about, its configuration read and its module built on the
    meta device. `processor` is None where there is none or it could not be read."""

    question: Question
    checkpoint: Checkpoint
    entry: ModelEntry
    config: ModelConfig
    dtype: DType
    model: Model
    parameters: Mapping[str, ParameterSpec]
    processor: ImageProcessor | None
    patches: int

    @property
    def choices(self) -> EngineConfig:
        return self.question.choices

    @property
    def gpu(self) -> Hardware:
        return self.question.gpu

    @property
    def module(self) -> nn.Module:
        return cast(nn.Module, self.model)


def build_subject(
    question: Question,
    checkpoint: Checkpoint,
    entry: ModelEntry,
    config: ModelConfig,
    processor: ImageProcessor | None,
) -> Subject:
    """Nothing is allocated: the module is made of shapes. Raises `Refused` where it is not to be
    had in fixed order, and that is asked for."""
    on_cpu = not question.gpu.cc
    dtype = served_dtype(question.choices, config, on_cpu)
    device = torch.device("cpu" if on_cpu else "cuda")
    model = model_of(question.choices, entry, config, dtype, device)
    return Subject(
        question=question,
        checkpoint=checkpoint,
        entry=entry,
        config=config,
        dtype=dtype,
        model=model,
        parameters=parameters_of(cast(nn.Module, model)),
        processor=processor,
        patches=encoder_budget(question.choices, config, processor, question.gpu),
    )
