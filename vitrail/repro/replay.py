"""A capsule's steps again: a model of random weights in the recorded configuration, and its plans
launched through the runner that serves, on random ids and pixels of the recorded shapes. Says what
failed; knows nothing of what a request asked.

Keys of tokens before the first step are random too, in the pages that the plans name."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from vitrail.cache.kv_pool import KvPool
from vitrail.config.engine import EngineConfig
from vitrail.engine.build import Built, build_engine
from vitrail.engine.capsule import Array, Capsule, Setup, Step
from vitrail.engine.evidence import cause_of
from vitrail.engine.placement import device_of, hardware_of
from vitrail.engine.request import SamplingParams
from vitrail.engine.runner import Launched, Runner
from vitrail.engine.step import Decodes, SlotSetup, StepInputs, StepPlan, WrittenPlan
from vitrail.models.checkpoint import Checkpoint, open_checkpoint
from vitrail.repro.outcome import Outcome, is_late
from vitrail.repro.room import check_room


def replay(
    capsule: Capsule,
    model: str | None = None,
    lost: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Build and run it here, once. `model`: a checkpoint's own weights instead of random ones.
    `lost` hears what was seen where a fault of the device is among it, while everything that lies
    there is still held: freeing it may end this process."""
    if capsule.cc and not torch.cuda.is_available():
        return Outcome(why=f"it failed on a {capsule.gpu}, and torch sees no CUDA device here")
    with tempfile.TemporaryDirectory() as folder:
        try:
            config, checkpoint = _restored(capsule, Path(folder), model)
            gpu = hardware_of(device_of(config)).name
            check_room(capsule, config, checkpoint)
            built = build_engine(config, checkpoint, None)
        except Exception as error:  # noqa: BLE001
            cause = cause_of(error)
            outcome = Outcome(why=f"the engine could not be built: {cause.title}")
            if cause.signature == capsule.signature:
                outcome = Outcome(signatures=(cause.signature,))
            if isinstance(error, torch.AcceleratorError):
                lost(outcome)
            return outcome
    if capsule.kind == "start":
        return Outcome(gpu=gpu)
    has, named = built.engine.runner.parts.pool.num_pages, _pages(capsule)
    if max(named, default=0) >= has:
        return Outcome(why=f"page {max(named)} was used, and here are {has}")
    outcome = Outcome(gpu=gpu)
    for signature in _failures(capsule, built):
        if signature not in outcome.signatures:
            outcome = structs.replace(outcome, signatures=(*outcome.signatures, signature))
        if is_late(signature):  # the generator, and so the error, waits
            lost(outcome)
    return outcome


def _restored(capsule: Capsule, folder: Path, model: str | None) -> tuple[EngineConfig, Checkpoint]:
    """The recorded choices, and a checkpoint of the recorded configuration without weights."""
    weights = "random" if model is None else capsule.flags.get("weights", "checkpoint")
    if model is None:
        files = {"config.json": capsule.config, "generation_config.json": capsule.generation}
        for name, data in files.items():
            (folder / name).write_text(json.dumps(data), encoding="utf-8")
    chosen = model or str(folder)
    flags = capsule.flags | {"model": chosen, "weights": weights, "revision": None}
    return EngineConfig(**flags), open_checkpoint(chosen)  # pyright: ignore[reportArgumentType]


@torch.inference_mode()
def _failures(capsule: Capsule, built: Built) -> Iterator[str]:
    """Signatures, as steps are launched and read in the order in which the engine does it."""
    runner, seen = built.engine.runner, list[str]()
    inputs = _Inputs(capsule, built)
    parts = runner.parts
    if parts.encoder is not None:
        parts.encoder.told = lambda error: seen.append(cause_of(error).signature)
    _fill(parts.pool, len(parts.model.cache_specs()), capsule, inputs.random)
    _put_entries(runner, capsule, inputs)
    ahead: deque[Launched] = deque()
    lead = int(bool(capsule.flags.get("step_ahead", True)))
    for step in (*capsule.steps, *[None] * (lead + 1)):  # None: what was launched is read
        try:
            if step is not None:
                for part in _unseen_parts(step, inputs):
                    runner.launch(_live(part), inputs.of(part)).read()
                ahead.append(runner.launch(_live(step), inputs.of(step)))
            while len(ahead) > (lead if step is not None else 0):
                ahead.popleft().read()
            if step is None and capsule.cc:
                torch.cuda.synchronize()
        except torch.AcceleratorError as error:  # nothing can succeed after it
            yield cause_of(error).signature
            return
        except Exception as error:  # noqa: BLE001
            yield cause_of(error).signature
        yield from seen
        seen.clear()


class _Inputs:
    """Makes what plans stand for, at random. Owns the generator, and which sequences and images it
    has seen."""

    def __init__(self, capsule: Capsule, built: Built):
        self.random = np.random.default_rng(capsule.seed)
        self._facts, self._capsule = built.facts, capsule
        self._known: set[int] = set()
        self.encoded: dict[int, int] = {}

    def of(self, step: Step) -> StepInputs:
        plan = step.plan
        tokens, sampled = sum(s.length for s in plan.prefills), len(plan.sampled)
        setups = {setup.seq: self._setup(setup) for setup in step.setups}
        for s in plan.rows:  # the recorder had forgotten some
            if s.seq not in self._known and s.seq not in setups:
                setups[s.seq] = self._bare(s.slot, s.seq)
        self._known |= set(setups)
        ids = self._ids(tokens)
        if self._facts.image_token_id is not None:
            for s in plan.slices:
                ids[s.token_start : s.token_start + s.length] = self._facts.image_token_id
        for job in plan.encodes:
            self.encoded[job.entry] = self.encoded.get(job.entry, 0) + job.count
        index = np.array(step.output_index or [0] * sampled, dtype=np.int64)
        return StepInputs(
            token_ids=ids,
            next_ids=np.append(ids[1:], -1)[:tokens],
            seeds=np.array(step.seeds or [self._capsule.seed] * sampled, np.uint64),
            output_index=index,
            setups=list(setups.values()),
            pixels=[self._pixels(array) for array in step.pixels],
        )

    def _ids(self, count: int) -> np.ndarray:
        return self.random.integers(0, self._facts.vocab_size, count, np.int64)

    def _pixels(self, array: Array) -> np.ndarray:
        if array.dtype == "uint8":
            return self.random.integers(0, 256, array.shape, np.uint8)
        return self.random.standard_normal(array.shape, np.float32)

    def _setup(self, s: Setup) -> SlotSetup:
        shared = ("min_tokens", "temperature", "top_k", "top_p", "min_p", "logprobs")
        shared += ("repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {name: value for name, value in structs.asdict(s).items() if name in shared}
        bias = dict.fromkeys(self._ids(s.num_bias).tolist(), 1.0)
        return SlotSetup(
            slot=s.slot,
            seq=s.seq,
            params=SamplingParams(prompt_logprobs=s.prompt_logprobs, logit_bias=bias, **given),
            prompt_token_ids=self._ids(s.num_prompt).tolist(),
            output_token_ids=self._ids(s.num_output).tolist(),
            stop_token_ids=frozenset(self._ids(s.num_stop).tolist()),
            want_logits=s.want_logits,
        )

    def _bare(self, slot: int, seq: int) -> SlotSetup:
        return SlotSetup(
            slot=slot,
            seq=seq,
            params=SamplingParams(temperature=0),
            prompt_token_ids=self._ids(1).tolist(),
            output_token_ids=[],
            stop_token_ids=frozenset(),
            want_logits=False,
        )


def _live(step: Step) -> StepPlan:
    p = step.plan
    decodes = Decodes.of(p.decodes)
    return StepPlan(p.index, p.prefills, decodes, p.encodes, p.slices, p.drop_entries)


def _pages(capsule: Capsule) -> set[int]:
    return {page for step in capsule.steps for s in step.plan.rows for page in s.new_pages}


def _fill(pool: KvPool, num_layers: int, capsule: Capsule, random: np.random.Generator) -> None:
    """Random keys and values in every page that the plans name: memory of a pool is not cleared."""
    pages = torch.tensor(sorted(_pages(capsule)), dtype=torch.int64)
    slots = (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).reshape(-1)
    generator = torch.Generator().manual_seed(int(random.integers(2**62)))

    def draw(like: torch.Tensor, count: int) -> torch.Tensor:
        shape = (count, *like.shape[2:])
        dtype = torch.bfloat16 if like.dtype.itemsize == 1 else like.dtype
        return torch.randn(shape, generator=generator).to(like.device, dtype)

    for i in range(num_layers):
        layer = pool.layer(i)
        for at in slots.split(1 << 16):
            if isinstance(layer, torch.Tensor):
                pool.write_latent(i, at.to(layer.device), draw(layer, len(at)))
            else:
                keys, values = (draw(each, len(at)) for each in layer)
                pool.write_paged(i, at.to(layer[0].device), keys, values)


def _put_entries(runner: Runner, capsule: Capsule, inputs: _Inputs) -> None:
    """Random rows of images that were encoded before the first step."""
    if not capsule.entries:
        return
    parts = runner.parts
    like = parts.model.embed(torch.zeros(1, dtype=torch.int64, device=parts.door.device))
    for entry, count in capsule.entries:
        rows = inputs.random.standard_normal((count, like.shape[1]), np.float32)
        parts.encoder_pool.put(entry, torch.from_numpy(rows).to(like.device, like.dtype))


def _unseen_parts(step: Step, inputs: _Inputs) -> Iterator[Step]:
    """Steps that encode what came before a picture's first recorded part, a sequence each."""
    for job, array in zip(step.plan.encodes, step.pixels, strict=True):
        for first in range(inputs.encoded.get(job.entry, 0), job.first):
            earlier = structs.replace(job, first=first, count=1)
            pixels = structs.replace(array, shape=(job.height * job.width, *array.shape[1:]))
            yield Step(plan=WrittenPlan(-1, (), (), (earlier,), (), ()), pixels=(pixels,))
