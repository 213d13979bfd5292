"""A kernel's failure as one file without the engine: the kernel's source, arguments of the recorded
shapes from a seed, the launch; or a planner's arithmetic, the numbers, the rule. What is recorded
is not trusted: it becomes literals, and names only where it is one; what is called by a name is a
kernel, an op beside its definition, or a planner's arithmetic and rule."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from vitrail.attention.fault import (
    OPTIONS,
    Array,
    KernelFault,
    LaunchFault,
    Number,
    OpFault,
    RuleFault,
)
from vitrail.attention.plan import KERNEL_BACKENDS
from vitrail.config.finding import Finding, Refused
from vitrail.repro.kernel_source import Flat, Flattener, Symbol, is_kernel

V = TypeVar("V")
SYMBOL = re.compile(r"(vitrail(?:\.\w+)+):(\w+)")

TENSOR = '''
DEVICE = "cuda" if ON_GPU else "cpu"
GENERATOR = torch.Generator(DEVICE).manual_seed(0)


def tensor(dtype, shape, stride, offset=0, values=None, block=()):
    """From the seed: floats are normal; integers those recorded, else zeros."""
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride) if n)
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        flat = torch.randn(size, generator=GENERATOR, device=DEVICE).to(kind)
    else:
        flat = torch.zeros(size, dtype=kind, device=DEVICE)
    made = flat.as_strided(shape, stride, offset)
    if values is not None:
        made.copy_(torch.tensor(values, dtype=kind).view(shape))
    if not block:
        return made
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(made, list(shape), list(stride), list(block))
'''
RUN = """
def launch(changes):
    constants = CONSTANTS | changes
    if not ON_GPU:
        constants.pop("launch_pdl", None)
        constants |= {"EARLY": False} if "EARLY" in constants else {}
    KERNEL[GRID](*arguments(), **constants)
    if ON_GPU:
        torch.cuda.synchronize()
"""
COMPILE = '''
def launch(changes):
    """Compiled for compute capability CC, on any machine; nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    every = CONSTANTS | changes
    options = {n: v for n, v in every.items() if n in OPTIONS}
    constants = {n: v for n, v in every.items() if n not in OPTIONS}
    names = KERNEL.arg_names
    types = TYPES | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        KERNEL,
        {n: types[n] for n in names},
        {(names.index(n),): v for n, v in constants.items() if n in names},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ALIGNED},
    )
    triton.compile(source, GPUTarget("cuda", CC, 32), options)
'''
MAIN = '''
def fixes():
    """Nearest first: tiles that are powers of two, fewer stages, other warps, smaller tiles."""
    tiles = {n: CONSTANTS[n] for n in TILES}
    legal = {n: max(1 << max(v - 1, 0).bit_length(), 1) for n, v in tiles.items()}
    up = {n: v for n, v in legal.items() if v != tiles[n]}
    yield up
    for stages in range(CONSTANTS.get("num_stages", 3) - 1, 0, -1):
        yield up | {"num_stages": stages}
    for warps in (8, 4, 2, 1, 16):
        yield up | {"num_warps": warps}
    for by in (2, 4, 8):
        yield {n: max(v // by, 1) for n, v in legal.items()} | {"num_stages": 1}


def main():
    tries = [change for change in fixes() if change] if "--fixed" in sys.argv else [{}]
    for change in tries:
        try:
            launch(change)
        except Exception as error:
            print(f"{change or 'as recorded'}: {type(error).__name__}: {error}")
            continue
        if SEEN_ON_GPU and not ON_GPU:
            print(f"cannot tell: seen on {SEEN_ON_GPU}; Triton's interpreter does not show it")
            return 2
        print(f"with {change} it passes" if change else "it passes")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
'''
OP = '''
def main():
    """0 where the op's results are the definition's; with --fixed that stands in its place."""
    wrong = held(DEFINITION if "--fixed" in sys.argv else OP, DEFINITION, arguments())
    if not wrong and SEEN_ON_GPU and not ON_GPU:
        print(f"cannot tell: seen on {SEEN_ON_GPU}; Triton's interpreter does not show it")
        return 2
    print(wrong or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
'''
# Triton's own launch in place of ours
LAUNCHERS = {
    Symbol("vitrail.ops.launch", name): f"""def {name}(kernel, grid, device, *given, **constants):
    kernel[grid](*given, **constants{early})
"""
    for name, early in (("launch", ""), ("launch_early", ", EARLY=False"))
}
RULE = '''
def main():
    """0 where the rule holds of what the arithmetic chooses."""
    choice = CHOOSE(FACTS)
    if "--fixed" in sys.argv:
        choice = choice._replace(**LEGAL)
    for name in READ:
        print(f"{name} = {getattr(choice, name)}")
    found = bool(holds(FACTS, choice))
    print(f"{'holds' if found else 'broken'}: {RULE}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
'''


def kernel_text(fault: KernelFault, root: Path, gpu: str) -> str:
    """The file but for its header. `root`: where the package's sources lie; `gpu`: the name of the
    one it was seen on, "" for none. Raises `Refused` where no source defines what is named."""
    try:
        if isinstance(fault, RuleFault):
            return _rule_text(fault, Flattener(root))
        if isinstance(fault, OpFault):
            return _op_text(fault, Flattener(root, LAUNCHERS), gpu)
        return _launch_text(fault, Flattener(root), gpu)
    except (ValueError, OSError, SyntaxError) as error:
        raise Refused(
            Finding(
                where="kernel script",
                saw=f"{type(error).__name__}: {error}",
                rule="a fault names functions of the package that stand at a module's top",
                change="give the commit's checkout, whose sources are those that failed",
            )
        ) from error


def _symbol(text: str) -> Symbol:
    found = SYMBOL.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no function of the package")
    return Symbol(found[1], found[2])


def _joined(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") + "\n" for part in parts if part.strip())


def _launch_text(fault: LaunchFault, flattener: Flattener, gpu: str) -> str:
    named = _symbol(fault.kernel)
    kernel = flattener.add(named)
    if not is_kernel(flattener.source(named.module).defined.get(named.name)):
        raise ValueError(f"{fault.kernel!r} is no kernel")
    flat = flattener.flat()
    tiles = sorted(
        name
        for name in set(re.findall(r"tl\.arange\(0, (\w+)\)", flat.text))
        if isinstance(fault.constants.get(name), int)
    )
    facts = [
        f"KERNEL, TILES, OPTIONS = {kernel}, {tuple(tiles)!r}, {OPTIONS!r}",
        f"CONSTANTS = {_dict(fault.constants)}",
        f"SEEN_ON_GPU = {'' if fault.cc else gpu!r}",
    ]
    if fault.cc:
        facts.append(f"CC, TYPES, ALIGNED = {fault.cc}, {fault.types!r}, {fault.aligned!r}")
        run = COMPILE
    else:
        facts.append(f"GRID = {fault.grid!r}")
        run = _arguments(fault.arguments) + RUN
    return _joined(_head(flat, bool(fault.cc)), flat.text, "\n".join(facts), run, MAIN)


def _op_text(fault: OpFault, flattener: Flattener, gpu: str) -> str:
    named = _symbol(fault.op), _symbol(fault.definition)
    folder, _, module = named[1].module.rpartition(".")
    beside = named[0].module.rpartition(".")[0] == folder and named[0].name == named[1].name
    if not (beside and folder.startswith("vitrail.ops.") and module == "naive"):
        raise ValueError(f"{fault.op!r} is no op beside a definition {fault.definition!r}")
    if any(isinstance(a, str) for a in fault.arguments.values()):
        raise ValueError("an op takes tensors and numbers")
    op, definition = map(flattener.add, named)
    flattener.add(Symbol("vitrail.repro.kernel_check", "held"))
    flat = flattener.flat()
    facts = f"OP, DEFINITION = {op}, {definition}\nSEEN_ON_GPU = {gpu!r}\n"
    return _joined(_head(flat), flat.text, facts, _arguments(fault.arguments), OP)


def _head(flat: Flat, compiled: bool = False) -> str:
    # Triton reads it when a kernel is defined
    interpreted = '"0"' if compiled else '"0" if ON_GPU else "1"'
    imports = {*flat.imports, "import triton", "import triton.language as tl"} - {"import torch"}
    return (
        "import sys\nfrom os import environ\n\nimport torch\n\nON_GPU = torch.cuda.is_available()\n"
        f'environ["TRITON_INTERPRET"] = {interpreted}\n\n' + "\n".join(sorted(imports))
    )


def _arguments(given: Mapping[str, Array | Number]) -> str:
    lines = [f"        {_given(value)},  # {name}" for name, value in _named(given)]
    return TENSOR + "\n\ndef arguments():\n    return [\n" + "\n".join(lines) + "\n    ]\n"


def _rule_text(fault: RuleFault, flattener: Flattener) -> str:
    known = {f"{b.choose.__module__}:{b.choose.__qualname__}" for b in KERNEL_BACKENDS.values()}
    if fault.choose not in known or not fault.holds.startswith("vitrail.attention."):
        raise ValueError(f"{fault.choose!r} and {fault.holds!r} are no planner's")
    choose = flattener.add(_symbol(fault.choose))
    facts = flattener.add(Symbol("vitrail.attention.tiles", "Facts"))
    module, line = _symbol(fault.holds)
    read = flattener.add_lambda(module, int(line), "holds").get("c", ())
    flat = flattener.flat()
    given = ", ".join(f"{name}={int(v)}" for name, v in _named(fault.facts))
    numbers = (
        f"CHOOSE = {choose}\nFACTS = {facts}({given})\n"
        f"READ = {read!r}  # by the rule, of the choice\n"
        f"LEGAL = {_dict(dict(fault.legal))}  # the least change that every rule allows\n"
        f"RULE = {fault.says!r}\n"
    )
    return _joined("import sys\n" + "\n".join(flat.imports), flat.text, numbers, RULE)


def _named(values: Mapping[str, V]) -> list[tuple[str, V]]:
    for name in values:
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name")
    return list(values.items())


def _given(value: Array | Number) -> str:
    if not isinstance(value, Array):
        return _literal(value)
    more = "".join(
        f", {name}={part!r}"
        for name, part in (
            ("offset", value.offset),
            ("values", value.values),
            ("block", value.block),
        )
        if part
    )
    return f"tensor({value.dtype!r}, {value.shape!r}, {value.stride!r}{more})"


def _dict(values: dict[str, Number]) -> str:
    return "{" + ", ".join(f"{n!r}: {_literal(v)}" for n, v in values.items()) + "}"


def _literal(value: Number) -> str:
    """Infinities have no literal."""
    if isinstance(value, str) and re.fullmatch(r"tl\.\w+", value):
        return value
    if isinstance(value, float) and value in (float("inf"), float("-inf")) or value != value:
        return f'float("{value}")'
    return repr(value)
