"""An engine process that computes nothing: `python -m tests.server.parrot FD` speaks the engine's
messages and says each request's prompt back, id by id, over and over up to `max_tokens`, as fast as
it can. A request's seed may ask for a fault, or for a pace. Imports no torch."""

import itertools
import os
import socket
import sys
import time

from vitrail.config.finding import Finding
from vitrail.config.model import PatchRules
from vitrail.engine.ipc import Abort, EngineChannel, Ready, Refusal, Stats, Stepped, Submit
from vitrail.engine.prepare import ServingFacts
from vitrail.engine.request import EngineRequest, FinishReason, Output
from vitrail.models.checkpoint import open_checkpoint

# What a seed asks for.
FAIL_FIRST, FAIL_LATER, REFUSE, DIE, MUTE, BURST = range(1001, 1007)
BURST_TOKENS = 50
PACE = 10_000  # and above: that many steps a second more


class Speaker:
    """One request: what it still has to say."""

    def __init__(self, request: EngineRequest):
        self.request = request
        self._ids = itertools.cycle(request.prompt_token_ids)
        self.num_said = 0

    def step(self) -> Output | None:
        """Its next output."""
        seed, left = self.request.seed, self.request.max_tokens - self.num_said
        if seed in (FAIL_LATER, DIE):
            time.sleep(0.05)  # what was said before has left the server
        if seed == FAIL_FIRST or (seed == FAIL_LATER and self.num_said == 3):
            return self._output([], FinishReason.ERROR, "RuntimeError: as asked")
        if seed == DIE and self.num_said == 3:
            os._exit(7)
        if seed == MUTE:
            return None
        count = min(left, BURST_TOKENS if seed == BURST else 1)
        self.num_said += count
        ids = list(itertools.islice(self._ids, count))
        return self._output(ids, FinishReason.LENGTH if count == left else None)

    def _output(
        self, ids: list[int], reason: FinishReason | None, error: str | None = None
    ) -> Output:
        return Output(request_id=self.request.id, token_ids=ids, finish_reason=reason, error=error)


def main(fd: int) -> None:
    """Until the frontend is gone."""
    channel = EngineChannel(socket.socket(fileno=fd))
    start = channel.start()
    checkpoint = open_checkpoint(str(start.config["model"]))
    text = checkpoint.config["text_config"]
    facts = ServingFacts(
        vocab_size=text["vocab_size"],
        max_model_len=1 << 20,
        eos_token_ids=(text["eos_token_id"],),
        image_token_id=checkpoint.config["media_placeholder_token_id"],
        encoder_patches=1 << 12,
        kv_tokens=1 << 20,
        patch_rules=PatchRules(patch_size=14, merge=2),
        video_frames=8,
    )
    channel.send(Ready(facts=facts))
    speakers: dict[str, Speaker] = {}
    steps = 0
    due = time.perf_counter()
    try:
        while True:
            is_quiet = all(s.request.seed == MUTE for s in speakers.values())
            for message in channel.receive(wait=is_quiet):
                if isinstance(message, Submit):
                    for request in message.requests:
                        if request.seed == REFUSE:
                            channel.send(Refusal(findings=[FULL], request_id=request.id))
                        else:
                            speakers[request.id] = Speaker(request)
                elif isinstance(message, Abort):
                    for each in message.ids:
                        speakers.pop(each, None)
            pace = max((s.request.seed - PACE for s in speakers.values()), default=0)
            if 0 < pace < PACE:
                due = max(due + 1 / pace, time.perf_counter() - 0.1)  # late is late
                time.sleep(max(0.0, due - time.perf_counter()))
            outputs = [o for s in speakers.values() if (o := s.step()) is not None]
            for output in outputs:
                if output.finish_reason is not None:
                    del speakers[output.request_id]
            steps += 1
            channel.send(Stepped(outputs=outputs, stats=stats(len(speakers), steps)))
    except (EOFError, ConnectionError):
        return


FULL = Finding(
    where="queue",
    saw="as asked",
    rule="some seeds are refused",
    change="send another",
    code="overloaded",
)


def stats(running: int, steps: int) -> Stats:
    return Stats(
        running=running,
        waiting=0,
        free_pages=1,
        num_pages=1,
        steps_total=steps,
        preemptions_total=0,
        images_encoded_total=0,
        cache_hit_tokens_total=0,
        cache_query_tokens_total=0,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
