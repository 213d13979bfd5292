"""Holds ops made of kernels to their definitions, on the arguments that they are called with: in a
process that looks for a wrong kernel, and in the script that shows one."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.attention.fault import OpFault, op_fault

SLACK = 1e-5  # of the largest value: sums in another order
OPS = Path(__file__).parents[1] / "ops"


def held(op: Callable[..., Any], definition: Callable[..., Any], given: list[Any]) -> str:
    """What is wrong with a result, or with an argument afterwards: whole numbers that differ; an
    error against the definition in fp32 of more than twice that of the definition in the given
    dtype. "" if nothing is. `given` stays as it is."""
    wide = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given]
    (exact, ends), (own, own_ends), (got, got_ends) = (
        _run(f, arguments)
        for f, arguments in ((definition, wide), (definition, given), (op, given))
    )
    for i, before in enumerate(given):  # an op may write where its definition does not
        if isinstance(before, Tensor) and not torch.equal(own_ends[i], before):
            exact, own, got = [*exact, ends[i]], [*own, own_ends[i]], [*got, got_ends[i]]
    for i, (e, o, g) in enumerate(zip(exact, own, got, strict=True)):
        if not g.is_floating_point():
            wrong = int((g != e).sum())
            if wrong:
                return f"result {i}: {wrong} of {g.numel()} differ"
        elif g.numel():
            allowed = 2 * _far(o, e) + SLACK * (1 + float(e.abs().nan_to_num().max()))
            if not _far(g, e) <= allowed:
                return f"result {i}: {_far(g, e):.3g} from the definition, {allowed:.3g} allowed"
    return ""


def _run(f: Callable[..., Any], given: list[Any]) -> tuple[list[Tensor], list[Any]]:
    """Results, and arguments as `f` left them."""
    copies = copied(given)
    made = f(*copies)
    results = made if isinstance(made, tuple) else (made,)
    return [t for t in results if isinstance(t, Tensor)], copies


def copied(given: Iterable[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in given]


def _far(a: Tensor, b: Tensor) -> float:
    far = torch.where(a.isnan() & b.isnan(), 0.0, (a.double() - b.double()).abs())
    return float(torch.where(far.isnan(), torch.inf, torch.where(a == b, 0.0, far)).max())


def watch_ops(found: Callable[[OpFault, str], None]) -> None:
    """From now on say of every op that differs from its definition, and how: of those with the
    definition's name, in a module beside it."""
    for path in sorted(OPS.glob("*/naive.py")):
        naive = importlib.import_module(f"vitrail.ops.{path.parent.name}.naive")
        for beside in sorted(path.parent.glob("[a-z]*.py")):
            module = importlib.import_module(f"vitrail.ops.{path.parent.name}.{beside.stem}")
            for name, definition in inspect.getmembers(naive, inspect.isfunction):
                op: Any = vars(module).get(name)
                own = inspect.isfunction(op) and op.__module__ == module.__name__ != naive.__name__
                if own and definition.__module__ == naive.__name__ and not name.startswith("_"):
                    setattr(module, name, _watched(op, definition, found))


def _watched(
    op: Callable[..., Any], definition: Callable[..., Any], found: Callable[[OpFault, str], None]
) -> Callable[..., Any]:
    @wraps(op)
    def call(*given: Any, **more: Any) -> Any:
        fault = None if more else op_fault(op, definition, given)
        before = copied(given) if fault else []
        made = op(*given, **more)  # what it refuses is no fault
        if fault is not None:
            with suppress(TypeError):  # the definition does not take these
                if wrong := held(op, definition, before):
                    found(fault, wrong)
        return made

    return call
