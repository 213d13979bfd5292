"""OpenAI-style messages as plain JSON -> `Message`s and the pictures of their image parts, in
order. A video part is as many image parts as frames are taken from it. Shared by the server and the
offline API; what the latter may do beyond JSON (a path, a PIL image) is the `local` switch. Unknown
keys and types are refused by name. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from PIL import Image

from vitrail.config.finding import Refused
from vitrail.tokenizer.messages import ImagePart, Message, TextPart, ToolCall
from vitrail.vision.image import ImageLimits, parse_data_url
from vitrail.vision.preprocess import PatchedImage
from vitrail.vision.video import Frame

ImageSource = bytes | Path | Image.Image | np.ndarray | PatchedImage | Frame
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
    """A picture before it is opened, and the field that brought it. `is_frame`: it belongs to a
    video."""

    source: ImageSource
    where: str
    is_frame: bool = False


class Conversation(NamedTuple):
    """The n-th image part of `messages` is `pictures[n]`."""

    messages: list[Message]
    pictures: list[Picture]


def parse_conversation(
    messages: object, limits: ImageLimits, *, num_frames: int = 8, local: bool = False
) -> Conversation:
    """`num_frames`: taken from each video. Raises `Refused` naming the part, what was seen and the
    rule."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise Refused.because(
            "messages",
            "an empty list" if messages == [] else _kind(cast(object, messages)),
            "a list of at least one message",
            "send a list of messages with role and content",
        )
    parts = _Parts(limits, num_frames, local)
    parsed = [
        _message(m, f"messages[{i}]", parts) for i, m in enumerate(cast(Sequence[object], messages))
    ]
    return Conversation(parsed, parts.pictures)


def _message(raw: object, where: str, taken: "_Parts") -> Message:
    message = _object(raw, where)
    _only(message, _MESSAGE_KEYS + _EMPTY_KEYS, where)
    for key in _EMPTY_KEYS:
        if message.get(key) not in (None, []):
            raise Refused.because(
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
            part
            for i, item in enumerate(items)
            for part in taken.read(item, f"{where}.content[{i}]")
        )
    else:
        raise Refused.because(
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


class _Parts:
    """Reads parts of content. Owns `pictures`, those of the parts read so far."""

    def __init__(self, limits: ImageLimits, num_frames: int, local: bool):
        self.pictures: list[Picture] = []
        self._limits = limits
        self._num_frames = num_frames
        self._local = local

    def read(self, content: object, where: str) -> list[TextPart | ImagePart]:
        if isinstance(content, str):
            return [TextPart(text=content)]
        part = _object(content, where)
        kinds = ("text", "image_url", "video_url", *(("image", "video") if self._local else ()))
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            saw, change = f"{kind!r:.60}", "send one of these parts"
            raise Refused.because(f"{where}.type", saw, " or ".join(kinds), change)
        _only(part, ("type", kind), where)
        raw, at = part.get(kind), f"{where}.{kind}"
        if kind == "text":
            return [TextPart(text=_string(part, "text", where))]
        if kind == "image_url":
            return self._take([_from_url(raw, at, self._limits)])
        if kind == "video_url":
            return self._take(self._frames(_url_bytes(raw, at, self._limits), at))
        if kind == "image":
            return self._take([Picture(local_source(raw, where), at)])
        return self._take(self._local_frames(raw, at))

    def _take(self, pictures: list[Picture]) -> list[TextPart | ImagePart]:
        self.pictures += pictures
        return [ImagePart() for _ in pictures]

    def _frames(self, video: bytes | Path, where: str) -> list[Picture]:
        count = self._num_frames
        return [
            Picture(Frame(video=video, index=i, count=count), where, is_frame=True)
            for i in range(count)
        ]

    def _local_frames(self, raw: object, where: str) -> list[Picture]:
        """A file's path or bytes, or frames as pictures, which are taken as they are."""
        if isinstance(raw, list | tuple):
            frames = cast(Sequence[object], raw)
            if not frames:
                rule, change = "a video has at least one frame", "leave the part out"
                raise Refused.because(where, "an empty list", rule, change)
            return [Picture(local_source(f, where), where, is_frame=True) for f in frames]
        source = local_source(raw, where)
        if isinstance(source, bytes | Path):
            return self._frames(source, where)
        raise Refused.because(
            where,
            f"a {type(raw).__name__}",
            "a video is the bytes of a file, a path, or a list of pictures",
            "pass one of these",
        )


def _from_url(raw: object, where: str, limits: ImageLimits) -> Picture:
    """`{"url": ..., "detail": ...}` or the URL itself. Detail is accepted and has no effect: a
    picture is always seen at its native resolution."""
    if isinstance(raw, Mapping):
        detail = cast(Mapping[str, object], raw).get("detail")
        if detail not in (None, "auto", "low", "high"):
            raise Refused.because(
                f"{where}.detail",
                f"{detail!r:.60}",
                "auto, low or high",
                "leave it out: pictures are seen at their native resolution",
            )
    return Picture(_url_bytes(cast(object, raw), where, limits, "detail"), where)


def _url_bytes(raw: object, where: str, limits: ImageLimits, *more: str) -> bytes:
    """The bytes in `{"url": ...}`, which may have the keys `more`, or in the URL itself."""
    if isinstance(raw, str):
        return parse_data_url(raw, limits, where)
    holder = _object(raw, where)
    _only(holder, ("url", *more), where)
    return parse_data_url(_string(holder, "url", where), limits, where)


def local_source(raw: object, where: str) -> ImageSource:
    """What the offline API takes as a picture: bytes of a file, a path, a PIL image, an array
    [H, W, 3] of uint8, or preprocessed patches."""
    if isinstance(raw, str):
        return Path(raw)
    if isinstance(raw, bytes | Path | Image.Image | np.ndarray | PatchedImage):
        return cast(ImageSource, raw)
    raise Refused.because(
        where,
        f"a {type(raw).__name__}",
        "a picture is bytes, a path, a PIL image, an array or PatchedImage",
        "pass one of these",
    )


def _tool_calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise Refused.because(where, f"a {type(raw).__name__}", "a list of calls", "send a list")
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
    raise Refused.because(where, f"a {type(raw).__name__}", "an object", "send an object")


def _only(data: Mapping[str, object], keys: Sequence[str], where: str) -> None:
    for key in data:
        if key not in keys:
            raise Refused.because(
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
    raise Refused.because(f"{where}.{key}", saw, "a string", "send a string")


def _optional(data: Mapping[str, object], key: str, where: str) -> str | None:
    return None if data.get(key) is None else _string(data, key, where)
