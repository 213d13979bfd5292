"""Compiled CuTe kernels, kept on disk by content beside what Triton keeps: compiling one takes
seconds, loading it milliseconds. A file's name is a hash of all that the kernel is made from: its
specialisation, our sources and the packages' releases, and the device. A file that cannot be loaded
is made again; a folder that cannot be written to costs the next start its time and nothing else."""

import ctypes
import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from vitrail.attention.installed import release

Kernel = Callable[..., None]
FUNCTION = "kernel"  # the name in each object file
PACKAGES = (
    *("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch-c-dlpack-ext", "flash-attn-4"),
    *("quack-kernels", "torch", "triton"),
)
SOURCES = (
    "fa4.py",
    "backends/cute.py",
    "backends/fa4.py",
    "decode_spec.py",
    "kernels/decode_sm90.py",
)
log = logging.getLogger("vitrail.attention")


def kept(
    name: str,
    parts: Sequence[str],
    make: Callable[[], Sequence[Any]],
    folder: Path | None = None,
    device: str | None = None,
) -> tuple[Kernel, ...]:
    """The kernels `parts` of what `name` says in full, from disk or made now, by whichever process
    comes first: others wait for it. `make` gives them in this order, and raises what its compiler
    raises. `device`: what they are compiled for; default the GPU at hand."""
    files = _files(name, parts, folder, device)
    folder = files[0].parent
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(files[0].with_suffix(".lock")):
        found = _load(files)
        if found is not None:
            return found
        made = tuple(make())
        assert len(made) == len(files), f"{len(made)} kernels for {parts}"
        for kernel, file in zip(made, files, strict=True):
            _store(kernel, file)
        return made


def noted(name: str) -> bool:
    """Whether this was noted, by this very package for this very GPU."""
    return _mark(name).is_file()


def note(name: str) -> None:
    """That all kernels of what `name` says are on Triton's disk. Where they are not, somebody
    having removed them, they are compiled when they are asked for."""
    with suppress(OSError):
        _mark(name).parent.mkdir(parents=True, exist_ok=True)
        _mark(name).touch()


def _mark(name: str) -> Path:
    (file,) = _files(f"{name}\0{_whole_package()}", ("noted",), None, None)
    return file.with_suffix("")


def is_kept(name: str, parts: Sequence[str]) -> bool:
    """Whether they are on disk; asks no compiler."""
    return all(file.is_file() for file in _files(name, parts, None, None))


def _files(name: str, parts: Sequence[str], folder: Path | None, device: str | None) -> list[Path]:
    folder = Path(knobs.cache.dir) / "vitrail" if folder is None else folder
    key = hashlib.sha256(f"{name}\0{device or _device()}\0{_made_from()}".encode()).hexdigest()
    return [folder / f"{key}.{part}.o" for part in parts]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """While no other process is here, where there is a folder for it."""
    try:
        opened = lock.open("wb")
    except OSError:
        yield
        return
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _load(files: Sequence[Path]) -> tuple[Kernel, ...] | None:
    if not all(file.is_file() for file in files):
        return None
    from cutlass import cute  # seconds, which a look at the disk need not wait for

    preload()
    try:
        # the modules live as long as their functions
        return tuple(
            _function(cute.runtime.load_module(str(file), enable_tvm_ffi=True)) for file in files
        )
    except Exception as error:  # noqa: BLE001  whatever a loader says of a file that is damaged
        log.warning("a kept kernel cannot be loaded and is made again: %s", error)
        return None


def _function(module: Any) -> Kernel:
    """The one function of a loaded file, whose attribute it is."""
    return module.kernel


@cache
def preload() -> None:
    """Loaded kernels find the compiler's runtime among the process's symbols."""
    from cutlass import cute

    for path in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        if Path(path).exists():
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _store(kernel: Any, file: Path) -> None:
    """Under its name only when it is whole."""
    part = file.with_suffix(f".{os.getpid()}.tmp.o")
    try:
        kernel.export_to_c(object_file_path=str(part), function_name=FUNCTION)
        part.replace(file)
    except Exception as error:  # noqa: BLE001  it serves as it is; keeping it is for the next start
        log.warning("a compiled kernel is not kept for the next start: %s", error)
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _device() -> str:
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{facts.name} {facts.major}.{facts.minor} {facts.multi_processor_count}"


@cache
def _made_from() -> str:
    """Releases of what compiles, and our sources."""
    named = [f"python {sys.version_info[:2]}", *(f"{p} {release(p)}" for p in PACKAGES)]
    sources = hashlib.sha256()
    for source in SOURCES:
        sources.update((Path(__file__).parents[1] / source).read_bytes())
    return "\n".join([*named, sources.hexdigest()])


@cache
def _whole_package() -> str:
    sources = hashlib.sha256()
    for source in sorted(Path(__file__).parents[2].rglob("*.py")):
        sources.update(source.read_bytes())
    return sources.hexdigest()
