"""Signatures of tensors are checked at call time: of each function the first calls of every test.
Its thousandth call in one test says little that its first did not, and checks of all calls were
two thirds of the time of an engine's tests."""

import functools
import inspect
from typing import Any

import jaxtyping
import jaxtyping._decorator

CALLS = 16  # of a function in a test that are checked

check_all = jaxtyping.jaxtyped
turn = 0  # a test's number


def next_test() -> None:
    global turn
    turn += 1


def check_first(fn: Any = None, /, **kwargs: Any) -> Any:
    """jaxtyping's own decorator, which goes through classes, properties and the like; a function
    within a function would be decorated anew at each call of it, and is left as it is."""
    if fn is None:
        return functools.partial(check_first, **kwargs)
    if not inspect.isfunction(fn):
        return check_all(fn, **kwargs)
    if "<locals>" in fn.__qualname__:
        return fn
    checked: Any = check_all(fn, **kwargs)
    seen, calls = -1, 0

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen, calls
        if seen != turn:
            seen, calls = turn, 0
        calls += 1
        return (checked if calls <= CALLS else fn)(*args, **kwargs)

    return called


def install(modules: list[str]) -> None:
    """Before any of `modules` is imported."""
    jaxtyping.jaxtyped = jaxtyping._decorator.jaxtyped = check_first
    jaxtyping.install_import_hook(modules, "beartype.beartype")
