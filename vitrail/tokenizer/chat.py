"""Messages to token ids with image slots, through the checkpoint's own chat template.

Owns the rule that text can never claim a slot or any other special token: what a client wrote is
marked before the template sees it, wherever it could spell a special literal, alone or together
with its surroundings. Special literals left in the rendered text can then only be the template's;
the texts between them lose their marks and are encoded as ordinary text. Knows no pixels and no
token counts of images: a slot is one token here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jinja2 import Template

from vitrail.config.finding import Finding, Refused
from vitrail.config.reader import Json, load_json, read_asset, there
from vitrail.tokenizer.messages import (
    ContentForms,
    Message,
    check_messages,
    count_images,
    show_messages,
    show_tools,
)
from vitrail.tokenizer.sandbox import TEMPLATE_ERRORS, TemplateEnvironment
from vitrail.tokenizer.specials import Specials
from vitrail.tokenizer.tokenizer import Tokenizer

Scalar = str | int | float | bool | None

# Unicode's noncharacters, set aside for a process's own use.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_MARK = re.compile("[\ufdd0-\ufdef]")
_NAMED_TOKENS = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
_OWN_NAMES = frozenset(("messages", "tools", "add_generation_prompt", *_NAMED_TOKENS))
_PROBE = "Vitrail probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered. `add_generation_prompt`: open the assistant's turn;
    `continue_final_message`: leave the last message open, so that generation goes on in it;
    `template_kwargs`: the template's own switches, JSON scalars."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[Mapping[str, object], ...] = ()
    template_kwargs: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt. `image_slots`: the index in `token_ids` of each image's one token, in order;
    `text`: what the template wrote."""

    token_ids: tuple[int, ...]
    image_slots: tuple[int, ...]
    text: str


class ChatTemplate:
    """A checkpoint's chat template, compiled. Immutable; may render from any thread.

    Which forms of content it takes is probed once, when it is loaded: one user message as a
    string, and the same as a list with one text part. A form counts where the text comes out and,
    for the list, its Python spelling does not. Raises `Refused` for a template that does not
    compile or takes neither form.
    """

    def __init__(self, sources: Mapping[str, str], named_tokens: Mapping[str, str]):
        """`sources`: by name; `default` renders, `tool_use`, if there, renders requests with tools.
        Without any, every rendering is refused."""
        environment = TemplateEnvironment()
        self._named_tokens = dict(named_tokens)
        self._templates: dict[str, Template] = {}
        self._forms: dict[str, ContentForms] = {}
        self._used = set(_MARK.findall("".join(sources.values())))
        for name, source in sources.items():
            where = f"chat template {name!r}"
            try:
                template = environment.compile_chat(source)
            except TEMPLATE_ERRORS as error:
                raise _bad_template(
                    where, f"{type(error).__name__}: {error}", "it is a Jinja template"
                ) from error
            forms = ContentForms(
                string=self._takes(template, _PROBE),
                parts=self._takes(template, [{"type": "text", "text": _PROBE}]),
            )
            if not any(forms):
                raise _bad_template(
                    where,
                    "a user's message, as a string and as a list of parts, does not come out",
                    "a template renders a user's message",
                )
            self._templates[name], self._forms[name] = template, forms

    @staticmethod
    def load(folder: Path) -> "ChatTemplate":
        """The template of the checkpoint in `folder`: chat_template.jinja, else chat_template.json,
        else `chat_template` of tokenizer_config.json; else one that refuses when it is used."""
        config = folder / "tokenizer_config.json"
        data = load_json(config) if there(config) else {}
        jinja, as_json = folder / "chat_template.jinja", folder / "chat_template.json"
        if there(jinja):
            sources = {"default": _read_text(jinja)}
        elif there(as_json):
            sources = _sources(load_json(as_json), as_json.name)
        else:
            sources = _sources(data, config.name)
        return ChatTemplate(sources, _named_tokens(data))

    @staticmethod
    def of_config(data: Json, where: str) -> "ChatTemplate":
        """The template that a tokenizer_config.json of this content holds."""
        return ChatTemplate(_sources(data, where), _named_tokens(data))

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        image_token: str | None,
        options: ChatOptions,
        after_images: Sequence[str] = (),
    ) -> Rendered:
        """The prompt of `messages`. `image_token` is the literal that the template writes for an
        image; None for a model without vision. `after_images`: text that is put after each image's
        literal, in order, before what follows is tokenised. Raises `Refused` for what is wrong with
        the request, and where template and messages disagree."""
        _check(messages, options, image_token)
        name = "tool_use" if options.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise _bad_template(
                "chat template", "none in the checkpoint", "chat needs one", "no_chat_template"
            )
        image_id = None if image_token is None else tokenizer.id_of(image_token)
        mark, end_mark = self._unused_marks(messages, options, name, tokenizer.specials)

        def clean(text: str) -> str:
            return tokenizer.specials.guard(text, mark)

        end = end_mark if options.continue_final_message else ""
        marked = self._write(name, self._payload(messages, options, name, clean, end))
        if options.continue_final_message:
            marked = _cut_at_end(marked, end_mark)
        marks = {mark: "", end_mark: ""}
        rendered = _encode(tokenizer, marked, marks, image_id, after_images)
        num_images = count_images(messages)
        if len(rendered.image_slots) != num_images:
            raise _bad_template(
                "chat template",
                f"{len(rendered.image_slots)} of {image_token!r} for {num_images} images",
                "the template writes the image token once for each image",
            )
        return rendered

    def _unused_marks(
        self, messages: Sequence[Message], options: ChatOptions, name: str, specials: Specials
    ) -> tuple[str, str]:
        """Two characters that occur nowhere in the request, the template or a special literal."""
        used = self._used | set(_MARK.findall("".join(specials.ids)))

        def collect(text: str) -> str:
            used.update(_MARK.findall(text))
            return text

        self._payload(messages, options, name, collect, "")
        free = [mark for mark in _MARKS if mark not in used]
        if len(free) < 2:
            raise Refused.because(
                where="messages",
                saw=f"{len(used)} of the noncharacters U+FDD0 to U+FDEF",
                rule="two of these 32, which are no text, are left to the server",
                change="remove noncharacters from the messages",
            )
        return free[0], free[1]

    def _payload(
        self,
        messages: Sequence[Message],
        options: ChatOptions,
        name: str,
        clean: Callable[[str], str],
        end: str,
    ) -> Json:
        """What the template is shown. Every string of the client's has gone through `clean`."""
        switches = {
            key: clean(value) if isinstance(value, str) else value
            for key, value in options.template_kwargs
        }
        return {
            **self._named_tokens,
            **switches,
            "messages": show_messages(messages, self._forms[name], clean, end),
            "tools": show_tools(options.tools, clean) or None,
            "add_generation_prompt": options.add_generation_prompt,
        }

    def _write(self, name: str, payload: Json) -> str:
        try:
            return self._templates[name].render(payload)
        except TEMPLATE_ERRORS as error:
            raise Refused.because(
                where="messages",
                saw=_MARK.sub("", f"the chat template stops with {type(error).__name__}: {error}"),
                rule="the checkpoint's template decides which conversations it renders",
                change="change the order, roles or kinds of the messages",
                code="chat_template",
            ) from error

    def _takes(self, template: Template, content: str | list[dict[str, str]]) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = template.render(
                {
                    **self._named_tokens,
                    "messages": messages,
                    "tools": None,
                    "add_generation_prompt": True,
                }
            )
        except TEMPLATE_ERRORS:
            return False
        spelled = [str(part) for part in content] if isinstance(content, list) else []
        return _PROBE in text and not any(part in text for part in spelled)


def _encode(
    tokenizer: Tokenizer,
    marked: str,
    marks: Mapping[str, str],
    image_id: int | None,
    after_images: Sequence[str],
) -> Rendered:
    """Cut at special literals, which are the template's; the rest is ordinary text."""
    unmark = str.maketrans(dict(marks))
    ids: list[int] = []
    slots: list[int] = []
    added = ""
    for i, piece in enumerate(tokenizer.specials.split(marked)):
        if i % 2 == 0:
            ids += tokenizer.encode(added + piece.translate(unmark))
            added = ""
            continue
        token_id = tokenizer.specials.ids[piece]
        if token_id == image_id:
            added = after_images[len(slots)] if len(slots) < len(after_images) else ""
            slots.append(len(ids))
        ids.append(token_id)
    return Rendered(token_ids=tuple(ids), image_slots=tuple(slots), text=marked.translate(unmark))


def _cut_at_end(marked: str, end_mark: str) -> str:
    at = marked.rfind(end_mark)
    if at < 0:
        raise _bad_template(
            "continue_final_message",
            "the template does not write the end of the last message",
            "the last message's text must come out to be continued",
        )
    return marked[:at]


def _check(messages: Sequence[Message], options: ChatOptions, image_token: str | None) -> None:
    findings = check_messages(messages)
    if options.continue_final_message and options.add_generation_prompt:
        findings.append(
            Finding(
                where="continue_final_message",
                saw="true, together with add_generation_prompt",
                rule="generation goes on in the last message or opens a new one",
                change="set add_generation_prompt to false",
            )
        )
    if options.continue_final_message and messages and messages[-1].role != "assistant":
        findings.append(
            Finding(
                where="continue_final_message",
                saw=f"a last message of role {messages[-1].role!r:.60}",
                rule="only an assistant's message is continued",
                change="end with an assistant's message",
            )
        )
    if image_token is None and count_images(messages):
        findings.append(
            Finding(
                where="messages",
                saw=f"{count_images(messages)} images",
                rule="this model has no vision tower",
                change="send text alone",
            )
        )
    for key, value in options.template_kwargs:
        if key in _OWN_NAMES or not isinstance(value, Scalar):
            findings.append(
                Finding(
                    where=f"chat_template_kwargs: {key!r:.60}",
                    saw=f"{value!r:.60}",
                    rule="a switch of the template's own, with a JSON scalar",
                    change=f"remove it; {', '.join(sorted(_OWN_NAMES))} are not switches",
                )
            )
    if findings:
        raise Refused(findings)


def _sources(data: Json, where: str) -> dict[str, str]:
    """`chat_template`: one template, or a list of named ones with a `default` among them."""
    value = data.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = cast(list[object], value) if isinstance(value, list) else [value]
    named = [cast(Json, e) if isinstance(e, dict) else {} for e in entries]
    sources = {str(e.get("name")): e.get("template") for e in named}
    if "default" not in sources or not all(isinstance(s, str) for s in sources.values()):
        raise _bad_template(
            f"{where}: chat_template",
            f"{value!r:.80}",
            "it is a string, or a list of names and templates with a default",
        )
    return cast(dict[str, str], sources)


def _named_tokens(config: Json) -> dict[str, str]:
    """The literals that templates know as `bos_token` and so on: strings, or objects with one."""
    literals: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        literal = cast(Json, value).get("content") if isinstance(value, dict) else value
        if isinstance(literal, str):
            literals[name] = literal
        elif value is not None:
            raise _bad_template(
                f"tokenizer_config.json: {name}", f"{value!r:.80}", "a named token is its literal"
            )
    return literals


def _read_text(path: Path) -> str:
    try:
        return read_asset(path).decode()
    except UnicodeDecodeError as error:
        raise _bad_template(path.name, f"not UTF-8 ({error})", "a template is text") from error


def _bad_template(where: str, saw: str, rule: str, code: str = "bad_chat_template") -> Refused:
    change = "use the chat template that the model's authors publish"
    return Refused.because(where=where, saw=saw, rule=rule, change=change, code=code)
