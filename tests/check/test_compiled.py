"""What `--compile` says of kernels: each compiled once, held to its plan, remembered by content."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import H200, ask

from vitrail.attention.cubin import SPILL_BYTES, Taken
from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.check import checks, compiled
from vitrail.check.compiled import Job, Proof, hold_kernel, run
from vitrail.check.run import check
from vitrail.check.subject import Question
from vitrail.cli import DEMO
from vitrail.config.engine import EngineConfig
from vitrail.config.finding import accept
from vitrail.config.hardware import CPU, find

TEXT = Path(__file__).parents[1] / "golden" / "text_models"


def planned() -> AttentionPlan:
    site = AttentionSite(
        num_q_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=64, scale=0.1, causal=True
    )
    shape = AttentionShape(
        site=site,
        phase=Phase.DECODE,
        dtype="bfloat16",
        page_size=64,
        batch=8,
        max_q_len=1,
        max_kv_len=4096,
    )
    return accept(plan(shape, H200, "triton"))


class Compiler:
    """Says what a kernel takes, and counts how often it was asked."""

    def __init__(self, smem_bytes: int = 100, fails: str = ""):
        self.asked, self.fails = 0, fails
        self.taken = Taken(
            kernel="attend",
            cc=90,
            num_warps=4,
            registers=90,
            stack_bytes=0,
            smem_bytes=smem_bytes,
        )

    def job(self, name: str) -> Job:
        return compiled.planned(name, planned(), H200, self.take)

    def take(self) -> list[Taken]:
        self.asked += 1
        if self.fails:
            raise RuntimeError(self.fails)
        return [self.taken]


def test_a_kernel_is_compiled_once_and_remembered_by_content(tmp_path: Path) -> None:
    compiler = Compiler()
    jobs = [compiler.job("a"), compiler.job("a"), compiler.job("b")]
    first = run(jobs, H200, tmp_path)
    assert (compiler.asked, first.reused, first.findings) == (2, 0, ())
    assert first.lines == (
        "compiled attend (decode, triton): 90 registers of 255, 100 bytes shared of "
        f"{compiled.gib(planned().smem_bytes)}",
    )
    again = run(jobs, H200, tmp_path)
    assert (compiler.asked, again.reused, again.lines) == (2, 2, first.lines)
    run(jobs, find("B300"), tmp_path)
    assert compiler.asked == 4, "another GPU, another kernel"
    for file in tmp_path.iterdir():
        file.write_text("[{")
    assert run(jobs, H200, tmp_path).reused == 0
    assert run(jobs, H200, tmp_path).reused == 2


def test_another_source_or_compiler_is_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler()
    run([compiler.job("a")], H200, tmp_path)
    monkeypatch.setattr(compiled, "release", lambda name: "99")
    run([compiler.job("a")], H200, tmp_path)
    assert compiler.asked == 2


@pytest.mark.parametrize(
    "source", ["kernels/attend.py", "backends/fa4.py", "compile.py", "compile_fa4.py", "cubin.py"]
)
def test_what_another_source_made_or_read_is_not_said(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that sees more than it did may see too much."""
    attention, cache = tmp_path / "attention", tmp_path / "cache"
    shutil.copytree(compiled.ATTENTION, attention)
    monkeypatch.setattr(compiled, "ATTENTION", attention)
    compiler = Compiler()
    run([compiler.job("a")], H200, cache)
    run([compiler.job("a")], H200, cache)
    assert compiler.asked == 1
    with (attention / source).open("a") as file:
        file.write("# changed\n")
    run([compiler.job("a")], H200, cache)
    assert compiler.asked == 2


def test_what_takes_more_than_its_plan_is_found_remembered_or_not(tmp_path: Path) -> None:
    compiler = Compiler(smem_bytes=1 << 20)
    for _ in range(2):
        (found,) = run([compiler.job("a")], H200, tmp_path).findings
        assert found.code == "compiled_shared_memory"
        assert str(1 << 20) in found.saw
    assert compiler.asked == 1


def test_what_does_not_compile_is_found_and_not_remembered(tmp_path: Path) -> None:
    compiler = Compiler(fails="Expected size in shape to be strictly positive, but got 0")
    for _ in range(2):
        (found,) = run([compiler.job("a")], H200, tmp_path).findings
        assert found.code == "compile_failed"
        assert "strictly positive, but got 0" in found.saw
    assert compiler.asked == 2


def test_without_compilers_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "release", lambda name: None)
    proof = compiled.prove([planned()], H200)
    assert "triton not installed" in (proof.unknown or "")
    assert compiled.prove([], CPU) == Proof(lines=("nothing to compile",))
    assert ask(TEXT / "qwen2", CPU).exit_code == 0


@pytest.mark.suite("kernels", minutes=5, owner="check")
@pytest.mark.nightly
def test_a_models_kernels_are_compiled_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """In a process of its own, because this one runs kernels in the interpreter."""
    code = (
        "import sys; from pathlib import Path\n"
        "from vitrail.check.run import check\n"
        "from vitrail.check.subject import Question\n"
        "from vitrail.config.engine import EngineConfig\n"
        "from vitrail.config.hardware import find\n"
        "model, cache = sys.argv[1:]\n"
        "for gpu in ('A100', 'B300'):\n"
        "    question = Question(choices=EngineConfig(model=model), gpu=find(gpu), compile=True,"
        " cache=Path(cache))\n"
        "    report = check(question)\n"
        "    print(report.exit_code, *report.row('attention tp=1').details, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(TEXT / "qwen2"), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in ("0", "1", "2")] == ["0", "0"]
    assert sum(line.startswith("compiled attend (extend") for line in lines) == 2
    assert list(tmp_path.iterdir())


def test_what_takes_more_than_its_gpu_has_is_found() -> None:
    """Of kernels that no plan bounds: no launch of them would succeed."""
    fits = Taken(
        kernel="moe_up", cc=90, num_warps=8, registers=255, stack_bytes=0, smem_bytes=227 << 10
    )
    assert list(hold_kernel(fits, H200)) == []
    (found,) = hold_kernel(fits, find("L40S"))
    assert (found.code, found.severity) == ("compiled_shared_memory", "error")
    assert str(227 << 10) in found.saw
    assert str(99 << 10) in found.rule
    (found,) = hold_kernel(replace(fits, num_warps=16), H200)
    assert (found.code, found.severity) == ("compiled_registers", "error")
    wide = replace(fits, smem_bytes=0, tmem_columns=512)
    assert list(hold_kernel(wide, find("B300"))) == []
    (found,) = hold_kernel(replace(wide, tmem_columns=513), find("B300"))
    assert (found.code, found.severity) == ("compiled_tensor_memory", "error")
    (found,) = hold_kernel(replace(fits, stack_bytes=SPILL_BYTES + 1), H200)
    assert (found.code, found.severity) == ("compiled_stack", "warning")


def test_every_kernel_of_the_demos_steps_is_compiled_and_remembered(tmp_path: Path) -> None:
    """In a process of its own, because this one runs kernels in the interpreter."""
    code = (
        "import sys; from pathlib import Path\n"
        "from vitrail.check.run import check\n"
        "from vitrail.check.subject import Question\n"
        "from vitrail.config.engine import EngineConfig\n"
        "from vitrail.config.hardware import find\n"
        "choices = EngineConfig(model=sys.argv[1], attention='triton', max_running=16,"
        " max_step_tokens=256)\n"
        "question = Question(choices=choices, gpu=find('B300'), compile=True,"
        " cache=Path(sys.argv[2]))\n"
        "for _ in range(2):\n"
        "    report = check(question)\n"
        "    row = report.row('kernels')\n"
        "    print(report.exit_code, row.status, len(row.facts['kernels']), sep='\\n')\n"
        "    print(*row.details, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(DEMO), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    first, again = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert first == again
    assert first[:2] == ["0", "ok"]
    assert int(first[2]) > 30
    kernels = [line.split()[1].split(":")[0] for line in first[3:]]
    assert {"moe.triton.moe_up", "sampling.triton._draw_filtered", "resize.triton.rows_kernel"} <= {
        *kernels
    }
    assert all("registers" in line and "shared" in line for line in first[3:])
    assert len(list(tmp_path.iterdir())) > int(first[2]), "attention's are there too"


def test_a_kernel_of_another_source_is_another_kernel(tmp_path: Path) -> None:
    """Else what was remembered of the kernel as it was would be said of the kernel as it is."""
    body = (
        "import triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\ndef inner(x):\n    return x + {0}\n\n\n"
        "@triton.jit\ndef kernel(out, N: tl.constexpr):\n    tl.store(out, inner({1}))\n"
    )
    for name, numbers in (("same", (1, 2)), ("inner", (3, 2)), ("outer", (1, 4))):
        (tmp_path / f"{name}.py").write_text(body.format(*numbers))
    code = (
        "import sys, torch\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "from vitrail.ops.compile import specialised\n"
        "from vitrail.ops.record import Recorded\n"
        "out = torch.empty(4, device='meta')\n"
        "def name(path):\n"
        "    spec = spec_from_file_location('kernels', path)\n"
        "    module = module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "    (made,) = specialised([Recorded(module.kernel, (out,), {'N': 4})], 90)\n"
        "    return f'{made.name} {made.facts}'\n"
        "same, again, inner, outer = map(name, sys.argv[1:])\n"
        "assert same == again, (same, again)\n"
        "assert len({same, inner, outer}) == 3, (same, inner, outer)\n"
    )
    paths = [str(tmp_path / f"{name}.py") for name in ("same", "same", "inner", "outer")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_interpreter_compiles_nothing_and_says_so(tmp_path: Path) -> None:
    report = check(
        Question(
            choices=EngineConfig(model=str(DEMO), attention="reference", cuda_graphs=0),
            gpu=H200,
            compile=True,
            cache=tmp_path,
        )
    )
    assert "TRITON_INTERPRET" in (report.row("kernels").unknown or "")
    assert report.exit_code == 2


def _fails(*_: object) -> None:
    raise ValueError("17 rows of 16")


def test_a_model_whose_steps_fail_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would fail there, and no traceback of check's own."""
    monkeypatch.setattr(checks, "step_launches", _fails)
    monkeypatch.setattr(checks, "prove", lambda *a: Proof())
    choices = EngineConfig(model=str(DEMO))
    report = check(Question(choices=choices, gpu=H200, compile=True))
    (found,) = report.row("kernels").findings
    assert (found.code, report.exit_code) == ("step_failed", 1)
    assert "17 rows of 16" in found.saw
