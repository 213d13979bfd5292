import base64
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from hostile_text import hostile
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.tokenizer.post_processor import begins_with
from tests.tokenizer.with_specials import encode_with_specials
from vitrail.config.finding import Refused
from vitrail.tokenizer.tokenizer import Tokenizer, kimi_pieces

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_kimi"
Edit = Callable[[dict], None]


def test_golden_cases_are_exact(tokenizer: Tokenizer, cases: dict[str, list[int]]):
    for text, ids in cases.items():
        assert encode_with_specials(tokenizer, text) == ids
        assert tokenizer.decode(ids, skip_special=False) == text
        if "<|" not in text:
            assert tokenizer.encode(text) == ids


@given(text=hostile)
def test_text_never_becomes_a_special_token(kimi: Tokenizer, from_json: Tokenizer, text: str):
    for tokenizer in (kimi, from_json):
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(text=st.text())
def test_both_files_give_the_same_ids(kimi: Tokenizer, from_json: Tokenizer, text: str):
    assert kimi.encode(text) == from_json.encode(text)


def test_specials_and_sizes(tokenizer: Tokenizer, kimi: Tokenizer, from_json: Tokenizer):
    assert tokenizer.id_of("<|media_pad|>") == 444
    assert tokenizer.special_ids["<|reserved_token_428|>"] == 428
    assert tokenizer.token_bytes(444) == b"<|media_pad|>"
    assert tokenizer.is_special(423)
    assert not tokenizer.is_special(422)
    assert tokenizer.encode("") == []
    assert tokenizer.decode([444, 65, 425]) == chr(tokenizer.token_bytes(65)[0])
    assert kimi.vocab_size == 423 + 256
    assert from_json.vocab_size == 423 + 258  # the published class makes two more than fit
    assert max(tokenizer.special_ids.values()) == tokenizer.vocab_size - 1
    with pytest.raises(Refused, match="no special token '<|pad|>'"):
        tokenizer.id_of("<|pad|>")


def test_an_id_that_nothing_assigns_decodes_to_nothing(tokenizer: Tokenizer):
    unassigned = [tokenizer.vocab_size, tokenizer.vocab_size + 7, -1]
    assert [tokenizer.token_bytes(i) for i in unassigned] == [b"", b"", b""]
    assert tokenizer.decode(unassigned) == ""


def test_b18_every_byte_token_has_its_bytes(tokenizer: Tokenizer):
    lines = (GOLDEN / "tiktoken.model").read_bytes().split(b"\n")
    for line in filter(None, lines):
        token, rank = line.split()
        assert tokenizer.token_bytes(int(rank)) == base64.b64decode(token)
    assert {tokenizer.token_bytes(i) for i in range(423)} >= {bytes([b]) for b in range(256)}


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer):
    with pytest.raises(Refused, match="character 2"):
        tokenizer.encode("ab\ud800")


def _published_pieces(text: str) -> list[str]:
    """The cuts, written out a character at a time."""
    pieces = []
    for start in range(0, len(text), 400_000):
        chunk = text[start : start + 400_000]
        first, length, is_blank = 0, 0, chunk[0].isspace()
        for i, char in enumerate(chunk):
            length = length + 1 if char.isspace() == is_blank else 1
            is_blank = char.isspace()
            if length > 25_000:
                pieces.append(chunk[first:i])
                first, length = i, 1
        pieces.append(chunk[first:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "x" * 25_000,
        "x" * 25_001,
        "ab " * 99 + " " * 75_001 + "y",
        "z" * 400_007,
        "\x1c\x85" * 12_501,
    ],
    ids=["at the limit", "one over", "blanks between", "long", "odd blanks"],
)
def test_long_text_is_cut_as_published(kimi: Tokenizer, text: str):
    assert list(kimi_pieces(text)) == _published_pieces(text)
    assert kimi.encode(text) == [i for piece in kimi_pieces(text) for i in kimi.encode(piece)]


def test_many_threads_encode_the_same(tokenizer: Tokenizer, cases: dict[str, list[int]]):
    texts = list(cases) * 40
    with ThreadPoolExecutor(8) as pool:
        for text, ids in zip(
            texts, pool.map(partial(encode_with_specials, tokenizer), texts), strict=True
        ):
            assert ids == cases[text]


def test_tiktoken_decides_where_both_files_are(golden_copy: Path, cases: dict[str, list[int]]):
    (golden_copy / "tokenizer.json").write_text("not read")
    tokenizer = Tokenizer.load(golden_copy)
    assert all(encode_with_specials(tokenizer, text) == ids for text, ids in cases.items())


def test_added_tokens_that_are_not_special_are_vocabulary(golden_copy: Path, tmp_path: Path):
    _edit(golden_copy / "tokenizer_config.json", _flag_as_ordinary)
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path / "tokenizer.json")
    _edit(tmp_path / "tokenizer.json", _flag_as_ordinary)
    for name in ("tiktoken.model", "tokenizer.json"):
        tokenizer = Tokenizer.load(golden_copy)
        assert tokenizer.encode("a[EOT]b") == [65 + 32 - 0, 432, 66 + 32 - 0], name
        assert tokenizer.decode([97, 432]) == "a[EOT]"
        assert not tokenizer.is_special(432)
        (golden_copy / "tiktoken.model").unlink(missing_ok=True)


def _flag_as_ordinary(data: dict) -> None:
    entries = data.get("added_tokens_decoder", {})
    for entry in (*entries.values(), *data.get("added_tokens", [])):
        if entry["content"] == "[EOT]":
            entry["special"] = False


def test_no_tokenizer_has_its_own_code(tmp_path: Path):
    with pytest.raises(Refused) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.findings[0].code == "no_tokenizer"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ranks: POINTER, "pointer of Git LFS"),
        (lambda ranks: b"", "0 bytes"),
        (lambda ranks: ranks[: len(ranks) - 5], "line 423"),
        (lambda ranks: ranks.replace(b" 7\n", b" 8\n"), "dense"),
        (lambda ranks: ranks + b"!!! 423\n", "line 424"),
        (lambda ranks: ranks.replace(b"IQ== 33\n", b"eHh4eA== 33\n"), r"no token for 1 of .* b'!'"),
    ],
    ids=["pointer", "empty", "truncated", "rank twice", "not base64", "no byte"],
)
def test_a_garbled_tiktoken_model_is_refused(golden_copy: Path, change: Callable, says: str):
    path = golden_copy / "tiktoken.model"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Refused, match=says):
        Tokenizer.load(golden_copy)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda c: c.update(tokenizer_class="QwenTokenizer"), "split pattern"),
        (lambda c: c.pop("added_tokens_decoder"), "no tokens"),
        (lambda c: c["added_tokens_decoder"].update({"7": {"content": "<x>"}}), "below the 423"),
        (lambda c: c["added_tokens_decoder"].update(x={"content": "<x>"}), "'id': 'x'"),
        (lambda c: c["added_tokens_decoder"]["425"].update(content=3), "has an id"),
        (lambda c: c["added_tokens_decoder"]["425"].update(lstrip=True), "lstrip"),
        (lambda c: c["added_tokens_decoder"]["425"].update(content="[BOS]"), "two ids"),
        (lambda c: c["added_tokens_decoder"]["425"].update(content="<"), "two characters"),
        (lambda c: c["added_tokens_decoder"]["425"].update(content=" \n"), "not blank"),
    ],
    ids=["class", "none", "low", "key", "content", "lstrip", "twice", "short", "blank"],
)
def test_a_wrong_tokenizer_config_is_refused(golden_copy: Path, edit: Edit, says: str):
    _edit(golden_copy / "tokenizer_config.json", edit)
    with pytest.raises(Refused, match=says):
        Tokenizer.load(golden_copy)


def test_a_missing_tokenizer_config_is_refused(golden_copy: Path):
    (golden_copy / "tokenizer_config.json").unlink()
    with pytest.raises(Refused, match="no such file"):
        Tokenizer.load(golden_copy)


def test_a_begin_token_is_known_and_never_within_encode(tmp_path: Path):
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)
    plain = Tokenizer.load(tmp_path)
    _edit(tmp_path / "tokenizer.json", lambda t: t.update(post_processor=begins_with("[BOS]")))
    begun = Tokenizer.load(tmp_path)
    assert (plain.prefix_ids, begun.prefix_ids) == ((), (423,))
    assert begun.encode("the [BOS]") == plain.encode("the [BOS]")


def _reach_by_merge(data: dict) -> None:
    data["model"].update(ignore_merges=False)
    for token in ("[B", "OS]", "[BOS]"):
        data["model"]["vocab"].setdefault(token, 900 + len(token))
    data["model"]["merges"].append(["[B", "OS]"])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t["model"].update(type="Unigram"), "Unigram"),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t["model"].update(end_of_word_suffix="</w>"), "</w>"),
        (lambda t: t.update(pre_tokenizer={"type": "Metaspace"}), "Metaspace"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "prefix"),
        (lambda t: t.update(decoder={"type": "ByteFallback"}), "ByteFallback"),
        (lambda t: t["model"]["vocab"].pop("a"), r"no token for 1 of .* b'a'"),
        (lambda t: t["model"]["vocab"].update({"▁the": 0}), "stands for one byte"),
        (lambda t: t["added_tokens"][0].update(rstrip=True), "rstrip"),
        (lambda t: t["added_tokens"][0].update(id="x"), "'id': 'x'"),
        (_reach_by_merge, "made by merges"),
        (lambda t: t["model"]["vocab"].update({"[BOS]": 423}), "made by merges"),
        (lambda t: t["model"].update(merges=[["not", "there"]]), "tokenizers reads"),
        (lambda t: t.update(post_processor=begins_with("[BOS]", ends="[EOS]")), "post_processor"),
        (lambda t: t.update(post_processor=begins_with("the")), "post_processor"),
        (lambda t: t.update(post_processor={"type": "RobertaProcessing"}), "RobertaProcessing"),
    ],
    ids=[
        *("unigram", "byte fallback", "suffix", "metaspace", "prefix space", "decoder", "no byte"),
        *("not a byte", "rstrip", "id", "merge to special", "word to special", "bad merges"),
        *("appends", "begins with a word", "roberta"),
    ],
)
def test_a_tokenizer_json_we_would_not_compute_exactly_is_refused(
    tmp_path: Path, edit: Edit, says: str
):
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)
    _edit(tmp_path / "tokenizer.json", edit)
    with pytest.raises(Refused, match=says):
        Tokenizer.load(tmp_path)


def test_files_that_disagree_are_refused(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    assert Tokenizer.load(tmp_path).id_of("[EOT]") == 432
    decoder = {"432": {"content": "[EOS]"}}
    _edit(tmp_path / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=decoder))
    with pytest.raises(Refused, match=r"432: '\[EOS\]', where tokenizer.json has"):
        Tokenizer.load(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE in the style of GPT-2 and Qwen, its special inside the vocabulary."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=301,
        special_tokens=["<|endoftext|>", "<image>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(["the end of the text, the image of the end"] * 9, trainer)
    folder = tmp_path_factory.mktemp("trained")
    core.save(str(folder / "tokenizer.json"))
    return folder


@given(text=st.lists(st.sampled_from(("<|endoftext|>", "<image>", "the ", "é", "\n")) | st.text()))
def test_a_trained_byte_level_tokenizer_agrees_with_its_library(trained: Path, text: list[str]):
    whole = "".join(text)
    ours = Tokenizer.load(trained)
    library = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
    with_specials = library.encode(whole, add_special_tokens=False).ids
    assert encode_with_specials(ours, whole) == with_specials
    assert ours.decode(with_specials) == library.decode(with_specials, skip_special_tokens=True)
    assert not set(ours.encode(whole)) & {0, 1}
    assert ours.decode(ours.encode(whole)) == whole


def _edit(path: Path, edit: Edit) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
