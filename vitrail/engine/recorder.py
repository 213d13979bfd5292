"""Keeps what a capsule needs while an engine runs, and writes one when something fails. A healthy
step costs it an entry in a ring. Nothing that goes wrong here makes a failure worse: it is logged,
and the failure goes on as it would have."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import logging
import os
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from vitrail.attention.fault import KernelFault, kernel_fault
from vitrail.attention.plan import AttentionPlan, PlanTable
from vitrail.attention.shape import Phase
from vitrail.cache.spec import LayerSpec
from vitrail.check.sizes import Sizes, step_tokens
from vitrail.config.cause import Cause
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.config.hardware import Hardware
from vitrail.engine.capsule import Array, Capsule, Held, Setup, Step, encoded
from vitrail.engine.evidence import KERNELS, cause_of, trace_of, versions
from vitrail.engine.placement import device_of, hardware_of
from vitrail.engine.runner import RunnerParts
from vitrail.engine.step import SequenceStep, SlotSetup, StepInputs, StepPlan, WrittenPlan
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.interface import ImageModel

log = logging.getLogger("vitrail.engine")
WINDOW = 32  # steps
MAX_BYTES = 4 << 20  # of a capsule
MAX_FILES = 32  # of a folder
RETIRED = 1024  # setups of rows that others have taken since


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What every capsule of an engine says."""

    config: EngineConfig
    checkpoint: Checkpoint
    held: Held
    hardware: Hardware

    def capsule(self, error: BaseException, cause: Cause) -> Capsule:
        """Of an error, without steps."""
        said = cause.signature.removeprefix(f"{cause.kind} ").removesuffix(f" @ {cause.frame}")
        kind = "kernel" if cause.frame.startswith(KERNELS) else "step"
        # a folder's name may be anybody's
        flags = asdict(replace(self.config, model=Path(self.config.model).name))
        return Capsule(
            kind=kind,
            signature=cause.signature,
            error=said,
            frame=cause.frame,
            trace=trace_of(error),
            kernel=_kernel_of(error),
            architecture=self.checkpoint.architecture,
            config=dict(self.checkpoint.config),
            generation=dict(self.checkpoint.generation),
            flags=flags,
            held=self.held,
            versions=versions(),
            gpu=self.hardware.name,
            cc=self.hardware.cc,
            seed=self.config.seed,
        )


def _kernel_of(error: BaseException) -> KernelFault | None:
    """What a kernel was launched with; a launch that cannot be read costs that alone."""
    try:
        return kernel_fault(error)
    except Exception as fault:  # noqa: BLE001
        log.warning("no kernel in this capsule: %s: %s", type(fault).__name__, fault)
        return None


def plans_of(
    step: StepPlan, parts: RunnerParts, image_plans: PlanTable
) -> tuple[AttentionPlan, ...]:
    """Plans of attention that a step selects."""
    found: dict[AttentionPlan, None] = {}
    for site, phase in parts.model.text_sites():
        rows = step.decodes if phase is Phase.DECODE else step.prefills
        if rows:
            longest = max(s.start + s.length for s in rows)
            found[parts.plans.select(site, phase, len(rows), longest)] = None
    if step.encodes and isinstance(parts.model, ImageModel):
        batch = sum(job.count for job in step.encodes)
        longest = max(job.height * job.width for job in step.encodes)
        for site, phase in parts.model.image_sites():
            found[image_plans.select(site, phase, batch, longest)] = None
    return tuple(found)


class _Noted(NamedTuple):
    """A step in the ring, sizes alone."""

    plan: StepPlan
    setups: tuple[Setup, ...]
    pixels: tuple[Array, ...]
    seeds: np.ndarray
    output_index: np.ndarray


class Recorder:
    """Owns the ring of recent steps and the setups of rows in use. `parts`, `image_plans`: the
    runner's, and the tower's. One capsule is written for each signature."""

    def __init__(self, folder: Path, facts: Facts, parts: RunnerParts, image_plans: PlanTable):
        self._folder, self._facts = folder, facts
        self._parts, self._image_plans = parts, image_plans
        self._recent: deque[_Noted] = deque(maxlen=WINDOW)
        self._slots: dict[int, Setup] = {}
        self._retired: deque[Setup] = deque(maxlen=RETIRED)
        self._entries: dict[int, int] = {}
        self._written: set[str] = set()

    def note(self, plan: StepPlan, inputs: StepInputs) -> None:
        """A step that is about to be launched."""
        setups = self._set_up(inputs.setups) if inputs.setups else ()
        pixels = tuple(Array(p.shape, p.dtype.name) for p in inputs.pixels) if inputs.pixels else ()
        for job in plan.encodes:
            self._entries[job.entry] = job.num_tokens
        for entry in plan.drop_entries:
            self._entries.pop(entry, None)
        self._recent.append(_Noted(plan, setups, pixels, inputs.seeds, inputs.output_index))

    def failed(self, error: BaseException, index: int | None = None) -> None:
        """Write a capsule: of step `index`, or of the last. Raises nothing."""
        try:
            cause = cause_of(error)
            if cause.signature in self._written:
                return
            self._written.add(cause.signature)
            failed = self._recent[-1].plan.index if index is None else index
            log.error("capsule: %s", write(self._capsule(error, cause, failed), self._folder))
        except Exception as fault:  # noqa: BLE001
            log.warning("no capsule of this failure: %s: %s", type(fault).__name__, fault)

    def _set_up(self, setups: Sequence[SlotSetup]) -> tuple[Setup, ...]:
        made = tuple(map(_setup, setups))
        for setup in made:
            if setup.slot in self._slots:
                self._retired.append(self._slots[setup.slot])
            self._slots[setup.slot] = setup
        return made

    def _capsule(self, error: BaseException, cause: Cause, failed: int) -> Capsule:
        """With as many of the recent steps as there is room for."""
        recent = list(self._recent)
        plan = next(noted.plan for noted in recent if noted.plan.index == failed)
        made = self._facts.capsule(error, cause)
        made = structs.replace(
            made, failed=failed, plans=plans_of(plan, self._parts, self._image_plans)
        )
        while True:
            steps = self._steps(recent)
            made = structs.replace(made, steps=steps, entries=self._encoded_before(recent))
            if len(encoded(made)) <= MAX_BYTES:
                return made
            if recent[0].plan.index == failed:
                raise ValueError(f"it would be larger than {MAX_BYTES} bytes")
            while len(recent) > 1 and recent[0].plan.index != failed:
                del recent[0]

    def _steps(self, recent: Sequence[_Noted]) -> tuple[Step, ...]:
        """Steps that lean on none before them."""
        known = {setup.seq: setup for setup in (*self._retired, *self._slots.values())}
        owner = {s.slot: s.seq for noted in recent for s in noted.plan.rows}  # the last one
        used = {page for noted in recent for s in noted.plan.rows for page in s.new_pages}
        first: dict[int, SequenceStep] = {}
        for noted in recent:
            for s in noted.plan.rows:
                first.setdefault(s.seq, s)
        before = {s.seq: s for s in first.values() if s.pages_before}
        pages = {
            seq: self._parts.builder.pages_of(s.slot, s.pages_before)
            for seq, s in before.items()
            if owner[s.slot] == seq
        }
        used.update(*pages.values())
        free = iter(page for page in range(self._facts.held.num_pages) if page not in used)
        for seq, s in before.items():
            if seq not in pages:
                pages[seq] = tuple(next(free, 0) for _ in range(s.pages_before))
        unsent, steps = dict(pages), list[Step]()
        for i, noted in enumerate(recent):
            setups = tuple(known[seq] for seq in before if i == 0 and seq in known)
            steps.append(
                Step(
                    plan=_with_pages(noted.plan, unsent),
                    setups=setups + noted.setups,
                    pixels=noted.pixels,
                    seeds=tuple(noted.seeds.tolist()),
                    output_index=tuple(noted.output_index.tolist()),
                )
            )
        return tuple(steps)

    def _encoded_before(self, recent: Sequence[_Noted]) -> tuple[tuple[int, int], ...]:
        """Entries that these steps read and do not encode, with the rows that they need at
        least."""
        rows: dict[int, int] = {}
        for noted in recent:
            for s in noted.plan.slices:
                end = max(rows.get(s.entry, 0), s.entry_start + s.length)
                rows[s.entry] = max(end, self._entries.get(s.entry, 0))
        made = {job.entry for noted in recent for job in noted.plan.encodes}
        return tuple((entry, count) for entry, count in rows.items() if entry not in made)


def facts_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    sizes: Sizes,
    specs: Sequence[LayerSpec],
    hardware: Hardware,
) -> Facts:
    """Of an engine that is ready; the choices with what they came to. `specs` as stored."""
    pages = sizes.cache.num_pages
    held = Held(
        num_pages=pages,
        max_model_len=sizes.max_model_len,
        encoder_patches=sizes.encoder_patches,
    )
    page_bytes = config.page_size * sum(spec.bytes_per_token() for spec in specs)
    resolved = replace(
        config,
        device="cuda" if hardware.cc else "cpu",
        max_model_len=sizes.max_model_len,
        max_step_tokens=step_tokens(config, on_cpu=not hardware.cc),
        kv_cache_bytes=pages * page_bytes,
        encoder_patches=sizes.encoder_patches or None,
    )
    return Facts(config=resolved, checkpoint=checkpoint, held=held, hardware=hardware)


@contextmanager
def watched_start(
    folder: Path | None, config: EngineConfig, checkpoint: Checkpoint
) -> Generator[None]:
    """A start-up: what raises in it leaves a capsule, but for what a plan refuses."""
    try:
        yield
    except Exception as error:
        planned = isinstance(error, Refused) and error.__cause__ is None
        if folder is not None and not planned:
            _start_failed(error, folder, config, checkpoint)
        raise


def _start_failed(
    error: Exception, folder: Path, config: EngineConfig, checkpoint: Checkpoint
) -> None:
    length, patches = config.max_model_len or 0, config.encoder_patches or 0
    held = Held(num_pages=0, max_model_len=length, encoder_patches=patches)
    try:
        hardware = hardware_of(device_of(config))
        facts = Facts(config=config, checkpoint=checkpoint, held=held, hardware=hardware)
        made = structs.replace(facts.capsule(error, cause_of(error)), kind="start")
        log.error("capsule: %s", write(made, folder))
    except Exception as fault:  # noqa: BLE001
        log.warning("no capsule of this failure: %s: %s", type(fault).__name__, fault)


def write(capsule: Capsule, folder: Path) -> Path:
    """Its file in `folder`, which is made if need be and keeps the newest `MAX_FILES`. Raises
    `OSError`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    path = folder / f"capsule-{now}-{os.getpid()}.json"
    part, data = path.with_suffix(".part"), encoded(capsule)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    for old in sorted(folder.glob("capsule-*.json"))[:-MAX_FILES]:
        old.unlink(missing_ok=True)
    return path


def _setup(s: SlotSetup) -> Setup:
    p = s.params
    return Setup(
        slot=s.slot,
        seq=s.seq,
        num_prompt=len(s.prompt_token_ids),
        num_output=len(s.output_token_ids),
        num_stop=len(s.stop_token_ids),
        num_bias=len(p.logit_bias),
        want_logits=s.want_logits,
        min_tokens=p.min_tokens,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        logprobs=p.logprobs,
        prompt_logprobs=p.prompt_logprobs,
    )


def _with_pages(plan: StepPlan, pages: dict[int, tuple[int, ...]]) -> WrittenPlan:
    """The plan as it is kept; a sequence of `pages` that is seen for the first time (it is taken
    out) has them sent with it."""

    def whole(rows: Sequence[SequenceStep]) -> tuple[SequenceStep, ...]:
        return tuple(
            structs.replace(s, pages_before=0, new_pages=(*pages.pop(s.seq), *s.new_pages))
            if s.seq in pages
            else s
            for s in rows
        )

    prefills, decodes = whole(plan.prefills), whole(plan.decodes)
    return WrittenPlan(plan.index, prefills, decodes, plan.encodes, plan.slices, plan.drop_entries)
