"""Failures that are known: each with an owner and a day on which it must be mended or looked at
again. One that is past its day fails the night, whether it was seen or not."""

import re
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from vitrail.config.cause import Cause
from vitrail.config.finding import Finding, Refused

FILE = Path(__file__).parent / "known_issues.toml"


class Issue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[issue]]`. `match` is a regular expression, searched in a cause's signature, which the
    digest shows; `fix` a
    commit or change that is said to mend it, "" where there is none yet."""

    id: str
    match: str
    owner: str
    expires: date
    why: str
    fix: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    issue: tuple[Issue, ...] = ()


def read_known(path: Path) -> tuple[Issue, ...]:
    """Every issue of a file. Raises `Refused` for one that cannot be understood."""
    try:
        issues = msgspec.convert(tomllib.loads(path.read_text()), _File).issue
        for issue in issues:
            re.compile(issue.match)
            if not (issue.match and issue.owner and issue.id):
                raise ValueError(f"issue {issue.id!r}: id, match and owner are not empty")
    except (OSError, ValueError, re.error) as error:
        raise Refused(
            Finding(
                where=str(path),
                saw=f"{type(error).__name__}: {error}",
                rule="[[issue]] with id, match, owner, expires (a date), why and perhaps fix",
                change="mend the file",
            )
        ) from error
    return issues


def known_as(cause: Cause, issues: Sequence[Issue], today: date) -> Issue | None:
    """The issue that covers a cause today: an expired one covers nothing."""
    for issue in issues:
        if today <= issue.expires and re.search(issue.match, cause.signature):
            return issue
    return None


def expired(issues: Sequence[Issue], today: date) -> list[Issue]:
    return [issue for issue in issues if issue.expires < today]
