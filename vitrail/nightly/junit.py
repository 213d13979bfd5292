"""pytest's report as cases. A file that is missing or cut off is None: the process ended before its
end, which is something else than a test that fails."""

import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Literal

from vitrail.nightly.records import Case

KEPT = 20_000  # characters of a trace and of what was said, each


def read_cases(path: Path) -> list[Case] | None:
    """Every test of the report in its order."""
    try:
        root = Xml.parse(path).getroot()
    except (OSError, Xml.ParseError):
        return None
    return [_case(node) for node in root.iter("testcase")]


def _case(node: Xml.Element) -> Case:
    outcome: Literal["passed", "failed", "error", "skipped"] = "passed"
    message = trace = ""
    for tag in ("failure", "error", "skipped"):
        found = node.find(tag)
        if found is not None:
            outcome = "failed" if tag == "failure" else tag
            message = found.get("message", "")
            trace = (found.text or "")[-KEPT:]
            break
    said = "\n".join(node.findtext(tag) or "" for tag in ("system-out", "system-err"))
    properties = {p.get("name", ""): p.get("value", "") for p in node.iter("property")}
    return Case(
        id=_id(node),
        outcome=outcome,
        seconds=float(node.get("time", "0")),
        message=message,
        trace="" if outcome in ("passed", "skipped") else trace,
        said=said[-KEPT:] if outcome in ("failed", "error") else "",
        properties=properties,
    )


def _id(node: Xml.Element) -> str:
    """file::test; of a file that could not be collected, the file."""
    name, place = node.get("name", ""), node.get("classname", "")
    if not place:
        return node.get("file", name.replace(".", "/") + ".py")
    file = node.get("file", place.replace(".", "/") + ".py")
    return f"{file}::{name}"
