"""`Engine`: scheduler and runner in one loop, with at most one step launched ahead. Knows neither
text nor sockets: ids in, ids out. Not thread-safe: one thread calls it."""

import logging
from collections import deque

import torch

from vitrail.engine.ipc import Stats
from vitrail.engine.recorder import Recorder
from vitrail.engine.request import EngineRequest, Output
from vitrail.engine.runner import Launched, Runner
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.step import StepInputs, StepPlan

log = logging.getLogger("vitrail.engine")


class Engine:
    """Owns the order of schedule, launch and absorb. With `step_ahead` a step is launched from
    device-resident tokens before the previous one's are read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, step_ahead: bool):
        self.scheduler = scheduler
        self._runner = runner
        self.recorder: Recorder | None = None
        self._depth = 1 if step_ahead else 0
        self._in_flight: deque[Launched] = deque()
        self._steps = 0
        self._images_encoded = 0

    def keep(self, recorder: Recorder) -> None:
        """Have a capsule of every failure from now on."""
        self.recorder = recorder
        encoder = self._runner.parts.encoder
        if encoder is not None:
            encoder.told = recorder.failed

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `Refused` if it can never run or the queue is full."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Output | None:
        """End a request now; its pages are released at once. None if it is unknown or done."""
        return self.scheduler.abort(request_id)

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return self.scheduler.idle and not self._in_flight

    def stats(self) -> Stats:
        """Counters and gauges after the last step."""
        usage = self.scheduler.cache_usage()
        return Stats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_pages=usage.free_pages + usage.cached_pages,
            num_pages=usage.num_pages,
            steps_total=self._steps,
            preemptions_total=self.scheduler.preemptions,
            images_encoded_total=self._images_encoded,
            cache_hit_tokens_total=usage.hit_tokens,
            cache_query_tokens_total=usage.query_tokens,
        )

    def step(self) -> list[Output]:
        """Launch the next step if there is work, then absorb what is older than the allowed
        lead."""
        outputs: list[Output] = []
        planned = self.scheduler.schedule()
        if planned is not None:
            self._steps += 1
            self._images_encoded += sum(job.is_last for job in planned[0].encodes)
            outputs += self._launch(*planned)
        while len(self._in_flight) > (self._depth if planned is not None else 0):
            outputs += self._absorb()
        return outputs

    def rest(self) -> None:
        """Check every invariant, once work is done and its outputs are delivered. O(pages); a leak
        is found here and not by the request that has no room."""
        assert self.idle, "work is left"
        self.scheduler.check()

    def _launch(self, plan: StepPlan, inputs: StepInputs) -> list[Output]:
        # The isolation boundary: whatever a step raises fails that step's requests, not the
        # process.
        try:
            if self.recorder is not None:
                self.recorder.note(plan, inputs)
            self._in_flight.append(self._runner.launch(plan, inputs))
        except Exception as error:  # noqa: BLE001
            return self._fail(plan, error)
        return []

    def _absorb(self) -> list[Output]:
        launched = self._in_flight.popleft()
        try:
            result = launched.read()
        except Exception as error:  # noqa: BLE001
            return self._fail(launched.plan, error)
        return self.scheduler.absorb(launched.plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> list[Output]:
        """Absorb what was launched before the faulty step, then fail the step's requests. A fault
        of the device itself is raised: nothing that this process launches can succeed after it."""
        if self.recorder is not None:
            self.recorder.failed(error, plan.index)
        if isinstance(error, torch.AcceleratorError):
            self._in_flight.clear()
            # all that were planned, one that fails around this too: its holder finds it at rest
            for each in self.scheduler.launched:
                self.scheduler.fail(each, str(error))
            raise error
        log.exception("step %d failed", plan.index, exc_info=error)
        outputs: list[Output] = []
        while self._in_flight and self._in_flight[0].plan.index < plan.index:
            outputs += self._absorb()
        return outputs + self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
