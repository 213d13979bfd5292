"""What an engine compiles before it serves: every kernel that its plans name, each once; and what
fails to compile is refused."""

from pathlib import Path

import msgspec
import pytest

from tests.attention.compile_cases import GQA, MLA, site
from vitrail.attention import compile as triton_compiler
from vitrail.attention.backends import cute, fa4, kept
from vitrail.attention.backends.fa4 import mend_launch
from vitrail.attention.backends.triton import join_launch
from vitrail.attention.decode_spec import spec
from vitrail.attention.fa4 import RELEASE
from vitrail.attention.plan import CUTLASS_RELEASE, PlanLimits, make_table
from vitrail.attention.shape import Phase
from vitrail.attention.warm import Question, answer, missing, warm
from vitrail.config.hardware import CPU, find

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl (the extra fa4)")
H200 = find("H200")
LIMITS = PlanLimits(dtype="bfloat16", page_size=64, max_batch=64, max_q_len=512, max_kv_len=20_000)
SITES = [
    (site(16, 16, 72, 72, causal=False), Phase.ENCODE),
    (site(16, 16, 192, 128), Phase.PREFILL),
    (GQA, Phase.EXTEND),
    (GQA, Phase.DECODE),
    (MLA, Phase.DECODE),
]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an H200's compiled kernels are kept: nowhere yet."""
    monkeypatch.setattr(kept, "_device", lambda: "H200 9.0 132")
    monkeypatch.setattr(kept.knobs.cache, "dir", str(tmp_path))
    (tmp_path / "vitrail").mkdir()
    return tmp_path / "vitrail"


@pytest.fixture
def asked(disk: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(triton_compiler, "compile_launch", lambda one, cc: names.append(repr(one)))
    monkeypatch.setattr(fa4, "kernels_of", lambda one: names.append(repr(one)))
    monkeypatch.setattr(cute, "kernel_of", lambda one: names.append(repr(one)))
    return names


def table(sites=SITES, gpu=H200, limits=LIMITS):
    return make_table(sites, limits, gpu, None, {"fa4": RELEASE, "cute": CUTLASS_RELEASE})


def test_every_kernel_is_compiled_once(asked: list[str]):
    plans = table()
    assert warm(plans, H200) == []
    assert len(asked) == len(set(asked))
    assert {plan.backend for plan in plans} == {"triton", "cute", "fa4"}
    for plan in plans:
        if plan.backend == "cute":
            assert repr(spec(plan)) in asked
            assert plan.max_splits == 1 or repr(join_launch(plan)) in asked
        if plan.backend == "fa4":
            assert all(repr(one) in asked for one in fa4.launches(plan))
            assert plan.shape.phase is Phase.EXTEND or repr(mend_launch(plan)) in asked


def test_a_cpu_has_nothing_to_compile(asked: list[str]):
    limits = PlanLimits(dtype="float32", page_size=16, max_batch=4, max_q_len=64, max_kv_len=500)
    assert warm(table(gpu=CPU, limits=limits), CPU) == []
    assert asked == []


def test_what_does_not_compile_is_refused(asked: list[str], monkeypatch):
    def broken(one):
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(cute, "kernel_of", broken)
    found = warm(table([(GQA, Phase.DECODE)]), H200)
    assert {f.severity for f in found} == {"error"}
    assert "OSError: libcuda.so.1" in found[0].saw
    assert "cute on H200" in found[0].where


def test_what_is_missing_is_asked_for_once_and_changes_nothing_here(asked: list[str], disk: Path):
    """Each question travels as JSON to a compiler's process, which is this one here."""
    plans = table()
    for question in missing(plans, H200):
        answer(msgspec.json.decode(msgspec.json.encode(question), type=Question))
    ahead = sorted(asked)
    assert len(ahead) == len(set(ahead))
    asked.clear()
    for note in disk.iterdir():  # of Triton's
        note.unlink()
    assert warm(plans, H200) == []
    assert sorted(asked) == ahead


def test_what_is_kept_is_not_missing(asked: list[str], disk: Path):
    """Triton's are noted when they have been compiled; the others lie there."""
    plans = table()
    assert missing(plans, H200)
    assert warm(plans, H200) == []
    for plan in plans:
        names = [(f"cute {spec(plan)}", ("decode",))] if plan.backend == "cute" else []
        if plan.backend == "fa4":
            names = [(f"fa4 {one}", fa4.parts_of(one)) for one in fa4.launches(plan)]
        for name, parts in names:
            for file in kept._files(name, parts, None, None):
                file.touch()
    assert missing(plans, H200) == []


def test_a_compilers_error_is_raised_in_its_process(asked: list[str], monkeypatch):
    def broken(one, cc):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(triton_compiler, "compile_launch", broken)
    question = next(q for q in missing(table(), H200) if q.plan.backend == "triton")
    with pytest.raises(RuntimeError, match="out of registers"):
        answer(question)
    assert question.name in {q.name for q in missing(table(), H200)}, "it is still missing"
