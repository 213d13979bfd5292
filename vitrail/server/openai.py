"""The bodies of /v1/chat/completions and /v1/completions: typed, strict, and mapped to what the
engine takes. A field that is not honoured is refused by name, unless its value asks for nothing."""

import re
from typing import Any, TypeVar, cast

import msgspec

from vitrail.config.finding import Refused
from vitrail.engine.request import MAX_LOGPROBS, SamplingParams
from vitrail.tokenizer.chat import ChatOptions, Scalar


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: one last chunk with the token counts."""

    include_usage: bool | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both routes share. Those after `user` are accepted only with the values in
    `_NEUTRAL`. `user` is a label and changes nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    user: str | None = None
    response_format: Any = None
    store: Any = None
    service_tier: Any = None
    metadata: Any = None


class ChatRequest(_Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`max_completion_tokens` wins over `max_tokens`. Messages are checked by
    `engine.conversation`."""

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompt`: text, ids, or a list of either; each prompt gives `n` choices."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None
    best_of: Any = None


# Values that ask for nothing of what we do not do.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "metadata": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
Body = TypeVar("Body", ChatRequest, CompletionRequest)


def parse(body: bytes | bytearray, kind: type[Body]) -> Body:
    """The typed body. Raises `Refused` naming the field, what was seen and the rule."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation(str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refused.because(
            "body", f"not JSON ({error})", "the body is one JSON object", "send valid JSON"
        ) from error
    for name, allowed in _NEUTRAL.items():
        if name in request.__struct_fields__:
            value = cast(object, msgspec.structs.asdict(request)[name])
            if not any(type(value) is type(each) and value == each for each in allowed):
                raise Refused.because(
                    name,
                    f"{value!r:.80}",
                    "this field is not supported",
                    f"leave {name} out",
                    "unsupported_field",
                )
    return request


def _validation(message: str) -> Refused:
    found = _PATH.search(message)
    where = f"{found[1]:.80}" if found and found[1] else "body"
    saw = message[: found.start()] if found else message
    unknown = re.search(r"unknown field `(.*?)`", saw)
    if unknown:
        name = f"{unknown[1]:.80}"
        return Refused.because(
            name if where == "body" else f"{where}.{name}",
            "a field that is not supported",
            "fields are honoured or refused, never ignored",
            f"leave {name} out",
            "unsupported_field",
        )
    missing = re.search(r"missing required field `(.*?)`", saw)
    if missing:
        return Refused.because(missing[1], "missing", "the field is required", f"send {missing[1]}")
    rule = "the field has the type that OpenAI's API gives it"
    return Refused.because(where, saw, rule, "send that type or leave the field out")


def chat_params(request: ChatRequest) -> SamplingParams:
    """Sampling of a chat request. `logprobs` true without `top_logprobs` gives the token's own."""
    limit = request.max_tokens
    if request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
        if limit < 1:
            raise Refused.because(
                "max_completion_tokens", str(limit), "at least 1", "send more, or none"
            )
    top = request.top_logprobs
    if top is not None and not request.logprobs:
        raise Refused.because(
            "top_logprobs", str(top), "it needs logprobs: true", "send logprobs: true as well"
        )
    return _params(request, limit, (top or 0) if request.logprobs else None)


def chat_options(request: ChatRequest) -> ChatOptions:
    """How the template is run."""
    going_on = bool(request.continue_final_message)
    opens = request.add_generation_prompt
    kwargs = request.chat_template_kwargs or {}
    return ChatOptions(
        add_generation_prompt=not going_on if opens is None else opens,
        continue_final_message=going_on,
        template_kwargs=tuple((k, cast(Scalar, v)) for k, v in kwargs.items()),
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Sampling of a completion. `max_tokens` defaults to 16, as OpenAI's does; 0 is for `echo`,
    where one token is computed and dropped."""
    limit = 16 if request.max_tokens is None else request.max_tokens
    if limit == 0 and request.echo:
        limit = 1
    params = _params(request, limit, request.logprobs)
    if request.echo and request.logprobs is not None:
        return msgspec.structs.replace(params, prompt_logprobs=request.logprobs)
    return params


def _params(
    request: ChatRequest | CompletionRequest, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        where = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        raise Refused.because(where, str(logprobs), f"0 to {MAX_LOGPROBS}", "ask for fewer")
    stop = () if request.stop is None else request.stop
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "min_tokens": request.min_tokens,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "ignore_eos": request.ignore_eos,
        "include_stop": request.include_stop_str_in_output,
        "n": request.n,
        "seed": request.seed,
    }
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_logit_bias(request.logit_bias or {}),
        **cast(Any, {k: v for k, v in given.items() if v is not None}),
    )


def _logit_bias(raw: dict[str, float]) -> dict[int, float]:
    bad = [key for key in raw if not re.fullmatch(r"\d{1,9}", key, re.ASCII)]
    if bad:
        raise Refused.because(
            "logit_bias", f"{bad[0]!r:.40}", "keys are token ids", "send token ids"
        )
    return {int(key): value for key, value in raw.items()}


def completion_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """One prompt or several, of one kind."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        items = cast(list[Any], prompt)
        if all(isinstance(i, str) for i in items):
            return items
        if all(_is_int(i) for i in items):
            return [items]
        if all(isinstance(i, list) and all(_is_int(t) for t in i) for i in items):
            return items
    raise Refused.because(
        "prompt",
        "an empty list" if prompt == [] else f"a {type(prompt).__name__}",
        "text, a list of token ids, or a non-empty list of either",
        "send text",
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
