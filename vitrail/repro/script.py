"""One standalone file from a capsule. What failed within a kernel needs public packages alone; any
other step is replayed by the engine. No torch."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vitrail.config.finding import Finding, Refused
from vitrail.repro.capsule import MAX_BYTES
from vitrail.repro.kernel import FORMAT, KernelCapsule
from vitrail.repro.kernel_script import kernel_text

ROOT = Path(__file__).parents[2]


def read_kernel(path: Path) -> KernelCapsule | None:
    """The kernel capsule of a file; None if it is another capsule's. Raises `Refused` for one that
    says of itself that it is a kernel's and is none."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES or b'"fault":' not in data:
        return None
    try:
        made = msgspec.json.decode(data, type=KernelCapsule)
        saw = f"version {made.version}"
    except (msgspec.DecodeError, RecursionError) as error:
        made, saw = None, f"{type(error).__name__}: {error}"
    if made is None or made.version != FORMAT:
        rule = f"a kernel capsule of version {FORMAT}, as a night writes it"
        raise Refused(Finding(where=str(path), saw=saw, rule=rule, change="give another file"))
    return made


def write_kernel_script(capsule: KernelCapsule, out: Path, commit: str, root: Path = ROOT) -> None:
    """`root`: where the sources of `commit` lie, which are the ones that failed."""
    body = kernel_text(capsule.fault, root, capsule.gpu)
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", body, re.M))
    names = {"torch": "torch", "triton": "triton"}
    needs = [
        f"{n}=={capsule.versions[n]}"
        for m, n in names.items()
        if m in imported and n in capsule.versions
    ]
    head = header(
        capsule.signature,
        {
            "error": capsule.error,
            "from": f"vitrail @ {commit}, whose sources are below",
            "seen": " ".join(f"{n} {v}" for n, v in capsule.versions.items())
            + f"; {capsule.gpu or 'no GPU'}",
            "needs": " ".join(needs) or "Python alone",
            "expected": "exit code 0; 1 while the fault is there; 2 where it cannot be told",
            "--fixed": "the nearest numbers that are legal: 0",
        },
    )
    out.write_text(head + body)


def write_script(path: Path, out: Path) -> None:
    """The script of a capsule's file. Raises `Refused`."""
    kernel = read_kernel(path)
    assert kernel is not None
    write_kernel_script(kernel, out, "?")


def header(title: str, lines: Mapping[str, str]) -> str:
    """Comments: whatever they are made of cannot end them."""
    said = [title, "", *(f"{name + ':':10} {text}" for name, text in lines.items())]
    return "".join(f"# {_plain(line)}".rstrip() + "\n" for line in said) + "\n"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)[:1000]


if __name__ == "__main__":
    write_script(*map(Path, sys.argv[1:]))
