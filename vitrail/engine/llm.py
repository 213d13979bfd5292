"""`LLM`: the offline API. The engine runs in this process, on the caller's thread."""

# torch and numpy leave parts of their own signatures unknown
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Float
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vitrail.config.engine import EngineConfig
from vitrail.config.env import read_env
from vitrail.config.finding import Refused
from vitrail.engine.answer import Answer, Delta
from vitrail.engine.build import build_engine
from vitrail.engine.conversation import Picture, local_source, parse_conversation
from vitrail.engine.prepare import Preparer, Prompt
from vitrail.engine.request import (
    EngineRequest,
    FinishReason,
    Output,
    SamplingParams,
    TokenLogprob,
)
from vitrail.models.assets import load_assets
from vitrail.models.checkpoint import open_checkpoint
from vitrail.tokenizer.chat import ChatOptions
from vitrail.vision.preprocess import from_patches

AnyPrompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice. `logprobs` is parallel to `token_ids`, empty unless asked for. `error` says why a
    choice with finish reason ERROR failed on its own while running; its neighbours did not."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a prompt became. `cached_tokens`: prompt tokens found in the cache by the first
    choice."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob]
    cached_tokens: int
    outputs: list[Completion]


class LLM:
    """An engine in this process. Keyword arguments are `EngineConfig`'s fields. Raises `Refused` at
    construction for whatever cannot run, at a call for a bad prompt. A request that fails on its
    own while running ends with `Completion.error`; `score`, of one, raises RuntimeError."""

    def __init__(self, model: str | Path, **choices: Any):
        self.config = EngineConfig(model=str(model), **choices)
        self._start()

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLM":
        """An engine of a configuration that is already there."""
        return cls(**asdict(config))

    def _start(self) -> None:
        checkpoint = open_checkpoint(self.config.model, self.config.revision)
        assets = load_assets(checkpoint)
        self.engine, facts = build_engine(
            self.config, checkpoint, assets.processor, capsules=read_env().capsules
        )
        self.preparer = Preparer(self.config, checkpoint, assets, facts)
        self._names = itertools.count()
        self._busy = False

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generated]:
        """Answer prompts together, in order. A prompt is text, a conversation (a list of messages),
        or `{"prompt_token_ids": [...], "images": [...]}`, where an image is bytes of a file, a
        path, a PIL image, an array [H, W, 3], a `PatchedImage`, or `{"patches": array, "grid": (h,
        w)}`, with `"block": (rows, columns)` where the model takes pictures in several scales."""
        listed = _listed(prompts)
        each = _one_each(params, len(listed))
        made = [
            self.preparer.requests(self.prepare(p), s, self._name())
            for p, s in zip(listed, each, strict=True)
        ]
        answers = self._run(list(itertools.chain.from_iterable(made)), progress)
        return [_generated([answers[r.id] for r in group]) for group in made]

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generated]:
        """`generate` for one conversation or several."""
        return self.generate(cast(Any, conversations), params, progress=progress)

    def score(
        self, token_ids: Sequence[int], images: Sequence[Any] = (), *, logprobs: bool = False
    ) -> Float[np.ndarray, "positions vocab"]:
        """fp32 logits (or natural-log probabilities) after every position of the ids, images
        expanded, in one forward pass or as many chunks as the engine's step allows. Nothing comes
        from the prefix cache."""
        prompt = self.prepare({"prompt_token_ids": token_ids, "images": images})
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
        request = self.preparer.requests(prompt, params, self._name(), want_logits=True)[0]
        rows: dict[int, np.ndarray] = {}
        for output in self._outputs([request]):
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.logits is not None:
                rows[output.logits_start] = output.logits
        logits = np.concatenate([rows[start] for start in sorted(rows)])
        if not logprobs:
            return logits
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def stream(self, requests: Sequence[EngineRequest]) -> Iterator[tuple[Answer, Delta]]:
        """Run requests to their ends, yielding what each step adds. Closing the iterator early
        aborts what is left."""
        tokenizer = self.preparer.assets.tokenizer
        answers = {r.id: Answer(r, tokenizer) for r in requests}
        for output in self._outputs(requests):
            answer = answers[output.request_id]
            delta = answer.push(output)
            if delta.stopped_by_text:
                self.engine.abort(answer.request.id)
            yield answer, delta

    def _outputs(self, requests: Sequence[EngineRequest]) -> Iterator[Output]:
        """Queue requests as the queue has room, step until all have ended, and leave the engine
        idle however the caller ends."""
        if self._busy:
            raise Refused.because(
                where="LLM",
                saw="a second call while an earlier one is still being read",
                rule="one call at a time uses an engine",
                change="read the earlier stream to its end or close it first",
            )
        self._busy = True
        waiting = deque(requests)
        scheduler = self.engine.scheduler
        try:
            while waiting or not self.engine.idle:
                while waiting and scheduler.num_waiting < self.config.max_waiting:
                    self.engine.add(waiting.popleft())
                yield from self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request.id)
            while not self.engine.idle:
                self.engine.step()
            self._busy = False
            self.engine.rest()

    def prepare(self, prompt: AnyPrompt) -> Prompt:
        """A prompt's ids and pictures, as the engine will see them."""
        if isinstance(prompt, str):
            return self.preparer.text(prompt)
        if isinstance(prompt, Mapping):
            return self._prepare_ids(prompt)
        messages, pictures = parse_conversation(
            prompt, self.preparer.limits, num_frames=self.preparer.video_frames, local=True
        )
        return self.preparer.chat(messages, pictures, ChatOptions())

    def _prepare_ids(self, prompt: Mapping[str, Any]) -> Prompt:
        unknown = set(prompt) - {"prompt_token_ids", "images"}
        if unknown or "prompt_token_ids" not in prompt:
            raise Refused.because(
                where="prompt",
                saw=f"a mapping with {', '.join(map(repr, prompt))}",
                rule="its keys are prompt_token_ids and, where there are any, images",
                change="pass these, or text, or a list of messages",
            )
        pictures = [
            Picture(self._source(image, f"images[{i}]"), f"images[{i}]")
            for i, image in enumerate(prompt.get("images", ()))
        ]
        return self.preparer.ids([int(i) for i in prompt["prompt_token_ids"]], pictures)

    def _source(self, image: Any, where: str) -> Any:
        """An image as the offline API takes it; patches with their grid become a `PatchedImage`."""
        if not isinstance(image, Mapping):
            return local_source(image, where)
        height, width = image["grid"]
        block = image.get("block")
        rules = self.preparer.facts.patch_rules
        if rules is None:
            raise Refused.because(
                where=where,
                saw="image patches",
                rule="this model takes text alone",
                change="remove the images or serve a vision model",
            )
        return from_patches(
            np.asarray(image["patches"]),
            (int(height), int(width)),
            None if block is None else (int(block[0]), int(block[1])),
            rules,
            where,
        )

    def _run(self, requests: list[EngineRequest], progress: bool) -> dict[str, Answer]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        answers: dict[str, Answer] = {}
        with Progress(*columns, disable=not progress) as bar:
            task = bar.add_task("answers", total=len(requests), rate="")
            tokens = 0
            for answer, delta in self.stream(requests):
                answers[answer.request.id] = answer
                tokens += len(delta.token_ids)
                elapsed = bar.tasks[task].elapsed or 0.0
                rate = f"{tokens / elapsed:.0f} token/s" if elapsed else ""
                bar.update(task, advance=int(delta.finish_reason is not None), rate=rate)
        return answers

    def _name(self) -> str:
        return f"request-{next(self._names)}"


def _listed(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """One prompt or several: a list whose first item has a role is one conversation."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], Mapping) and "role" in items[0]:
        return [cast(AnyPrompt, items)]
    return items


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise Refused.because(
            where="params",
            saw=f"{len(params)} for {count} prompts",
            rule="one for all, or one for each prompt",
            change="pass as many as there are prompts",
        )
    return list(params)


def _generated(answers: list[Answer]) -> Generated:
    first = answers[0]
    return Generated(
        prompt_token_ids=first.request.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        outputs=[
            Completion(
                index=i,
                text=a.text,
                token_ids=a.token_ids,
                logprobs=a.logprobs,
                finish_reason=a.finish_reason or FinishReason.ABORT,
                stop_reason=a.stop_reason,
                error=a.error,
            )
            for i, a in enumerate(answers)
        ],
    )
