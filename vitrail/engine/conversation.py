"""OpenAI-style messages as plain JSON -> `Message`s and the pictures of their image parts, in
order. Shared by the server and the offline API; what the latter may do beyond JSON (a path, a PIL
image) is the `local` switch. Unknown keys and types are refused by name. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from PIL import Image

from vitrail.config.finding import Finding, Refused
from vitrail.tokenizer.messages import ImagePart, Message, TextPart, ToolCall
from vitrail.vision.image import ImageLimits, parse_data_url
from vitrail.vision.preprocess import PatchedImage

ImageSource = bytes | Path | Image.Image | np.ndarray | PatchedImage
_MESSAGE_KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
)
# Fields of OpenAI's replies that clients send back; only their null is taken.
_EMPTY_KEYS = ("refusal", "annotations", "audio", "function_call")


class Picture(NamedTuple):
    """A picture before it is opened, and the field that brought it."""

    source: ImageSource
    where: str


class Conversation(NamedTuple):
    """The n-th image part of `messages` is `pictures[n]`."""

    messages: list[Message]
    pictures: list[Picture]


def parse_conversation(
    messages: object, limits: ImageLimits, *, local: bool = False
) -> Conversation:
    """Raises `Refused` naming the part, what was seen and the rule."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _refused(
            "messages",
            "an empty list" if messages == [] else _kind(cast(object, messages)),
            "a list of at least one message",
            "send a list of messages with role and content",
        )
    pictures: list[Picture] = []
    parsed = [
        _message(m, f"messages[{i}]", pictures, limits, local)
        for i, m in enumerate(cast(Sequence[object], messages))
    ]
    return Conversation(parsed, pictures)


def _message(
    raw: object, where: str, pictures: list[Picture], limits: ImageLimits, local: bool
) -> Message:
    message = _object(raw, where)
    _only(message, _MESSAGE_KEYS + _EMPTY_KEYS, where)
    for key in _EMPTY_KEYS:
        if message.get(key) not in (None, []):
            raise _refused(
                f"{where}.{key}",
                f"a {type(message[key]).__name__}",
                "this field is not supported, so it is null",
                "leave it out",
            )
    content = message.get("content")
    parts: tuple[TextPart | ImagePart, ...] | None
    if content is None:
        parts = None
    elif isinstance(content, str):
        parts = (TextPart(text=content),) if content else ()
    elif isinstance(content, Sequence):
        items = cast(Sequence[object], content)
        parts = tuple(
            _part(p, f"{where}.content[{i}]", pictures, limits, local) for i, p in enumerate(items)
        )
    else:
        raise _refused(
            f"{where}.content",
            f"a {type(content).__name__}",
            "a string, a list of parts, or null beside tool calls",
            "send a string",
        )
    return Message(
        role=_string(message, "role", where),
        content=parts,
        name=_optional(message, "name", where),
        tool_calls=_tool_calls(message.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=_optional(message, "tool_call_id", where),
        reasoning_content=_optional(message, "reasoning_content", where),
    )


def _part(
    raw: object, where: str, pictures: list[Picture], limits: ImageLimits, local: bool
) -> TextPart | ImagePart:
    if isinstance(raw, str):
        return TextPart(text=raw)
    part = _object(raw, where)
    kind = part.get("type")
    if kind == "text":
        _only(part, ("type", "text"), where)
        return TextPart(text=_string(part, "text", where))
    if kind == "image_url":
        _only(part, ("type", "image_url"), where)
        pictures.append(_from_url(part.get("image_url"), f"{where}.image_url", limits))
        return ImagePart()
    if kind == "image" and local:
        _only(part, ("type", "image"), where)
        pictures.append(Picture(local_source(part.get("image"), where), f"{where}.image"))
        return ImagePart()
    raise _refused(
        f"{where}.type",
        f"{kind!r:.60}",
        f"text or image_url{' or image' if local else ''}",
        "send one of these parts",
    )


def _from_url(raw: object, where: str, limits: ImageLimits) -> Picture:
    """`{"url": ..., "detail": ...}` or the URL itself. Detail is accepted and has no effect: a
    picture is always seen at its native resolution."""
    if isinstance(raw, str):
        url = raw
    else:
        image = _object(raw, where)
        _only(image, ("url", "detail"), where)
        if image.get("detail") not in (None, "auto", "low", "high"):
            raise _refused(
                f"{where}.detail",
                f"{image['detail']!r:.60}",
                "auto, low or high",
                "leave it out: pictures are seen at their native resolution",
            )
        url = _string(image, "url", where)
    return Picture(parse_data_url(url, limits, where), where)


def local_source(raw: object, where: str) -> ImageSource:
    """What the offline API takes as a picture: bytes of a file, a path, a PIL image, an array
    [H, W, 3] of uint8, or preprocessed patches."""
    if isinstance(raw, str):
        return Path(raw)
    if isinstance(raw, bytes | Path | Image.Image | np.ndarray | PatchedImage):
        return cast(ImageSource, raw)
    raise _refused(
        where,
        f"a {type(raw).__name__}",
        "a picture is bytes, a path, a PIL image, an array or PatchedImage",
        "pass one of these",
    )


def _tool_calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise _refused(where, f"a {type(raw).__name__}", "a list of calls", "send a list")
    calls: list[ToolCall] = []
    for i, item in enumerate(cast(list[object], raw)):
        call = _object(item, f"{where}[{i}]")
        _only(call, ("id", "type", "function", "index"), f"{where}[{i}]")
        function = _object(call.get("function"), f"{where}[{i}].function")
        _only(function, ("name", "arguments"), f"{where}[{i}].function")
        calls.append(
            ToolCall(
                name=_string(function, "name", f"{where}[{i}].function"),
                arguments=_optional(function, "arguments", f"{where}[{i}].function") or "",
                id=_optional(call, "id", f"{where}[{i}]"),
            )
        )
    return tuple(calls)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _object(raw: object, where: str) -> Mapping[str, object]:
    if isinstance(raw, Mapping):
        return cast(Mapping[str, object], raw)
    raise _refused(where, f"a {type(raw).__name__}", "an object", "send an object")


def _only(data: Mapping[str, object], keys: Sequence[str], where: str) -> None:
    for key in data:
        if key not in keys:
            raise _refused(
                f"{where}.{key:.40}",
                "a field that is not supported",
                f"one of {', '.join(keys)}",
                "leave it out",
            )


def _string(data: Mapping[str, object], key: str, where: str) -> str:
    value = data.get(key)
    if isinstance(value, str):
        return value
    saw = "missing" if key not in data else f"a {type(value).__name__}"
    raise _refused(f"{where}.{key}", saw, "a string", "send a string")


def _optional(data: Mapping[str, object], key: str, where: str) -> str | None:
    return None if data.get(key) is None else _string(data, key, where)


def _refused(where: str, saw: str, rule: str, change: str) -> Refused:
    return Refused(Finding(where=where, saw=saw, rule=rule, change=change))
