"""What failed within one kernel, as data from which it can be made to fail again without an engine:
a launch, read out of the traceback of what it raised, or a planner's rule, read out of the finding.
A launch that does not raise costs nothing. No torch."""

from collections.abc import Iterator, Sequence
from inspect import signature
from types import FrameType
from typing import Any

import msgspec

from vitrail.attention.legality import Rule, broken
from vitrail.attention.plan import KERNEL_BACKENDS
from vitrail.attention.tiles import Choice, Facts
from vitrail.config.finding import Refused

LAUNCHES = (
    "launch",
    "launch_early",
)  # of ops/launch: (kernel, grid, device, *arguments, **constants)
# functions that compile: (launch, cc) with a local `source`; (self, cc) with an attribute of it
COMPILES = (("attention/compile.py", "compile_launch"), ("ops/compile.py", "compile"))
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
SIZES = (*range(1, 9), *(1 << i for i in range(4, 13)))
NAMES = ("kernel", "loader", "pack")  # of a choice's numbers, those that are no sizes
Number = int | float | bool | str | None


class Array(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor: `offset` elements behind an address of 16 bytes. `values` of integers, flat, where
    they were asked for; `block`: of a tensor descriptor."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    values: tuple[int, ...] | None = None
    block: tuple[int, ...] = ()


class LaunchFault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="launch"
):
    """`kernel` is MODULE:NAME; `arguments` by its parameters; `constants` with the options of the
    launch, a type of Triton's as "tl.NAME". `cc`: compiled for this and not launched; `types`
    then, and which are `aligned`."""

    kernel: str
    grid: tuple[int, ...] = ()
    arguments: dict[str, Array | Number] = {}
    constants: dict[str, Number] = {}
    cc: int = 0
    types: dict[str, str] = {}
    aligned: tuple[str, ...] = ()


class RuleFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rule"):
    """`choose` is MODULE:NAME of a backend's arithmetic, `holds` MODULE:LINE of the rule. `legal`:
    the least change of one number of the choice that every rule allows, {} if there is none."""

    backend: str
    rule: str
    saw: str
    says: str
    choose: str
    holds: str
    facts: dict[str, int]
    choice: dict[str, int]
    legal: dict[str, int] = {}


class OpFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="op"):
    """An op that differs from its definition, each MODULE:NAME, on arguments like these."""

    op: str
    definition: str
    arguments: dict[str, Array | Number]


KernelFault = LaunchFault | RuleFault | OpFault


def kernel_fault(error: BaseException, values: bool = False) -> KernelFault | None:
    """Of an error, if a kernel's launch, compilation or plan is what raised. `values`: with those
    of integer tensors of up to 4,096, which may be tokens: where it is known that they are not."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Refused):
            return _rule_fault(cause)
        for frame in _frames(cause):
            file, function, given = frame.f_code.co_filename, frame.f_code.co_name, frame.f_locals
            if file.endswith("ops/launch.py") and function in LAUNCHES:
                return _launch_fault(given, values)
            if any(file.endswith(f) and function == name for f, name in COMPILES):
                return _compile_fault(given)
        cause = cause.__cause__
    return None


def op_fault(op: Any, definition: Any, given: Sequence[Any]) -> OpFault | None:
    """A call as data, with the values of small integer tensors; None where an argument is neither
    tensor nor number."""
    arguments = {
        n: _argument(a, True) for n, a in zip(signature(op).parameters, given, strict=False)
    }
    if any(isinstance(a, str) for a in arguments.values()):
        return None
    return OpFault(op=_symbol(op), definition=_symbol(definition), arguments=arguments)


def _frames(error: BaseException) -> Iterator[FrameType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def _launch_fault(given: dict[str, Any], values: bool) -> LaunchFault:
    kernel, arguments = given["kernel"], given["arguments"]
    names = kernel.arg_names
    return LaunchFault(
        kernel=_symbol(kernel.fn),
        grid=tuple(given["grid"]),
        arguments={n: _argument(a, values) for n, a in zip(names, arguments, strict=False)},
        constants={n: _number(c) for n, c in given["constants"].items()},
    )


def _compile_fault(given: dict[str, Any]) -> LaunchFault:
    asked = given.get("launch") or given["self"]
    source = given["source"] if "launch" in given else asked.source
    names = source.fn.arg_names
    constants = {names[i]: value for (i, *_), value in source.constants.items()}
    options = {name: value for name, value in asked.options.items() if name in OPTIONS}
    return LaunchFault(
        kernel=_symbol(source.fn.fn),
        constants={n: _number(c) for n, c in {**constants, **options}.items()},
        cc=given["cc"],
        types={name: kind for name, kind in source.signature.items() if kind != "constexpr"},
        aligned=tuple(names[i] for (i, *_), what in source.attrs.items() if what),
    )


def _symbol(function: Any) -> str:
    return f"{function.__module__}:{function.__name__}"


def _argument(value: Any, values: bool) -> Array | Number:
    if hasattr(value, "block_shape"):  # Triton's descriptor of a tensor
        return msgspec.structs.replace(_array(value.base, False), block=tuple(value.block_shape))
    return _array(value, values) if hasattr(value, "data_ptr") else _number(value)


def _array(tensor: Any, values: bool) -> Array:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    kept = values and whole and tensor.numel() <= 4096
    return Array(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=tensor.data_ptr() % 16 // tensor.element_size(),
        values=tuple(int(v) for v in tensor.flatten().tolist()) if kept else None,
    )


def _number(value: Any) -> Number:
    """As JSON has it. Triton's types and tensors of one element by what they stand for."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"tl.{value.name}" if hasattr(value, "primitive_bitwidth") else str(value)


def _rule_fault(refused: Refused) -> RuleFault | None:
    for found in refused.findings:
        if found.evidence is None or found.severity != "error":
            continue
        backend, facts, choice = found.evidence
        known = KERNEL_BACKENDS[backend]
        (rule,) = (r for r in known.rules if found.code == f"attention_{r.name}")
        return RuleFault(
            backend=backend,
            rule=rule.name,
            saw=found.saw,
            says=rule.rule,
            choose=f"{known.choose.__module__}:{known.choose.__qualname__}",
            holds=f"{rule.holds.__module__}:{rule.holds.__code__.co_firstlineno}",
            facts=dict(facts),
            choice=dict(choice),
            legal=legal(known.rules, rule, Facts(**facts), Choice(**choice)),
        )
    return None


def legal(rules: tuple[Rule, ...], rule: Rule, f: Facts, c: Choice) -> dict[str, int]:
    """The least change of one number that `rule` reads after which it holds, and no other of
    `rules` is broken that was not before."""
    read = [n for n in rule.holds.__code__.co_names if n in Choice._fields and n not in NAMES]
    tries = sorted((abs(v - getattr(c, n)), n, v) for n in read for v in SIZES)
    before = [r for r in broken(rules, f, c) if r is not rule]
    for _, name, value in tries:
        if all(r in before for r in broken(rules, f, c._replace(**{name: value}))):
            return {name: value}
    return {}
