"""What a client may ask of the engine, and the state of a request inside it. No torch.

`SamplingParams` and `EngineRequest` are values; `Sequence` is the scheduler's own record of a
request and is written by the scheduler alone."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from vitrail.cache.encoder import EncoderEntry
from vitrail.cache.page_keys import PageKeys
from vitrail.config.finding import Finding, Refused

MAX_LOGPROBS = 20
# A request's parameters travel with each of its choices, so their size is bounded.
MAX_STOPS, MAX_STOP_LEN, MAX_IDS = 16, 1024, 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Order of application to a row of logits: repetition, presence and
    frequency penalties, `logit_bias`, the mask of ids that may never be sampled (image ids; end ids
    before `min_tokens`), temperature, `top_k`, `top_p`, `min_p`.
    `max_tokens` None: the rest of the context. `temperature` 0: greedy. `top_k` 0: off.
    `seed` None: the engine's seed and the request's id. `logprobs` n: the sampled token and the n
    likeliest, of the model's own distribution (before everything above). `n` answers are n requests
    to the scheduler. Stop strings are looked for in the text, outside the engine."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    n: int = 1


def typed(params: SamplingParams) -> SamplingParams:
    """`params` with every field of its declared type; one stop string may come as a str. Raises
    `Refused`: msgspec checks what it decodes, not what a caller constructs."""
    given = msgspec.structs.asdict(params)
    if isinstance(params.stop, str):
        given["stop"] = (params.stop,)
    try:
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        saw, _, path = str(error).partition(" - at `$.")
        raise Refused.because(
            where=path.rstrip("`") or "params",
            saw=saw,
            rule="a field has the type that SamplingParams declares",
            change="pass that type",
        ) from error


def sampling_findings(params: SamplingParams, vocab_size: int) -> list[Finding]:
    """Every field out of range, whatever front door the request came through."""
    found: list[Finding] = []

    def require(ok: bool, field: str, saw: object, rule: str) -> None:
        if not ok:
            change = f"send {field} within the rule, or leave it out"
            found.append(Finding(where=field, saw=repr(saw), rule=rule, change=change))

    p = params
    require(p.max_tokens is None or p.max_tokens >= 1, "max_tokens", p.max_tokens, "at least 1")
    require(0 <= p.min_tokens < 2**31, "min_tokens", p.min_tokens, "0 to 2**31 - 1")
    require(
        p.max_tokens is None or p.min_tokens <= max(p.max_tokens, 0),
        "min_tokens",
        p.min_tokens,
        f"at most max_tokens, {p.max_tokens}",
    )
    require(
        p.temperature == 0 or 0.01 <= p.temperature <= 100,
        "temperature",
        p.temperature,
        "0 (greedy), or 0.01 to 100",
    )
    require(0 <= p.top_k < 2**31, "top_k", p.top_k, "0 (off) to 2**31 - 1")
    require(0 < p.top_p <= 1, "top_p", p.top_p, "above 0, at most 1")
    require(0 <= p.min_p <= 1, "min_p", p.min_p, "0 to 1")
    require(
        0.01 <= p.repetition_penalty <= 100,
        "repetition_penalty",
        p.repetition_penalty,
        "0.01 to 100",
    )
    require(-2 <= p.presence_penalty <= 2, "presence_penalty", p.presence_penalty, "-2 to 2")
    require(-2 <= p.frequency_penalty <= 2, "frequency_penalty", p.frequency_penalty, "-2 to 2")
    for name, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}")
    require(1 <= p.n <= 128, "n", p.n, "1 to 128")
    require(p.seed is None or 0 <= p.seed < 2**63, "seed", p.seed, "0 to 2**63 - 1")
    require(len(p.stop) <= MAX_STOPS, "stop", len(p.stop), f"at most {MAX_STOPS} strings")
    require(all(p.stop), "stop", "", "stop strings are not empty")
    longest = max(map(len, p.stop), default=0)
    require(
        longest <= MAX_STOP_LEN, "stop", f"{longest} characters", f"at most {MAX_STOP_LEN} each"
    )
    # One finding a field, whatever its length: a refusal is no larger than what was sent.
    for name, ids in (("stop_token_ids", p.stop_token_ids), ("logit_bias", p.logit_bias)):
        require(len(ids) <= MAX_IDS, name, f"{len(ids)} ids", f"at most {MAX_IDS}")
        bad = [i for i in ids if not 0 <= i < vocab_size]
        saw = f"{len(bad)} ids outside, the first {bad[0]}" if bad else ""
        require(not bad, name, saw, f"token ids are 0 to {vocab_size - 1}")
    far = [{i: bias} for i, bias in p.logit_bias.items() if not -100 <= bias <= 100]
    require(not far, "logit_bias", far[:1], "a bias is -100 to 100")
    return found


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a request. `identity`: 32 bytes over content, processor parameters and model
    revision. `offset`: absolute position of its first token; it covers `num_tokens`. It is
    `sequences` attention sequences of `height` x `width` patches each, and `patches` are theirs in
    order, [sequences * height * width, C*P*P], uint8 or normalised float32. `block`: (rows,
    columns) of tiles in its last scale, where it has several scales. `resized`: (rows, columns) of
    pixels to which the encoder brings `patches`, which then are the picture's pixels, uint8 [rows,
    columns, 3], of one sequence."""

    identity: bytes
    offset: int
    num_tokens: int
    height: int
    width: int
    patches: np.ndarray
    sequences: int = 1
    block: tuple[int, int] | None = None
    resized: tuple[int, int] | None = None

    @property
    def sequence_patches(self) -> int:
        return self.height * self.width


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the scheduler takes it: ids only. `id` is unique among requests not yet ended.
    `prompt_token_ids` has one image id for each image token; `images` by offset. `max_tokens`: at
    most this many are sampled. `stop_token_ids` is what ends it (end-of-turn ids included unless
    ignored). `group`: requests of one group share a prompt; the first computes it, the others wait
    for its pages. `want_logits`: return the logits of every prompt position computed (offline
    scoring): all but a cached prefix's. With `params.prompt_logprobs` no cached prefix is used, so
    that with both every position has its row."""

    id: str
    prompt_token_ids: list[int]
    images: list[ImageInput]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int
    group: str = ""
    want_logits: bool = False


def request_findings(
    request: EngineRequest, max_model_len: int, pool_len: int, encoder_patches: int
) -> list[Finding]:
    """Why `request` can never run where a context has `max_model_len` tokens, all pages together
    hold `pool_len`, and a step encodes `encoder_patches`."""
    found: list[Finding] = []
    longest, num_prompt = min(max_model_len, pool_len), len(request.prompt_token_ids)
    if num_prompt + 1 > longest:
        what = "the context" if max_model_len <= pool_len else "what the KV cache can hold"
        found.append(
            Finding(
                where="prompt",
                saw=f"{num_prompt} tokens, images included",
                rule=f"with one token of output at most {longest} tokens, {what}",
                change=f"send at most {longest - 1} tokens",
                code="context_length_exceeded",
            )
        )
    for i, image in enumerate(request.images):
        if image.sequence_patches > encoder_patches:
            found.append(
                Finding(
                    where=f"images[{i}]",
                    saw=f"{image.height} x {image.width} = {image.sequence_patches} patches",
                    rule=f"at most {encoder_patches} patches are encoded in a step",
                    change="send a smaller image, or serve with more --encoder-patches",
                    code="image_too_large",
                )
            )
    return found


def overloaded(num_waiting: int, max_waiting: int) -> Finding:
    """Why a request is not taken now."""
    return Finding(
        where="queue",
        saw=f"{num_waiting} requests are waiting",
        rule=f"at most {max_waiting} wait",
        change="try again later, or serve with more --max-waiting",
        code="overloaded",
    )


class FinishReason(StrEnum):
    """`STOP`: an end id or stop string; `LENGTH`: max_tokens or the context; `ABORT`: the client
    left; `ERROR`: this request's own failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Natural-log probability of `token_id` (None for an image token beyond the vocabulary, which
    has no logit), and the likeliest (id, logprob), best first."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step gave one request. `token_ids` includes the id that ended it, `stop_token_id`.
    `logprobs` is parallel to `token_ids` where asked for. `prompt_logprobs`: entries for the prompt
    positions that follow those of earlier outputs (position 0 has none). `cached_tokens`: prompt
    tokens taken from the cache (set with the first token). `logits`: fp32 [positions, vocab] of
    prompt positions from `logits_start` on, where asked for. `error`: why, with `ERROR`."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    error: str | None = None
    logits: np.ndarray | None = None
    logits_start: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request inside the scheduler.

        position  0 ...... cached ...... launched ............ goal ......... end
                  from the    a launched    to be prefilled   decoded       at most
                  cache       step computes                   one by one    this many

    `tokens`: prompt and absorbed output. `launched`: up to `goal`; from there on `Decoding` knows.
    `arrival`: its place in every queue. While it runs it has an `id` of its own (a resumed request
    gets another, so that results of steps launched before its preemption are nobody's), a `slot`,
    and pages of which the first `pages_sent` were in a plan. `held`: encoder entries of
    images[image_at:]: the one that the last chunk cut, or that is not encoded to its end. From
    `commit_at` computed tokens on, another page can be shared. `cached_tokens`: of the prompt, as
    told to the client. `rows_sent`: prompt positions whose logits or logprobs were returned."""

    request: EngineRequest
    arrival: int
    tokens: "array[int]"
    keys: PageKeys
    num_prompt: int
    end: int
    id: int = -1
    slot: int = -1
    cached: int = 0
    cached_tokens: int = 0
    launched: int = 0
    goal: int = 0
    pages_sent: int = 0
    commit_at: int = 0
    image_at: int = 0
    held: list[EncoderEntry] = field(default_factory=list[EncoderEntry])
    rows_sent: int = 0

    @property
    def may_reuse(self) -> bool:
        """Whether a cached prefix leaves no gap in the rows of logits or logprobs asked for."""
        if self.rows_sent >= self.num_prompt:
            return True
        if self.request.params.prompt_logprobs is not None:
            return False
        return not self.request.want_logits or self.rows_sent == 0
