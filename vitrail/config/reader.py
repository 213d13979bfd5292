"""Strict reading of a checkpoint's JSON: every key is read with a type, asserted, or listed as
ignored; what is left over is a finding. Knows JSON and findings, no architecture."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar, cast

from vitrail.config.finding import Finding, Refused

T = TypeVar("T", int, float, str, bool)
Json = dict[str, object]
_MISSING = object()
MAX_FILE_BYTES = 128 << 20  # of what is read whole; the largest tokenizers have some 35 MB
MAX_INT = 2**63 - 1  # what a tensor's size, an id or an offset can be
POINTER = b"version https://git-lfs.github.com/spec/"  # a clone's file before `git lfs pull`
PULL = "run `git lfs pull` in the folder, or download the file itself"
RESTORE = "restore it from the published config.json"
REPAIR = "check that the model folder is complete"


def there(path: Path) -> bool:
    """Whether a folder has this name, of whatever: what is there is read or refused."""
    return path.is_symlink() or path.exists()


def read_file(path: Path) -> bytes:
    """A checkpoint's small file. Raises `Refused` for what is no regular file (a pipe would wait
    without end), is too large, or cannot be read."""
    rule = f"a readable file of at most {MAX_FILE_BYTES} bytes"
    try:
        if not path.is_file():
            if there(path):
                raise _refused(path, "not a regular file", rule)
            nothing = f"no such file in {path.parent}"
            raise _refused(path, nothing, "a complete checkpoint has this file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refused(path, f"not readable ({error.strerror})", rule) from error
    if len(data) > MAX_FILE_BYTES:
        raise _refused(path, f"{path.stat().st_size} bytes", rule)
    return data


def read_asset(path: Path) -> bytes:
    """`read_file` of what must say something. Raises `Refused` also for an empty file, and for a
    pointer that stands for it."""
    data = read_file(path)
    if not data:
        raise _refused(path, "0 bytes", "the file says something", "download the file again")
    if data.startswith(POINTER):
        raise _refused(path, "a pointer of Git LFS", "the file itself", PULL)
    return data


def _refused(path: Path, saw: str, rule: str, change: str = REPAIR) -> Refused:
    return Refused.because(
        where=path.name, saw=saw, rule=rule, change=change, code="bad_checkpoint"
    )


def load_json(path: Path) -> Json:
    """The JSON object in `path`. Raises `Refused` for a missing file, bad JSON or another type."""
    rule, data = "a checkpoint's configuration is one JSON object", read_asset(path)
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # also a number or a nesting without end
        raise _refused(path, f"not JSON that we read ({error})", rule) from error
    if not isinstance(value, dict):
        raise _refused(path, f"a {type(value).__name__}", rule)
    return cast(Json, value)


class Keys:
    """A JSON object being consumed. Owns which keys were read; collects findings instead of
    raising, so that one reading reports everything. Call `finish` last: unread keys become
    findings. `unread`: keys that stand-ins were given for, of children too; of an object that is
    missing itself (`absent`) its keys are not missed one by one."""

    def __init__(self, data: Json, where: str, absent: bool = False):
        self._data = data
        self._where = where
        self._absent = absent
        self._seen: set[str] = set()
        self.unread: list[str] = []
        self.findings: list[Finding] = []

    def _find(
        self, key: str, saw: str, rule: str, change: str = RESTORE, code: str = "bad_config"
    ) -> None:
        if self._absent:
            return
        self.findings.append(
            Finding(where=f"{self._where}: {key}", saw=saw, rule=rule, change=change, code=code)
        )

    def judge(self, findings: Iterable[Finding]) -> None:
        """Findings about values, kept where all were read: a stand-in breaks rules that the file
        does not."""
        if not self.unread:
            self.findings.extend(findings)

    def has(self, key: str) -> bool:
        """Whether `key` is there with a value other than null."""
        return self._data.get(key) is not None

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """`key` as `kind` (an int is accepted for a float; a bool is never an int; ints are of 64
        bits). A missing or null key gives `default`; without one, a finding and the type's zero."""
        self._seen.add(key)
        value = self._data.get(key, _MISSING)
        if value is _MISSING or value is None:
            if default is None:
                return self._stand_in(key, "missing" if value is _MISSING else "null", kind)
            return default
        if not self._fits(key, value):
            self.unread.append(key)
            return kind()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return self._stand_in(key, f"{value!r:.80} of type {type(value).__name__}", kind)
        return value

    def _stand_in(self, key: str, saw: str, kind: type[T]) -> T:
        self._find(key, saw, f"a value of type {kind.__name__}")
        self.unread.append(key)
        return kind()

    def _fits(self, key: str, value: object) -> bool:
        """Whether an integer is of 64 bits; a finding if not."""
        if isinstance(value, int) and abs(value) > MAX_INT:
            self._find(key, f"{value!r:.80}", f"an integer is at most {MAX_INT} either way")
            return False
        return True

    def take_optional(self, key: str, kind: type[T]) -> T | None:
        """`key` as `kind`, or None where it is missing or null."""
        if not self.has(key):
            self._seen.add(key)
            return None
        return self.take(key, kind)

    def take_ints(self, key: str) -> tuple[int, ...]:
        """`key` as a tuple of ints: an int, a list of ints; missing or null is empty."""
        items = self._items(key)
        if all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            return tuple(cast(list[int], items)) if all(self._fits(key, i) for i in items) else ()
        return self._no_list(key, "an int or a list of ints")

    def take_strings(self, key: str) -> tuple[str, ...]:
        """`key` as a tuple of strings, from a list of them; missing or null is empty."""
        items = self._items(key)
        if isinstance(self._data.get(key), list | None) and all(isinstance(i, str) for i in items):
            return tuple(cast(list[str], items))
        return self._no_list(key, "a list of strings")

    def _items(self, key: str) -> list[object]:
        """Of a list, or the one value that stands in its place."""
        self._seen.add(key)
        value = self._data.get(key)
        if value is None:
            return []
        return cast(list[object], value) if isinstance(value, list) else [value]

    def _no_list(self, key: str, rule: str) -> tuple[()]:
        self._find(key, f"{self._data[key]!r:.80}", rule)
        return ()

    def child(self, key: str) -> "Keys":
        """The object under `key`; its findings are collected by `finish` of the child."""
        self._seen.add(key)
        value = self._data.get(key)
        there = isinstance(value, dict)
        child = Keys(cast(Json, value) if there else {}, f"{self._where}: {key}", not there)
        child.findings, child.unread = self.findings, self.unread
        if not there:
            saw = "missing" if value is None else f"{value!r:.80} of type {type(value).__name__}"
            self._find(key, saw, "an object")
            self.unread.append(key)
        return child

    def expect(self, key: str, *allowed: object) -> None:
        """Assert that `key`, where present, has one of `allowed` values: we compute nothing
        else."""
        self._seen.add(key)
        if key in self._data and self._data[key] not in allowed:
            self._find(
                key,
                f"{self._data[key]!r:.80}",
                f"only {' or '.join(repr(a) for a in allowed)} is implemented",
                "use a checkpoint without it, or add it to the model",
                "unsupported_config",
            )

    def agree(self, key: str, value: object, other: str) -> None:
        """Assert that `key`, where it is not null, says what the key `other` was read to say."""
        self._seen.add(key)
        if self.has(key) and self._data[key] != value and not self.unread:
            saw, rule = f"{self._data[key]!r:.80}", f"{value!r:.80}, as {other} says"
            self._find(key, saw, rule, code="unsupported_config")

    def require(self, key: str, value: object) -> None:
        """Assert that `key` is there with this `value`: its default would be another."""
        if key not in self._data:
            self._find(key, "missing", f"the key must be {value!r}")
        self.expect(key, value)

    def ignore(self, keys: Iterable[str]) -> None:
        """Keys that do not change what we compute, ignored on purpose."""
        self._seen.update(keys)

    def finish(self) -> None:
        """Turn every key that nobody read into a finding."""
        for key in self._data:
            if key not in self._seen:
                self._find(
                    key,
                    f"unknown key with value {self._data[key]!r:.80}",
                    "every key is read, asserted or listed as ignored",
                    "remove it if it is yours, or teach the model's reader what it means",
                    "unknown_key",
                )
