"""The flags of `vitrail check`. Nothing heavy is imported before the command runs."""

import argparse
from collections.abc import Callable

from vitrail.config.engine import EngineConfig


def add_check(
    command: argparse.ArgumentParser,
    default: str,
    read: Callable[[argparse.Namespace], EngineConfig],
) -> None:
    """What is asked of a checkpoint beside the engine's choices, which `read` reads back.
    `default`: the checkpoint where none is named."""
    command.add_argument(
        "model", nargs="?", default=default, help="folder, .gguf file or hub id; default the demo"
    )
    command.add_argument(
        "--gpu", help="h200, b300, ... or cpu; default what this machine has (see --device)"
    )
    command.add_argument(
        "--tp", type=int, nargs="+", action="extend", help="sizes of the tensor-parallel axis"
    )
    command.add_argument(
        "--image-size",
        action="append",
        default=[],
        metavar="WxH",
        help="a picture, in pixels; repeatable; default a spread",
    )
    command.add_argument(
        "--release",
        action="append",
        default=[],
        metavar="NAME==RELEASE",
        help="plan with this flash-attn-4 or nvidia-cutlass-dsl; default what is installed",
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    command.add_argument(
        "--compile", action="store_true", help="also compile every planned kernel for the GPU"
    )

    def run(args: argparse.Namespace) -> int:
        from vitrail.check.command import run

        return run(
            read(args),
            gpu=args.gpu,
            sizes=args.tp or [1],
            images=args.image_size,
            releases=args.release,
            as_json=args.json,
            compiles=args.compile,
        )

    command.set_defaults(run=run, refused=2)
