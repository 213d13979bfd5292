"""A step as values. `StepPlan` is ints alone (handles, ranges, page ids): it can be broadcast,
recorded and replayed without revealing a prompt. Token ids and pixels travel in `StepInputs`, which
is never recorded. No torch."""

from array import array
from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from vitrail.engine.request import ImageInput, SamplingParams, Sequence, TokenLogprob


class SequenceStep(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + length) of sequence `seq`, which lives in row `slot` of the
    runner's tables. `new_pages` are appended to the row's block table at index `pages_before` (0
    resets the row). `sample`: its last position gives a token. A decode has length 1 and takes its
    input from the row's last sampled token, on the device. A request that resumes after preemption
    comes as another `seq`."""

    seq: int
    slot: int
    start: int
    length: int
    pages_before: int
    new_pages: tuple[int, ...]
    sample: bool


class EncodeJob(msgspec.Struct, frozen=True, gc=False):
    """Encode attention sequences [first, first + count) of the `sequences` of an image, each of
    `height` x `width` patches, into encoder entry `entry`. Parts come in order, in one step or in
    several; the image is ready with the last one. `block`, `resized`: as the image's."""

    entry: int
    height: int
    width: int
    num_tokens: int
    first: int = 0
    count: int = 1
    sequences: int = 1
    block: tuple[int, int] | None = None
    resized: tuple[int, int] | None = None

    @property
    def num_patches(self) -> int:
        return self.count * self.height * self.width

    @property
    def is_last(self) -> bool:
        return self.first + self.count == self.sequences


class ImageSlice(msgspec.Struct, frozen=True, gc=False):
    """Rows [entry_start, entry_start + length) of encoder entry `entry` replace the embeddings of
    the step's prefill tokens [token_start, token_start + length) (index in the packed prefill)."""

    entry: int
    entry_start: int
    token_start: int
    length: int


class Decodes(abc.Sequence[SequenceStep]):
    """A step's decodes by column, and, to whoever reads them one by one, as the rows they stand
    for. `seqs`, `slots`, `starts`, `pages_before`: int64 [B], as a row's. `grown`: (pages before,
    new pages) of the slots that get some. Nobody writes to what is here."""

    __slots__ = ("grown", "pages_before", "seqs", "slots", "starts")

    def __init__(
        self,
        seqs: np.ndarray,
        slots: np.ndarray,
        starts: np.ndarray,
        pages_before: np.ndarray,
        grown: dict[int, tuple[int, tuple[int, ...]]],
    ):
        self.seqs, self.slots, self.starts = seqs, slots, starts
        self.pages_before, self.grown = pages_before, grown

    @classmethod
    def of(cls, rows: Iterable[SequenceStep]) -> "Decodes":
        """Rows of one sampled token each."""
        rows = tuple(rows)
        assert all(s.length == 1 and s.sample for s in rows), rows
        columns = [[s.seq for s in rows], [s.slot for s in rows], [s.start for s in rows]]
        seqs, slots, starts, before = (
            np.array(column, dtype=np.int64)
            for column in (*columns, [s.pages_before for s in rows])
        )
        grown = {s.slot: (s.pages_before, s.new_pages) for s in rows if s.new_pages}
        return cls(seqs, slots, starts, before, grown)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[SequenceStep]:
        columns = (self.seqs, self.slots, self.starts, self.pages_before)
        for seq, slot, start, before in zip(*(c.tolist() for c in columns), strict=True):
            new_pages = self.grown[slot][1] if slot in self.grown else ()
            yield SequenceStep(seq, slot, start, 1, before, new_pages, True)

    @overload
    def __getitem__(self, index: int) -> SequenceStep: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SequenceStep, ...]: ...
    def __getitem__(self, index: int | slice) -> SequenceStep | tuple[SequenceStep, ...]:
        return tuple(self)[index]


NO_DECODES = Decodes.of(())


Decoded = TypeVar("Decoded", bound=abc.Sequence[SequenceStep])


class Plan(msgspec.Struct, Generic[Decoded], frozen=True):
    """Order of work: drop entries, encode, then one forward pass over [prefills | decodes], which
    may be empty where there is something to encode or to drop. An entry whose encoding failed, or
    whose step did, is dropped like any other: the runner may not hold it. What is encoded may still
    be under way when its step's results are read: a step with a slice of it waits for that."""

    index: int
    prefills: tuple[SequenceStep, ...]
    decodes: Decoded
    encodes: tuple[EncodeJob, ...]
    slices: tuple[ImageSlice, ...]
    drop_entries: tuple[int, ...]

    @property
    def rows(self) -> tuple[SequenceStep, ...]:
        """Prefills, then decodes."""
        return (*self.prefills, *self.decodes)

    @property
    def sampled(self) -> tuple[SequenceStep, ...]:
        """Sequences that get a token, in result order: prefills first."""
        return tuple(s for s in self.rows if s.sample)


# As it is run, and row by row, as it is recorded.
StepPlan = Plan[Decodes]
WrittenPlan = Plan[tuple[SequenceStep, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSetup:
    """Sampling state of a row that a sequence enters (again, after preemption): parameters, the
    prompt and the output so far (for penalties and min_tokens), ids that end it, what to return.
    It comes with the sequence's first chunk."""

    slot: int
    seq: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    stop_token_ids: frozenset[int]
    want_logits: bool


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """What the plan's ints stand for, in the plan's order. `token_ids`: int64 [prefill tokens],
    image positions hold the image id. `next_ids`: parallel; the prompt token that follows each
    position, -1 where none does (for prompt logprobs). `seeds`: uint64 [sampled]. `output_index`:
    int64 [sampled], how many tokens the sequence sampled before this one. `pixels`: parallel to
    `encodes`."""

    token_ids: np.ndarray
    next_ids: np.ndarray
    seeds: np.ndarray
    output_index: np.ndarray
    setups: list[SlotSetup]
    pixels: list[np.ndarray]

    @property
    def draws(self) -> np.ndarray:
        """float64 [sampled], one uniform in [0, 1) each; made for whoever draws."""
        return draws(self.seeds, self.output_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """What a prefill chunk returned for its positions beside the sampled token. `logprobs`: an
    entry for each position whose next prompt token is known, in order. `logits`: fp32 [length,
    vocab]."""

    start: int
    logprobs: list[TokenLogprob] | None
    logits: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`token_ids`: int64, parallel to `plan.sampled`; -1: the row's logits were not finite (that
    request fails). `logprobs`: by index in them, where asked for. `prompt_rows`: by seq.
    `failed_entries`: images whose encoding failed, with the reason; sequences that needed them have
    token -1.
    `encoded`: the last launched step whose encodings are done by now, and those before it."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprob]
    prompt_rows: dict[int, PromptRows]
    failed_entries: dict[int, str]
    encoded: int


def draws(seeds: ArrayLike, output_index: np.ndarray) -> np.ndarray:
    """float64 [n], uniform in [0, 1): a function of (seed, output index) alone, so that a request's
    draws do not depend on its batch, on preemption or on who else samples. Two rounds of splitmix64
    (Steele, Lea and Flood 2014), the upper 53 bits."""
    start = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
    bits = _mix(start + (output_index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(slots=True)
class StepDraft:
    """A plan and its inputs being put together. Decides nothing: it writes down what the scheduler
    decided, and moves a sequence's `launched` and `pages_sent` on to match. `seeds` and
    `output_index` of the decodes: as the inputs'."""

    decodes: Decodes = NO_DECODES
    seeds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    output_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    prefills: list[SequenceStep] = field(default_factory=list[SequenceStep])
    encodes: list[EncodeJob] = field(default_factory=list[EncodeJob])
    slices: list[ImageSlice] = field(default_factory=list[ImageSlice])
    setups: list[SlotSetup] = field(default_factory=list[SlotSetup])
    pixels: list[np.ndarray] = field(default_factory=list[np.ndarray])
    _tokens: "array[int]" = field(default_factory=lambda: array("i"))
    _next: "array[int]" = field(default_factory=lambda: array("i"))
    # seed and output index of each chunk that is sampled after
    _sampled: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def num_prefill_tokens(self) -> int:
        return len(self._tokens)

    def prefill(self, seq: Sequence, end: int, new_pages: tuple[int, ...]) -> None:
        """Positions [seq.launched, end) of `seq`, whose images there are in `seq.held`."""
        start, sample = seq.launched, end == seq.goal
        if seq.pages_sent == 0:
            self.setups.append(_setup(seq))
        self._slice_images(seq, start, end)
        self.prefills.append(
            SequenceStep(seq.id, seq.slot, start, end - start, seq.pages_sent, new_pages, sample)
        )
        following = seq.tokens[start + 1 : min(end + 1, seq.num_prompt)]
        self._tokens += seq.tokens[start:end]
        self._next += following
        self._next += array("i", [-1]) * (end - start - len(following))
        if sample:
            self._sampled.append((seq.request.seed, end - seq.num_prompt))
        seq.launched = end
        seq.pages_sent += len(new_pages)

    def _slice_images(self, seq: Sequence, start: int, end: int) -> None:
        shift = self.num_prefill_tokens - start
        for image, entry in zip(seq.request.images[seq.image_at :], seq.held, strict=False):
            if image.offset >= end:  # held, but not ready
                break
            first = max(start, image.offset)
            length = min(end, image.offset + image.num_tokens) - first
            self.slices.append(ImageSlice(entry.id, first - image.offset, first + shift, length))

    def encode(self, entry: int, image: ImageInput, first: int, count: int) -> None:
        """Sequences [first, first + count) of `image` into `entry`."""
        size = image.sequence_patches
        self.encodes.append(
            EncodeJob(
                entry=entry,
                height=image.height,
                width=image.width,
                num_tokens=image.num_tokens,
                first=first,
                count=count,
                sequences=image.sequences,
                block=image.block,
                resized=image.resized,
            )
        )
        part = slice(first * size, (first + count) * size)
        self.pixels.append(image.patches if image.resized else image.patches[part])

    def finish(self, index: int, drop_entries: tuple[int, ...]) -> tuple[StepPlan, StepInputs]:
        """The plan numbered `index` and its inputs."""
        plan = Plan(
            index=index,
            prefills=tuple(self.prefills),
            decodes=self.decodes,
            encodes=tuple(self.encodes),
            slices=tuple(self.slices),
            drop_entries=drop_entries,
        )
        seeds, output_index = self.seeds, self.output_index
        if self._sampled:
            firsts, indices = zip(*self._sampled, strict=True)
            seeds = np.concatenate([np.array(firsts, dtype=np.uint64), seeds])
            output_index = np.concatenate([np.array(indices, dtype=np.int64), output_index])
        inputs = StepInputs(
            token_ids=np.array(self._tokens, dtype=np.int64),
            next_ids=np.array(self._next, dtype=np.int64),
            seeds=seeds,
            output_index=output_index,
            setups=self.setups,
            pixels=self.pixels,
        )
        return plan, inputs


def _setup(seq: Sequence) -> SlotSetup:
    return SlotSetup(
        slot=seq.slot,
        seq=seq.id,
        params=seq.request.params,
        prompt_token_ids=seq.request.prompt_token_ids,
        output_token_ids=list(seq.tokens[seq.num_prompt :]),
        stop_token_ids=seq.request.stop_token_ids,
        want_logits=seq.request.want_logits,
    )
