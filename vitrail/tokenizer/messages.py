"""A conversation as frozen values, and the plain JSON that a chat template is shown of it. Owns
which messages are well formed and which of their strings come from a client. Knows no template and
no ids."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitrail.config.finding import Finding, Refused

ROLES = ("system", "developer", "user", "assistant", "tool")
Clean = Callable[[str], str]
_MAX_DEPTH = 64

# Words of JSON schema that templates compare with and look up, so they are never marked. A client
# chooses where they stand, not what they are.
_SCHEMA_WORDS = frozenset(
    (
        "additionalProperties",
        "anyOf",
        "array",
        "boolean",
        "default",
        "description",
        "enum",
        "format",
        "function",
        "integer",
        "items",
        "name",
        "null",
        "number",
        "object",
        "parameters",
        "properties",
        "required",
        "return",
        "string",
        "title",
        "type",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A piece of a message's text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """The place of an image. Which image: the n-th of the request, in order of appearance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made. `arguments`: one JSON object as text; '' is an empty one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. `content` is None only for an assistant's turn that is nothing but tool calls."""

    role: str
    content: tuple[TextPart | ImagePart, ...] | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ContentForms(NamedTuple):
    """Which forms of `content` a template renders: a plain string, a list of parts."""

    string: bool
    parts: bool


def count_images(messages: Sequence[Message]) -> int:
    """The image parts of a conversation."""
    return sum(isinstance(part, ImagePart) for m in messages for part in m.content or ())


def check_messages(messages: Sequence[Message]) -> list[Finding]:
    """Everything that is wrong with a conversation before any template sees it."""
    if not messages:
        return [_finding("messages", "an empty list", "a conversation has a message", "add one")]
    findings: list[Finding] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            findings.append(
                _finding(
                    f"{where}.role",
                    f"{message.role!r:.60}",
                    f"one of {', '.join(ROLES)}",
                    "use one of these",
                )
            )
        if message.tool_calls and message.role != "assistant":
            findings.append(
                _finding(
                    f"{where}.tool_calls",
                    f"{len(message.tool_calls)} calls by role {message.role!r:.60}",
                    "only an assistant's message has tool calls",
                    "remove them or change the role",
                )
            )
        if message.content is None and not message.tool_calls:
            findings.append(
                _finding(
                    f"{where}.content",
                    "null without tool calls",
                    "a message has content (an empty string is content) or tool calls",
                    "send a string or a list of parts",
                )
            )
    return findings


def show_messages(
    messages: Sequence[Message], forms: ContentForms, clean: Clean, end: str = ""
) -> list[dict[str, object]]:
    """The conversation in the shape that templates know from transformers; `developer` is shown as
    `system`. Every string of the client's goes through `clean`; `end` is put after the last
    message's text. Raises `Refused` for content that no form of the template takes and for bad
    arguments."""
    shown: list[dict[str, object]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        suffix = end if i == len(messages) - 1 else ""
        role = "system" if message.role == "developer" else message.role
        content = _show_content(message.content or (), forms, clean, suffix, where)
        entry: dict[str, object] = {"role": role, "content": content}
        for key, value in (
            ("name", message.name),
            ("tool_call_id", message.tool_call_id),
            ("reasoning_content", message.reasoning_content),
        ):
            if value is not None:
                entry[key] = clean(value)
        if message.tool_calls:
            entry["tool_calls"] = [
                _show_call(call, clean, f"{where}.tool_calls[{j}]")
                for j, call in enumerate(message.tool_calls)
            ]
        shown.append(entry)
    return shown


def show_tools(tools: Sequence[Mapping[str, object]], clean: Clean) -> list[object]:
    """The request's tools with every string cleaned, but for the vocabulary of JSON schema."""
    keep: Clean = lambda text: text if text in _SCHEMA_WORDS else clean(text)  # noqa: E731
    return [_show_json(tool, keep, f"tools[{i}]") for i, tool in enumerate(tools)]


def _show_content(
    parts: Sequence[TextPart | ImagePart],
    forms: ContentForms,
    clean: Clean,
    end: str,
    where: str,
) -> str | list[dict[str, str]]:
    """A string where all parts are text and the template takes one, so that how a client cut its
    text changes nothing; else a list of parts."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if len(texts) == len(parts) and forms.string:
        return clean("".join(texts)) + end
    if not forms.parts:
        raise Refused(
            _finding(
                f"{where}.content",
                f"{len(parts) - len(texts)} images",
                "this checkpoint's chat template takes text alone",
                "remove the images or use the template of a vision model",
            )
        )
    shown = [
        {"type": "text", "text": clean(part.text)}
        if isinstance(part, TextPart)
        else {"type": "image"}
        for part in parts
    ]
    if end and (not shown or shown[-1]["type"] != "text"):
        shown.append({"type": "text", "text": end})
    elif end:
        shown[-1]["text"] += end
    return shown


def _show_call(call: ToolCall, clean: Clean, where: str) -> dict[str, object]:
    try:
        arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(
            _finding(
                f"{where}.function.arguments",
                f"{call.arguments!r:.80}",
                "a call's arguments are the text of one JSON object",
                "send them as they were generated, if that was valid JSON",
            )
        )
    function = {
        "name": clean(call.name),
        "arguments": _show_json(arguments, clean, f"{where}.function.arguments"),
    }
    shown: dict[str, object] = {"type": "function", "function": function}
    return shown if call.id is None else {"id": clean(call.id), **shown}


def _show_json(value: object, clean: Clean, where: str, depth: int = 0) -> object:
    if depth > _MAX_DEPTH:
        raise Refused(
            _finding(
                where, f"more than {_MAX_DEPTH} levels", "JSON is not nested so deep", "flatten"
            )
        )
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(k): _show_json(v, clean, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_show_json(v, clean, where, depth + 1) for v in value]
    return value


def _finding(where: str, saw: str, rule: str, change: str) -> Finding:
    return Finding(where=where, saw=saw, rule=rule, change=change)
