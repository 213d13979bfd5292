"""The scheduler: which tokens of which requests the next step computes. Owns every request from
`add` to its last output, their slots and handles; the pages are the cache manager's, embeddings the
encoder cache's. Ints on the host: knows no device, no text, and no clock.

A step has the next token of every running sequence whose prompt is done, then chunks of prompts.
Steps may be planned ahead of the results they build on; all that a plan needs of those is how many
tokens they sample, which is known. What a step computed for a sequence that ended or was preempted
meanwhile is ignored: its handle is gone."""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from vitrail.cache.encoder import EncoderCache, EncoderEntry
from vitrail.cache.manager import CacheUsage, Manager
from vitrail.cache.page_keys import PageKeys
from vitrail.config.finding import Refused
from vitrail.engine import policy
from vitrail.engine.claims import Claims
from vitrail.engine.decoding import Decoding, Grown
from vitrail.engine.policy import Groups, SchedulerLimits
from vitrail.engine.request import (
    EngineRequest,
    FinishReason,
    Output,
    Sequence,
    TokenLogprob,
    overloaded,
    request_findings,
)
from vitrail.engine.step import (
    Decodes,
    PromptRows,
    SequenceStep,
    StepDraft,
    StepInputs,
    StepPlan,
    StepResult,
)


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A plan whose result is not absorbed. `encoded`: entries with a part in it, by id; `readers`:
    (entry id, sequence) for every slice, and for those who wait for an entry."""

    plan: StepPlan
    encoded: dict[int, EncoderEntry]
    readers: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class _Step:
    """What `schedule` knows of the step at hand. `tokens` are left. `readers`: as a flight's.
    `done`: references that end in this step."""

    tokens: int
    draft: StepDraft = field(default_factory=StepDraft)
    readers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    done: list[tuple[EncoderEntry, int]] = field(default_factory=list[tuple[EncoderEntry, int]])


class Scheduler:
    """`schedule`, launch, `absorb` (or `fail`), in the order of launches; at any moment `add` and
    `abort`. Not thread-safe."""

    def __init__(self, limits: SchedulerLimits, manager: Manager, encoder: EncoderCache):
        assert limits.page_size == manager.page_size
        self._limits = limits
        self._manager = manager
        self._encoder = encoder
        # The longest prompt with output that can be held: all pages, by one request.
        self._pool_len = manager.num_pages * manager.page_size
        self._requests: dict[str, Sequence] = {}  # all that have not ended
        self._waiting: list[Sequence] = []
        # who did not fit last beside those that run, and how many pages were free
        self._refused: Sequence | None = None
        self._refused_at = -1
        self._running: list[Sequence] = []
        self._prefilling: list[Sequence] = []  # of the running ones, the rest decode
        self._decoding = Decoding(limits.max_running, limits.page_size)
        self._live: dict[int, Sequence] = {}  # the running ones, by handle
        self._groups = Groups()
        self._slots = list(range(limits.max_running))
        self._flights: deque[_Flight] = deque()
        self._claims = Claims(encoder, limits)
        self._arrivals = 0
        self._handles = 0
        self._plans = 0
        self.preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing: queued, preempted or waiting for their group's leader."""
        return len(self._requests) - len(self._running)

    @property
    def idle(self) -> bool:
        """Nothing is left to schedule, to absorb or to drop."""
        return not (self._requests or self._flights or self._encoder.has_dropped)

    @property
    def launched(self) -> tuple[StepPlan, ...]:
        """Plans whose results are neither absorbed nor failed, the oldest first."""
        return tuple(flight.plan for flight in self._flights)

    def cache_usage(self) -> CacheUsage:
        """Pages and prefix hits, for metrics."""
        return self._manager.usage()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `Refused` if it can never run, or if as many wait as may."""
        limits = self._limits
        findings = request_findings(
            request, limits.max_model_len, self._pool_len, limits.encoder_patches
        )
        queued = self.num_waiting - max(0, limits.max_running - self.num_running)
        if not findings and queued >= limits.max_waiting:
            findings = [overloaded(queued, limits.max_waiting)]
        if findings:
            raise Refused(findings)
        assert request.id not in self._requests, f"request {request.id} is already here"
        assert request.max_tokens >= 1
        tokens = array("i", request.prompt_token_ids)
        num_prompt = len(tokens)
        spans = [(i.offset, i.num_tokens, i.identity) for i in request.images]
        assert all(offset + length <= num_prompt for offset, length, _ in spans)
        seq = Sequence(
            request=request,
            arrival=self._arrivals,
            tokens=tokens,
            keys=PageKeys(tokens, spans, limits.page_size),
            num_prompt=num_prompt,
            end=min(num_prompt + request.max_tokens, limits.max_model_len, self._pool_len),
        )
        self._arrivals += 1
        self._requests[request.id] = seq
        # Without a cache to share there is nothing to wait for.
        if not limits.prefix_cache or self._groups.join(seq):
            policy.enqueue(self._waiting, seq)

    def abort(self, request_id: str) -> Output | None:
        """End a request now, wherever it is. None if it is unknown or has ended."""
        seq = self._requests.get(request_id)
        return None if seq is None else self._end(seq, FinishReason.ABORT)

    def schedule(self) -> tuple[StepPlan, StepInputs] | None:
        """The next step, or None if nothing can be computed before a result is absorbed."""
        step = _Step(tokens=self._limits.max_step_tokens)
        self._decode(step)
        waiting = self.num_waiting + len(self._prefilling)
        self._claims.begin(self._plans, len(step.draft.decodes), waiting)
        for seq in self._prefilling.copy():
            if step.tokens:
                self._prefill(step, seq)
        while self._waiting and step.tokens and self._slots and self._admit(self._waiting[0]):
            self._prefill(step, self._waiting.pop(0))
        draft = step.draft
        if not draft.prefills and not draft.decodes and not draft.encodes:
            assert self._flights or not self._requests, "requests are stuck"
            if self._flights or not self._encoder.has_dropped:
                return None
        # Taken before the references below go: an entry dropped by those is read in this step.
        drops = self._encoder.take_dropped()
        for job in draft.encodes:
            if job.is_last:
                self._encoder.mark_ready(self._claims.encoded[job.entry])
        for entry, seq_id in step.done:
            self._encoder.release(entry, seq_id)
        plan, inputs = draft.finish(self._plans, drops)
        self._plans += 1
        self._flights.append(_Flight(plan=plan, encoded=self._claims.encoded, readers=step.readers))
        return plan, inputs

    def absorb(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take in the result of the oldest launched step; what it gave each request."""
        flight = self._flights.popleft()
        assert flight.plan is plan, f"step {plan.index} is not the oldest"
        self._claims.finished(result.encoded)
        outputs = self._fail_images(flight, result.failed_entries)
        ids, live, num_sampled = result.token_ids, self._live, 0
        for row in plan.prefills:
            token = logprob = None
            if row.sample:
                token, logprob = int(ids[num_sampled]), result.logprobs.get(num_sampled)
                num_sampled += 1
            seq = live.get(row.seq)
            if seq is not None:
                rows = result.prompt_rows.get(row.seq)
                outputs += self._absorb_chunk(seq, row, token, logprob, rows)
        return outputs + self._absorb_decodes(plan.decodes, num_sampled, result)

    def fail(self, plan: StepPlan, reason: str) -> list[Output]:
        """A launched step raised: its requests, and those that waited for an image in it, end with
        `ERROR`. Those of later steps that read an image it was to encode start again."""
        flight = next(f for f in self._flights if f.plan is plan)
        self._flights.remove(flight)
        self._encoder.drop_again(plan.drop_entries)
        waited = [seq for entry, seq in flight.readers if entry in flight.encoded]
        handles = dict.fromkeys([*(r.seq for r in (*plan.prefills, *plan.decodes)), *waited])
        outputs = [
            self._end(seq, FinishReason.ERROR, reason)
            for handle in handles
            if (seq := self._live.get(handle)) is not None
        ]
        for entry in flight.encoded.values():
            self._encoder.forget(entry)
            for seq in self._readers(entry.id):
                self._preempt(seq)
        return outputs

    def check(self) -> None:
        """Every invariant, the caches' too. O(requests + pages)."""
        self._manager.check()
        self._encoder.check()
        self._check_queues()
        self._decoding.check([seq for seq in self._running if seq.launched == seq.goal])
        sampled = Counter(r.seq for f in self._flights for r in f.plan.sampled)
        page_size, held = self._limits.page_size, dict[int, int]()
        for seq in self._running:
            pages = len(self._manager.pages(seq.id))
            assert seq.pages_sent in (0, pages), f"{seq.pages_sent} of {pages} pages sent"
            decodes, in_flight = seq in self._decoding, sampled[seq.id]
            launched = self._decoding.launched(seq) if decodes else seq.launched
            assert seq.cached <= launched <= pages * page_size
            assert seq.end <= seq.num_prompt + self._pool_len
            if decodes:
                assert in_flight == self._decoding.in_flight(seq)
                assert launched < seq.end
                assert not seq.held
            else:
                assert not in_flight
            waits = zip(seq.held[:-1], seq.request.images[seq.image_at :], strict=False)
            assert all(e.encoded == image.sequences for e, image in waits), "held too early"
            for entry in seq.held:
                assert entry.users[seq.id] == seq.held.count(entry)
                held[entry.id] = entry.num_tokens
        referenced = sum(held.values()) * self._encoder.bytes_per_token
        assert referenced == self._encoder.referenced_bytes, "referenced by none that runs"

    def _check_queues(self) -> None:
        parked = self._groups.parked()
        queued = [*self._waiting, *self._running, *parked]
        assert {id(s) for s in queued} == {id(s) for s in self._requests.values()}
        assert len(queued) == len(self._requests), "a request is in two queues"
        assert self._prefilling == [s for s in self._running if s not in self._decoding]
        for queue in (self._waiting, self._running):
            assert all(a.arrival < b.arrival for a, b in pairwise(queue))
        assert self._live == {s.id: s for s in self._running}
        slots = [*self._slots, *(s.slot for s in self._running)]
        assert sorted(slots) == list(range(self._limits.max_running))
        assert all(s.id == s.slot == -1 and not s.held for s in (*self._waiting, *parked))
        self._groups.check([*self._waiting, *self._running])

    # Planning

    def _decode(self, step: _Step) -> None:
        """A token for every running sequence that can have one, oldest first. Victims of preemption
        are younger than the sequence at hand, so none is among those that have got theirs."""
        decoding, grown, passed = self._decoding, Grown(), list[int]()
        for before, seq in decoding.due():
            if before - len(passed) >= step.tokens:
                break
            if seq not in decoding:  # preempted for an older one
                continue
            slot = seq.slot
            if decoding.launched(seq) + 1 >= seq.end:
                decoding.rest(seq)
            elif self._grow(seq):
                grown[slot] = seq.pages_sent, self._new_pages(seq)
                seq.pages_sent += len(grown[slot][1])
                continue
            passed.append(slot)
        slots = decoding.order
        if passed:
            slots = slots[~np.isin(slots, passed)]
        slots = slots[: step.tokens]
        if len(slots):
            step.tokens -= len(slots)
            draft = step.draft
            draft.decodes, draft.seeds, draft.output_index = decoding.launch(slots, grown)

    def _grow(self, seq: Sequence) -> bool:
        """A page more for `seq`, at the cost of younger ones. False if it has to go itself, or
        would but for the token that is on its way: that one is not thrown away. One that is alone
        goes where pages it computed beside equal cached ones fill the pool; it resumes on those."""
        need = self._decoding.launched(seq) + 1
        while not self._manager.reserve(seq.id, need):
            victim = policy.victim(self._running)
            if victim is seq and self._decoding.in_flight(seq):
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _new_pages(self, seq: Sequence) -> tuple[int, ...]:
        return tuple(self._manager.pages(seq.id)[seq.pages_sent :])

    def _admit(self, seq: Sequence) -> bool:
        """Give the head of the queue a slot and all the pages that its known tokens and the next
        one need. False if they are not to be had: nobody behind it goes first."""
        manager = self._manager
        if seq is self._refused and manager.free_pages <= self._refused_at:
            return False
        handle, num_tokens = self._handles, len(seq.tokens)
        cached = manager.open(handle, seq.keys, num_tokens if seq.may_reuse else 1)
        if not manager.reserve(handle, num_tokens + 1):
            manager.close(handle)
            self._refused, self._refused_at = seq, manager.free_pages
            return False
        self._handles += 1
        seq.id, seq.slot = handle, self._slots.pop()
        seq.cached = seq.launched = cached
        seq.goal = num_tokens
        seq.commit_at = cached + manager.page_size
        if num_tokens == seq.num_prompt:
            seq.cached_tokens = cached
        ends = (i.offset + i.num_tokens for i in seq.request.images)
        seq.image_at = sum(end <= cached for end in ends)
        self._live[handle] = seq
        policy.enqueue(self._running, seq)
        policy.enqueue(self._prefilling, seq)
        return True

    def _prefill(self, step: _Step, seq: Sequence) -> None:
        """The next chunk of `seq`: as much as the step has tokens and images for, maybe nothing."""
        end = self._claims.claim(step.draft, seq, min(seq.goal, seq.launched + step.tokens))
        step.readers += [(entry.id, seq.id) for entry in seq.held]
        if end == seq.launched:
            return
        step.tokens -= end - seq.launched
        step.draft.prefill(seq, end, self._new_pages(seq))
        images = seq.request.images
        while seq.held and images[seq.image_at].offset + images[seq.image_at].num_tokens <= end:
            step.done.append((seq.held.pop(0), seq.id))
            seq.image_at += 1
        if end == seq.goal:
            policy.remove(self._prefilling, seq)
            self._decoding.enter(seq)

    # Results

    def _absorb_chunk(
        self,
        seq: Sequence,
        row: SequenceStep,
        token: int | None,
        logprob: TokenLogprob | None,
        rows: PromptRows | None,
    ) -> list[Output]:
        """A prompt's chunk is computed; with its last one comes a token."""
        first = len(seq.tokens) == seq.num_prompt
        if token is not None:
            self._refused = None  # what is shared from now on needs no page of its own
            if first and token >= 0:
                for member in self._groups.prompt_done(seq):
                    policy.enqueue(self._waiting, member)
            output = self._advance(seq, row.start + row.length, token, logprob)
            if first and token >= 0:
                output = replace(output, cached_tokens=seq.cached_tokens)
        elif rows is None:
            return []
        else:
            output = Output(request_id=seq.request.id, token_ids=[], finish_reason=None)
        if rows is None or output.error is not None:
            return [output]
        # Rows that were returned before a preemption are not returned again.
        start, end = max(seq.rows_sent, row.start), min(row.start + row.length, seq.num_prompt)
        if start < end:
            seq.rows_sent = end
            new = slice(start - row.start, end - row.start)
            logprobs = None if rows.logprobs is None else rows.logprobs[new]
            logits = None if rows.logits is None else rows.logits[new]
            output = replace(output, prompt_logprobs=logprobs, logits=logits, logits_start=start)
        return [output]

    def _absorb_decodes(self, rows: Decodes, first: int, result: StepResult) -> list[Output]:
        """The tokens of `rows`, in the result from `first` on."""
        tokens, logprobs = result.token_ids[first:], result.logprobs
        ids = tokens.tolist()
        names = self._decoding.names(rows)  # of those as well that end now
        outputs = [
            Output(request_id=name, token_ids=[token])
            for name, token in zip(names, ids, strict=True)
        ]
        others = [i - first for i in logprobs if i >= first]
        gone: list[int] = []
        for i in self._decoding.absorb(rows, tokens, ids, others):
            seq = self._live.get(int(rows.seqs[i]))
            if seq is None:
                gone.append(i)
            else:
                computed, logprob = int(rows.starts[i]) + 1, logprobs.get(first + i)
                outputs[i] = self._advance(seq, computed, ids[i], logprob)
        for i in reversed(gone):
            del outputs[i]
        return outputs

    def _advance(
        self, seq: Sequence, computed: int, token: int, logprob: TokenLogprob | None
    ) -> Output:
        """One more token of `seq`, sampled after `computed` positions. Only what led to finite
        logits is offered to others."""
        if token < 0:
            return self._end(seq, FinishReason.ERROR, "the model's logits were not finite")
        self._decoding.take(seq, token)
        if computed >= seq.commit_at:
            self._manager.commit(seq.id, computed)
            size = self._limits.page_size
            seq.commit_at = (computed // size + 1) * size
            self._decoding.mark(seq)
        reason, request = None, seq.request
        stop = token in request.stop_token_ids  # masked while below min_tokens
        if stop:
            reason = FinishReason.STOP
        elif len(seq.tokens) >= seq.end:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._forget(seq)
        return Output(
            request_id=request.id,
            token_ids=[token],
            finish_reason=reason,
            stop_token_id=token if stop else None,
            logprobs=None if logprob is None else [logprob],
        )

    def _fail_images(self, flight: _Flight, failed: dict[int, str]) -> list[Output]:
        """End every request that read an entry whose encoding failed, in this step or later."""
        outputs: list[Output] = []
        for entry_id, reason in failed.items():
            if entry_id in flight.encoded:
                self._encoder.forget(flight.encoded[entry_id])
            error = f"an image could not be encoded: {reason}"
            for seq in self._readers(entry_id, flight):
                outputs += [self._end(seq, FinishReason.ERROR, error)]
        return outputs

    def _readers(self, entry_id: int, *flights: _Flight) -> list[Sequence]:
        """Running sequences that hold an entry, or read it in `flights` or any not yet absorbed."""
        readers = (r for f in (*flights, *self._flights) for r in f.readers)
        holders = ((e.id, seq.id) for seq in self._running for e in seq.held)
        ids = dict.fromkeys(s for entry, s in (*readers, *holders) if entry == entry_id)
        return [self._live[seq] for seq in ids if seq in self._live]

    # Leaving

    def _end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> Output:
        self._forget(seq)
        return Output(request_id=seq.request.id, token_ids=[], finish_reason=reason, error=error)

    def _forget(self, seq: Sequence) -> None:
        """`seq` ends, wherever it is."""
        del self._requests[seq.request.id]
        if seq.id >= 0:
            self._stop(seq)
        elif not self._groups.is_parked(seq):
            policy.remove(self._waiting, seq)
        heir = self._groups.leave(seq)
        if heir is not None:
            policy.enqueue(self._waiting, heir)

    def _preempt(self, seq: Sequence) -> None:
        """Back to its place in the queue with the tokens it has; those in flight are sampled again,
        the same, since a draw depends on the seed and the index alone."""
        self._stop(seq)
        policy.enqueue(self._waiting, seq)
        self.preemptions += 1

    def _stop(self, seq: Sequence) -> None:
        """Give back all that a running sequence holds."""
        policy.remove(self._running, seq)
        if seq in self._decoding:
            self._decoding.leave(seq)
        else:
            policy.remove(self._prefilling, seq)
        self._refused = None
        del self._live[seq.id]
        self._manager.close(seq.id)
        for entry in seq.held:
            self._encoder.release(entry, seq.id)
        seq.held.clear()
        self._slots.append(seq.slot)
        seq.id = seq.slot = -1
        seq.pages_sent = 0
