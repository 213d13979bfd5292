"""`vitrail bench offline`: the same requests through `vitrail.LLM` in this process, prepared in
threads as a server prepares them. A request's clock starts when it is due, whatever this thread,
the engine's, is doing then; its times are those of the engine's own outputs, one a token."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from vitrail.bench.record import Record, figures
from vitrail.bench.report import (
    Outputs,
    Report,
    Side,
    describe,
    describe_arrivals,
    publish,
    warnings_of,
)
from vitrail.bench.serve import Run, Work
from vitrail.bench.workload import Arrivals, Closed, Item, Lines, Workload, conversation
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.engine.ipc import ProfileWindow
from vitrail.engine.llm import LLM, AnyPrompt
from vitrail.engine.profile import profiled
from vitrail.engine.request import EngineRequest, FinishReason, Output, SamplingParams
from vitrail.models.checkpoint import open_checkpoint

NAME = "offline"
IDLE_WAIT_S = 0.05


def bench_offline(
    config: EngineConfig, work: Work, outputs: Outputs, window: ProfileWindow | None = None
) -> int:
    """Exit code 0, or 1 where no request succeeded. `window`: steps that are recorded, which slows
    them. Raises `Refused`."""
    llm = LLM.from_config(config)
    recording = None
    if window is not None:
        checkpoint = open_checkpoint(config.model, config.revision)
        llm.engine = recording = profiled(llm.engine, config, checkpoint, window)
    work = replace(work, workload=fitting(llm, work.workload))
    runs = [_run(llm, work, index) for index in range(work.warm_up + work.runs)][work.warm_up :]
    side = Side(
        name=NAME,
        address=str(config.device),
        model=config.model,
        runs=[run.figures for run in runs],
    )
    report = Report(
        kind=NAME,
        workload=describe(work.workload),
        arrivals=describe_arrivals(work.arrivals),
        seed=work.seed,
        warm_up_runs=work.warm_up,
        sides=[side],
        verdicts=[],
        # the engine's own thread is this process's: a busy one is what is measured
        warnings=[text for text in warnings_of([side]) if "the client used" not in text],
    )
    records = [r for run in runs for r in run.records]
    publish(report, [records], outputs)
    if recording is not None and window is not None:
        done = f"the engine launched fewer than {window.skip + 2} steps: nothing was recorded"
        print(f"\n{recording.summary or done}\nin {window.folder}")
    return int(all(r.failure is not None for r in records))


def fitting(llm: LLM, workload: Workload) -> Workload:
    """The workload with ids of the model's vocabulary alone. Raises `Refused` where none is
    left."""
    if isinstance(workload, Lines):
        return workload
    low, high = workload.ids
    vocab = llm.preparer.facts.vocab_size
    if low >= vocab:
        raise Refused.because(
            where="--ids",
            saw=f"{low}:{high}",
            rule=f"some ids are below the vocabulary's {vocab}",
            change=f"pass --ids 0:{vocab}",
        )
    return replace(workload, ids=(low, min(high, vocab)))


def _run(llm: LLM, work: Work, index: int) -> Run:
    items, times = work.run(index)
    before = llm.engine.stats()
    wall, cpu = time.perf_counter(), time.process_time()
    records = Drive(llm, items, work.arrivals, times).run()
    used = (time.process_time() - cpu) / (time.perf_counter() - wall)
    after = llm.engine.stats()
    cache = (
        after.cache_hit_tokens_total - before.cache_hit_tokens_total,
        after.cache_query_tokens_total - before.cache_query_tokens_total,
    )
    return Run(records, figures(records, used, cache))


class Drive:
    """One run. Owns which requests are being prepared, wait for the queue's room, and run."""

    def __init__(self, llm: LLM, items: Sequence[Item], arrivals: Arrivals, times: Sequence[float]):
        self._llm = llm
        self._items = items
        # pictures are drawn before the run: a client has them
        self._prompts = [prompt_of(llm, item) for item in items]
        self._arrivals = arrivals
        self._times = times
        self._records = [Record(due=0.0, wanted=item.max_tokens) for item in items]
        self._sent = 0
        self._preparing: dict[Future[list[EngineRequest]], int] = {}
        self._ready: deque[tuple[int, EngineRequest]] = deque()
        self._live: dict[str, int] = {}

    def run(self) -> list[Record]:
        """Every request's record, in order; the engine is idle afterwards."""
        engine = self._llm.engine
        start = time.perf_counter()
        with ThreadPoolExecutor(self._llm.config.image_workers) as pool:
            while self._sent < len(self._items) or self._num_open or not engine.idle:
                for index, due in self._due(start):
                    self._send(pool, index, due)
                self._collect(0 if not engine.idle else IDLE_WAIT_S)
                self._queue()
                if not engine.idle:
                    outputs = engine.step()
                    now = time.perf_counter()
                    for output in outputs:
                        self._take(output, now)
        engine.rest()
        return self._records

    @property
    def _num_open(self) -> int:
        return len(self._preparing) + len(self._ready) + len(self._live)

    def _due(self, start: float) -> Iterator[tuple[int, float]]:
        """Requests to begin now, with the moments when they were due."""
        while self._sent < len(self._items):
            now = time.perf_counter()
            due = now
            if not isinstance(self._arrivals, Closed):
                due = start + self._times[self._sent]
                if due > now:
                    return
            elif self._num_open >= self._arrivals.concurrency:
                return
            self._sent += 1
            yield self._sent - 1, due

    def _send(self, pool: ThreadPoolExecutor, index: int, due: float) -> None:
        item, record, prompt = self._items[index], self._records[index], self._prompts[index]
        params = SamplingParams(max_tokens=item.max_tokens, temperature=0, ignore_eos=True)
        record.due = record.began = due
        name = f"bench-{index}-{due}"

        def prepare() -> list[EngineRequest]:
            return self._llm.preparer.requests(self._llm.prepare(prompt), params, name)

        self._preparing[pool.submit(prepare)] = index

    def _collect(self, wait_s: float) -> None:
        """What has been prepared; waits a little where there is nothing else to do."""
        if not self._preparing:
            if wait_s and not self._ready and self._sent < len(self._items):
                time.sleep(0.0005)  # the next arrival is not due yet
            return
        done, _ = wait(self._preparing, wait_s, FIRST_COMPLETED)
        for future in done:
            index = self._preparing.pop(future)
            error = future.exception()
            if error is None:
                self._ready += [(index, request) for request in future.result()]
            elif isinstance(error, Refused):
                self._fail(index, error)
            else:
                raise error

    def _queue(self) -> None:
        engine = self._llm.engine
        while self._ready and engine.scheduler.num_waiting < self._llm.config.max_waiting:
            index, request = self._ready.popleft()
            try:
                engine.add(request)
            except Refused as refused:
                self._fail(index, refused)
            else:
                self._live[request.id] = index
                self._records[index].num_prompt = len(request.prompt_token_ids)

    def _take(self, output: Output, now: float) -> None:
        index = self._live[output.request_id]
        record = self._records[index]
        if output.token_ids:
            record.arrivals.append(now)
            record.num_output += len(output.token_ids)
            record.num_cached = record.num_cached or output.cached_tokens
        if output.finish_reason is not None:
            record.ended = now
            if output.finish_reason is FinishReason.ERROR:
                record.failure, record.detail = "an error of the engine", str(output.error)
            del self._live[output.request_id]

    def _fail(self, index: int, refused: Refused) -> None:
        record, finding = self._records[index], refused.findings[0]
        record.failure, record.detail = f"refused: {finding.code}", str(finding)
        record.ended = time.perf_counter()


def prompt_of(llm: LLM, item: Item) -> AnyPrompt:
    """The item as the offline API takes it: ids with one image id a picture; text and messages as
    they are."""
    pictures = [picture.pixels() for picture in item.pictures]
    if item.messages is not None:
        return conversation(item, [{"type": "image", "image": each} for each in pictures])
    if isinstance(item.prompt, str):
        return item.prompt
    image_id = llm.preparer.facts.image_token_id
    own = item.prompt if item.prompt is not None else item.ids
    # an id that would claim a slot is its neighbour
    shared, ids = (
        [i - 1 if i == image_id and i else i for i in each] for each in (item.shared_ids, own)
    )
    if not pictures:
        return {"prompt_token_ids": [*shared, *ids]}
    slots = [-1 if image_id is None else image_id] * len(pictures)
    return {"prompt_token_ids": [*shared, *slots, *ids], "images": pictures}
