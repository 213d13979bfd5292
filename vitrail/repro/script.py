"""What failed within a kernel as a file of its own, and what that says when it runs: of a kernel's
capsule, and of an engine's whose step failed there."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from vitrail.config.finding import Finding, Refused, printable
from vitrail.repro.capsule import MAX_BYTES, read
from vitrail.repro.kernel import FORMAT, KernelCapsule
from vitrail.repro.kernel_script import kernel_text

ROOT = Path(__file__).parents[2]
CODES = {1: 0, 0: 1}  # of a script -> of `vitrail repro`
WORDS = {0: "seen again", 1: "not seen", 2: "cannot tell"}


def repro_kernel(path: Path, out: Path | None, seconds: float) -> int | None:
    """As `vitrail repro` of a kernel's capsule: its script run, and written to `out` if it fails.
    One that is not done in time says nothing.
    None where the engine is needed: of an engine's capsule, unless a script is asked for and what
    failed is a kernel that fails alone."""
    made = read_kernel(path)
    alone = made is not None
    if made is None and out is not None:
        capsule = read(path)
        if capsule.kernel is not None:
            made = KernelCapsule(
                signature=capsule.signature,
                error=capsule.error,
                versions=capsule.versions,
                gpu="" if capsule.gpu == "cpu" else capsule.gpu,
                fault=capsule.kernel,
            )
    if made is None:
        return None
    text = kernel_script(made)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(text)
        try:
            done = subprocess.run(
                [sys.executable, str(script)], capture_output=True, text=True, timeout=seconds
            )
            code, said = CODES.get(done.returncode, 2), f"{done.stdout}{done.stderr}"
        except subprocess.TimeoutExpired:
            code, said = 2, f"it was not done after {seconds:.0f} s"
    for line in (f"recorded: {made.signature}", *said.splitlines()):
        print(printable(line))
    print(f"{WORDS[code]}: the kernel alone")
    if code == 0 and out is not None:
        out.write_text(text)
    return code if alone or code == 0 else None


def read_kernel(path: Path) -> KernelCapsule | None:
    """The kernel capsule of a file; None if it is another file. Raises `Refused` for one that says
    of itself that it is a kernel's and is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
        if not data.startswith(b'{"fault":'):
            return None
        made = msgspec.json.decode(data, type=KernelCapsule)
        saw = f"version {made.version}"
    except OSError:
        return None  # whoever reads it next says so
    except (msgspec.DecodeError, RecursionError) as error:
        made, saw = None, f"{type(error).__name__}: {error}"
    if made is None or made.version != FORMAT:
        rule = f"a kernel capsule of version {FORMAT}, as a night writes it"
        raise Refused(Finding(where=str(path), saw=saw, rule=rule, change="give another file"))
    return made


def kernel_script(made: KernelCapsule, root: Path = ROOT) -> str:
    """`root`: where the sources lie that failed. Raises `Refused` if they are not there."""
    body = kernel_text(made.fault, root, made.gpu)
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", body, re.M))
    ran = {n: v for n, v in made.versions.items() if n != "vitrail"}
    lines = (
        made.signature,
        "",
        f"error:    {made.error}",
        f"from:     vitrail @ {made.versions.get('vitrail', 'unknown')}, its sources are below",
        f"seen:     {', '.join(f'{n} {v}' for n, v in ran.items())}; {made.gpu or 'no GPU'}",
        f"needs:    {' '.join(f'{n}=={v}' for n, v in ran.items() if n in imported) or 'Python'}",
        "expected: exit code 0; 1 while the fault is there; 2 where it cannot be told",
        "--fixed:  with the nearest numbers that are legal, or the definition in the op's place",
    )
    return "".join(f"# {_plain(line)}".rstrip() + "\n" for line in lines) + "\n" + body


def _plain(text: str) -> str:
    """In one line, whatever it is made of."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)[:1000]
