"""Asking a model in the terminal: `vitrail generate` and `vitrail chat`. Text streams as it
comes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Refused
from vitrail.engine.llm import LLM
from vitrail.engine.request import SamplingParams

HELP = "/image PATH adds a picture to the next message, /new starts over, /quit leaves"


class Terminal:
    """One conversation with one model. Owns the messages so far."""

    def __init__(self, config: EngineConfig, max_tokens: int, temperature: float):
        self._llm = LLM.from_config(config)
        self._params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        self._messages: list[dict[str, Any]] = []

    def ask(self, text: str, images: Sequence[Path] = (), label: str = "") -> None:
        """Send a message, print `label` and the answer as it comes, remember both. `Refused`, and
        nothing remembered, for a message that cannot be sent."""
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        prompt = self._llm.prepare([*self._messages, message])
        requests = self._llm.preparer.requests(prompt, self._params, "terminal")
        said: list[str] = []
        print(label, end="", flush=True)
        for answer, delta in self._llm.stream(requests):
            print(delta.text, end="", flush=True)
            said.append(delta.text)
            if answer.error is not None:
                raise RuntimeError(answer.error)
        print()
        self._messages += [message, {"role": "assistant", "content": "".join(said)}]

    def converse(self, images: Sequence[Path]) -> None:
        """Read messages until the end of input."""
        print(HELP)
        waiting = list(images)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            if line == "/quit":
                return
            if line == "/new":
                self._messages.clear()
                waiting.clear()
            elif line.startswith("/image "):
                waiting.append(Path(line.removeprefix("/image ").strip()))
            elif line.startswith("/"):
                print(HELP)
            elif line:
                try:
                    self.ask(line, waiting)
                except Refused as refused:
                    print(refused, file=sys.stderr)
                waiting.clear()
