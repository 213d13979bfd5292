"""Finding a checkpoint: a local folder, or a hub id whose files are fetched. Owns which files may
be fetched (never code or pickles). No torch; reads JSON alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from blake3 import blake3

from vitrail.config.finding import Finding, Refused
from vitrail.config.reader import Json, load_json

FETCHED = ("*.json", "*.safetensors", "*.jinja", "tiktoken.model", "tokenizer.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder with a config.json. `generation` is {} where the file is absent. `revision`: 32
    bytes that change with the checkpoint; part of every cache key made from it."""

    folder: Path
    architecture: str
    config: Json
    generation: Json
    revision: bytes


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint behind a folder path or a hub id. Raises `Refused` if there is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _fetch(model, revision)
    config = load_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = load_json(generation_file) if generation_file.is_file() else {}
    found = config.get("architectures")
    names = cast(list[object], found) if isinstance(found, list) else list[object]()
    if len(names) != 1 or not isinstance(names[0], str):
        raise Refused(
            Finding(
                where="config.json: architectures",
                saw=repr(config.get("architectures")),
                rule="a list of one architecture name",
                change="restore it from the published config.json",
                code="bad_config",
            )
        )
    return Checkpoint(
        folder=folder,
        architecture=names[0],
        config=config,
        generation=generation,
        revision=_revision(folder),
    )


def _revision(folder: Path) -> bytes:
    """A digest of the names, sizes and times of the weights and of the small files' contents, in
    the folder and in its sub-folders."""
    digest = blake3()
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in (p for place in (folder, *inner) for p in sorted(place.iterdir())):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            digest.update(name.encode() + b"\0" + path.read_bytes())
        elif path.suffix == ".safetensors":
            stat = path.stat()
            digest.update(f"{name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.digest()


def _fetch(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(FETCHED)))
    except (ValueError, OSError) as error:  # a malformed id; a hub or network that says no
        raise Refused(
            Finding(
                where="model",
                saw=f"{model!r}: no such folder, and as a hub id: {error}",
                rule="a local folder with a config.json, or a hub id that can be fetched",
                change="give the path of a checkpoint, or check the id and the network",
                code="model_not_found",
            )
        ) from error
