"""Reads a `Capsule` strictly: whoever sends one may be wrong or mean no good. No torch."""

from pathlib import Path

import msgspec

from vitrail.config.finding import Finding, Refused
from vitrail.engine.capsule import FORMAT, Capsule, encoded

__all__ = ["MAX_BYTES", "Capsule", "decoded", "encoded", "read"]

MAX_BYTES = 8 << 20


class _Versioned(msgspec.Struct):
    version: int


def read(path: Path) -> Capsule:
    """The capsule in a file. Raises `Refused` where it is none, or of another version."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        saw = f"it cannot be read: {error.strerror}"
        raise Refused(_finding(str(path), saw, "a readable file", "give its path")) from error
    return decoded(data, str(path))


def decoded(data: bytes, where: str = "capsule") -> Capsule:
    """The capsule that JSON says. Raises `Refused`."""
    if len(data) > MAX_BYTES:
        rule = f"a capsule is at most {MAX_BYTES} bytes"
        raise Refused(_finding(where, "a larger file", rule, "give another"))
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != FORMAT:
            rule = f"this release reads version {FORMAT}"
            change = "use the release that wrote it"
            raise Refused(_finding(where, f"version {version}", rule, change))
        return msgspec.json.decode(data, type=Capsule)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        saw = f"{type(error).__name__}: {error}"
        rule = "a capsule as `recorder` writes it"
        raise Refused(_finding(where, saw, rule, "give the file as it was written")) from error


def _finding(where: str, saw: str, rule: str, change: str) -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change=change, code="bad_capsule")
