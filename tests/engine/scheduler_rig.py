"""A device made of paper, and an oracle. The device carries out plans on numpy block tables as a
runner does, with numbers for keys and values: what a token leaves in its cell is a function of the
token (or the image row) and of every cell before it, read through the block table; a sampled token
is a function of all cells, of the slot's sampling state and of the draw. So a wrong page, slot,
row, order, image or draw changes the outputs; much of it is asserted at once. The oracle computes
a request alone, with no pages."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from vitrail.cache.encoder import EncoderCache
from vitrail.cache.manager import Manager
from vitrail.engine.policy import EncodeBudget, SchedulerLimits
from vitrail.engine.request import (
    EngineRequest,
    FinishReason,
    ImageInput,
    Output,
    SamplingParams,
    TokenLogprob,
)
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.step import (
    PromptRows,
    SequenceStep,
    SlotSetup,
    StepInputs,
    StepPlan,
    StepResult,
    draws,
)

VOCAB = 50
IMAGE_ID = 7
MASK = (1 << 64) - 1
EMPTY = -1  # a cell that nobody wrote
NAN = -2  # what a poisoned step leaves; it spreads to everything computed from it


def mix(*numbers: int) -> int:
    """A 63-bit hash, order sensitive."""
    x = 0x2545F4914F6CDD1D
    for n in numbers:
        x = (x ^ (n & MASK)) * 0xD6E8FEB86659FD93 & MASK
        x ^= x >> 32
        x = x * 0xD6E8FEB86659FD93 & MASK
        x ^= x >> 29
    return x >> 1


def image_row(identity: bytes, row: int) -> int:
    return mix(int.from_bytes(identity[:8], "little"), row)


def sample(state: int, setup: SlotSetup, history: list[int], index: int, draw: float) -> int:
    """What every decoder here samples after cells whose digest is `state`."""
    token = mix(state, index, int(draw * 2**53), *history[-3:], len(history)) % VOCAB
    masked = setup.stop_token_ids if index < setup.params.min_tokens else frozenset[int]()
    while token in masked:
        token = (token + 1) % VOCAB
    return token


@dataclass(slots=True)
class Slot:
    """A row of the tables: whose it is, its pages, how many positions are computed, its tokens."""

    setup: SlotSetup
    history: list[int]
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PaperDevice:
    """`launch` does the work at once (a device keeps the order of launches); its result is read
    when the driver likes. `bad_images`: identities whose encoding fails. `nan_steps`: plans whose
    numbers come out as NaN. `encoded`: how often each identity was encoded."""

    def __init__(self, num_pages: int, page_size: int, chunk: int, beside: bool):
        self.page_size, self.beside = page_size, beside
        self.cells = np.full((num_pages, page_size), EMPTY, dtype=np.int64)
        self.slots: dict[int, Slot] = {}
        self.entries: dict[int, tuple[bytes, int]] = {}
        self.parts: dict[int, list[bytes]] = {}  # of entries whose last part is to come
        self.failed: set[int] = set()
        self.encoded: dict[bytes, int] = {}
        self.bad_images: set[bytes] = set()
        self.nan_steps: set[int] = set()
        self.max_entry_tokens = 0
        self.max_patches = 0
        self._chunk = chunk

    def launch(self, plan: StepPlan, inputs: StepInputs) -> StepResult:
        self._check_plan(plan, inputs)
        for setup in inputs.setups:
            history = [*setup.prompt_token_ids, *setup.output_token_ids]
            self.slots[setup.slot] = Slot(setup, history)
        failed = self._encode(plan, inputs)
        images = self._image_rows(plan, len(inputs.token_ids))
        rows = (*plan.prefills, *plan.decodes)
        for row in rows:
            self._extend_table(row)
        self._check_writers(rows)
        ids: list[int] = []
        prompt_rows: dict[int, PromptRows] = {}
        at, sampled = 0, 0
        for row in rows:
            slot = self.slots[row.slot]
            if row in plan.prefills:
                tokens = inputs.token_ids[at : at + row.length].tolist()
                next_ids = inputs.next_ids[at : at + row.length].tolist()
                prompt = slot.setup.prompt_token_ids
                following = prompt[row.start + 1 : row.start + 1 + row.length]
                assert next_ids == following + [-1] * (row.length - len(following))
                content = [images.get(at + i, t) for i, t in enumerate(tokens)]
                at += row.length
            else:
                tokens = next_ids = []
                content = [slot.history[row.start]]
            states = self._compute(row, slot, content, plan.index in self.nan_steps)
            extras = slot.setup.want_logits, slot.setup.params.prompt_logprobs
            if next_ids and extras != (False, None):
                prompt_rows[row.seq] = self._prompt_rows(row, slot, states, next_ids)
            if row.sample:
                index, draw = int(inputs.output_index[sampled]), float(inputs.draws[sampled])
                assert index == len(slot.history) - len(slot.setup.prompt_token_ids)
                assert row.start + row.length == len(slot.history)
                token = sample(states[-1], slot.setup, slot.history, index, draw)
                slot.history.append(token)
                ids.append(-1 if states[-1] == NAN else token)
                sampled += 1
        assert sampled == len(inputs.draws) == len(inputs.output_index)
        return StepResult(
            token_ids=np.array(ids, dtype=np.int64),
            logprobs={},
            prompt_rows=prompt_rows,
            failed_entries=failed,
            encoded=plan.index,
        )

    def _check_plan(self, plan: StepPlan, inputs: StepInputs) -> None:
        rows = (*plan.prefills, *plan.decodes)
        assert rows or plan.encodes or plan.drop_entries, "an empty step"
        assert len({r.slot for r in rows}) == len({r.seq for r in rows}) == len(rows)
        assert sum(r.length for r in rows) <= self._chunk
        assert sum(r.length for r in plan.prefills) == len(inputs.token_ids) == len(inputs.next_ids)
        assert all(r.length >= 1 for r in rows)
        assert all(r.length == 1 and r.sample for r in plan.decodes)
        firsts = [r for r in rows if r.pages_before == 0]
        assert [(s.slot, s.seq) for s in inputs.setups] == [(r.slot, r.seq) for r in firsts]
        assert len({j.entry for j in plan.encodes}) == len(plan.encodes)
        if not self.beside:
            assert {j.entry for j in plan.encodes if j.is_last} <= {s.entry for s in plan.slices}

    def _encode(self, plan: StepPlan, inputs: StepInputs) -> dict[int, str]:
        for entry in plan.drop_entries:
            self.entries.pop(entry, None)
            self.parts.pop(entry, None)
            self.failed.discard(entry)
        failed: dict[int, str] = {}
        for job, pixels in zip(plan.encodes, inputs.pixels, strict=True):
            size = job.height * job.width
            assert pixels.shape == (job.count * size, 8)
            parts = [pixels[i * size :].tobytes()[:32] for i in range(job.count)]
            assert job.entry not in self.entries, "encoded twice"
            if job.entry in self.failed:
                failed[job.entry] = "an earlier part of it failed"
                continue
            kept = self.parts.pop(job.entry, [])
            identity = [*kept, *parts][0]
            if len(kept) != job.first or identity in self.bad_images:
                self.failed.add(job.entry)
                failed[job.entry] = "bad pixels" if len(kept) == job.first else "a part is missing"
                continue
            self.parts[job.entry] = [*kept, *parts]
            if job.is_last:
                found = self.parts.pop(job.entry)
                assert found == [sequence_id(identity, i) for i in range(job.sequences)]
                self.encoded[identity] = self.encoded.get(identity, 0) + 1
                self.entries[job.entry] = (identity, job.num_tokens)
        assert len(self.parts) <= 1, "parts of two pictures at once"
        tokens = sum(n for _, n in self.entries.values())
        self.max_entry_tokens = max(self.max_entry_tokens, tokens)
        patches = sum(j.num_patches for j in plan.encodes)
        self.max_patches = max(self.max_patches, patches)
        return failed

    def _image_rows(self, plan: StepPlan, num_tokens: int) -> dict[int, int]:
        """Packed prefill index -> the embedding that replaces it."""
        rows: dict[int, int] = {}
        for s in plan.slices:
            assert s.length >= 1
            assert s.token_start + s.length <= num_tokens
            if s.entry in self.failed:
                rows |= dict.fromkeys(range(s.token_start, s.token_start + s.length), NAN)
                continue
            identity, size = self.entries[s.entry]
            assert s.entry_start >= 0
            assert s.entry_start + s.length <= size
            for i in range(s.length):
                assert s.token_start + i not in rows
                rows[s.token_start + i] = image_row(identity, s.entry_start + i)
        return rows

    def _extend_table(self, row: SequenceStep) -> None:
        slot = self.slots[row.slot]
        assert slot.setup.seq == row.seq, f"slot {row.slot} belongs to {slot.setup.seq}"
        assert len(slot.pages) == row.pages_before
        slot.pages += row.new_pages
        assert row.start == (slot.length if row.pages_before else row.start)
        assert row.start + row.length <= len(slot.pages) * self.page_size
        assert len(set(slot.pages)) == len(slot.pages)

    def _check_writers(self, rows: tuple[SequenceStep, ...]) -> None:
        """No page that one row writes is in reach of another row."""
        size = self.page_size
        users: dict[int, list[SequenceStep]] = {}
        for row in rows:
            end = -(-(row.start + row.length) // size)
            for page in self.slots[row.slot].pages[:end]:
                users.setdefault(page, []).append(row)
        for row in rows:
            pages = self.slots[row.slot].pages
            for page in pages[row.start // size : -(-(row.start + row.length) // size)]:
                assert users[page] == [row], f"page {page} is written and read by {users[page]}"

    def _compute(
        self, row: SequenceStep, slot: Slot, content: list[int], poisoned: bool
    ) -> list[int]:
        """The digest of all cells up to each position of the row; writes the row's cells."""
        table = np.array(slot.pages)
        at = np.arange(row.start)
        before = self.cells[table[at // self.page_size], at % self.page_size].tolist()
        assert EMPTY not in before, "read a cell that nobody wrote"
        state = NAN if NAN in before else fold(before)
        states: list[int] = []
        for p, c in enumerate(content, start=row.start):
            cell = NAN if poisoned or c == NAN or state == NAN else mix(c, state)
            self.cells[table[p // self.page_size], p % self.page_size] = cell
            state = NAN if cell == NAN else mix(state, cell)
            states.append(state)
        slot.length = row.start + row.length
        return states

    def _prompt_rows(
        self, row: SequenceStep, slot: Slot, states: list[int], next_ids: list[int]
    ) -> PromptRows:
        logprobs = [
            TokenLogprob(token_id=t, logprob=-float(s % 1000), top=[])
            for s, t in zip(states, next_ids, strict=True)
            if t >= 0
        ]
        asked = slot.setup.params.prompt_logprobs is not None
        logits = np.array(states, dtype=np.int64)[:, None]
        return PromptRows(
            start=row.start,
            logprobs=logprobs if asked else None,
            logits=logits if slot.setup.want_logits else None,
        )


def fold(cells: list[int]) -> int:
    state = 0
    for cell in cells:
        state = mix(state, cell)
    return state


def oracle_states(request: EngineRequest, tokens: list[int]) -> list[int]:
    """The digest after each of `tokens`, computed with no pages at all."""
    content = list(tokens)
    for image in request.images:
        for i in range(image.num_tokens):
            content[image.offset + i] = image_row(image.identity, i)
    states, state = list[int](), 0
    for c in content:
        state = mix(state, mix(c, state))
        states.append(state)
    return states


def oracle(request: EngineRequest, context: int) -> tuple[list[int], FinishReason]:
    """The tokens of `request` alone in the world, and why they end."""
    setup = SlotSetup(
        slot=0,
        seq=0,
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=[],
        stop_token_ids=request.stop_token_ids,
        want_logits=False,
    )
    history = list(request.prompt_token_ids)
    state = oracle_states(request, history)[-1]
    out: list[int] = []
    while True:
        draw = float(draws([request.seed], np.array([len(out)]))[0])
        token = sample(state, setup, history, len(out), draw)
        history.append(token)
        out.append(token)
        if token in request.stop_token_ids:
            return out, FinishReason.STOP
        if len(out) == request.max_tokens or len(history) == context:
            return out, FinishReason.LENGTH
        state = mix(state, mix(token, state))


def sequence_id(identity: bytes, index: int) -> bytes:
    """The first 32 bytes of sequence `index` of the image `identity`."""
    row = np.frombuffer(identity, np.float32).copy()
    row[4] += index
    return row.tobytes()


def picture(
    name: int, height: int, width: int, offset: int, num_tokens: int, sequences: int = 1
) -> ImageInput:
    """An image whose identity is its pixels' first 32 bytes."""
    patches = np.full((sequences * height * width, 8), name, dtype=np.float32)
    patches[0, 1:4] = height, width, num_tokens
    for i in range(1, sequences):
        patches[i * height * width] = np.frombuffer(
            sequence_id(patches[0].tobytes(), i), np.float32
        )
    return ImageInput(
        sequences=sequences,
        identity=patches.tobytes()[:32],
        offset=offset,
        num_tokens=num_tokens,
        height=height,
        width=width,
        patches=patches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A scheduler's world. `depth`: plans launched before the oldest is absorbed. `lag`: how many
    results later than its own step's it is known that an encoding is done."""

    num_pages: int = 64
    page_size: int = 3
    max_running: int = 8
    max_waiting: int = 1000
    max_step_tokens: int = 16
    max_model_len: int = 64
    encoder_patches: int = 40
    encoder_tokens: int = 40
    patches_beside: int = 0
    lag: int = 0
    prefix_cache: bool = True
    depth: int = 2

    @property
    def context(self) -> int:
        return min(self.max_model_len, self.num_pages * self.page_size)


class Rig:
    """Scheduler, device and what each request has got so far; `check()` after every move."""

    def __init__(self, setting: Setting):
        self.setting = s = setting
        self.manager = Manager(s.num_pages, s.page_size, s.prefix_cache)
        self.encoder = EncoderCache(s.encoder_tokens * 4, 4)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_running=s.max_running,
                max_waiting=s.max_waiting,
                max_step_tokens=s.max_step_tokens,
                max_model_len=s.max_model_len,
                encoder_patches=s.encoder_patches,
                patches_beside=s.patches_beside,
                page_size=s.page_size,
                prefix_cache=s.prefix_cache,
            ),
            self.manager,
            self.encoder,
        )
        # few decode here
        self.scheduler._claims._budget = EncodeBudget(s.encoder_patches, s.patches_beside, 4)
        beside = s.patches_beside > 0
        self.device = PaperDevice(s.num_pages, s.page_size, s.max_step_tokens, beside)
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.id] = request
            self.outputs[request.id] = []
        self.scheduler.check()

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        self._take([] if output is None else [output])

    def launch(self) -> bool:
        """Plan a step and run it; its result waits. False: there was nothing to plan."""
        planned = self.scheduler.schedule()
        self.scheduler.check()
        if planned is None:
            return False
        self.plans.append(planned[0])
        self.flights.append((planned[0], self.device.launch(*planned)))
        return True

    def absorb(self) -> list[Output]:
        plan, result = self.flights.popleft()
        late = (
            p.index for p in self.plans if p.encodes and p.index + self.setting.lag > plan.index
        )
        encoded = min(late, default=self.plans[-1].index + 1) - 1
        return self._take(self.scheduler.absorb(plan, replace(result, encoded=encoded)))

    def fail(self) -> None:
        """The oldest launched step turns out to have raised."""
        plan, _ = self.flights.popleft()
        self._take(self.scheduler.fail(plan, "the device is on fire"))

    def step(self) -> list[Output]:
        """As the engine does: launch, then absorb down to the allowed lead."""
        planned = self.launch()
        outputs: list[Output] = []
        while len(self.flights) >= (self.setting.depth if planned else 1):
            outputs += self.absorb()
        return outputs

    def run(self, limit: int = 5000) -> None:
        """Until idle; then nothing may be held by anyone."""
        for _ in range(limit):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle, "did not come to an end"
        self.check_idle()

    def check_idle(self) -> None:
        self.scheduler.check()
        assert not self.flights
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.manager.free_pages == self.setting.num_pages, "pages leaked"
        assert self.encoder.referenced_bytes == 0, "encoder references leaked"

    def tokens(self, request_id: str) -> list[int]:
        return [t for o in self.outputs[request_id] for t in o.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        got = self.outputs[request_id]
        return got[-1].finish_reason if got else None

    def check_outputs(self) -> None:
        """A request that came to its end has the oracle's tokens, another a beginning of them."""
        for name, request in self.requests.items():
            wanted, reason = oracle(request, self.setting.context)
            got = self.tokens(name)
            if self.reason(name) in (FinishReason.STOP, FinishReason.LENGTH):
                assert (got, self.reason(name)) == (wanted, reason), name
            else:
                assert got == wanted[: len(got)], name

    def _take(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            assert self.reason(output.request_id) is None, "an output after the end"
            self.outputs[output.request_id].append(output)
        assert len({o.request_id for o in outputs}) == len(outputs)
        self.scheduler.check()
        return outputs


def run(setting: Setting, *requests: EngineRequest) -> Rig:
    """All at once, to the end, against the oracle."""
    rig = Rig(setting)
    rig.add(*requests)
    rig.run()
    rig.check_outputs()
    return rig


def request(
    name: str,
    prompt: list[int],
    images: list[ImageInput] | None = None,
    *,
    max_tokens: int = 5,
    stop: frozenset[int] = frozenset(),
    group: str = "",
    seed: int = 0,
    want_logits: bool = False,
    **params: int,
) -> EngineRequest:
    return EngineRequest(
        id=name,
        prompt_token_ids=prompt,
        images=images or [],
        params=SamplingParams(**params),
        max_tokens=max_tokens,
        stop_token_ids=stop,
        seed=seed,
        group=group,
        want_logits=want_logits,
    )


def chat(name: str, *parts: int | tuple[int, ...], **options: object) -> EngineRequest:
    """A prompt from parts: n > 0 is n text tokens (numbered from their position), (picture, tokens)
    an image of that many tokens and twice as many patches, (picture, tokens, n) one of n sequences
    of so many patches each."""
    prompt: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, tuple):
            sequences = part[2] if len(part) == 3 else 1
            images.append(picture(part[0], 2, part[1], len(prompt), part[1], sequences))
            prompt += [IMAGE_ID] * part[1]
        else:
            prompt += [10 + (len(prompt) + i) % 30 for i in range(part)]
    return request(name, prompt, images, **options)  # type: ignore[arg-type]
