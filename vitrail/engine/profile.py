"""`--profile`: an engine that records some of its steps with torch.profiler, writes the Chrome
trace and says where the time went, beside the floor. Layers' ranges are hooks that exist only while
it records, so that an engine without it, or before and after its window, does nothing more."""

# torch leaves parts of its own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused
from vitrail.config.hardware import Hardware
from vitrail.engine.engine import Engine
from vitrail.engine.floors import Rates, Shapes, floor_seconds
from vitrail.engine.ipc import ProfileWindow
from vitrail.engine.kernel_groups import (
    ABSORB,
    ATTENTION,
    GROUPS,
    LAUNCH,
    MOE,
    SAMPLE,
    STEP,
    Breakdown,
    Group,
    Share,
    breakdown,
    read_trace,
)
from vitrail.engine.placement import placed
from vitrail.engine.request import Output
from vitrail.engine.runner import Runner
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.step import StepInputs, StepPlan
from vitrail.layers.attention import MlaAttention
from vitrail.layers.embedding import LmHead
from vitrail.layers.gqa import GqaAttention
from vitrail.layers.linear import torch_dtype
from vitrail.layers.moe import MoeLayer
from vitrail.models.checkpoint import Checkpoint

log = logging.getLogger("vitrail.profile")
TRACE, SUMMARY = "trace.json", "summary.txt"
# torch.profiler's own start is in the first recorded step
SETTLING_STEPS = 1
_RANGES: dict[type[nn.Module], str] = {
    MlaAttention: ATTENTION,
    GqaAttention: ATTENTION,
    MoeLayer: MOE,
}


class ProfiledEngine(Engine):
    """An `Engine` that records steps [skip, skip + steps) in which something was launched. Owns
    the profiler; `summary` is what was found, once it has been. The window ends early where the
    engine comes to rest."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        step_ahead: bool,
        window: ProfileWindow,
        shapes: Shapes,
        rates: Rates,
    ):
        super().__init__(scheduler, runner, step_ahead=step_ahead)
        self._window, self._shapes, self._rates = window, shapes, rates
        self._folder = Path(window.folder)
        self._launched = 0
        self._recorder: _Recorder | None = None
        self._plans: list[StepPlan] = []
        self.summary: str | None = None

    @classmethod
    def over(
        cls, engine: Engine, window: ProfileWindow, shapes: Shapes, rates: Rates
    ) -> "ProfiledEngine":
        """In place of `engine`, which must be new."""
        assert engine.idle, "an engine is wrapped before it is used"
        made = cls(
            engine.scheduler,
            engine.runner,
            step_ahead=engine._depth > 0,
            window=window,
            shapes=shapes,
            rates=rates,
        )
        if engine.recorder is not None:
            made.keep(engine.recorder)
        return made

    def step(self) -> list[Output]:
        if self._recorder is None and self.summary is None and self._launched >= self._window.skip:
            self._recorder = _Recorder()
        if self._recorder is None:
            return super().step()
        with record_function(STEP):
            outputs = super().step()
        if len(self._plans) >= self._window.steps + SETTLING_STEPS:
            self.finish()
        return outputs

    def rest(self) -> None:
        super().rest()
        self.finish()

    def finish(self) -> None:
        """End the window, if it is open, and write what it holds."""
        if self._recorder is None:
            return
        trace = self._folder / TRACE
        self._recorder.stop(trace)
        self._recorder = None
        plans = self._plans[SETTLING_STEPS:]
        if not plans:
            self.summary = f"the engine came to rest before step {self._window.skip} was recorded"
        else:
            found = breakdown(read_trace(trace.read_bytes()), SETTLING_STEPS)
            floors = floor_seconds(self._shapes, plans, self._rates)
            self.summary = show(found, floors, plans, self._rates)
        (self._folder / SUMMARY).write_text(self.summary + "\n", encoding="utf-8")
        log.info("%s\ntrace: %s", self.summary, trace)

    def _launch(self, plan: StepPlan, inputs: StepInputs) -> list[Output]:
        self._launched += 1
        if self._recorder is None:
            return super()._launch(plan, inputs)
        self._plans.append(plan)
        with record_function(LAUNCH), self._recorder.sampling():
            return super()._launch(plan, inputs)

    def _absorb(self) -> list[Output]:
        if self._recorder is None:
            return super()._absorb()
        with record_function(ABSORB):
            return super()._absorb()


class _Recorder:
    """The profiler while it runs, and the hooks that open a range around each layer."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._open: list[Any] = []
        self._sampling: Any = None
        self._handles: list[RemovableHandle] = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, trace: Path) -> None:
        """Wait for the device, end the recording, write it."""
        for handle in self._handles:
            handle.remove()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(trace))

    @contextlib.contextmanager
    def sampling(self) -> Generator[None]:
        """A launch: what follows its logits is sampling, until the end."""
        try:
            yield
        finally:
            if self._sampling is not None:
                self._sampling.__exit__(None, None, None)
                self._sampling = None

    def _enter(self, module: nn.Module, _: object) -> None:
        name = _RANGES.get(type(module))
        if name is not None:
            self._open.append(record_function(name))
            self._open[-1].__enter__()

    def _leave(self, module: nn.Module, *_: object) -> None:
        if type(module) in _RANGES:
            self._open.pop().__exit__(None, None, None)
        elif type(module) is LmHead and self._sampling is None:
            self._sampling = record_function(SAMPLE)
            self._sampling.__enter__()


def profiled(
    engine: Engine, config: EngineConfig, checkpoint: Checkpoint, window: ProfileWindow
) -> ProfiledEngine:
    """`engine`, which is new, recording a window of its steps beside rates that are measured here.
    Raises `Refused` where the trace cannot be written."""
    found: list[Finding] = []
    if window.skip < 0 or window.steps < 1:
        rule = "steps to pass over are at least 0, steps to record at least 1"
        found.append(_bad(f"{window.skip}:{window.steps}", rule, "pass for example 64:16"))
    try:
        Path(window.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found.append(_bad(str(error), "a folder that can be written", "give another"))
    if found:
        raise Refused(found)
    shapes, hardware, device = placed(config, checkpoint)
    rates = measure_rates(device, torch_dtype(shapes.dtype), hardware)
    return ProfiledEngine.over(engine, window, shapes, rates)


def _bad(saw: str, rule: str, change: str) -> Finding:
    return Finding(where="--profile", saw=saw, rule=rule, change=change)


def measure_rates(device: torch.device, dtype: torch.dtype, hardware: Hardware) -> Rates:
    """What a copy and a square product reach here and now, the best of a few."""
    on_gpu = device.type == "cuda"
    num_bytes, side = (1 << 28, 8192) if on_gpu else (1 << 24, 512)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copied = 2 * num_bytes / _best(lambda: target.copy_(source), device)
    a = torch.ones((side, side), dtype=dtype, device=device) / side
    out = torch.zeros_like(a)
    products = 2 * side**3 / _best(lambda: torch.mm(a, a, out=out), device)
    said = f"measured on {hardware.name}: copies {copied / 1e12:.3g} TB/s, a product of {side} x "
    said += f"{side} in {str(dtype).removeprefix('torch.')} {products / 1e12:.3g} TFLOP/s"
    if hardware.hbm_bytes_per_s:
        said += f"; published: {hardware.hbm_bytes_per_s / 1e12:.3g} TB/s"
    return Rates(bytes_per_s=copied, flops_per_s=products, source=said)


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of several calls, each waited for."""
    taken: list[float] = []
    for _ in range(8):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken)


def show(
    found: Breakdown, floors: Mapping[Group, float], plans: Sequence[StepPlan], rates: Rates
) -> str:
    """The table of a window: milliseconds a step by group, beside the floor."""
    steps = found.steps
    lines = [
        f"{steps} steps of {found.seconds / steps * 1e3:.3f} ms: {_work(plans)}",
        f"the host took {found.launch / steps * 1e3:.3f} ms a step to launch and "
        f"{found.absorb / steps * 1e3:.3f} ms to absorb, which waits for the device",
        f"{'ms a step':<14}{'took':>10}{'share':>8}{'kernels':>9}{'floor':>10}{'of floor':>10}",
    ]

    def row(name: str, seconds: float, kernels: float | None, floor: float | None) -> str:
        part = seconds / found.seconds if found.seconds else 0.0
        count = f"{'':>9}" if kernels is None else f"{kernels:>9.1f}"
        cells = f"{name:<14}{seconds / steps * 1e3:>10.3f}{part:>8.1%}{count}"
        if floor is None:
            return cells
        reached = f"{floor / seconds:.0%}" if seconds else "-"
        return f"{cells}{floor / steps * 1e3:>10.3f}{reached:>10}"

    for group in GROUPS:
        share, floor = found.groups.get(group), floors.get(group)
        if share is not None or floor is not None:
            share = share or Share(0.0, 0)
            lines.append(row(group, share.seconds, share.kernels / steps, floor))
    lines.append(row("idle", found.idle, None, None))
    lines.append(row("all", found.seconds, None, sum(floors.values())))
    lines += [f"  other: {s / steps * 1e3:.3f} ms {name:.90}" for name, s in found.unknown[:6]]
    if not found.on_device:
        lines.append("no device: operations of the CPU by their own time")
    return "\n".join([*lines, f"floor: {rates.source}"])


def _work(plans: Sequence[StepPlan]) -> str:
    """What the steps did, on average."""
    prefill = sum(s.length for p in plans for s in p.prefills) / len(plans)
    decode = sum(len(p.decodes) for p in plans) / len(plans)
    patches = sum(job.num_patches for p in plans for job in p.encodes) / len(plans)
    return f"{prefill:.1f} prompt tokens, {decode:.1f} decodes, {patches:.0f} patches a step"
