"""What `--compile` says of kernels: each compiled once, held to its plan, remembered by content."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import H200, ask

from vitrail.attention.cubin import Taken
from vitrail.attention.plan import AttentionPlan, plan
from vitrail.attention.shape import AttentionShape, AttentionSite, Phase
from vitrail.check import compiled
from vitrail.check.compiled import Job, Proof, run
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
    monkeypatch.setattr(compiled, "_release", lambda name: "99")
    run([compiler.job("a")], H200, tmp_path)
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
    monkeypatch.setattr(compiled, "_release", lambda name: None)
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
