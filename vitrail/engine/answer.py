"""The text of one choice as its tokens arrive: detokenised, stop strings cut, counted. Shared by
the offline API, the terminal and the server. No torch."""

from typing import NamedTuple

from vitrail.engine.request import EngineRequest, FinishReason, Output, TokenLogprob
from vitrail.tokenizer.detokenize import Detokenizer, StopChecker
from vitrail.tokenizer.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What one step added. `stopped_by_text`: a stop string was met, so the engine's request must
    be aborted by the caller. `logprobs` belong to `token_ids`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    stopped_by_text: bool = False


class Answer:
    """Owns one request's text, tokens and end. Without a tokenizer its text stays empty."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None):
        self.request = request
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.cached_tokens = 0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        stops = request.params.stop
        self._stops = StopChecker(stops, request.params.include_stop) if stops else None

    @property
    def text(self) -> str:
        """All that may be shown so far."""
        return "".join(self._pieces)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: Output) -> Delta:
        """Take one output of this request. Outputs after the end are dropped."""
        if self.done:
            return Delta("", [], [], None)
        self.prompt_logprobs += output.prompt_logprobs or []
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        spoken = output.token_ids
        if output.stop_token_id is not None and not self.request.params.include_stop:
            spoken = spoken[:-1]
        text, stop = self._speak(spoken, ends=output.finish_reason is not None)
        self._pieces.append(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        else:
            self.finish_reason, self.error = output.finish_reason, output.error
            self.stop_reason = output.stop_token_id
        early = stop is not None and output.finish_reason is None
        return Delta(text, output.token_ids, output.logprobs or [], self.finish_reason, early)

    def drop_output(self) -> None:
        """Forget what was generated, for an echo alone."""
        self._pieces, self.token_ids, self.logprobs = [], [], []

    def _speak(self, ids: list[int], ends: bool) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(ids)
        if ends:
            text += self._detokenizer.finish()
        if self._stops is None:
            return text, None
        found = self._stops.push(text)
        if found.stop is None and ends:
            return found.text + self._stops.finish(), None
        return found.text, found.stop
