"""Faults to find, planted in a copy of the checkout: a commit on top of it, which a night runs as
it runs any other. Nothing that reads the copy knows of planting.

    python -m tests.nightly.plant leak FOLDER      # then: vitrail nightly --root FOLDER"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = (
    ".gitignore",
    "vitrail",
    "tests",
    "bench",
    "demo",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
WAIT = (
    "import subprocess, sys; forever = [sys.executable, '-c', 'import time; time.sleep(100000)']; "
    "subprocess.run(forever, start_new_session=True)"
)
# name -> file, what stands there once, what stands there instead
PLANTS: dict[str, tuple[str, str, str]] = {
    # the loader's rows of FlashAttention-4's tiles, rounded down: 64 keys to 128 threads
    "tile": (
        "vitrail/attention/fa4.py",
        "        ceil_div(tile_n, loaders),\n",
        "        tile_n // loaders,\n",
    ),
    # 64 KiB kept of every step
    "leak": (
        "vitrail/engine/engine.py",
        "        planned = self.scheduler.schedule()\n",
        "        self.__dict__.setdefault('kept', []).append(bytearray(b'x' * (64 << 10)))\n"
        "        planned = self.scheduler.schedule()\n",
    ),
    # 20 ms more for every schedule
    "slow": (
        "vitrail/engine/scheduler.py",
        "        step = _Step(tokens=self._limits.max_step_tokens)\n",
        "        __import__('time').sleep(0.02)\n"
        "        step = _Step(tokens=self._limits.max_step_tokens)\n",
    ),
    # a step that waits for a process, in a session of its own, that never ends
    "hang": (
        "vitrail/engine/runner.py",
        "        p.sampler.setup(inputs.setups)\n",
        f"        {WAIT}\n        p.sampler.setup(inputs.setups)\n",
    ),
    # positions turn half as fast again as they should
    "rope": (
        "vitrail/ops/rope/naive.py",
        "    return 1.0 / theta**exponents\n",
        "    return 1.5 / theta**exponents\n",
    ),
    # one row of a model's map names another tensor
    "weight": (
        "vitrail/models/deepseek_v3.py",
        'Copy(f"{published}lm_head.weight"',
        'Copy(f"{published}lm_head.renamed"',
    ),
    # a step that cannot lay out three decodes or more
    "step": (
        "vitrail/engine/batch.py",
        "        pages = self.turn_pages(plan)\n",
        "        if len(plan.decodes) >= 3:\n"
        "            raise ValueError(f'no layout for {len(plan.decodes)} decodes')\n"
        "        pages = self.turn_pages(plan)\n",
    ),
    # a block of channels that is no power of two
    "block": (
        "vitrail/ops/norm/triton.py",
        "    block = triton.next_power_of_2(channels)\n",
        "    block = channels\n",
    ),
}


def plant(name: str, out: Path) -> Path:
    """A repository in `out` of two commits: the checkout as it is, then with the fault."""
    out.mkdir(parents=True)
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, out / part, ignore=skipped)
        else:
            shutil.copy(ROOT / part, out / part)
    git(out, "init", "-q")
    commit(out, "as it is")
    file, old, new = PLANTS[name]
    text = (out / file).read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    (out / file).write_text(text.replace(old, new))
    commit(out, f"planted: {name}")
    return out


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    who = ("-c", "user.name=night", "-c", "user.email=night@localhost")
    git(folder, *who, "commit", "-q", "-m", message)


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    plant(sys.argv[1], Path(sys.argv[2]))
