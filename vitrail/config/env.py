"""Every environment variable that Vitrail reads. A malformed value is an error, never ignored.
`tests/test_limits.py` freezes the list; nothing else in the package reads the environment."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.config.finding import Refused

NAMES = ("VITRAIL_LOG", "VITRAIL_API_KEY", "VITRAIL_CAPSULES")
LogLevel = Literal["debug", "info", "warning", "error"]
_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """`log`: log level; `api_key`: required bearer key of the server, if set; `capsules`: the
    folder for capsules of failed steps, None for none ("off")."""

    log: LogLevel
    api_key: str | None
    capsules: Path | None


def read_env() -> Env:
    """Read once, at a process's entry point."""
    log = os.environ.get("VITRAIL_LOG", "info").lower()
    if log not in _LEVELS:
        raise Refused.because(
            where="VITRAIL_LOG",
            saw=repr(log),
            rule=f"one of {', '.join(_LEVELS)}",
            change="set it to one of these or unset it",
        )
    key = os.environ.get("VITRAIL_API_KEY")
    if key is not None and (not key or not key.isascii()):
        raise Refused.because(
            where="VITRAIL_API_KEY",
            saw="an empty or non-ASCII key",
            rule="a key is at least one ASCII character",
            change="set a key or unset the variable",
        )
    return Env(log=log, api_key=key, capsules=_capsules(os.environ.get("VITRAIL_CAPSULES")))


def of_child(package_root: Path | None = None, **more: str) -> dict[str, str]:
    """What a process that this one starts is given: the same and `more`; its Python looks in
    `package_root` first."""
    if package_root is not None:
        paths = (str(package_root), os.environ.get("PYTHONPATH"))
        more["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**os.environ, **more}


def _capsules(text: str | None) -> Path | None:
    """The folder; unset: one in the user's home, if there is one."""
    if text is None:
        home = Path("~").expanduser()
        return home / ".local" / "state" / "vitrail" / "capsules" if home.is_absolute() else None
    if not text:
        raise Refused.because(
            where="VITRAIL_CAPSULES",
            saw="an empty name",
            rule="a folder, or off",
            change="set it to one of these or unset it",
        )
    return None if text == "off" else Path(text)
