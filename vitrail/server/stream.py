"""One HTTP request's choices as they grow, and their bytes: SSE chunks from byte templates, or the
one JSON object of an answer that is not streamed. All that one step gave is one wake-up; what a
slow reader has not taken is merged into one chunk."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from vitrail.config.finding import Refused
from vitrail.engine.answer import Answer, Delta
from vitrail.engine.client import EngineClient, Listener
from vitrail.engine.ipc import Staged
from vitrail.engine.request import FinishReason, Output, TokenLogprob
from vitrail.tokenizer.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
_json = msgspec.json.encode


class ChoiceFailed(Exception):
    """A choice's own failure inside the engine."""


class Piece(NamedTuple):
    """What has been added to choice `index` since it was last read."""

    index: int
    answer: Answer
    delta: Delta


class Exchange:
    """Owns the answers of one HTTP request, from submission to the end of its last choice."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None):
        self._client = client
        self._tokenizer = tokenizer
        self._index: dict[str, int] = {}
        self.answers: list[Answer] = []
        self._num_open = 0
        self._pending: dict[int, list[Delta]] = {}
        self._failure: Refused | ChoiceFailed | None = None
        self._event = asyncio.Event()

    def submit(self, staged: Staged) -> None:
        """Hand the requests over. Raises `Refused` if the engine is gone."""
        self._client.submit(staged, Listener(self._take, self._fail))
        for request in staged.requests:
            self._index[request.id] = len(self.answers)
            self.answers.append(Answer(request, self._tokenizer))
        self._num_open = len(self.answers)

    async def read(self) -> list[Piece]:
        """Wait until something was added; each choice's additions are one piece. Empty when all are
        done. Raises `Refused` if the engine refused a request or ended, `ChoiceFailed` if a choice
        failed."""
        while self._num_open and not self._pending and self._failure is None:
            self._event.clear()
            await self._event.wait()
        if self._failure is not None:
            raise self._failure
        pending, self._pending = self._pending, {}
        return [Piece(i, self.answers[i], _merged(d)) for i, d in sorted(pending.items())]

    def close(self) -> None:
        """Abort whatever has not ended."""
        self._client.abort([a.request.id for a in self.answers if not a.done])

    def _take(self, output: Output) -> None:
        index = self._index[output.request_id]
        delta = self.answers[index].push(output)
        if delta.stopped_by_text:
            self._client.abort([output.request_id])
        if delta.finish_reason is not None:
            self._num_open -= 1
            if delta.finish_reason is FinishReason.ERROR:
                self._failure = ChoiceFailed(output.error)
        self._pending.setdefault(index, []).append(delta)
        self._event.set()

    def _fail(self, refused: Refused) -> None:
        self._failure = refused
        self._event.set()


def _merged(deltas: Sequence[Delta]) -> Delta:
    """One choice's additions as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        "".join(d.text for d in deltas),
        [i for d in deltas for i in d.token_ids],
        [row for d in deltas for row in d.logprobs],
        deltas[-1].finish_reason,
        deltas[-1].stopped_by_text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole HTTP request; a shared prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_of(answers: Sequence[Answer], prompt_lens: Sequence[int]) -> Usage:
    """`answers` of all choices, n a prompt in prompt order."""
    n = len(answers) // len(prompt_lens)
    return Usage(
        prompt_tokens=sum(prompt_lens),
        completion_tokens=sum(len(a.token_ids) for a in answers),
        cached_tokens=sum(a.cached_tokens for a in answers[::n]),
    )


class Writer:
    """Bytes of one response. `chat` chooses between the two routes' shapes."""

    def __init__(
        self,
        *,
        chat: bool,
        response_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer | None,
        logprobs: bool,
    ):
        self._chat = chat
        self._head = {"id": response_id, "created": created, "model": model}
        self._object = "chat.completion" if chat else "text_completion"
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        kind = "chat.completion.chunk" if chat else "text_completion"
        opening = _json({"id": response_id, "object": kind, "created": created, "model": model})
        self._prefix = b"data: " + opening[:-1] + b',"choices":[{"index":'
        self._usage_prefix = b"data: " + opening[:-1] + b',"choices":[],"usage":'
        self._body = b',"delta":{"content":' if chat else b',"text":'
        self._num_chars: dict[int, int] = defaultdict(int)

    def role(self, index: int) -> bytes:
        """A chat choice's first chunk."""
        delta = (
            b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        )
        return self._prefix + b"%d" % index + delta + b"\n\n"

    def chunk(self, piece: Piece) -> bytes:
        """A piece's text, and its end if it has one. Nothing to say gives no bytes."""
        index, _, delta = piece
        reason = delta.finish_reason
        if not delta.text and reason is None and not (self._logprobs and delta.logprobs):
            return b""
        logprobs = b"null"
        if self._logprobs and delta.logprobs:
            logprobs = _json(self._tokens(index, delta.logprobs, []))
        return b"".join(
            (
                self._prefix,
                b"%d" % index,
                self._body,
                _json(delta.text),
                b'},"logprobs":' if self._chat else b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                b"null" if reason is None else b'"%s"' % reason.value.encode(),
                b"}]}\n\n",
            )
        )

    def usage(self, usage: Usage) -> bytes:
        """The one chunk without choices."""
        return self._usage_prefix + _json(usage.json()) + b"}\n\n"

    def whole(self, answers: Sequence[Answer], usage: Usage, echoed: Sequence[str] = ()) -> bytes:
        """The response of a request that is not streamed. `echoed`: each prompt's text, before its
        choices' own; their prompt has logprobs in its first choice."""
        n = len(answers) // len(echoed) if echoed else 1
        choices = [
            self._choice(i, a, echoed[i // n], answers[i - i % n]) if echoed else self._choice(i, a)
            for i, a in enumerate(answers)
        ]
        return _json(
            {**self._head, "object": self._object, "choices": choices, "usage": usage.json()}
        )

    def _choice(
        self, index: int, answer: Answer, echoed: str = "", first: Answer | None = None
    ) -> dict[str, Any]:
        content = (
            {"message": {"role": "assistant", "content": answer.text}}
            if self._chat
            else {"text": echoed + answer.text}
        )
        before = [] if first is None else answer.request.prompt_token_ids[:1]
        rows = answer.logprobs if first is None else [*first.prompt_logprobs, *answer.logprobs]
        assert answer.finish_reason is not None, "answers are shown whole when they are done"
        return {
            "index": index,
            **content,
            "logprobs": self._tokens(index, rows, before) if self._logprobs else None,
            "finish_reason": answer.finish_reason.value,
        }

    def _tokens(
        self, index: int, rows: Sequence[TokenLogprob], unscored: Sequence[int]
    ) -> dict[str, Any]:
        """A choice's next tokens in the route's shape. `unscored`: ids before them that have no
        logprob, as an echo's first."""
        if self._chat:
            content = [
                {**self._token(r.token_id, r.logprob), "top_logprobs": self._top(r)} for r in rows
            ]
            return {"content": content, "refusal": None}
        texts = [self._text(i) for i in (*unscored, *(r.token_id for r in rows))]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(text)
        none = [None] * len(unscored)
        return {
            "tokens": texts,
            "token_logprobs": [*none, *(_finite(r.logprob) for r in rows)],
            "top_logprobs": [
                *none,
                *({self._text(i): _finite(v) for i, v in reversed(r.top)} for r in rows),
            ],
            "text_offset": offsets,
        }

    def _top(self, row: TokenLogprob) -> list[dict[str, Any]]:
        return [self._token(i, value) for i, value in row.top]

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {"token": self._text(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _text(self, token_id: int) -> str:
        """A token's text; bytes that are no text of their own are spelled, so that two such tokens
        differ."""
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        if not raw:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
