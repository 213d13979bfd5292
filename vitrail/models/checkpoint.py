"""Finding a checkpoint: a local folder, a GGUF file, or a hub id whose files are fetched. Owns
which files may be fetched (never code or pickles). No torch; reads JSON and GGUF headers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from blake3 import blake3

from vitrail.config.finding import Refused, accept
from vitrail.config.reader import Json, load_json, read_file, there
from vitrail.models.gguf import ROPE_FACTORS, published_config
from vitrail.models.registry import ARCHITECTURES
from vitrail.weights.gguf import SUFFIX, GgufFile, GgufTensors, read

WEIGHTS = "*.safetensors"
FETCHED = ("*.json", WEIGHTS, "*.jinja", "tiktoken.model", "tokenizer.model")
ADAPTER = "adapter_config.json"
MAX_FACTORS = 4096  # rotary frequencies of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder with a config.json, or a GGUF file in its folder, `config` being what its metadata
    say. `generation` is {} where the file is absent. `revision`: 32 bytes that change with the
    checkpoint; part of every cache key made from it."""

    folder: Path
    architecture: str
    config: Json
    generation: Json
    revision: bytes
    gguf: GgufFile | None = None


def open_checkpoint(model: str, revision: str | None = None, *, weights: bool = True) -> Checkpoint:
    """The checkpoint behind the path of a folder, the path of a .gguf file (or of a folder with
    one and no config.json), or a hub id, whose weights are fetched too unless `weights` is False.
    Raises `Refused` if there is none."""
    folder = Path(model).expanduser()
    if revision is not None and folder.exists():
        saw, rule = f"{revision!r}, of the local {model!r}", "a revision is of a hub repository"
        raise Refused.because("revision", saw, rule, "leave it out, or give the hub id")
    if folder.suffix == SUFFIX and folder.is_file():
        return _open_gguf(folder)
    if not model or not folder.is_dir():
        folder = _fetch(model, revision, weights)
    held = sorted(folder.glob(f"*{SUFFIX}"))
    if held and not (folder / "config.json").is_file():
        return _open_gguf(_only(held))
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise _adapter(folder)
    if not there(folder / "config.json"):
        raise _no_config(folder)
    config = load_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = load_json(generation_file) if there(generation_file) else {}
    found = config.get("architectures")
    names = cast(list[object], found) if isinstance(found, list) else list[object]()
    if len(names) != 1 or not isinstance(names[0], str):
        raise Refused.because(
            where="config.json: architectures",
            saw=repr(found) if found is not None else "missing",
            rule="a list of one architecture name",
            change="restore it from the published config.json",
            code="bad_config",
        )
    return Checkpoint(
        folder=folder,
        architecture=names[0],
        config=config,
        generation=generation,
        revision=_revision(folder, names[0]),
    )


def _adapter(folder: Path) -> Refused:
    saw, change = "a LoRA adapter, without its model", "merge it into its base model and serve that"
    rule = "adapters are not served: nothing would apply it, and the base model would answer"
    return Refused.because(f"{folder.name}: {ADAPTER}", saw, rule, change, "lora_adapter")


def _no_config(folder: Path) -> Refused:
    inner = sorted(path.parent for path in folder.glob("*/config.json"))[:8]
    named = f"; there is one in {', '.join(p.name for p in inner)}" if inner else ""
    saw, rule = (
        f"no such file in {folder}{named}",
        "a checkpoint's folder has it, or one .gguf file",
    )
    change = f"give {inner[0]}" if inner else "check the path, and that its files are all there"
    return Refused.because("config.json", saw, rule, change, "bad_checkpoint")


def _only(files: list[Path]) -> Path:
    if len(files) == 1:
        return files[0]
    raise Refused.because(
        where="model",
        saw=f"{len(files)} files: {', '.join(file.name for file in files)}",
        rule="a folder has one .gguf file",
        change="give the path of one of them",
        code="bad_checkpoint",
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = accept(read(path))
    factors = _rope_factors(file)
    config = accept(published_config(file.metadata, file.headers.tensors, factors))
    stat = path.stat()
    digest = blake3(file.digest)
    digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return Checkpoint(
        folder=path.parent,
        architecture=cast(list[str], config["architectures"])[0],
        config=config,
        generation={},
        revision=digest.digest(),
        gguf=file,
    )


def _rope_factors(file: GgufFile) -> list[float] | None:
    """Values of the file's `ROPE_FACTORS`, None where it has none. Raises `Refused`, before a value
    is read, for more than any head can have."""
    header = file.headers.tensors.get(ROPE_FACTORS)
    if header is None:
        return None
    kind = file.kinds[ROPE_FACTORS].name
    if kind != "F32" or len(header.shape) != 1 or header.shape[0] > MAX_FACTORS:
        raise Refused.because(
            where=f"{file.path.name}: {ROPE_FACTORS}",
            saw=f"{kind} of shape {header.shape}",
            rule=f"F32 of one dimension, at most {MAX_FACTORS} long",
            change="use a file as llama.cpp's converter writes it",
            code="unsupported_config",
        )
    with GgufTensors(file) as arrays:
        return cast(list[float], arrays.get(ROPE_FACTORS).tolist())


def _revision(folder: Path, architecture: str) -> bytes:
    """A digest of the names, sizes and times of the weights and of the small files' contents, in
    the folder and in the sub-folders that the architecture has. Raises `Refused`."""
    digest = blake3()
    row = ARCHITECTURES.get(architecture)
    named = () if row is None else row.folders
    inner = sorted(folder / name for name in named if (folder / name).is_dir())
    for path in (p for place in (folder, *inner) for p in sorted(place.iterdir())):
        name = os.fsencode(path.relative_to(folder))
        if path.suffix == ".json":
            digest.update(name + b"\0" + read_file(path))
        elif path.suffix == ".safetensors" and path.is_file():
            stat = path.stat()
            digest.update(name + f":{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.digest()


def _fetch(model: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = [name for name in FETCHED if weights or name != WEIGHTS]
    path, code, change = Path(model), "model_not_found", "check the path, the id and the login"
    saw = "a file, not its folder" if path.is_file() else "no such folder, and no hub id"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except HFValidationError:
        change = f"give its folder, {path.parent}" if path.is_file() else change
    except LocalEntryNotFoundError as error:  # no answer, and none of an earlier day
        code, change = "hub_unreachable", "check the path, or the id and the network"
        saw = f"no such folder, and no answer from the hub: {_line(error)}"
    except (ValueError, OSError) as error:
        saw = f"no such folder, and as a hub id: {_line(error)}"
    rule = "a folder with a config.json, a .gguf file, or a hub id that can be fetched"
    raise Refused.because("model", f"{model!r}: {saw}", rule, change, code)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
