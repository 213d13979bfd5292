"""Time from a process's start to its first token and to its whole answer: the README's command.

    python bench/first_answer.py [--runs 5] [arguments of `vitrail generate`]

Checks first that the demo's answer is right. Prints hardware, each run and the median."""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

GOAL_S = 10.0
RIGHT = "COFFEE $4.50"


class Run(NamedTuple):
    """Seconds to the answer's first character and to the process's end."""

    first: float
    whole: float
    answer: str


def measure(arguments: list[str]) -> Run:
    began = time.perf_counter()
    command = [sys.executable, "-u", "-m", "vitrail.cli", "generate", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    seen, first = b"", 0.0
    while chunk := os.read(process.stdout.fileno(), 1):
        seen += chunk
        if not first and b"answer:" in seen and seen.split(b"answer:")[1].strip():
            first = time.perf_counter() - began
    assert process.wait() == 0, "the command failed"
    answer = seen.split(b"answer:")[1].strip().decode()
    return Run(first, time.perf_counter() - began, answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args, rest = parser.parse_known_args()
    runs = [measure(rest) for _ in range(args.runs)]
    if not rest:
        assert all(RIGHT in r.answer for r in runs), runs
    print(f"{platform.machine()}, {os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}")
    for r in runs:
        print(f"first token {r.first:.2f} s, whole answer {r.whole:.2f} s: {r.answer!r}")
    median = statistics.median(r.first for r in runs)
    print(f"median first token {median:.2f} s; goal {GOAL_S} s: ", end="")
    print("reached" if median <= GOAL_S else "MISSED")
    return int(median > GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
