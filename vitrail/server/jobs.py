"""Bodies -> jobs: typed request, prompt, pictures, engine requests, all checked. Runs in worker
threads, so nothing here touches the loop."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.engine.conversation import parse_conversation
from vitrail.engine.ipc import Staged
from vitrail.engine.prepare import Preparer, Prompt
from vitrail.engine.request import EngineRequest, SamplingParams
from vitrail.server import openai
from vitrail.server.stream import Writer

Stage = Callable[[list[EngineRequest]], Staged]
# The rest of making a job, where it holds videos; the event is set when nobody waits for it.
Later = Callable[[Event], "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request, ready for the engine. `prompt_lens` in tokens and, if it is echoed, `echo`
    as text: one a prompt. `only_echo`: nothing generated is shown."""

    staged: Staged
    prompt_lens: list[int]
    writer: Writer
    chat: bool
    stream: bool
    with_usage: bool
    echo: list[str]
    only_echo: bool


class JobMaker:
    """Makes jobs for one model. Immutable; thread-safe. Every method raises `Refused` for whatever
    a client got wrong."""

    def __init__(self, config: EngineConfig, preparer: Preparer, stage: Stage, name: str):
        self._max_choices = config.max_waiting
        self._preparer = preparer
        self._stage = stage
        self._name = name

    def chat(self, body: bytes | bytearray) -> "Job | Later":
        """A body of /v1/chat/completions. Nothing of a video is decoded here: with one in it, what
        is still to be done comes back, for a thread where it keeps no other request waiting."""
        request = openai.parse(body, openai.ChatRequest)
        self._check(request)
        params, options = openai.chat_params(request), openai.chat_options(request)
        make = self._preparer
        messages, pictures = parse_conversation(
            request.messages, make.limits, num_frames=make.video_frames
        )

        def rest(gone: Event) -> Job:
            prompt = make.chat(messages, pictures, options, gone)
            return self._job(request, [prompt], params, [])

        return rest if any(each.is_frame for each in pictures) else rest(Event())

    def completion(self, body: bytes | bytearray) -> Job:
        """A body of /v1/completions."""
        request = openai.parse(body, openai.CompletionRequest)
        self._check(request)
        params = openai.completion_params(request)
        given = openai.completion_prompts(request.prompt)
        make = self._preparer
        prompts = [make.text(p) if isinstance(p, str) else make.ids(p) for p in given]
        echo: list[str] = []
        if request.echo:
            echo = [
                p if isinstance(p, str) else make.tokenizer.decode(p, skip_special=False)
                for p in given
            ]
        return self._job(request, prompts, params, echo)

    def _job(
        self,
        request: openai.ChatRequest | openai.CompletionRequest,
        prompts: list[Prompt],
        params: SamplingParams,
        echo: list[str],
    ) -> Job:
        choices = len(prompts) * max(params.n, 1)
        if choices > self._max_choices:
            raise Refused.because(
                "n" if len(prompts) == 1 else "prompt",
                f"{len(prompts)} prompts of {params.n} choices each",
                f"at most {self._max_choices} choices, what this server queues",
                "send fewer in one request",
            )
        chat = isinstance(request, openai.ChatRequest)
        response_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        requests = [
            each
            for i, prompt in enumerate(prompts)
            for each in self._preparer.requests(prompt, params, f"{response_id}-{i}")
        ]
        options = request.stream_options
        return Job(
            staged=self._stage(requests),
            prompt_lens=[len(p.token_ids) for p in prompts],
            writer=Writer(
                chat=chat,
                response_id=response_id,
                created=int(time.time()),
                model=self._name,
                tokenizer=self._preparer.assets.tokenizer,
                logprobs=params.logprobs is not None,
            ),
            chat=chat,
            stream=bool(request.stream),
            with_usage=options is not None and bool(options.include_usage),
            echo=echo,
            only_echo=bool(echo) and request.max_tokens == 0,
        )

    def _check(self, request: openai.ChatRequest | openai.CompletionRequest) -> None:
        """What does not depend on the prompt."""
        if request.model is not None and request.model != self._name:
            raise Refused.because(
                "model",
                f"{request.model!r:.80}",
                f"this server serves {self._name!r}",
                "ask for that model, or start the server with --served-model-name",
                "model_not_found",
            )
        if request.stream_options is not None and not request.stream:
            raise Refused.because(
                "stream_options", "given", "only with stream: true", "leave it out or stream"
            )
        if request.stream and isinstance(request, openai.CompletionRequest) and request.echo:
            raise Refused.because(
                "echo", "true with stream", "an echo is not streamed", "send stream: false"
            )
