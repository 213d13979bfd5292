"""The flags of `vitrail bench`, and what they mean. Nothing heavy is imported before a command
runs."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.config.engine import EngineConfig
from vitrail.config.env import read_env
from vitrail.config.finding import Finding, Refused

if TYPE_CHECKING:
    from vitrail.bench.report import Outputs
    from vitrail.bench.serve import Work
    from vitrail.engine.ipc import ProfileWindow

EngineFlags = Callable[[argparse.ArgumentParser], None]
ReadConfig = Callable[[argparse.Namespace], EngineConfig]
MIXES = ("1024x1024", "8*1024x1024", "224x224,448x336,640x480,1024x768,1344x1008")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoices:
    """How the command line adds the engine's flags to a command, and reads them back."""

    add: EngineFlags
    read: ReadConfig


def add_bench(bench: argparse.ArgumentParser, engine: EngineChoices) -> None:
    """The three commands under `bench`."""
    commands = bench.add_subparsers(required=True, metavar="what")
    serve = commands.add_parser("serve", help="a running server, or two in turns")
    _serve_flags(serve)
    _workload_flags(serve)
    serve.set_defaults(run=_serve)
    offline = commands.add_parser("offline", help="the engine in this process, without a server")
    _workload_flags(offline)
    add_profile_flags(offline)
    engine.add(offline)
    offline.set_defaults(run=lambda args: _offline(args, engine.read(args)))
    vision = commands.add_parser("vision", help="the vision tower alone")
    vision.add_argument(
        "--mix",
        action="append",
        help="pictures encoded at once: COUNT*WIDTHxHEIGHT joined by commas; repeatable "
        f"(default: {' and '.join(MIXES)})",
    )
    vision.add_argument("--runs", type=int, default=20, help="timed runs of each mix")
    vision.add_argument("--json", type=Path, help="file for the report")
    engine.add(vision)
    vision.set_defaults(run=lambda args: _vision(args, engine.read(args)))


def _serve_flags(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--url", required=True, help="a server's address, http://HOST:PORT")
    serve.add_argument("--against", help="another server: both run in turns and are compared")
    serve.add_argument("--model", help="model name to ask for; default the first one served")
    serve.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    serve.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length (vLLM, SGLang and Vitrail understand it)",
    )


def add_profile_flags(command: argparse.ArgumentParser) -> None:
    """Which steps of an engine are recorded, and where to."""
    command.add_argument(
        "--profile",
        metavar="FOLDER",
        help="record some steps: a Chrome trace, and where their time went beside its floor",
    )
    command.add_argument(
        "--profile-steps",
        metavar="SKIP:COUNT",
        default="64:16",
        help="which steps, counted from the start (default: 64:16)",
    )


def profile_window(args: argparse.Namespace) -> "ProfileWindow | None":
    """What the flags ask for, if anything. Raises `Refused`."""
    if args.profile is None:
        return None
    from vitrail.engine.ipc import ProfileWindow

    skip, _, steps = args.profile_steps.partition(":")
    if not (skip.isdecimal() and steps.isdecimal() and int(steps)):
        rule = "SKIP:COUNT, of which COUNT is at least 1"
        raise Refused(_flag("profile_steps", args.profile_steps, rule, "for example 64:16"))
    return ProfileWindow(folder=args.profile, skip=int(skip), steps=int(steps))


def _workload_flags(command: argparse.ArgumentParser) -> None:
    """What is asked, when, how often, and where the report goes."""
    group = command.add_argument_group("workload")

    def number(flag: str, default: int, text: str) -> None:
        group.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")

    group.add_argument("--file", type=Path, help="JSONL of requests instead of synthetic ones")
    number("--prompt-tokens", 1024, "tokens of each prompt of its own")
    number("--output-tokens", 128, "tokens of each answer")
    number("--pictures", 0, "new pictures of noise in each request")
    group.add_argument(
        "--picture-size", default="1024x1024", help="WIDTHxHEIGHT (default: 1024x1024)"
    )
    number("--shared-tokens", 0, "tokens before them that every request has")
    number("--shared-pictures", 0, "pictures that every request has")
    group.add_argument(
        "--ids", default="0:30000", help="random ids are of LOW:HIGH (default: 0:30000)"
    )
    number("--requests", 64, "requests in a run")
    group.add_argument("--concurrency", type=int, help="requests at any time (default: 8)")
    group.add_argument("--rate", type=float, help="instead: Poisson arrivals, requests a second")
    number("--runs", 3, "runs shown; of two servers each")
    number("--warm-up", 1, "runs before them that are not shown")
    number("--load-seed", 0, "seed of requests and arrivals")
    group.add_argument("--json", type=Path, help="file for the report")
    group.add_argument("--plot", type=Path, help="file for an SVG of the distributions")


def _work(args: argparse.Namespace) -> "Work":
    """The flags' workload. Raises `Refused` with every flag that is out of range."""
    from vitrail.bench.serve import Work
    from vitrail.bench.workload import Closed, Poisson, Synthetic, parse_size, read_lines

    found = [
        _at_least(name, value, minimum)
        for name, minimum in (
            *(("prompt_tokens", 0), ("output_tokens", 1), ("pictures", 0), ("shared_tokens", 0)),
            *(("shared_pictures", 0), ("requests", 1), ("concurrency", 1), ("runs", 1)),
            *(("warm_up", 0), ("load_seed", 0)),
        )
        if (value := vars(args)[name]) is not None and value < minimum
    ]
    low, _, high = args.ids.partition(":")
    ids = (int(low), int(high)) if low.isdecimal() and high.isdecimal() else (0, 0)
    if ids[0] >= ids[1]:
        found.append(_flag("ids", args.ids, "LOW:HIGH, rising", "for example 0:30000"))
    if args.rate is not None and not 0 < args.rate < 1e6:
        found.append(_flag("rate", args.rate, "above 0 a second", "for example 4"))
    if args.rate is not None and args.concurrency is not None:
        saw = f"{args.rate} a second, and {args.concurrency} at any time"
        found.append(_flag("rate", saw, "one of the two", "leave one out"))
    pictures = args.pictures + args.shared_pictures
    if args.file is None and args.prompt_tokens + args.shared_tokens + pictures < 1:
        found.append(_flag("prompt_tokens", 0, "a prompt has something", "ask for 1 or more"))
    if found:
        raise Refused(found)
    return Work(
        workload=read_lines(args.file)
        if args.file is not None
        else Synthetic(
            prompt_len=args.prompt_tokens,
            output_len=args.output_tokens,
            num_pictures=args.pictures,
            picture_size=parse_size(args.picture_size, "picture_size"),
            shared_len=args.shared_tokens,
            num_shared_pictures=args.shared_pictures,
            ids=ids,
        ),
        arrivals=Closed(concurrency=args.concurrency or 8)
        if args.rate is None
        else Poisson(rate=args.rate),
        requests=args.requests,
        runs=args.runs,
        warm_up=args.warm_up,
        seed=args.load_seed,
    )


def _outputs(args: argparse.Namespace) -> "Outputs":
    """Where the report goes. Raises `Refused` before anything is measured, not after."""
    from vitrail.bench.report import Outputs

    found = [
        _flag(name, path, "a file in a folder that is there", "give another path")
        for name, path in (("json", args.json), ("plot", args.plot))
        if path is not None and (path.is_dir() or not path.parent.is_dir())
    ]
    if found:
        raise Refused(found)
    return Outputs(json=args.json, plot=args.plot)


def _serve(args: argparse.Namespace) -> int:
    from vitrail.bench.serve import Asked, bench_serve

    asked = Asked(
        urls=(args.url,) if args.against is None else (args.url, args.against),
        model=args.model,
        api_key=read_env().api_key,
        ignore_eos=args.ignore_eos,
        timeout_s=args.timeout,
    )
    return bench_serve(asked, _work(args), _outputs(args))


def _offline(args: argparse.Namespace, config: EngineConfig) -> int:
    from vitrail.bench.offline import bench_offline

    return bench_offline(config, _work(args), _outputs(args), profile_window(args))


def _vision(args: argparse.Namespace, config: EngineConfig) -> int:
    from vitrail.bench.vision import bench_vision, parse_mix

    if args.runs < 1:
        raise Refused(_at_least("runs", args.runs, 1))
    mixes = [parse_mix(text) for text in args.mix or MIXES]
    return bench_vision(config, mixes, args.runs, args.json)


def _at_least(name: str, value: int, minimum: int) -> Finding:
    return _flag(name, value, f"at least {minimum}", f"ask for {minimum} or more")


def _flag(name: str, saw: object, rule: str, change: str) -> Finding:
    return Finding(where=f"--{name.replace('_', '-')}", saw=str(saw), rule=rule, change=change)
