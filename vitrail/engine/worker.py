"""The engine's process: `python -m vitrail.engine.worker FD`, started by `client.py` with one end
of a socket pair. Ends when the frontend does."""

import gc
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

from vitrail.config.engine import EngineConfig
from vitrail.config.env import read_env
from vitrail.config.finding import Refused
from vitrail.engine.ahead import Ahead
from vitrail.engine.ipc import (
    Abort,
    EngineChannel,
    Loading,
    ProfileWindow,
    Ready,
    Refusal,
    Stepped,
    Submit,
)
from vitrail.engine.request import Output
from vitrail.models.assets import load_assets
from vitrail.models.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from vitrail.engine.build import Built
    from vitrail.engine.engine import Engine


def main(fd: int) -> int:
    """Exit codes: 0 the frontend is gone, 1 the engine was refused."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-C is the frontend's
    logging.basicConfig(level=read_env().log.upper(), format="%(levelname)s %(name)s: %(message)s")
    channel = EngineChannel(socket.socket(fileno=fd))
    try:
        try:
            engine, facts = _build(channel)
        except Refused as refused:
            channel.send(Refusal(findings=list(refused.findings)))
            return 1
        # What start-up made stays; collections between steps need not walk through it.
        gc.collect()
        gc.freeze()
        channel.send(Ready(facts=facts))
        channel.send(Stepped(outputs=[], stats=engine.stats()))
        while True:
            serve_once(channel, engine)
    except (EOFError, ConnectionError):  # nobody is left to compute for
        return 0


def _build(channel: EngineChannel) -> "Built":
    start = channel.start()
    config = EngineConfig(**start.config)  # pyright: ignore[reportArgumentType]
    with Ahead.begin(config) as ahead:
        return _build_beside(channel, config, start.profile, ahead)


def _build_beside(
    channel: EngineChannel, config: EngineConfig, window: ProfileWindow | None, ahead: Ahead
) -> "Built":
    from vitrail.engine.build import build_engine  # torch, for seconds

    checkpoint = open_checkpoint(config.model, config.revision)
    processor = load_assets(checkpoint).processor

    def progress(done: int, total: int, name: str) -> None:
        channel.send(Loading(done=done, total=total, name=name))

    capsules = read_env().capsules
    built = build_engine(config, checkpoint, processor, progress, ahead, capsules)
    if window is None:
        return built
    from vitrail.engine.profile import profiled

    engine = profiled(built.engine, config, checkpoint, window)
    return built._replace(engine=engine)


def serve_once(channel: EngineChannel, engine: "Engine") -> None:
    """Take what has arrived (waiting for it when there is nothing to compute), run one step, send
    what it gave."""
    outputs: list[Output] = []
    for message in channel.receive(wait=engine.idle):
        if isinstance(message, Submit):
            for request in message.requests:
                try:
                    engine.add(request)
                except Refused as refused:
                    channel.send(Refusal(findings=list(refused.findings), request_id=request.id))
        elif isinstance(message, Abort):
            ended = [engine.abort(each) for each in message.ids]
            outputs += [output for output in ended if output is not None]
    outputs += engine.step()
    channel.send(Stepped(outputs=outputs, stats=engine.stats()))
    if engine.idle:
        engine.rest()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
