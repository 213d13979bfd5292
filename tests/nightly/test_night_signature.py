"""Causes read out of tracebacks as pytest, torch and the interpreter write them: the same cause
has one key on any night and any machine, other causes have others."""

import re

import pytest

from vitrail.config.cause import Cause, normalised, trimmed
from vitrail.nightly.records import Attempt, Case
from vitrail.nightly.signature import cause_of_attempt, cause_of_case

PYTEST = """Traceback (most recent call last):
  File "/tmp/venv/lib/python3.11/site-packages/_pytest/runner.py", line 353, in from_call
    result: TResult | None = func()
                             ^^^^^^
  File "/tmp/venv/lib/python3.11/site-packages/_pytest/python.py", line 187, in pytest_pyfunc_call
    result = testfunction(**testargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^
"""
PARITY = (
    PYTEST
    + """  File "/home/me/vitrail/tests/models/test_kimi_vl_parity.py", line 47, in test_text
    close(run.step([(run.add(golden.text), 37)])[0], golden.reference["text_logits"])
  File "/home/me/vitrail/tests/models/test_kimi_vl_parity.py", line 41, in close
    assert (got - want).abs().max() <= LIMIT
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError: assert tensor(10.8424) <= 0.0001
 +  where tensor(10.8424) = <built-in method max of Tensor object at 0x7f8cc4d09d60>()
"""
)
WEIGHT = (
    PYTEST
    + """  File "/home/me/vitrail/tests/nightly/test_demo_accuracy.py", line 90, in test_choices
    llm = LLM(DEMO, device="cpu", kv_cache_bytes=16 << 20, max_running=16)
  File "/home/me/vitrail/vitrail/engine/build.py", line 276, in _load
    plan = accept(resolve(entry.weight_map(config), found, parameters))
  File "/home/me/vitrail/vitrail/config/finding.py", line 49, in accept
    raise Refused(cast(list[Finding], planned))
vitrail.config.finding.Refused: language_model.lm_head.weight: not in the checkpoint. Rule: r.
"""
)
KEY = (
    PYTEST
    + """  File "/w/tests/weights/test_load.py", line 9, in test_names
    load()
  File "/w/vitrail/weights/load.py", line 88, in _assign
    parameter = self._by_name[name]
KeyError: 'model.layers.3.mlp.experts.17.w2'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/w/vitrail/engine/build.py", line 12, in build
    raise RuntimeError("could not load") from error
RuntimeError: could not load
"""
)
CUDA_OOM = (
    PYTEST
    + """  File "/w/tests/gpu/test_vision_gpu.py", line 70, in test_peak
    tower(patches, grids)
  File "/w/vitrail/vision/moonvit.py", line 212, in forward
    scores = q_THD @ k_THD
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 61.04 GiB. GPU 0 has\
 139.81 GiB of which 30.25 GiB is free. Process 71023 has 109.55 GiB memory in use.
"""
)
LATE = (
    PYTEST
    + """  File "/w/tests/server/served.py", line 77, in wait
    self.process.wait(timeout=60)
  File "/usr/lib/python3.11/subprocess.py", line 1264, in wait
    return self._wait(timeout=timeout)
subprocess.TimeoutExpired: Command '['python', '-m', 'vitrail.cli']' timed out after 60 seconds
"""
)
DISK = (
    PYTEST
    + """  File "/w/vitrail/weights/write.py", line 31, in write
    handle.write(block)
OSError: [Errno 28] No space left on device
"""
)
COLLECTION = """ImportError while importing test module '/tmp/pytest-of-root/pytest-1/x/test_y.py'.
Hint: make sure your test modules/packages have valid Python names.
Traceback:
/root/.pyenv/versions/3.11.7/lib/python3.11/importlib/__init__.py:126: in import_module
    return _bootstrap._gcd_import(name[level:], package, level)
tests/test_y.py:1: in <module>
    import gguf
E   ModuleNotFoundError: No module named 'gguf'"""
INVARIANT = (
    PYTEST
    + """  File "/w/tests/cache/test_allocator.py", line 7, in test_free
    a.free(3)
  File "/w/vitrail/cache/allocator.py", line 52, in free
    assert self._uses[page] > 0, f"page {page} is free already"
AssertionError: page 3 is free already
"""
)
STEP = """ERROR    vitrail.engine:engine.py:104 step 12 failed
Traceback (most recent call last):
  File "/w/vitrail/engine/engine.py", line 80, in _launch
    self._in_flight.append(self._runner.launch(plan, inputs))
  File "/w/vitrail/ops/moe/grouped.py", line 40, in grouped
    return torch.stack(parts)
RuntimeError: stack expects each tensor to be equal size, but got [4, 64] at entry 0
"""
ASKED = (
    PYTEST
    + """  File "/w/tests/laws/test_engine_laws.py", line 20, in test_batched_is_alone
    assert out.error is None
AssertionError: assert 'RuntimeError: stack expects' is None
"""
)
SLOW = "slower: demo, cpu: schedule takes 31.20 times what it took (28.00 to 33.10; 12 samples)"
SEGFAULT = """Fatal Python error: Segmentation fault

Current thread 0x00007f1dbd6d5740 (most recent call first):
  File "/w/vitrail/ops/moe/triton.py", line 90 in launch
  File "/w/vitrail/ops/moe/fused.py", line 33 in mixture
  File "/w/tests/ops/test_moe_triton.py", line 51 in test_up
  File "/v/lib/python3.11/site-packages/_pytest/python.py", line 187 in pytest_pyfunc_call

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
STACKS = """
Thread 0x00007f0a4bfff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/w/vitrail/engine/client.py", line 60 in _read

Thread 0x00007f0a6d0b3740 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/w/vitrail/engine/runner.py", line 71 in launch
  File "/w/vitrail/engine/engine.py", line 84 in _launch
  File "/w/tests/nightly/test_demo_speed.py", line 77 in test_steps
"""


def case(trace: str, said: str = "", message: str = "") -> Cause:
    test = "tests/x/test_x.py::test_it[3-0x7f]"
    made = Case(id=test, outcome="failed", seconds=1, message=message, trace=trace, said=said)
    return cause_of_case(made)


def attempt(outcome, tail: str, code: int | None, why: str = "w") -> Cause:
    return cause_of_attempt(
        Attempt(outcome=outcome, why=why, seconds=1, code=code, tail=tail, peak_bytes=1)
    )


CAUSES: dict[str, tuple[Cause, str, str, str]] = {
    "parity": (
        case(PARITY),
        "numerics",
        "tests/models/test_kimi_vl_parity.py:test_text",
        "AssertionError: assert tensor(10.8424) <= 0.0001",
    ),
    "weight": (
        case(WEIGHT),
        "crash",
        "vitrail/engine/build.py:_load",
        "Refused: language_model.lm_head.weight: not in the checkpoint. Rule: r.",
    ),
    "key": (
        case(KEY),
        "crash",
        "vitrail/weights/load.py:_assign",
        "KeyError: 'model.layers.3.mlp.experts.17.w2'",
    ),
    "cuda oom": (
        case(CUDA_OOM),
        "memory",
        "vitrail/vision/moonvit.py:forward",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 61.04 GiB.",
    ),
    "late": (case(LATE), "hang", "tests/server/served.py:wait", "TimeoutExpired: Command"),
    "disk": (
        case(DISK),
        "infrastructure",
        "vitrail/weights/write.py:write",
        "OSError: [Errno 28] No space left on device",
    ),
    "collection": (
        case(COLLECTION),
        "infrastructure",
        "tests/test_y.py:<module>",
        "ModuleNotFoundError: No module named 'gguf'",
    ),
    "invariant": (
        case(INVARIANT),
        "crash",
        "vitrail/cache/allocator.py:free",
        "AssertionError: page 3 is free already",
    ),
    "isolated step": (
        case(ASKED, said=STEP),
        "crash",
        "vitrail/ops/moe/grouped.py:grouped",
        "RuntimeError: stack expects each tensor to be equal size",
    ),
    "slow": (
        case(SLOW, message=SLOW),
        "speed",
        "tests/x/test_x.py::test_it",
        "slower: demo, cpu: schedule",
    ),
    "segfault": (
        attempt("crash", SEGFAULT, -11),
        "crash",
        "vitrail/ops/moe/triton.py:launch",
        "Fatal Python error: Segmentation fault",
    ),
    "hang": (
        attempt("hang", STACKS, None),
        "hang",
        "vitrail/engine/runner.py:launch",
        "no end within its limit",
    ),
    "killed": (
        attempt("crash", "", -9, "ended by signal 9"),
        "memory",
        "",
        "ended by signal 9",
    ),
    "no tests": (
        attempt("lost", "no tests ran in 0.01s", 5, "pytest: no test found"),
        "infrastructure",
        "",
        "pytest: no test found",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_kind_frame_and_title(name: str):
    cause, kind, frame, title = CAUSES[name]
    assert (cause.kind, cause.frame) == (kind, frame)
    assert cause.title.startswith(title)


def test_different_causes_have_different_keys():
    assert len({cause.key for cause, *_ in CAUSES.values()}) == len(CAUSES)
    other = case(KEY.replace("KeyError: 'model", "IndexError: 'model"))
    elsewhere = case(KEY.replace("in _assign", "in _read"))
    assert len({case(KEY).key, other.key, elsewhere.key}) == 3


def another_night(text: str) -> str:
    """The same lines elsewhere and later: other addresses, line numbers, folders, numbers, ids."""
    text = re.sub(r"line \d+", lambda m: f"line {len(m[0]) * 37}", text)
    text = re.sub(r"0x[0-9a-f]+", "0x0000abcdef12", text)
    text = re.sub(r"\.py:\d+:", ".py:99:", text)
    text = text.replace("/home/me/vitrail/", "/tmp/tmpq8x2z/tree/").replace('"/w/', '"/ci/b/1/')
    text = text.replace("pytest-of-root/pytest-1/", "pytest-of-ci/pytest-993/")
    text = text.replace("Process 71023", "Process 4").replace("30.25 GiB", "7 GiB")
    return text.replace("10.8424", "9.1e-3").replace("page 3 is", "page 118 is")


@pytest.mark.parametrize(
    "trace", [PARITY, WEIGHT, KEY, CUDA_OOM, DISK, COLLECTION, INVARIANT, LATE]
)
def test_a_case_s_key_is_the_same_on_another_night(trace: str):
    later = another_night(trace)
    assert later != trace
    assert case(later).key == case(trace).key, (case(later), case(trace))


def test_keys_of_processes_and_logged_steps_are_the_same_on_another_night():
    assert case(another_night(ASKED), said=another_night(STEP)).key == case(ASKED, said=STEP).key
    assert attempt("crash", another_night(SEGFAULT), -11).key == CAUSES["segfault"][0].key
    assert attempt("hang", another_night(STACKS), None).key == CAUSES["hang"][0].key
    faster = SLOW.replace("31.20", "29.99")
    assert case(faster, message=faster).key == CAUSES["slow"][0].key


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("object at 0x7f8cc4d09d60>", "object at 0x1>"),
        ("/tmp/pytest-of-root/pytest-12/test_x0/model.bin: cut", "/tmp/tmpab12/model.bin: cut"),
        ("took 12.5 ms of 10", "took 9 ms of 10"),
        ("request churn-17 failed", "request churn-9 failed"),
        ("request chatcmpl-8f3a09bc12", "request chatcmpl-0011223344"),
        (
            "id 123e4567-e89b-12d3-a456-426614174000",
            "id 00000000-e89b-12d3-a456-426614174fff",
        ),
        ("shape [4, 64, 128]", "shape [9, 64, 2]"),
        ("1,234,567 tokens", "12 tokens"),
        ("/home/a/vitrail/vitrail/x.py is", "/b/vitrail/x.py is"),
        ("-1.5e-07 is", "3 is"),
        ("at 2026-11-30", "at 2026-12-01"),
        ("\x1b[31mred\x1b[0m 1", "red 2"),
    ],
)
def test_what_changes_from_night_to_night_is_left_out(a: str, b: str):
    assert normalised(a) == normalised(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("layers.3.mlp", "layers.4.mlp"),
        ("sm_90a", "sm_100a"),
        ("int8", "int32"),
        ("w2", "w3"),
        ("fp8_e4m3", "fp8_e5m2"),
        ("expected float, got int", "expected int, got float"),
        ("deadbeef is a word", "accede is a word"),
    ],
)
def test_names_are_kept(a: str, b: str):
    assert normalised(a) != normalised(b)


def test_frames_of_pytest_are_left_out_of_what_is_shown():
    stack = CAUSES["segfault"][0].trace
    assert "test_moe_triton.py" in stack
    assert "_pytest" not in stack
    shown = trimmed(PARITY).splitlines()
    assert "runner.py" not in trimmed(PARITY)
    assert shown[0] == "Traceback (most recent call last):"
    assert "test_kimi_vl_parity.py" in shown[1]
    assert shown[-1].startswith(" +  where")
