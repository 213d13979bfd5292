"""Runs a decoder without the engine: packed steps laid out from python lists, for tests that want
to cut a prompt where they like. Also loads a checkpoint folder the way the engine does.

Legend: T packed tokens, M hidden channels, V vocabulary."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from vitrail.attention.metadata import PagedMetadata, paged_metadata
from vitrail.attention.plan import PlanLimits, PlanTable, make_table
from vitrail.cache.kv_pool import KvPool
from vitrail.cache.spec import LayerSpec, stored_as
from vitrail.config.finding import Finding, accept
from vitrail.config.hardware import CPU
from vitrail.config.model import DType, KvDType, KvScales, ModelConfig
from vitrail.layers.context import ForwardContext
from vitrail.models.interface import ImageModel, Model
from vitrail.models.registry import load_entry
from vitrail.weights.headers import read
from vitrail.weights.load import load, parameters_of
from vitrail.weights.plan import LoadPlan, resolve

M = TypeVar("M", bound=Model)
NO_PAGE = 1 << 30  # what a block table holds past its pages: reading it is an index error


@dataclass
class Running:
    """A sequence being computed: input embeddings so far [length, M], how many are done, its
    pages."""

    hidden: Tensor
    done: int = 0
    pages: list[int] = field(default_factory=list)


class Driver:
    """Owns a pool whose page ids are handed out in shuffled order."""

    def __init__(
        self,
        model: Model,
        dtype: DType,
        page_size: int,
        max_tokens: int,
        batch: int = 4,
        e4m3: Callable[[LayerSpec], KvScales] | None = None,
    ):
        """`e4m3`: the pool stores a byte a value, with these scales."""
        per_sequence = -(-max_tokens // page_size)
        self.model, self.page_size = model, page_size
        specs, scales = model.cache_specs(), None
        if e4m3 is not None:
            specs = stored_as(specs, "float8_e4m3fn")
            scales = {i: e4m3(spec) for i, spec in enumerate(specs)}
        self.pool = KvPool(specs, per_sequence * batch + 3, page_size, torch.device("cpu"), scales)
        self._free = random.Random(7).sample(range(self.pool.num_pages), self.pool.num_pages)
        stored = None if e4m3 is None else "float8_e4m3fn"
        self.plans = plan_table(model, dtype, page_size, max_tokens, batch, stored)

    def add(
        self, token_ids: Sequence[int], image_id: int = -1, images: Tensor | None = None
    ) -> Running:
        """A new sequence; rows of `images` replace the embeddings at `image_id`, in order."""
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        hidden = self.model.embed(ids).clone()
        if images is not None:
            hidden[ids == image_id] = images
        return Running(hidden)

    def step(
        self, prefills: Sequence[tuple[Running, int]] = (), decodes: Sequence[Running] = ()
    ) -> list[Tensor]:
        """One forward pass over chunks of the given lengths and one token of each decode. Returns
        the logits of every computed position, [length, V] for each sequence in order."""
        work = [*prefills, *((s, 1) for s in decodes)]
        hidden, positions, slots = [], [], []
        for sequence, length in work:
            at = range(sequence.done, sequence.done + length)
            while len(sequence.pages) * self.page_size < at.stop:
                sequence.pages.append(self._free.pop())
            hidden.append(sequence.hidden[at.start : at.stop])
            positions += at
            slots += [
                sequence.pages[p // self.page_size] * self.page_size + p % self.page_size
                for p in at
            ]
            sequence.done = at.stop
        ctx = ForwardContext(
            positions=torch.tensor(positions),
            cache_slots=torch.tensor(slots),
            num_prefill=sum(length for _, length in prefills),
            prefill=self._metadata(list(prefills)),
            decode=self._metadata([(s, 1) for s in decodes]),
            plans=self.plans,
            pool=self.pool,
        )
        out = self.model.logits(self.model.forward(torch.cat(hidden), ctx))
        return list(out.split([length for _, length in work]))

    def chunked(self, sequence: Running, cuts: Sequence[int]) -> Tensor:
        """Logits of all positions, computed in chunks that end at `cuts` and at the end."""
        ends = [*cuts, len(sequence.hidden)]
        return torch.cat([self.step([(sequence, end - sequence.done)])[0] for end in ends])

    def greedy(self, sequence: Running, last: Tensor, count: int) -> list[int]:
        """`count` tokens by decodes, the first of them from the prompt's `last` row of logits."""
        found = [int(last.argmax())]
        while len(found) < count:
            self.append(sequence, found[-1])
            found.append(int(self.step(decodes=[sequence])[0][-1].argmax()))
        return found

    def append(self, sequence: Running, token: int) -> None:
        row = self.model.embed(torch.tensor([token]))
        sequence.hidden = torch.cat((sequence.hidden, row))

    def release(self, sequence: Running) -> None:
        """Give the pages back; the next owner finds what was written there."""
        self._free = sequence.pages + self._free
        sequence.pages = []

    def _metadata(self, work: Sequence[tuple[Running, int]]) -> PagedMetadata | None:
        if not work:
            return None
        width = max(len(s.pages) for s, _ in work)
        table = [[*s.pages, *[NO_PAGE] * (width - len(s.pages))] for s, _ in work]
        return paged_metadata(
            self.page_size,
            [length for _, length in work],
            [s.done for s, _ in work],
            torch.tensor(table, dtype=torch.int32),
        )


def plan_table(
    model: Model,
    dtype: DType,
    page_size: int,
    max_tokens: int,
    batch: int = 4,
    kv_dtype: KvDType | None = None,
) -> PlanTable:
    """Plans of every text site."""
    limits = PlanLimits(
        dtype=dtype,
        page_size=page_size,
        max_batch=batch,
        max_q_len=max_tokens,
        max_kv_len=max_tokens,
        kv_dtype=kv_dtype,
    )
    return make_table(model.text_sites(), limits, CPU, None)


def image_plans(model: ImageModel, dtype: DType, max_patches: int, batch: int = 4) -> PlanTable:
    """Plans of every tower site."""
    limits = PlanLimits(
        dtype=dtype,
        page_size=None,
        max_batch=batch,
        max_q_len=max_patches,
        max_kv_len=max_patches,
    )
    return make_table(model.image_sites(), limits, CPU, None)


def read_folder(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder, read strictly."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = folder / "generation_config.json"
    more = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    return accept(load_entry(raw["architectures"][0]).read_config(raw, more))


def load_folder(folder: Path, dtype: DType = "float32") -> tuple[ModelConfig, Model]:
    """Configuration and loaded model; raises `Refused` with all that does not fit."""
    config = read_folder(folder)
    with torch.device("meta"):
        model = load_entry(config.architecture).build(config, dtype)
    return config, fill(model, config, folder)


def fill(model: M, config: ModelConfig, folder: Path) -> M:
    """A model built on the meta device, its parameters from `folder`."""
    plan = accept(resolve_folder(model, config, folder))
    load(plan, model, folder, torch.device("cpu"))
    return model


def resolve_folder(model: Model, config: ModelConfig, folder: Path) -> LoadPlan | list[Finding]:
    """What loading would do, or all that forbids it."""
    weight_map = load_entry(config.architecture).weight_map(config)
    return resolve(weight_map, accept(read(folder)), parameters_of(model))
