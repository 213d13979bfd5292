"""GGUF's tokenizer metadata: the ids are those of the tokenizer it was written from, and kinds that
we do not know are refused by name."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from vitrail.config.finding import Refused
from vitrail.tokenizer.chat import ChatOptions
from vitrail.tokenizer.gguf import SPLITS, read_tokenizer
from vitrail.tokenizer.messages import Message, TextPart
from vitrail.tokenizer.tokenizer import JsonTokenizer, Tokenizer

CORPUS = [
    "the end of 12 texts, we're here 345 times\n\n  THE END don't 'tis  x",
    "été 漢字 2024!",
] * 9
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
SPECIALS = ("<|begin|>", "<|end|>")
# The splits as the models' authors spell them in tokenizer.json.
PUBLISHED = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(
            tokenizers.Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
                r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(
            tokenizers.Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def trained(pre: str) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


CORES = {pre: trained(pre) for pre in PUBLISHED}


def metadata(written: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    core = json.loads(CORES[written].to_str())["model"]
    tokens = sorted(core["vocab"], key=core["vocab"].get)
    if written == "llama-bpe":  # whose specials stand behind the vocabulary
        tokens = [*tokens[2:], *SPECIALS]
    stem = "tokenizer.ggml."
    found = {
        f"{stem}model": "gpt2",
        f"{stem}pre": written,
        f"{stem}tokens": tokens,
        f"{stem}token_type": [3 if t in SPECIALS else 1 for t in tokens],
        f"{stem}merges": [" ".join(m) for m in core["merges"]],
        f"{stem}bos_token_id": tokens.index(SPECIALS[0]),
        f"{stem}eos_token_id": tokens.index(SPECIALS[1]),
        "tokenizer.chat_template": TEMPLATE,
    }
    changed = found | {stem + key: value for key, value in changes.items()}
    return {key: value for key, value in changed.items() if value is not None}


def read(written: str = "gpt-2", **changes: Any) -> JsonTokenizer:
    got = read_tokenizer(metadata(written, **changes))
    assert got is not None
    return got[0]


READ = {pre: read(pre) for pre in PUBLISHED}


def test_every_split_is_tested_against_its_authors() -> None:
    assert set(PUBLISHED) == set(SPLITS)


@given(
    pre=st.sampled_from(sorted(PUBLISHED)),
    text=st.lists(
        st.sampled_from(("the end", " 12", "345", "'re", "\n", "  ", "é", "漢"))
        | st.text(max_size=5)
    ),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_ids_are_those_of_the_tokenizer_it_was_written_from(pre: str, text: list[str]) -> None:
    whole = "".join(text)
    ids = CORES[pre].encode(whole, add_special_tokens=False).ids
    if pre == "llama-bpe":
        ids = [i - 2 for i in ids]
    if pre != "qwen2":  # which composes the text beforehand
        assert READ[pre].encode(whole) == ids
        assert READ[pre].decode(ids) == whole


def test_qwen2_composes_its_text_as_its_authors_do() -> None:
    assert READ["qwen2"].encode("e\u0301te\u0301") == CORES["qwen2"].encode("\u00e9t\u00e9").ids


def said(text: str) -> Message:
    return Message(role="user", content=(TextPart(text=text),))


def test_the_template_knows_the_named_tokens_and_specials_are_special() -> None:
    got = read_tokenizer(metadata())
    assert got is not None
    tokenizer, template = got
    message = [said("the <|end|>")]
    rendered = template.render(tokenizer, message, image_token=None, options=ChatOptions())
    assert rendered.token_ids[0] == tokenizer.special_ids["<|begin|>"] == 0
    assert 1 not in rendered.token_ids
    assert rendered.text == "<|begin|>the <|end|>"


def test_named_templates_are_read() -> None:
    data = metadata() | {"tokenizer.chat_template.tool_use": "tools: {{ messages[0].content }}"}
    got = read_tokenizer(data)
    assert got is not None
    tools: Any = ({"type": "function", "function": {"name": "f"}},)
    for options, text in (
        (ChatOptions(), "<|begin|>the"),
        (ChatOptions(tools=tools), "tools: the"),
    ):
        rendered = got[1].render(got[0], [said("the")], image_token=None, options=options)
        assert rendered.text == text


@pytest.mark.parametrize(
    ("pre", "stated", "begins"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_text_begins_as_the_model_was_trained(
    pre: str, stated: bool | None, begins: bool
) -> None:
    tokenizer = read(pre, add_bos_token=stated)
    begin = tokenizer.special_ids["<|begin|>"]
    assert tokenizer.prefix_ids == (begin,) * begins
    assert begin not in tokenizer.encode("the <|begin|>"), "never within `encode`"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: 'llama'"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre: 'deepseek-llm'.*'smollm'"),
        ({"add_eos_token": True}, "add_eos_token"),
        ({"add_space_prefix": True}, "add_space_prefix"),
        ({"tokens": ["a", "b"], "token_type": [1, 1], "merges": []}, "2 tokens"),
        ({"token_type": [1, 2]}, "2 types"),
        ({"token_type": [6] * 330}, "6"),
        ({"add_bos_token": True, "bos_token_id": 5}, "bos_token_id: 5"),
        ({"merges": ["no such"]}, "tokenizers reads"),
        ({"tokens": ["x"] * 330}, "329 repeated"),
    ],
)
def test_what_we_would_not_compute_exactly_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        read(**changes)


def test_a_file_without_a_tokenizer_has_none() -> None:
    assert read_tokenizer({"general.name": "x"}) is None


def test_unused_ids_decode_to_nothing() -> None:
    data = metadata()
    tokens = [*data["tokenizer.ggml.tokens"], "[PAD330]"]
    got = read(tokens=tokens, token_type=[*data["tokenizer.ggml.token_type"], 5])
    assert got.decode([330, 330]) == ""


def test_a_vocabulary_without_a_rare_byte_refuses_the_texts_that_need_it() -> None:
    """SmolLM2's lacks some control characters: its library drops them, we say so."""
    data = metadata()
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\x04")[0][0]
    at = data["tokenizer.ggml.tokens"].index(spelled)
    tokens = list(data["tokenizer.ggml.tokens"])
    tokens[at] = "the" * 9
    tokenizer = read(tokens=tokens)
    assert tokenizer.decode(tokenizer.encode("the \x05 end")) == "the \x05 end"
    with pytest.raises(Refused, match=r"'\\x04' at character 4, with the byte 0x04") as caught:
        tokenizer.encode("the \x04 end")
    assert caught.value.findings[0].code == "unspelt_character"
    tokens[at], tokens[tokens.index("a")] = spelled, "the" * 9
    with pytest.raises(Refused, match=r"no token for 1 of .* b'a'"):
        read(tokens=tokens)


def test_a_tokenizer_is_one_of_ours() -> None:
    assert isinstance(READ["smollm"], Tokenizer)


def test_a_file_that_begins_texts_with_a_token_it_does_not_name_is_refused() -> None:
    with pytest.raises(Refused, match="add_bos_token: true, and no"):
        read("llama-bpe", add_bos_token=True, bos_token_id=None)
    read("llama-bpe", add_bos_token=False, bos_token_id=None)
