"""Headers of a hub repository's safetensors files, read where they lie: a few kilobytes of each,
and never weights."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from vitrail.config.finding import Finding
from vitrail.weights.headers import Elsewhere, TensorHeader, header_of, layout_error

READERS = 16  # files asked for at once


class Hub(Protocol):
    """What of huggingface_hub's `HfApi` is asked."""

    def model_info(self, repo_id: str, *, revision: str | None, files_metadata: bool) -> Any: ...

    def parse_safetensors_file_metadata(
        self, repo_id: str, filename: str, *, revision: str | None
    ) -> Any: ...


def remote_headers(
    hub: Hub, repo: str, revision: str | None, folders: Sequence[str]
) -> Elsewhere | Finding:
    """By path, of the files at the root (without `folders`) or in these. A `Finding` where the hub
    cannot be asked."""
    try:
        info = hub.model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # noqa: BLE001  a hub, a network or a login that says no
        return _unreachable(repo, error)
    sizes = {s.rfilename: s.size for s in info.siblings if s.rfilename.endswith(".safetensors")}
    wanted = [name for name in sizes if _is_wanted(name, folders)]
    with ThreadPoolExecutor(READERS) as pool:
        read = pool.map(lambda name: _read(hub, repo, revision, name, sizes[name]), wanted)
        return dict(zip(wanted, read, strict=True))


def _is_wanted(name: str, folders: Sequence[str]) -> bool:
    place = name.rpartition("/")[0]
    return place in folders if folders else not place


def _read(
    hub: Hub, repo: str, revision: str | None, name: str, size: int | None
) -> list[TensorHeader] | Finding:
    file = name.rpartition("/")[2]
    try:
        found = hub.parse_safetensors_file_metadata(repo, name, revision=revision)
    except Exception as error:  # noqa: BLE001  also what is no safetensors file
        return Finding(
            where=file,
            saw=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            rule="a shard starts with a safetensors header",
            change="ask the repository's authors, or try again",
            code="bad_checkpoint",
        )
    tensors: list[TensorHeader] = []
    for key, info in found.tensors.items():
        fields = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": list(info.data_offsets),
        }
        tensor = header_of(key, file, fields, 0)
        if isinstance(tensor, Finding):
            return tensor
        tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = max((tensor.stop for tensor in tensors), default=0)
    return layout_error(tensors, file, 0, end) or _too_short(file, size, end) or tensors


def _too_short(file: str, size: int | None, end: int) -> Finding | None:
    """The header's own length is not known here, so a file may be longer by it."""
    if size is None or size > end + 8:
        return None
    return Finding(
        where=file,
        saw=f"have {size} bytes, want {end} and a header: cut short",
        rule="a file ends with its last tensor",
        change="ask the repository's authors to upload it again",
        code="wrong_file_size",
    )


def _unreachable(repo: str, error: Exception) -> Finding:
    return Finding(
        where="model",
        saw=f"{repo!r}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
        rule="a hub tells a repository's files",
        change="check the id, the network and the login, or give a local folder",
        code="hub_unreachable",
    )


def cannot_tell(findings: Iterable[Finding]) -> str | None:
    """Why weights were not looked at, if that is what `findings` say."""
    said = [str(f) for f in findings if f.code == "hub_unreachable"]
    return " ".join(said) or None
