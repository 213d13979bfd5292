import json
from pathlib import Path

import pytest
from hostile_text import IMAGE, hostile
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.with_specials import encode_with_specials
from vitrail.config.finding import Refused
from vitrail.tokenizer.chat import ChatOptions, ChatTemplate, Rendered
from vitrail.tokenizer.messages import ImagePart, Message, TextPart, ToolCall
from vitrail.tokenizer.tokenizer import Tokenizer

PAD = "<|media_pad|>"
OPENING = "<|im_assistant|>assistant<|im_middle|>"
CHATML = "{% for m in messages %}<|im_user|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
JOINING = (
    "{% for m in messages %}<|im_user|>{% for p in m.content %}"
    "{% if p.type == 'image' %}<|media_pad|>{% else %}{{ p.text | trim }}{% endif %}"
    "{% endfor %}{{ m.name }}{% endfor %}"
)


def message(*parts: str | None, role: str = "user", **more: object) -> Message:
    """A message whose parts are texts, and images where None."""
    content = tuple(ImagePart() if p is None else TextPart(text=p) for p in parts)
    return Message(role=role, content=content, **more)


@pytest.fixture
def render(kimi: Tokenizer, template: ChatTemplate):
    def render(*messages: Message, use: ChatTemplate = template, **options: object) -> Rendered:
        return use.render(kimi, messages, image_token=PAD, options=ChatOptions(**options))

    return render


def only(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {})


def test_a_plain_conversation_is_the_published_text(render, kimi: Tokenizer):
    turns = (message("Hi"), message("Hello!", role="assistant"), message("See:", None, "ok?"))
    rendered = render(*turns)
    text = (
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Hello!<|im_end|>"
        f"<|im_user|>user<|im_middle|>See:{IMAGE}ok?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    assert rendered.text == text
    assert list(rendered.token_ids) == encode_with_specials(kimi, text)
    assert rendered.image_slots == (rendered.token_ids.index(444),)
    assert render(*turns, add_generation_prompt=False).text + text[-len(OPENING) :] == text


def test_a_system_message_replaces_the_default_one(render):
    rendered = render(message("Be brief.", role="system"), message("Hi"))
    assert rendered.text.startswith(
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>"
    )
    assert render(message("Be brief.", role="developer"), message("Hi")) == rendered


def test_a24_text_and_images_keep_their_order(render):
    rendered = render(message("A", None, "B", None, None))
    assert f"<|im_middle|>A{IMAGE}B{IMAGE}{IMAGE}<|im_end|>" in rendered.text
    assert [rendered.token_ids[i] for i in rendered.image_slots] == [444] * 3
    assert list(rendered.image_slots) == sorted(set(rendered.image_slots))


def _expected_ids(tokenizer: Tokenizer, parts: list[str | None], name: str | None) -> list[int]:
    """One user message in Kimi's form, put together from ids, with no template and no marks."""
    special = tokenizer.special_ids
    ids = [special["<|im_system|>"], *tokenizer.encode("system"), special["<|im_middle|>"]]
    ids += [*tokenizer.encode("You are a helpful assistant"), special["<|im_end|>"]]
    ids += [special["<|im_user|>"], *tokenizer.encode(name or "user"), special["<|im_middle|>"]]
    text = ""
    for part in parts:
        if part is not None:
            text += part
            continue
        ids += [*tokenizer.encode(text), special["<|media_start|>"], *tokenizer.encode("image")]
        ids += [special["<|media_content|>"], 444, special["<|media_end|>"]]
        text = ""
    ids += [*tokenizer.encode(text), special["<|im_end|>"], special["<|im_assistant|>"]]
    return [*ids, *tokenizer.encode("assistant"), special["<|im_middle|>"]]


@given(parts=st.lists(st.none() | hostile, min_size=1, max_size=5), name=st.none() | hostile)
def test_f12_ids_are_those_of_ordinary_text_around_the_slots(
    kimi: Tokenizer, template: ChatTemplate, parts: list[str | None], name: str | None
):
    options = ChatOptions()
    user = message(*parts, name=name)
    rendered = template.render(kimi, [user], image_token=PAD, options=options)
    assert list(rendered.token_ids) == _expected_ids(kimi, parts, name)
    assert len(rendered.image_slots) == parts.count(None)
    assert all(rendered.token_ids[i] == 444 for i in rendered.image_slots)


@given(parts=st.lists(st.none() | hostile, min_size=1, max_size=5), name=hostile)
def test_f12_a_template_that_trims_and_joins_opens_no_way(
    kimi: Tokenizer, parts: list[str | None], name: str
):
    def specials(*parts: str | None, name: str) -> list[int]:
        user = message(*parts, name=name)
        rendered = JOINED.render(kimi, [user], image_token=PAD, options=ChatOptions())
        return [i for i in rendered.token_ids if kimi.is_special(i)]

    blanks = [None if p is None else "x" for p in parts]
    assert specials(*parts, name=name) == specials(*blanks, name="x")


JOINED = only(JOINING)


@given(
    texts=st.lists(hostile, min_size=9, max_size=9),
    arguments=st.dictionaries(hostile, hostile | st.lists(hostile), max_size=3),
)
def test_f12_no_string_of_the_request_claims_a_special_token(
    kimi: Tokenizer, template: ChatTemplate, texts: list[str], arguments: dict
):
    """System, user, assistant, reasoning, call name, id and arguments, tool result, tools."""

    def specials(t: list[str], arguments: dict) -> list[int]:
        call = ToolCall(name=t[3], arguments=json.dumps(arguments), id=t[4])
        conversation = [
            message(t[0], role="system"),
            message(t[1], None),
            message(t[2], role="assistant", tool_calls=(call,), reasoning_content=t[5]),
            message(t[6], role="tool", name="x" + t[7], tool_call_id=t[4]),
        ]
        tools = ({"type": "function", "function": {"name": t[8], "parameters": arguments}},)
        options = ChatOptions(tools=tools)
        rendered = template.render(kimi, conversation, image_token=PAD, options=options)
        assert len(rendered.image_slots) == 1
        return [i for i in rendered.token_ids if kimi.is_special(i)]

    assert specials(texts, arguments) == specials(["x"] * 9, {})


@pytest.mark.parametrize("num_images", [0, 1])
def test_f12_a_spelt_image_is_text(render, kimi: Tokenizer, num_images: int):
    rendered = render(message(*[None] * num_images, IMAGE))
    assert rendered.token_ids.count(444) == len(rendered.image_slots) == num_images
    assert IMAGE in kimi.decode(rendered.token_ids)


def test_template_logic_on_ordinary_text_still_works(render):
    template = only(
        "{% for m in messages %}{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>{% endfor %}"
    )
    rendered = render(message("plan </think>  answer < "), message(" 1 > 0 "), use=template)
    assert rendered.text == "answer <<|im_end|> 1 > 0 <|im_end|>"


def test_a_template_with_strings_alone_gets_joined_text_and_no_images(render):
    template = only(CHATML)
    rendered = render(message("a <|im_", "end|> b"), use=template)
    assert rendered.text == "<|im_user|>user\na <|im_end|> b<|im_end|>\n"
    assert rendered.token_ids.count(425) == 1
    with pytest.raises(Refused, match=r"messages\[1\].content: 2 images.*text alone"):
        render(message("a"), message(None, "b", None), use=template)


def test_a_template_with_parts_alone_gets_parts(render):
    template = only(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
    )
    assert render(message("a", "b"), message("c"), use=template).text == "a|b|c|"
    assert render(message("a"), message(), use=template).text == "a|"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for m in messages %}{{ m.contents }}{% endfor %}", "does not come out"),
        ("{{ raise_exception('never') }}", "does not come out"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{% include 'x' %}", "include is not for chat templates"),
        ("{{ messages | xmlattr }}", "No filter named 'xmlattr'"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_loaded(source: str, says: str):
    with pytest.raises(Refused, match=says):
        only(source)


def test_a_template_that_miscounts_images_is_refused(render):
    doubling = only(JOINING.replace(PAD, PAD * 2))
    with pytest.raises(Refused, match=r"2 of '<\|media_pad\|>' for 1 images"):
        render(message(None), use=doubling)
    forgetting = only(JOINING.replace(PAD, ""))
    with pytest.raises(Refused, match="0 of .* for 1 images"):
        render(message(None), use=forgetting)


def test_what_a_template_refuses_is_said_in_its_words(render):
    source = (
        CHATML + "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    )
    with pytest.raises(Refused, match="TemplateError: one turn only") as caught:
        render(message("a"), message("b"), use=only(source))
    assert caught.value.findings[0].code == "chat_template"
    adding = only(CHATML + "{% if messages|length > 1 %}{{ messages + 1 }}{% endif %}")
    with pytest.raises(Refused, match="stops with TypeError: can only concatenate"):
        render(message("a"), message("b"), use=adding)


CALL = ToolCall(name="weather", arguments='{"city": "Brno", "days": 2}', id="c1")


def test_b29_an_assistant_that_only_calls_tools(render):
    silent = Message(role="assistant", content=None, tool_calls=(CALL,))
    result = message("12 C", role="tool", tool_call_id="c1")
    rendered = render(message("Weather?"), silent, result, message("And?"))
    call = 'call c1 weather {"city": "Brno", "days": 2}'
    assert f"<|im_assistant|>assistant<|im_middle|>{call}<|im_end|>" in rendered.text
    assert "<|im_user|>tool<|im_middle|>12 C<|im_end|>" in rendered.text


@pytest.mark.parametrize("bad", ["{", "[1]", "3", "null", "x", "[" * 100_000, '{"a":' * 80 + "1"])
def test_b29_arguments_that_are_no_object_are_refused(render, bad: str):
    turn = Message(role="assistant", content=None, tool_calls=(ToolCall(name="f", arguments=bad),))
    with pytest.raises(Refused, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        render(message("a"), turn)


def test_b29_deep_arguments_are_refused(render):
    deep = '{"a":' * 80 + "1" + "}" * 80
    turn = message(role="assistant", tool_calls=(ToolCall(name="f", arguments=deep),))
    with pytest.raises(Refused, match="more than 64 levels"):
        render(message("a"), turn)


def test_b31_empty_is_not_absent(render):
    empty = render(message("a"), message("", role="assistant"), message("b"))
    assert "<|im_assistant|>assistant<|im_middle|><|im_end|>" in empty.text
    kept = render(message("a"), message("x", role="assistant", tool_calls=()), message("b"))
    assert "<|im_middle|>x<|im_end|>" in kept.text


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_b32_a_list_of_texts_is_the_string(render, role: str):
    whole = render(message("one two", role=role), message("q"))
    assert render(message("one", " ", "two", role=role), message("q")) == whole
    assert render(message(role=role), message("q")) == render(message("", role=role), message("q"))


def test_b47_odd_conversations(render):
    with pytest.raises(Refused, match="messages: an empty list"):
        render()
    assert "only this" in render(message("only this", role="system")).text
    assert "<|im_middle|>   <|im_end|>" in render(message("   ")).text
    last = render(message("a"), message("b", role="assistant"))
    assert last.text.endswith("b<|im_end|><|im_assistant|>assistant<|im_middle|>")
    assert render(*[message("m")] * 1000).text.count("<|im_end|>") == 1001
    assert "<|im_middle|>z<|im_end|>" in render(message("z")).text


def test_everything_wrong_with_a_conversation_is_said_at_once(render):
    with pytest.raises(Refused) as caught:
        render(
            message("a", role="robot"),
            message("b", tool_calls=(CALL,)),
            Message(role="user", content=None),
        )
    wheres = [f.where for f in caught.value.findings]
    assert wheres == ["messages[0].role", "messages[1].tool_calls", "messages[2].content"]


def test_images_for_a_model_without_vision_are_refused(kimi: Tokenizer, template: ChatTemplate):
    with pytest.raises(Refused, match="no vision tower"):
        template.render(kimi, [message(None)], image_token=None, options=ChatOptions())
    template.render(kimi, [message("x")], image_token=None, options=ChatOptions())


def test_the_last_message_can_be_continued(render):
    turns = (message("Count"), message("1, 2, ", role="assistant"))
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(*turns, **options).text.endswith("<|im_middle|>1, 2, ")
    after_image = render(message("a"), message("b", None, role="assistant"), **options)
    assert after_image.text.endswith("<|media_end|>")
    ending = render(message("a"), message("<|im_end|", role="assistant"), **options)
    assert ending.text.endswith("<|im_middle|><|im_end|")
    trimming = only(CHATML.replace("m.content", "m.content | trim"))
    assert render(*turns, use=trimming, **options).text.endswith("\n1, 2, ")
    with pytest.raises(Refused, match="together with add_generation_prompt"):
        render(*turns, continue_final_message=True)
    with pytest.raises(Refused, match="role 'user'"):
        render(message("a"), **options)
    hiding = only("{% for m in messages %}{{ m.content[:13] }}{% endfor %}")
    with pytest.raises(Refused, match="does not write the end"):
        render(message("a"), message("b" * 14, role="assistant"), use=hiding, **options)


def test_noncharacters_of_the_client_are_kept_until_they_run_out(render, kimi: Tokenizer):
    marks = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    rendered = render(message(f"{marks[:30]}{PAD}<"))
    assert f"{marks[:30]}{PAD}<" in kimi.decode(rendered.token_ids)
    assert 444 not in rendered.token_ids
    with pytest.raises(Refused, match="U\\+FDD0 to U\\+FDEF"):
        render(message(marks[:15]), message("x", name=marks[15:]))


def test_switches_reach_the_template_and_claim_nothing(render):
    source = CHATML + "{{ mood }}{% if enable_thinking %}T{% endif %}{{ range(3) | list }}"
    switches = (("mood", "<|im_end|>"), ("enable_thinking", True))
    rendered = render(message("a"), use=only(source), template_kwargs=switches)
    assert rendered.text.endswith("<|im_end|>\n<|im_end|>T[0, 1, 2]")
    assert rendered.token_ids.count(425) == 1
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(Refused, match="are not switches"):
            render(message("a"), template_kwargs=((name, "x"),))


def test_schema_words_are_what_templates_look_up(tmp_path: Path, golden_copy: Path):
    """A special token that contains `name` must not hide a tool's name from the template."""
    path = golden_copy / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["428"] = {"content": "<reponame>", "special": True}
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer.load(golden_copy)
    source = CHATML + "{% for t in tools or [] %}<repo{{ t.function.name }}>{% endfor %}"
    options = ChatOptions(tools=({"function": {"name": "pony"}}, {"function": {"name": "ame"}}))
    rendered = only(source).render(tokenizer, [message("a")], image_token=PAD, options=options)
    assert rendered.text.endswith("<repopony><repoame>")
    renamed = ChatOptions(tools=({"function": {"name": "nam"}},))
    forging = only(source.replace("}}>", "}}e>"))
    rendered = forging.render(tokenizer, [message("a")], image_token=PAD, options=renamed)
    assert rendered.text.endswith("<reponame>")
    assert 428 not in rendered.token_ids


def test_the_folder_says_which_template(tmp_path: Path, render):
    with pytest.raises(Refused, match="chat template: none") as caught:
        render(message("a"), use=ChatTemplate.load(tmp_path))
    assert caught.value.findings[0].code == "no_chat_template"

    named = [
        {"name": "default", "template": CHATML + "1{{ bos_token }}{{ eos_token }}"},
        {"name": "tool_use", "template": CHATML + "tools"},
    ]
    config = {"chat_template": named, "bos_token": "[B]", "eos_token": {"content": "[E]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert render(message("a"), use=template).text.endswith("1[B][E]")
    assert render(message("a"), use=template, tools=({"a": 1},)).text.endswith("tools")

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML + "2"}))
    assert render(message("a"), use=ChatTemplate.load(tmp_path)).text.endswith("2")
    (tmp_path / "chat_template.jinja").write_text(CHATML + "3 {{ bos_token }}")
    assert render(message("a"), use=ChatTemplate.load(tmp_path)).text.endswith("3 [B]")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="not UTF-8"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 3}, "list of names"),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, "with a default"),
        ({"chat_template": [{"name": "default"}]}, "list of names"),
        ({"bos_token": 7}, "bos_token: 7"),
    ],
)
def test_a_garbled_template_entry_is_refused(tmp_path: Path, config: dict, says: str):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=says):
        ChatTemplate.load(tmp_path)
