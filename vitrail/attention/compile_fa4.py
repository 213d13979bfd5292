"""FlashAttention-4's kernels compiled for a GPU that is not here, in a process of their own: its
host code reads its target from the environment. Registers, stack and threads are read from the
binary, shared memory from the launch in the compiled host code. What its compiler refuses is a
`Finding`.

    python -m vitrail.attention.compile_fa4 90 < launches.json

prints one line of JSON for each launch of the list it reads: what it takes, or the error."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

from vitrail.attention.backends.fa4 import Launch, compile_launch, launches
from vitrail.attention.cubin import Taken, hold, read_cubin, read_threads
from vitrail.attention.plan import AttentionPlan
from vitrail.config.finding import Finding
from vitrail.config.hardware import Hardware

# A launch in the compiled host code: grid, block, bytes of shared memory, stream, attributes.
_CONFIG = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SHARED = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\][^\n]*" + _CONFIG + r"\n\s*llvm\.store (%\d+), \1"
)


def prove(plans: Iterable[AttentionPlan], gpu: Hardware) -> Iterator[Finding]:
    """What exceeds its plan or does not compile, of those `plans` that are this backend's."""
    mine = [plan for plan in plans if plan.backend == "fa4"]
    if mine:
        yield from judge(mine, gpu, take(mine, gpu))


def judge(
    plans: Iterable[AttentionPlan], gpu: Hardware, results: dict[Launch, list[Taken] | str]
) -> Iterator[Finding]:
    for plan in plans:
        for launch in launches(plan):
            result = results[launch]
            if isinstance(result, str):
                yield refused(plan, gpu, result)
                continue
            for taken in result:
                yield from hold(taken, plan, gpu)


def refused(plan: AttentionPlan, gpu: Hardware, error: str) -> Finding:
    site = plan.shape.site
    return Finding(
        where=f"attention {plan.shape.phase}: flash-attn-4 on {gpu.name}",
        saw=f"{error} for tiles of {plan.tile_m} x {plan.tile_n}, heads of {site.head_dim} and "
        f"{site.head_dim_v}, {site.num_q_heads} to {site.num_kv_heads}, pages of "
        f"{plan.shape.page_size or 0}, {plan.max_splits} splits",
        rule="every kernel that a plan names compiles for its GPU",
        change="install the release that this backend is tested with, or report this plan",
        code="compile_failed",
    )


def take(plans: Iterable[AttentionPlan], gpu: Hardware) -> dict[Launch, list[Taken] | str]:
    """What the kernels of each distinct launch take, or the error that its compiler raised."""
    wanted = list(dict.fromkeys(launch for plan in plans for launch in launches(plan)))
    target = f"sm_{gpu.cc}"
    variables = {
        "FLASH_ATTENTION_ARCH": target,
        "FLASH_ATTENTION_NUM_SMS": gpu.num_sms,
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": 0,
        "CUTE_DSL_ARCH": target + ("a" if gpu.cc >= 90 else ""),
        "CUTE_DSL_KEEP_CUBIN": 1,
    }
    with TemporaryDirectory() as folder:  # kept binaries are also written
        named = [f"{k}={v}" for k, v in (variables | {"CUTE_DSL_DUMP_DIR": folder}).items()]
        done = subprocess.run(
            ["env", *named, sys.executable, "-m", __name__, str(gpu.cc)],
            input=json.dumps([asdict(launch) for launch in wanted]),
            capture_output=True,
            text=True,
        )
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(wanted):
        raise RuntimeError(f"the compiler's process ended: {done.stderr[-2000:]}")
    return {launch: _result(json.loads(line)) for launch, line in zip(wanted, lines, strict=True)}


def _result(line: list[dict[str, Any]] | str) -> list[Taken] | str:
    return line if isinstance(line, str) else [Taken(**taken) for taken in line]


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


def _taken(name: str, kernel: Any, cc: int) -> Taken:
    registers, stack_bytes = read_cubin(kernel.__cubin__)
    return Taken(
        kernel=name,
        cc=cc,
        num_warps=read_threads(kernel.__cubin__) // 32,
        registers=registers,
        stack_bytes=stack_bytes,
        smem_bytes=launch_smem_bytes(str(kernel.ir_module)),
    )


def main() -> None:
    cc, answers = int(sys.argv[1]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    for given in json.load(sys.stdin):
        try:
            kernels = compile_launch(Launch(**given))
            made = {"flash-attn-4": kernels.forward, "flash-attn-4 combine": kernels.combine}
            taken = [_taken(name, made[name], cc) for name in made if made[name] is not None]
            print(json.dumps([asdict(t) for t in taken]), file=answers, flush=True)
        except Exception as error:  # noqa: BLE001  the answer to what was asked
            print(json.dumps(f"{type(error).__name__}: {error}"), file=answers, flush=True)


if __name__ == "__main__":
    main()
