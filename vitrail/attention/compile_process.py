"""Compilers that read their target from the environment, asked in a process of their own. A
question is a JSON object; the answer is what the kernels take, or the error that was raised."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vitrail.attention.cubin import Taken, read_cubin, read_threads

Answer = list[Taken] | str
# A launch in the compiled host code: grid, block, bytes of shared memory, stream, attributes.
_CONFIG = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SHARED = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\][^\n]*" + _CONFIG + r"\n\s*llvm\.store (%\d+), \1"
)


def ask(module: str, questions: list[dict[str, Any]], target: dict[str, str]) -> list[Answer]:
    """What `module`, run as a program with `target` in its environment, answers to each question.
    Binaries that the compilers keep lie in a folder that goes with them."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        environment = [f"{name}={value}" for name, value in {**kept, **target}.items()]
        done = subprocess.run(
            ["env", *environment, sys.executable, "-m", module],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
        )
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(questions):
        raise RuntimeError(f"the compiler's process ended: {done.stderr[-2000:]}")
    return [_answer(json.loads(line)) for line in lines]


def _answer(line: list[dict[str, Any]] | str) -> Answer:
    return line if isinstance(line, str) else [Taken(**taken) for taken in line]


def serve(take: Callable[[dict[str, Any]], list[Taken]]) -> None:
    """The program's side: one line for each question on the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    for question in json.load(sys.stdin):
        try:
            answer: Any = [asdict(taken) for taken in take(question)]
        except Exception as error:  # noqa: BLE001  the answer to what was asked
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


def taken(name: str, kernel: Any, cc: int) -> Taken:
    """Of a kernel that CuTe DSL compiled: registers, stack and threads are read from the binary,
    shared memory from the launch in the compiled host code."""
    registers, stack_bytes = read_cubin(kernel.__cubin__)
    return Taken(
        kernel=name,
        cc=cc,
        num_warps=read_threads(kernel.__cubin__) // 32,
        registers=registers,
        stack_bytes=stack_bytes,
        smem_bytes=launch_smem_bytes(str(kernel.ir_module)),
    )


def launch_smem_bytes(host_code: str) -> int:
    """Bytes of shared memory that a kernel is launched with, of the one launch in its host code.
    Raises `ValueError` where there is none."""
    found = _SHARED.search(host_code)
    if found is None:
        raise ValueError("compiled host code without a launch")
    before = host_code[: found.start()]
    values = re.findall(rf"{found[2]} = llvm\.mlir\.constant\((\d+) : i64\)", before)
    if not values:
        raise ValueError(f"a launch whose shared memory {found[2]} is no constant")
    return int(values[-1])
