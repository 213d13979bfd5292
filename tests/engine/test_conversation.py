"""Messages as a client writes them -> our own. What JSON may bring is tested through HTTP as well;
here: exact results, pictures in order, and what only the offline API may pass."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.config.finding import Finding, Refused
from vitrail.config.model import PatchRules
from vitrail.engine.conversation import Picture, local_source, parse_conversation
from vitrail.tokenizer.messages import ImagePart, Message, TextPart, ToolCall
from vitrail.vision.image import ImageLimits
from vitrail.vision.preprocess import from_patches

LIMITS = ImageLimits(max_bytes=1000, max_pixels=1000)
RULES = PatchRules(patch_size=14, merge=2)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "url", "name", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def refusal(messages: object, **how: bool) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        parse_conversation(messages, LIMITS, **how)
    (finding,) = caught.value.findings
    return finding.where, finding.saw


def test_every_form_of_content():
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [], "refusal": None, "annotations": []},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "why",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    parsed, pictures = parse_conversation(messages, LIMITS)
    assert parsed == [
        Message(role="system", content=()),
        Message(role="user", content=(TextPart(text="hi"),), name="ann"),
        Message(role="user", content=(TextPart(text="a"), TextPart(text="b"))),
        Message(role="assistant", content=()),
        Message(
            role="assistant",
            content=None,
            reasoning_content="why",
            tool_calls=(ToolCall(name="f", arguments="{}", id="1"),),
        ),
        Message(role="tool", content=(TextPart(text="r"),), tool_call_id="1"),
    ]
    assert pictures == []


def test_a34_pictures_come_in_the_order_of_their_parts():
    messages = [
        {"role": "user", "content": [image(b"one"), "between", image(b"two")]},
        {"role": "user", "content": [{"type": "image_url", "image_url": url(b"three")}]},
    ]
    parsed, pictures = parse_conversation(messages, LIMITS)
    assert [p.source for p in pictures] == [b"one", b"two", b"three"]
    assert [p.where for p in pictures] == [
        "messages[0].content[0].image_url",
        "messages[0].content[2].image_url",
        "messages[1].content[0].image_url",
    ]
    first = parsed[0].content
    assert first is not None
    assert [type(p) for p in first] == [ImagePart, TextPart, ImagePart]


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def test_detail_is_one_of_openais_and_changes_nothing():
    for detail in ("auto", "low", "high", None):
        messages = [{"role": "user", "content": [image(b"x", detail=detail)]}]
        assert parse_conversation(messages, LIMITS).pictures[0].source == b"x"
    where, saw = refusal([{"role": "user", "content": [image(b"x", detail="medium")]}])
    assert where == "messages[0].content[0].image_url.detail"
    assert "medium" in saw


def test_limits_hold_before_decoding():
    where, saw = refusal([{"role": "user", "content": [image(b"x" * 1001)]}])
    assert where == "messages[0].content[0].image_url"
    assert "1001 bytes" in saw


def test_only_the_offline_api_may_name_files():
    part = {"type": "image", "image": "somewhere.png"}
    messages = [{"role": "user", "content": [part]}]
    assert refusal(messages)[0] == "messages[0].content[0].type"
    assert parse_conversation(messages, LIMITS, local=True).pictures == [
        Picture(Path("somewhere.png"), "messages[0].content[0].image")
    ]


def test_a_video_of_no_pictures_is_refused():
    """It would leave the prompt without a word."""
    for none in ([], ()):
        message = {"role": "user", "content": [{"type": "video", "video": none}]}
        with pytest.raises(Refused, match="an empty list.*at least one frame"):
            parse_conversation([message], LIMITS, local=True)


def test_local_sources():
    patched = from_patches(np.zeros((4, 3 * 14 * 14), np.uint8), (2, 2), None, RULES, "x")
    pixels = np.zeros((2, 2, 3), np.uint8)
    for source in (b"x", Path("a"), Image.new("RGB", (2, 2)), pixels, patched):
        assert local_source(source, "x") is source
    with pytest.raises(Refused, match="a picture is bytes, a path"):
        local_source(1, "x")


@given(JSON, st.booleans())
def test_any_json_is_parsed_or_refused(messages: object, local: bool):
    """Nothing but `Refused` comes out, and it names the messages."""
    findings: tuple[Finding, ...] = ()
    parsed: list[Message] = []
    try:
        parsed = parse_conversation(messages, LIMITS, local=local).messages
    except Refused as refused:
        findings = refused.findings
    assert bool(parsed) != bool(findings)
    assert all(isinstance(m, Message) for m in parsed)
    assert all(f.where.startswith("messages") and len(str(f)) < 2000 for f in findings)


@given(JSON, JSON)
def test_any_json_in_a_message_is_parsed_or_refused(content: object, extra: object):
    message = {"role": "user", "content": [content, {"type": "image_url", "image_url": extra}]}
    with pytest.raises(Refused) as caught:  # no JSON above is a data URL
        parse_conversation([message], LIMITS)
    assert caught.value.findings[0].where.startswith("messages[0].content")
