"""A kernel's failure becomes one file that fails alone and passes with the nearest legal numbers:
without the package, in a process that cannot see it."""

import ast
import importlib.util
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from tests.engine.driver import Golden, golden_llm
from tests.engine.test_recorder import ends
from tests.ops.kernels import interpreted
from vitrail import SamplingParams
from vitrail.attention.fa4 import choose_fa4
from vitrail.attention.fault import (
    Array,
    LaunchFault,
    OpFault,
    RuleFault,
    kernel_fault,
    legal,
    op_fault,
)
from vitrail.attention.legality import broken, finding
from vitrail.attention.plan import KERNEL_BACKENDS
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.attention.tiles import Choice, Facts, facts
from vitrail.cli import main
from vitrail.config.finding import Refused
from vitrail.config.hardware import GPUS
from vitrail.layers import norm
from vitrail.ops.dispatch import NormOps
from vitrail.ops.norm import naive, triton
from vitrail.repro.capsule import read
from vitrail.repro.kernel import KernelCapsule, kernel_capsule
from vitrail.repro.kernel_check import held
from vitrail.repro.kernel_script import kernel_text
from vitrail.repro.kernel_source import Flattener, Symbol
from vitrail.repro.script import kernel_script, read_kernel

ROOT = Path(__file__).parents[2]
RULES = [(name, rule) for name, b in KERNEL_BACKENDS.items() for rule in b.rules]
SHAPES = [
    AttentionShape(
        site=AttentionSite(
            num_q_heads=8,
            num_kv_heads=kv,
            head_dim=d,
            head_dim_v=dv,
            scale=1.0,
            causal=phase is not Phase.ENCODE,
        ),
        phase=phase,
        dtype="bfloat16",
        page_size=page,
        batch=3,
        max_q_len=1 if phase is Phase.DECODE else 300,
        max_kv_len=5000,
    )
    for kv, d, dv, phase, page in (
        (8, 72, 72, Phase.ENCODE, None),
        (1, 192, 128, Phase.DECODE, 16),
        (2, 128, 128, Phase.EXTEND, 128),
    )
]


def given(path: Path) -> KernelCapsule:
    made = read_kernel(path)
    assert made is not None
    return made


def alone(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """In a folder and a process that know nothing of the package."""
    blocked = (
        "import runpy, sys; sys.modules['vitrail'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-I", "-c", blocked, str(path), *flags],
        cwd=path.parent,
        capture_output=True,
        text=True,
    )


def load(path: Path, text: str) -> ModuleType:
    path = path.with_suffix(".py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat_file(*symbols: Symbol) -> str:
    flattener = Flattener(ROOT)
    for symbol in symbols:
        flattener.add(symbol)
    made = flattener.flat()
    return "\n".join(made.imports) + "\n\n\n" + made.text


def kernels() -> list[Symbol]:
    found = []
    for path in sorted((ROOT / "vitrail").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            jitted = isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            )
            if jitted and "triton" in path.read_text():
                found.append(Symbol(module, node.name))
    return found


def test_every_kernel_of_the_package_stands_alone(tmp_path: Path):
    found = kernels()
    assert len(found) > 40
    for symbol in found:
        text = flat_file(symbol)
        assert "vitrail" not in text.replace('"""', "").split("def ")[0], symbol
        load(tmp_path / f"{symbol.module}.{symbol.name}".replace(".", "_"), text)
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F811"]
    done = subprocess.run([*check, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_stands_alone_computes_the_same(tmp_path: Path):
    made = load(tmp_path / "norm.py", flat_file(Symbol("vitrail.ops.norm.naive", "rms_norm")))
    x, weight = torch.randn(5, 33), torch.randn(33)
    assert torch.equal(made.rms_norm(x, weight, 1e-5), naive.rms_norm(x, weight, 1e-5))
    assert "Float" not in (tmp_path / "norm.py").read_text(), "annotations need packages"


def test_equal_names_of_two_modules_stay_two(tmp_path: Path):
    for name, text in {
        "a": "import math\nimport vitrail.b as other\nN = 2\n\n\n"
        "def f(x: int) -> int:\n    n = other.f(x)  # both\n    return n * N + math.floor(0.5)\n",
        "b": "from vitrail.a import N as M\n\nN = 5\n\n\ndef f(x):\n    return g(x=x) + N * M\n\n\n"
        "def g(x, N=1):\n    return x * N\n",
    }.items():
        (tmp_path / "vitrail").mkdir(exist_ok=True)
        (tmp_path / "vitrail" / f"{name}.py").write_text(text)
    flattener = Flattener(tmp_path)
    assert flattener.add(Symbol("vitrail.a", "f")) == "f"
    made = flattener.flat()
    assert made.names[Symbol("vitrail.b", "f")] == "b_f"
    module = load(tmp_path / "both.py", "\n".join(made.imports) + "\n" + made.text)
    assert module.f(3) == (3 + 5 * 2) * 2
    assert "# both" in made.text


def faulty_norm(monkeypatch: pytest.MonkeyPatch, channels: int = 48) -> Exception:
    """What a block of channels that is no power of two raises."""
    monkeypatch.setattr(triton.triton, "next_power_of_2", lambda n: n)
    with pytest.raises(Exception, match="power of 2") as raised:
        triton.rms_norm(torch.randn(3, channels), torch.randn(channels), 1e-5)
    return raised.value


@interpreted
def test_a_launch_that_raises_fails_alone_and_passes_with_a_legal_tile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    made = kernel_capsule(faulty_norm(monkeypatch))
    assert made is not None
    assert isinstance(made.fault, LaunchFault)
    assert made.fault.kernel == "vitrail.ops.norm.triton:norm_kernel"
    x = Array(dtype="float32", shape=(3, 48), stride=(48, 1))
    assert made.fault.arguments["x"] == x
    path, script = tmp_path / "capsule.json", tmp_path / "script.py"
    path.write_bytes(msgspec.json.encode(made))
    assert read_kernel(path) == made
    script.write_text(kernel_script(given(path)))
    done = alone(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "power of 2" in done.stdout
    done = alone(script, "--fixed")
    assert (done.returncode, done.stdout) == (0, "with {'M_BLOCK': 64} it passes\n")


@interpreted
def test_the_command_runs_a_kernel_s_capsule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path, script = tmp_path / "capsule.json", tmp_path / "script.py"
    made = kernel_capsule(faulty_norm(monkeypatch))
    path.write_bytes(msgspec.json.encode(made))
    assert main(["repro", str(path), "--script", str(script)]) == 0
    assert "seen again: the kernel alone" in capfd.readouterr().out
    assert "def norm_kernel(" in script.read_text()
    assert made is not None
    assert isinstance(made.fault, LaunchFault)
    fault = msgspec.structs.replace(made.fault, constants=made.fault.constants | {"M_BLOCK": 64})
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(made, fault=fault)))
    assert main(["repro", str(path), "--script", str(tmp_path / "none.py")]) == 1
    assert not (tmp_path / "none.py").exists()


@interpreted
def test_a_kernel_that_does_not_end_is_ended_and_steers_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    fault = LaunchFault(
        kernel="vitrail.ops.norm.triton:norm_kernel", grid=(1 << 30,), arguments={"x": 1}
    )
    made = KernelCapsule(signature="\x1b]0;evil\x07", error="e", versions={}, gpu="", fault=fault)
    path = tmp_path / "capsule.json"
    path.write_bytes(msgspec.json.encode(made))
    assert main(["repro", str(path), "--minutes=0.0001"]) == 2
    said = capfd.readouterr().out
    assert "cannot tell" in said
    assert "was not done" in said
    assert "\x1b" not in said
    assert "\\x1b]0;evil" in said


@interpreted
def test_a_step_that_fails_in_a_kernel_is_a_kernel_s_script(
    golden: Golden,
    capsules: Callable[[], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """The engine's norms by our kernel, whose block is no power of two."""
    llm = golden_llm()
    ours = NormOps(triton.rms_norm, triton.add_rms_norm)
    monkeypatch.setattr(norm, "select_norm", lambda device: ours)
    monkeypatch.setattr(triton.triton, "next_power_of_2", lambda n: n - 1)
    ends(llm, [{"prompt_token_ids": golden.text_ids}], SamplingParams(max_tokens=2))
    (path,) = capsules()
    kernel = read(path).kernel
    assert isinstance(kernel, LaunchFault)
    assert kernel.kernel == "vitrail.ops.norm.triton:norm_kernel"
    script = tmp_path / "script.py"
    assert main(["repro", str(path), "--script", str(script)]) == 0
    assert alone(script).returncode == 1, "without the engine"


@interpreted
def test_a_kernel_that_was_mended_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The reader mends the text itself: here, the constant."""
    fault = kernel_fault(faulty_norm(monkeypatch))
    assert fault is not None
    script = tmp_path / "script.py"
    script.write_text(kernel_text(fault, ROOT, "").replace("'M_BLOCK': 48", "'M_BLOCK': 64"))
    assert alone(script).returncode == 0
    script.write_text(kernel_text(fault, ROOT, "H200").replace("'M_BLOCK': 48", "'M_BLOCK': 64"))
    done = alone(script)
    assert done.returncode == 2, "a GPU's fault is not gone because an interpreter is content"
    assert "cannot tell: seen on H200" in done.stdout


COMPILING = """
import sys
from pathlib import Path
import msgspec
from vitrail.attention.backends.triton import Launch
from vitrail.attention.compile import compile_launch
from vitrail.ops.norm.triton import norm_kernel
from vitrail.repro.kernel import kernel_capsule
pointers = dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16")
numbers = {"x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
constants = {"M": 48, "M_BLOCK": 48, "ADD": False, "EARLY": False}
launch = Launch(kernel=norm_kernel, types=pointers | numbers, aligned=("x", "out"),
                constants=constants, num_warps=1, num_stages=2)
try:
    compile_launch(launch, 90)
except Exception as error:
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(kernel_capsule(error)))
"""


@pytest.mark.suite("faults", minutes=1, owner="repro")
@pytest.mark.nightly
def test_a_kernel_that_does_not_compile_fails_on_any_machine(tmp_path: Path):
    path, script = tmp_path / "capsule.json", tmp_path / "script.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", COMPILING, str(path)], cwd=ROOT, env=env, check=True)
    script.write_text(kernel_script(given(path)))
    done = alone(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "power of 2" in done.stdout
    done = alone(script, "--fixed")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("backend", "rule"), RULES, ids=lambda x: getattr(x, "name", x))
def test_a_rule_alone_holds_where_the_package_s_does(backend: str, rule, tmp_path: Path):
    flattener = Flattener(ROOT)
    code = rule.holds.__code__
    flattener.add_lambda(rule.holds.__module__, code.co_firstlineno, "holds")
    made = flattener.flat()
    alone = load(tmp_path / "rule.py", "\n".join(made.imports) + "\n" + made.text)
    draw = random.Random(7)
    fields = (*Choice._fields, *Facts._fields)
    read = [name for name in fields if re.search(rf"\b[fc]\.{name}\b", made.text)]
    told = set()
    for i in range(20_000):
        if i > 500 and len(told) == 2:
            break
        f = facts(draw.choice(SHAPES), draw.choice(GPUS))
        c = KERNEL_BACKENDS[backend].choose(f)
        for name in read:
            value = draw.choice((1, 2, 3, 8, 16, 64, 90, 100, 128, 192, 256, 1 << 33))
            value = (
                draw.choice((value, 0)) if name not in ("kv_heads", "tile_m", "tile_n") else value
            )
            if draw.random() < 0.5 and name in Choice._fields:
                c = c._replace(**{name: value})
            if draw.random() < 0.5 and name in Facts._fields:
                f = f._replace(**{name: value})
        want = bool(rule.holds(f, c))
        assert bool(alone.holds(f, c)) == want
        told.add(want)
    assert told == {True, False}, "the rule was never broken, or always"


def zero_rows() -> RuleFault:
    f = facts(SHAPES[0], next(gpu for gpu in GPUS if gpu.cc == 80))
    c = choose_fa4(f)
    c = c._replace(rows_per_thread=c.tile_n // c.loader_threads)
    rules = KERNEL_BACKENDS["fa4"].rules
    (rule,) = broken(rules, f, c)
    made = kernel_fault(Refused(finding(rule, SHAPES[0], "fa4", f, c)))
    assert isinstance(made, RuleFault)
    assert legal(rules, rule, f, c) == made.legal == {"rows_per_thread": 1}
    return made


def planted_root(tmp_path: Path) -> Path:
    """The package with the tile's fault in its source."""
    for name in ("fa4", "legality", "tiles"):
        path = tmp_path / "vitrail" / "attention" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / path.relative_to(tmp_path)).read_text()
        path.write_text(text.replace("ceil_div(tile_n, loaders),", "tile_n // loaders,"))
    return tmp_path


def test_a_tile_of_zero_rows_fails_alone_and_passes_with_a_legal_one(tmp_path: Path):
    fault, script = zero_rows(), tmp_path / "script.py"
    script.write_text(kernel_text(fault, planted_root(tmp_path), ""))
    done = alone(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rows_per_thread = 0" in done.stdout
    assert alone(script, "--fixed").returncode == 0
    script.write_text(kernel_text(fault, ROOT, ""))
    assert alone(script).returncode == 0, "with the fault out of the source it passes"


@pytest.mark.suite("faults", minutes=1, owner="repro")
@pytest.mark.nightly
@interpreted
def test_an_op_that_is_not_its_definition_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A norm that forgets its last channel, as in the source of the commit."""
    root = tmp_path / "root"
    for path in (ROOT / "vitrail").rglob("*.py"):
        (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        if path.match("ops/norm/triton.py"):
            assert text.count("M=channels,") == 1
            text = text.replace("M=channels,", "M=channels - 1,")
        (root / path.relative_to(ROOT)).write_text(text)
    x, weight = torch.randn(5, 33, dtype=torch.float16), torch.randn(33, dtype=torch.float16)
    fault = op_fault(triton.rms_norm, naive.rms_norm, (x, weight, 1e-5))
    assert fault is not None
    assert held(triton.rms_norm, naive.rms_norm, [x, weight, 1e-5]) == ""
    script = tmp_path / "script.py"
    script.write_text(kernel_text(fault, root, ""))
    done = alone(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "from the definition" in done.stdout
    assert alone(script, "--fixed").returncode == 0
    script.write_text(kernel_text(fault, ROOT, ""))
    assert alone(script).returncode == 0, "with the fault out of the source it passes"


def test_held_sees_what_is_wrong():
    def double(x, out):
        out += 2 * x
        return x * 2

    x, out, whole = torch.randn(3, 5), torch.zeros(3, 5), torch.arange(4)
    assert held(double, double, [x, out]) == ""
    assert torch.equal(out, torch.zeros(3, 5)), "what is given stays"
    assert "result 0: inf" in held(lambda x, out: double(x, out) * torch.nan, double, [x, out])
    assert "result 1: " in held(lambda x, out: x * 2, double, [x, out]), "what is written counts"
    assert held(lambda x: x.add_(1) - 1, lambda x: x + 0, [x]) == "", "an op may overwrite"
    assert held(lambda x: x + 1, lambda x: x + 0, [whole]) == "result 0: 4 of 4 differ"
    half = torch.linspace(-1, 1, 15).half()
    assert held(lambda x: (x.float() ** 3).half(), lambda x: x**3, [half]) == ""
    assert held(lambda x: x**3 + 1e-2, lambda x: x**3, [half]) != ""


def test_what_is_recorded_holds_no_contents_unless_asked(monkeypatch: pytest.MonkeyPatch):
    from vitrail.ops.launch import launch

    class Kernel:
        arg_names = ("ids", "scale")
        fn = faulty_norm

        def __getitem__(self, grid: object):
            raise RuntimeError("out of resource: shared memory")

    tokens = torch.tensor([31337, 4711])
    with pytest.raises(RuntimeError) as raised:
        launch(Kernel(), (1,), torch.device("cpu"), tokens, 2.0, BLOCK=16)
    kept = msgspec.json.encode(kernel_fault(raised.value))
    assert b"31337" not in kept
    assert b"4711" not in kept
    assert b"31337" in msgspec.json.encode(kernel_fault(raised.value, values=True))


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "os:system"},
        {"kernel": "vitrail.ops.norm.triton:norm_kernel)\nimport os  #:x"},
        {"kernel": "vitrail.ops.norm.triton:no_such_kernel"},
        {"kernel": "vitrail.no_such:x"},
        {"kernel": "vitrail.ops.launch:launch"},
        {"arguments": {"x)\nevil(": 1}},
    ],
)
def test_a_hostile_capsule_is_refused(change: dict, tmp_path: Path):
    fault = LaunchFault(kernel="vitrail.ops.norm.triton:norm_kernel", grid=(1,), arguments={"x": 1})
    with pytest.raises(Refused, match="kernel script"):
        kernel_text(msgspec.structs.replace(fault, **change), ROOT, "")


@pytest.mark.parametrize(
    ("op", "definition"),
    [
        ("vitrail.engine.ipc:_remove_unlocked", "vitrail.engine.ipc:_remove_unlocked"),
        ("vitrail.engine.ipc:_remove_unlocked", "vitrail.ops.norm.naive:rms_norm"),
        ("vitrail.ops.norm.triton:rms_norm", "vitrail.engine.ipc:_remove_unlocked"),
        ("vitrail.ops.norm.triton:rms_norm", "vitrail.ops.norm.naive:add_rms_norm"),
        ("vitrail.ops.norm.triton:rms_norm", "vitrail.ops.norm.naive:rms_norm"),
    ],
)
def test_a_capsule_calls_no_function_but_an_op_and_no_op_with_words(
    op: str, definition: str, tmp_path: Path
):
    """The package has functions that remove a folder by its name."""
    victim, path = tmp_path / "victim", tmp_path / "capsule.json"
    victim.mkdir()
    fault = OpFault(op=op, definition=definition, arguments={"folder": str(victim)})
    made = KernelCapsule(signature="s", error="e", versions={}, gpu="", fault=fault)
    path.write_bytes(msgspec.json.encode(made))
    assert main(["repro", str(path)]) == 2
    assert victim.exists()
    with pytest.raises(Refused, match="kernel script"):
        kernel_text(fault, ROOT, "")


@pytest.mark.parametrize(
    "change",
    [{"choose": "vitrail.engine.ipc:_remove_unlocked"}, {"holds": "vitrail.engine.policy:34"}],
)
def test_a_capsule_calls_no_arithmetic_but_a_planner_s(change: dict):
    with pytest.raises(Refused, match="kernel script"):
        kernel_text(msgspec.structs.replace(zero_rows(), **change), ROOT, "")


def test_a_hostile_capsule_s_words_stay_words(tmp_path: Path):
    evil = "tl.x\n'''\"\"\"\\\nopen('pwned', 'w')\r\0open('pwned', 'w')\u2028open('pwned', 'w')"
    fault = LaunchFault(
        kernel="vitrail.ops.norm.triton:norm_kernel",
        grid=(1,),
        arguments={"x": evil, "y": Array(dtype=evil, shape=(1,), stride=(1,))},
        constants={evil: evil},
    )
    made = KernelCapsule(signature=evil, error=evil, versions={evil: evil}, gpu=evil, fault=fault)
    path, script = tmp_path / "capsule.json", tmp_path / "script.py"
    path.write_bytes(msgspec.json.encode(made))
    script.write_text(kernel_script(given(path)))
    done = alone(script)
    assert done.returncode in (1, 2), done.stderr
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("text", ['{"fault":1}', '{"fault":{"type":"launch"},"kind":"x"}'])
def test_a_capsule_that_is_none_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "capsule.json"
    path.write_text(text)
    with pytest.raises(Refused, match="a kernel capsule"):
        read_kernel(path)
