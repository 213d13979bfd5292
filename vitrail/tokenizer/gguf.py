"""GGUF's tokenizer metadata in the words of tokenizer.json and tokenizer_config.json, so that one
reader and one set of rules serve both. Knows the names by which llama.cpp calls how a text is
split, and no file.

`tokenizer.ggml.pre` names the split; the splits themselves are those that the models' authors
publish in their tokenizer.json."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from vitrail.config.finding import Finding, Refused
from vitrail.config.reader import Json, Keys
from vitrail.tokenizer.chat import ChatTemplate
from vitrail.tokenizer.tokenizer import JsonTokenizer

# llama.cpp's token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Split(NamedTuple):
    """How a text is cut before merging. `pattern` "": GPT-2's own; `digits`: each digit alone
    first; `nfc`: composed beforehand; `whole_words`: a word of the vocabulary is never merged;
    `begins`: a text starts with the begin token where the file does not say."""

    pattern: str = ""
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


SPLITS: Mapping[str, Split] = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "qwen2": Split(pattern=_WORDS + _REST, nfc=True),
    "llama-bpe": Split(pattern=_WORDS + "{1,3}" + _REST, whole_words=True, begins=True),
}


def read_tokenizer(metadata: Mapping[str, object]) -> tuple[JsonTokenizer, ChatTemplate] | None:
    """The tokenizer and chat template of a GGUF file; None where it has no tokenizer. Raises
    `Refused` for a kind that we would not compute exactly."""
    if "tokenizer.ggml.model" not in metadata:
        return None
    keys = Keys(dict(metadata), "GGUF metadata")
    keys.expect("tokenizer.ggml.model", "gpt2")
    name = keys.take("tokenizer.ggml.pre", str, "gpt-2")
    keys.expect("tokenizer.ggml.pre", *SPLITS)
    keys.expect("tokenizer.ggml.add_eos_token", False)
    keys.expect("tokenizer.ggml.add_space_prefix", False)
    tokens = keys.take_strings("tokenizer.ggml.tokens")
    merges = keys.take_strings("tokenizer.ggml.merges")
    types = keys.take_ints("tokenizer.ggml.token_type") or (NORMAL,) * len(tokens)
    split = SPLITS.get(name, Split())
    begins = keys.take("tokenizer.ggml.add_bos_token", bool, split.begins)
    bos = keys.take_optional("tokenizer.ggml.bos_token_id", int)
    found = keys.findings + _token_findings(tokens, types, bos if begins else None)
    if begins and bos is None and keys.has("tokenizer.ggml.add_bos_token"):
        found.append(
            _finding(
                "add_bos_token",
                "true, and no tokenizer.ggml.bos_token_id",
                "a file that says a text begins with a token says with which",
            )
        )
    if found:
        raise Refused(found)
    data = _tokenizer_json(tokens, types, merges, split)
    if begins and bos is not None:
        data["post_processor"] = _begins_with(tokens[bos], bos)
    tokenizer = JsonTokenizer(data, json.dumps(data), {})
    config = _named(metadata, tokens) | _templates(metadata)
    return tokenizer, ChatTemplate.of_config(config, "GGUF metadata: tokenizer")


def _token_findings(tokens: Sequence[str], types: Sequence[int], bos: int | None) -> list[Finding]:
    kinds = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}
    rules = (
        ("tokens", f"{len(tokens)} tokens", "at least the 256 bytes", len(tokens) >= 256),
        (
            "tokens",
            f"{len(tokens) - len(set(tokens))} repeated",
            "a token has one id",
            len(set(tokens)) == len(tokens),
        ),
        (
            "token_type",
            f"{len(types)} types, {sorted(set(types))[:8]}",
            f"one of {sorted(kinds)} for each of the {len(tokens)} tokens",
            len(types) == len(tokens) and set(types) <= kinds,
        ),
        (
            "bos_token_id",
            str(bos),
            "an id of a control token, where a text begins with it",
            bos is None or (0 <= bos < len(types) and types[bos] == CONTROL),
        ),
    )
    return [_finding(key, saw, rule) for key, saw, rule, holds in rules if not holds]


def _finding(key: str, saw: str, rule: str) -> Finding:
    return Finding(
        where=f"GGUF metadata: tokenizer.ggml.{key}",
        saw=saw,
        rule=rule,
        change="use a file whose tokenizer is whole",
        code="bad_tokenizer",
    )


def _tokenizer_json(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], split: Split
) -> Json:
    added = [
        {"id": i, "content": token, "special": kind != USER_DEFINED}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    steps: list[Json] = []
    if split.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if split.pattern:
        pattern = {"Regex": split.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(level | {"use_regex": not split.pattern})
    # Added tokens behind the vocabulary stay out of it, so that no whole word can be one of them.
    end = 1 + max((i for i, kind in enumerate(types) if kind == NORMAL), default=-1)
    vocab = {
        t: i for i, (t, k) in enumerate(zip(tokens[:end], types[:end], strict=True)) if k != UNUSED
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split.whole_words,
            "vocab": vocab,
            "merges": list(merges),
        },
    }


def _begins_with(literal: str, token_id: int) -> Json:
    special: Json = {"SpecialToken": {"id": literal, "type_id": 0}}
    text: Json = {"Sequence": {"id": "A", "type_id": 0}}
    second: Json = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, second],
        "special_tokens": {literal: {"id": literal, "ids": [token_id], "tokens": [literal]}},
    }


def _named(metadata: Mapping[str, object], tokens: Sequence[str]) -> Json:
    """`bos_token` and so on as literals."""
    theirs = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    found: Json = {}
    for ours, name in theirs.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            found[f"{ours}_token"] = tokens[token_id]
    return found


def _templates(metadata: Mapping[str, object]) -> Json:
    """`chat_template`; several where the file names others beside the default one."""
    stem = "tokenizer.chat_template"
    default = metadata.get(stem)
    named = [
        {"name": key.removeprefix(f"{stem}."), "template": value}
        for key, value in metadata.items()
        if key.startswith(f"{stem}.")
    ]
    if default is None:
        return {}
    if not named:
        return {"chat_template": default}
    return {"chat_template": [{"name": "default", "template": default}, *cast(list[object], named)]}
