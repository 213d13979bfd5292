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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from cutlass import cute
from triton import knobs

Kernel = Callable[..., None]
FUNCTION = "kernel"  # the name in each object file
PACKAGES = (
    *("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch-c-dlpack-ext", "flash-attn-4"),
    *("quack-kernels", "torch"),
)
SOURCES = ("backends/cute.py", "backends/fa4.py", "decode_spec.py", "kernels/decode_sm90.py")
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
    folder = Path(knobs.cache.dir) / "vitrail" if folder is None else folder
    key = hashlib.sha256(f"{name}\0{device or _device()}\0{_made_from()}".encode()).hexdigest()
    files = [folder / f"{key}.{part}.o" for part in parts]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{key}.lock"):
        found = _load(files)
        if found is not None:
            return found
        made = tuple(make())
        assert len(made) == len(files), f"{len(made)} kernels for {parts}"
        for kernel, file in zip(made, files, strict=True):
            _store(kernel, file)
        return made


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
    _preload()
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
def _preload() -> None:
    """Loaded kernels find the compiler's runtime among the process's symbols."""
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
    named = [f"python {sys.version_info[:2]}", *(f"{p} {_release(p)}" for p in PACKAGES)]
    sources = hashlib.sha256()
    for source in SOURCES:
        sources.update((Path(__file__).parents[1] / source).read_bytes())
    return "\n".join([*named, sources.hexdigest()])


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
