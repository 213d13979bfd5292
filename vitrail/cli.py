"""The command line: `vitrail serve | generate | chat | check | bench | nightly | repro`. Engine
flags are generated from `EngineConfig`; `tests/test_cli.py` freezes the list. Heavy rooms are
imported by the command that needs them, so that `--help` and bad flags answer at once."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from vitrail.bench.flags import EngineChoices, add_bench, add_profile_flags, profile_window
from vitrail.check.flags import add_check
from vitrail.config.engine import EngineConfig
from vitrail.config.env import read_env
from vitrail.config.finding import Refused
from vitrail.nightly.flags import add_nightly
from vitrail.repro.flags import add_repro

DEMO = Path(__file__).parent / "demo"
DEMO_PICTURE = DEMO / "picture.png"
DEMO_QUESTION = "What does the sign say?"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 refused or failed, 2 bad flags, 130 interrupted. Where 1 is a verdict
    (`check`, `repro`, `nightly`), what is refused unseen is 2."""
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        args.command.error(_unrecognized(unknown, args.command.format_help()))
    try:
        env = read_env()
        logging.basicConfig(level=env.log.upper(), format="%(levelname)s %(name)s: %(message)s")
        return args.run(args)
    except Refused as refused:
        for finding in refused.findings:
            print(f"vitrail: {finding}", file=sys.stderr)
        return args.refused
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="vitrail", description="Serve vision-language models.")
    top.set_defaults(refused=1)
    commands = top.add_subparsers(required=True, metavar="command")
    serve = commands.add_parser("serve", help="an OpenAI-compatible server")
    serve.set_defaults(run=_serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on")
    serve.add_argument("--served-model-name", help="name in /v1/models; default the model's")
    serve.add_argument(
        "--http", choices=("granian", "uvicorn"), default="granian", help="HTTP server"
    )
    add_profile_flags(serve)
    generate = commands.add_parser("generate", help="answer one prompt and exit")
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt", nargs="?", help=f"default: {DEMO_QUESTION!r} of the demo")
    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.set_defaults(run=_chat)
    for command in (generate, chat):
        command.add_argument(
            "--image", action="append", default=[], help="picture file; repeatable"
        )
        command.add_argument("--max-tokens", type=int, default=256, help="longest answer, tokens")
        command.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    for command in (serve, generate, chat):
        add_engine_flags(command)
    check = commands.add_parser("check", help="will it run? asked without a GPU or weights")
    add_check(check, str(DEMO), engine_config)
    add_engine_flags(check, without=("model",))
    bench = commands.add_parser("bench", help="measure a server, an engine, a vision tower")
    add_bench(bench, EngineChoices(add=add_engine_flags, read=engine_config))
    add_nightly(commands.add_parser("nightly", help="run the night's tests, and say what failed"))
    add_repro(commands.add_parser("repro", help="a failed step again, from what it left behind"))
    for command in commands.choices.values():
        command.set_defaults(command=command)
    return top


def _unrecognized(words: Sequence[str], help_text: str) -> str:
    """The words, and of each flag among them the nearest that there is."""
    known = dict.fromkeys(re.findall(r"--[a-z][a-z-]*", help_text))
    nearest = [m for w in words for m in get_close_matches(w.partition("=")[0], known, n=1)]
    hint = f"; the nearest is {', '.join(nearest)}" if nearest else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def add_engine_flags(command: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """One flag a field of `EngineConfig`, but for those that the command has as arguments; the
    model defaults to the demo that ships with Vitrail."""
    group = command.add_argument_group("engine")
    for f in fields(EngineConfig):
        if f.name in without:
            continue
        flag = f"--{f.name.replace('_', '-')}"
        default = str(DEMO) if f.default is MISSING else f.default
        shown = "the demo model" if f.default is MISSING else f.default
        text = f"{f.metadata['help']} (default: {shown})".replace("%", "%%")
        group.add_argument(flag, default=default, help=text, **_kind(f))


def _kind(f: "Field[Any]") -> dict[str, Any]:
    kind = f.type
    if isinstance(kind, UnionType):
        (kind,) = (k for k in get_args(kind) if k is not NoneType)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's part of parsed flags."""
    values = vars(args)
    return EngineConfig(**{f.name: values[f.name] for f in fields(EngineConfig)})


def _serve(args: argparse.Namespace) -> int:
    from vitrail.server.run import serve

    return serve(
        engine_config(args),
        host=args.host,
        port=args.port,
        name=args.served_model_name,
        http=args.http,
        api_key=read_env().api_key,
        profile=profile_window(args),
    )


def _generate(args: argparse.Namespace) -> int:
    from vitrail.engine.terminal import Terminal

    images = [Path(p) for p in args.image]
    if args.prompt is None:
        if args.model != str(DEMO) or images:
            print("vitrail generate: a prompt is needed with --model or --image", file=sys.stderr)
            return 2
        images = [DEMO_PICTURE]
    question = args.prompt or DEMO_QUESTION
    terminal = Terminal(engine_config(args), args.max_tokens, args.temperature)
    for image in images:
        print(f"picture:  {image}")
    print(f"question: {question}")
    terminal.ask(question, images, label="answer:   ")
    return 0


def _chat(args: argparse.Namespace) -> int:
    from vitrail.engine.terminal import Terminal

    terminal = Terminal(engine_config(args), args.max_tokens, args.temperature)
    terminal.converse([Path(p) for p in args.image])
    return 0


if __name__ == "__main__":
    sys.exit(main())
